//! Pages in device memory and in pinned host memory: tensors come back with the bytes of their live rows and zeros
//! elsewhere, whatever the size of a page, in whichever order they come and go, and whatever the main stream does meanwhile.

use crate::support::{cuda, must, refused};
use half::bf16;
use moe4::kernels::pages::{AnyBuffer, Live, PageId, PagePool, Part, PartShape};
use moe4::kernels::{Backend, Error, Extent};
use moe4::mlp::PagedStash;
use moe4::numerics::BLOCK;
use moe4::tensor::Groups;
use moe4_conformance::compare::{bytes, ensure};
use moe4_conformance::data::Random;
use moe4_conformance::{InCase, Outcome, checks};
use moe4_cuda::{Behind, CudaPages, DeviceGroups, DeviceMemory, PageHome};

const HOMES: [PageHome; 2] = [PageHome::Device, PageHome::PinnedHost];

/// What a forward saves, as bytes on the host: `c`, `prob`, codes, scales and amax of a columnwise copy, a BF16 tensor.
struct Tensors {
    parts: Vec<(Vec<u8>, Live, Kind)>,
    groups: Groups,
    padded: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    U8,
    F32,
    Bf16,
}

impl Tensors {
    /// Columnwise tensors are allocated for `padded` token positions.
    fn new(groups: &Groups, padded: usize, cols: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let (rows, experts) = (groups.rows(), groups.experts());
        // Never zero, so that a dead byte which survives is seen.
        let mut some = |len: usize| -> Vec<u8> { (0..len).map(|_| random.bits() as u8 | 1).collect() };
        let parts = vec![
            (some(rows * cols * 2), Live::Rows { cols }, Kind::Bf16),
            (some(rows * 4), Live::Rows { cols: 1 }, Kind::F32),
            (some(cols * padded / 2), Live::Positions { per: 2 }, Kind::U8),
            (some(cols * padded / BLOCK), Live::Positions { per: BLOCK }, Kind::U8),
            (some(experts * 4), Live::All, Kind::F32),
            (some(rows * (cols + 1) * 2), Live::Rows { cols: cols + 1 }, Kind::Bf16),
        ];
        Self { parts, groups: groups.clone(), padded }
    }

    fn upload(&self) -> Result<Vec<Part<DeviceMemory>>, Error> {
        let cuda = cuda();
        let part = |(bytes, live, kind): &(Vec<u8>, Live, Kind)| -> Result<_, Error> {
            let buffer = match kind {
                Kind::U8 => AnyBuffer::U8(cuda.upload(bytes)?),
                Kind::F32 => AnyBuffer::F32(cuda.upload(&bytemuck::pod_collect_to_vec::<u8, f32>(bytes))?),
                Kind::Bf16 => AnyBuffer::Bf16(cuda.upload(&bytemuck::pod_collect_to_vec::<u8, bf16>(bytes))?),
            };
            Ok(Part { buffer, live: *live })
        };
        self.parts.iter().map(part).collect()
    }

    /// The live bytes, zeros between them.
    fn expected(&self) -> Vec<Vec<u8>> {
        let live = |(bytes, live, kind): &(Vec<u8>, Live, Kind)| {
            let element = [1, 4, 2][*kind as usize];
            let (line, alive) = match live {
                Live::All => (bytes.len(), bytes.len()),
                Live::Rows { cols } => (bytes.len(), self.groups.live_rows() * cols * element),
                Live::Positions { per } => (self.padded / per, self.groups.padded_rows() / per),
            };
            let mut out = bytes.clone();
            out.chunks_mut(line.max(1)).for_each(|line| line[alive..].fill(0));
            out
        };
        self.parts.iter().map(live).collect()
    }

    fn compare(&self, got: &[Part<DeviceMemory>]) -> Outcome {
        for (i, (expected, got)) in self.expected().iter().zip(got).enumerate() {
            let got = match &got.buffer {
                AnyBuffer::U8(b) => cuda().download(b.view())?,
                AnyBuffer::F32(b) => bytemuck::cast_slice(&cuda().download(b.view())?).to_vec(),
                AnyBuffer::Bf16(b) => bytemuck::cast_slice(&cuda().download(b.view())?).to_vec(),
            };
            bytes(&format!("tensor {i}"), &[expected.len()], expected, &got)?;
        }
        Ok(())
    }
}

/// Tensors in pages of a pool.
struct Stored {
    tensors: Tensors,
    groups: DeviceGroups,
    shapes: Vec<PartShape>,
    pages: Vec<PageId>,
    _writing: Behind,
}

/// A pool with its free pages in a random order.
struct Pool {
    pages: CudaPages,
    free: Vec<PageId>,
}

impl Pool {
    fn new(home: PageHome, page_bytes: usize, pages: PageId, seed: u64) -> Result<Self, Error> {
        let mut free: Vec<PageId> = (0..pages).collect();
        let mut random = Random::new(seed);
        (1..free.len()).rev().for_each(|i| free.swap(i, random.below(i + 1)));
        Ok(Self { pages: CudaPages::new(cuda(), home, page_bytes, pages)?, free })
    }

    fn store(&mut self, tensors: Tensors, groups: DeviceGroups) -> Result<Stored, Error> {
        let parts = tensors.upload()?;
        let shapes: Vec<PartShape> = parts.iter().map(Part::shape).collect();
        let needed = self.pages.bytes(&groups, &shapes).div_ceil(self.pages.page_bytes());
        let pages = self.free.split_off(self.free.len() - needed);
        let writing = self.pages.write(&groups, &pages, parts).map_err(|refused| refused.error)?;
        Ok(Stored { tensors, groups, shapes, pages, _writing: writing })
    }

    fn restore(&mut self, stored: Stored) -> Outcome {
        let Stored { tensors, groups, shapes, pages, .. } = stored;
        let reading = self.pages.read(&groups, &pages, &shapes)?;
        self.free.extend(pages);
        tensors.compare(&self.pages.finish(reading)?)
    }
}

/// Groups that the host knows, or that only the device knows.
fn on_device(groups: &Groups, known: bool) -> Result<DeviceGroups, Error> {
    if known {
        return cuda().groups(groups);
    }
    let mut unknown = cuda().empty_groups(groups.experts(), groups.rows())?;
    let splits: Vec<i64> = groups.splits().map(|s| s as i64).collect();
    cuda().compute_groups(cuda().upload_plain(&splits)?.view(), &mut unknown)?;
    Ok(unknown)
}

const SPLITS: [&[usize]; 5] = [&[37, 0, 1, 150, 20], &[0, 0], &[16], &[1, 1, 1], &[0, 64, 0]];

/// Several stores in flight, read back in another order, for each home, kind of splits and size of a page.
pub(crate) fn round_trips(cols: usize) -> Outcome {
    for home in HOMES {
        for (known, page_bytes) in
            [(true, 16), (false, 16), (true, 48), (false, 4096), (true, 4096), (true, 1 << 20)]
        {
            let case = || -> Outcome {
                // Pages of 16 bytes also take more than one launch.
                let pages = (4_000_000 / page_bytes).max(12) as PageId;
                let mut pool = Pool::new(home, page_bytes, pages, 5)?;
                let total = pool.free.len();
                for round in 0..2 {
                    let mut flying = vec![];
                    for (i, splits) in SPLITS.into_iter().enumerate() {
                        let rows = splits.iter().sum::<usize>() + 5;
                        let groups = Groups::new(splits, rows).expect("fits");
                        let on_device = on_device(&groups, known)?;
                        let padded = on_device.padded_rows();
                        let tensors = Tensors::new(&groups, padded, cols, 100 * round + i as u64);
                        flying.push(pool.store(tensors, on_device)?);
                    }
                    for pick in [3, 0, 2, 0, 0] {
                        pool.restore(flying.remove(pick))?;
                    }
                }
                ensure(pool.free.len() == total, || "pages were lost".into())
            };
            case().in_case(format!("{home:?}, splits known: {known}, pages of {page_bytes} bytes"))?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn every_live_byte_comes_back() {
    must(round_trips(144));
    must(round_trips(17 * 16 + 16));
}

/// Memory of stored tensors is reused by the main stream at once, while their copy is still under way.
#[test]
#[ignore = "needs a GPU"]
fn the_main_stream_runs_ahead() {
    let compared = || -> Outcome {
        for (home, known) in HOMES.into_iter().flat_map(|home| [(home, false), (home, true)]) {
            let groups = Groups::new(&[3000, 0, 5000, 96], 9000).expect("fits");
            let mut pool = Pool::new(home, 1 << 16, 1500, 6)?;
            let mut flying = vec![];
            for seed in 0..3 {
                let device_groups = on_device(&groups, known)?;
                let tensors = Tensors::new(&groups, device_groups.padded_rows(), 512, 200 + seed);
                flying.push(pool.store(tensors, device_groups)?);
                // New tensors of the same sizes: nothing of them may reach the pages.
                let junk = Tensors::new(&groups, groups.padded_rows(), 512, 300 + seed);
                drop((junk.upload()?, junk.upload()?));
            }
            // Dropped behind an unfinished copy, too.
            drop(flying.remove(1));
            for stored in flying {
                pool.restore(stored)?;
            }
        }
        Ok(())
    };
    must(compared());
}

#[test]
#[ignore = "needs a GPU"]
fn reads_that_nobody_waits_for() {
    let compared = || -> Outcome {
        let groups = Groups::new(&[300, 50], 360).expect("fits");
        let mut pool = Pool::new(PageHome::Device, 4096, 400, 7)?;
        for seed in 0..4 {
            let device_groups = cuda().groups(&groups)?;
            let tensors = Tensors::new(&groups, groups.padded_rows(), 64, 400 + seed);
            let stored = pool.store(tensors, device_groups)?;
            drop(pool.pages.read(&stored.groups, &stored.pages, &stored.shapes)?);
            pool.restore(stored)?;
        }
        Ok(())
    };
    must(compared());
}

#[test]
#[ignore = "needs a GPU"]
fn only_live_rows_take_pages() {
    let compared = || -> Outcome {
        let pool = CudaPages::new(cuda(), PageHome::Device, 4096, 4)?;
        let groups = Groups::new(&[16, 0, 16], 100).expect("fits");
        let shapes = |padded| -> Result<Vec<PartShape>, Error> {
            Ok(Tensors::new(&groups, padded, 64, 500).upload()?.iter().map(Part::shape).collect())
        };
        let (known, unknown) = (on_device(&groups, true)?, on_device(&groups, false)?);
        let exact = 32 * 64 * 2 + 32 * 4 + 64 * 32 / 2 + 64 * 32 / 16 + 16 + 32 * 65 * 2;
        let got = pool.bytes(&known, &shapes(known.padded_rows())?);
        ensure(got == exact, || format!("known splits: expected {exact} bytes, got {got}"))?;
        let got = pool.bytes(&unknown, &shapes(unknown.padded_rows())?);
        ensure(got > 100 * 64 * 2, || format!("unknown splits: expected the most rows, got {got} bytes"))
    };
    must(compared());
}

#[test]
#[ignore = "needs a GPU"]
fn impossible_pools_are_refused() {
    for page_bytes in [0, 8, 24 + 16 * 7, 1 << 28] {
        must(refused(CudaPages::new(cuda(), PageHome::Device, page_bytes, 1), "a multiple of 16 below 2^28"));
    }
    for home in HOMES {
        let huge = CudaPages::new(cuda(), home, 1 << 27, u32::MAX);
        assert!(matches!(huge, Err(Error::Device(_))), "{huge:?}");
    }
}

/// The whole operator, once the backend has products.
#[test]
#[ignore = "needs a GPU"]
fn the_operator_through_pages() {
    if !cuda().capabilities().products {
        return;
    }
    for home in HOMES {
        must(checks::paged_stash_over(cuda(), || {
            Ok(PagedStash::over(CudaPages::new(cuda(), home, 1024, 300)?))
        }));
    }
}
