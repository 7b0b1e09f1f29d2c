//! Passes recorded once and launched again, with other splits, values and random numbers in the same buffers: byte for byte
//! what the passes give by themselves, and what the CPU gives. That a capture succeeds also shows that no pass waits
//! for the device.

use crate::cases::{Case, Form, Made, Setting, stochastic};
use crate::support::{another, called, cuda, must, refused, skewed};
use half::bf16;
use moe4::kernels::contract::*;
use moe4::kernels::cpu::Cpu;
use moe4::kernels::{Backend, Error, Extent, Memory};
use moe4::numerics::BLOCK;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::{RandomStream, Rounding};
use moe4::tensor::{Groups, Nvfp4, ScaleLayout, scale_layout};
use moe4_conformance::compare::{bf16_bits, bytes, f32_bits};
use moe4_conformance::data::{self, Kind};
use moe4_conformance::drive::{self, Poison};
use moe4_conformance::{InCase, Outcome};
use moe4_cuda::{Cuda, DeviceBuffer, DeviceGroups, DeviceMemory};

const MASK: SignMask = SignMask::DEFAULT;
/// Rowwise and columnwise.
const LAYOUT: [ScaleLayout; 2] = [ScaleLayout::Plain, ScaleLayout::Swizzled128x4];

/// All that a sequence of passes reads and writes, for splits that only the device knows.
struct Buffers {
    rows: usize,
    cols: usize,
    x: DeviceBuffer<bf16>,
    splits: DeviceBuffer<i64>,
    /// What is added to the streams of random numbers.
    shift: DeviceBuffer<u64>,
    groups: DeviceGroups,
    amax: DeviceBuffer<f32>,
    amax_rht: DeviceBuffer<f32>,
    row: Nvfp4<DeviceBuffer<u8>, ()>,
    col: Nvfp4<DeviceBuffer<u8>, ()>,
    /// BF16 values of the columnwise copy.
    unpacked: DeviceBuffer<bf16>,
    /// The columnwise copy back to f32.
    values: DeviceBuffer<f32>,
}

/// What the passes left, on the host.
struct Outputs {
    amax: Vec<f32>,
    amax_rht: Vec<f32>,
    row: Nvfp4<Vec<u8>, ()>,
    col: Nvfp4<Vec<u8>, ()>,
    unpacked: Vec<bf16>,
    values: Vec<f32>,
}

fn poison<T: Poison>(cuda: &Cuda, buffer: &mut DeviceBuffer<T>) -> Result<(), Error> {
    let len = buffer.view().len();
    cuda.write(buffer, &vec![T::POISON; len])
}

impl Buffers {
    fn new(cuda: &Cuda, experts: usize, rows: usize, cols: usize) -> Result<Self, Error> {
        let groups = cuda.empty_groups(experts, rows)?;
        let k = groups.padded_rows();
        let copy = |rows, k, layout: ScaleLayout| -> Result<_, Error> {
            let (codes, scales) = (cuda.empty(rows * k / 2)?, cuda.empty(layout.bytes(rows, k / BLOCK))?);
            Ok(Nvfp4 { codes, scales, amax: () })
        };
        Ok(Self {
            rows,
            cols,
            x: cuda.empty(rows * cols)?,
            splits: cuda.upload_plain(&vec![0; experts])?,
            shift: cuda.upload_plain(&[0])?,
            groups,
            amax: cuda.empty(experts)?,
            amax_rht: cuda.empty(experts)?,
            row: copy(rows, cols, LAYOUT[0])?,
            col: copy(cols, k, LAYOUT[1])?,
            unpacked: cuda.empty(cols * k)?,
            values: cuda.empty(cols * k)?,
        })
    }

    /// Inputs, and outputs that no pass would leave.
    fn fill(&mut self, cuda: &Cuda, x: &[bf16], splits: &[i64], shift: u64) -> Result<(), Error> {
        cuda.write(&mut self.x, x)?;
        cuda.write(&mut self.shift, &[shift])?;
        cuda.write(&mut self.splits, splits)?;
        [&mut self.amax, &mut self.amax_rht, &mut self.values]
            .into_iter()
            .try_for_each(|b| poison(cuda, b))?;
        let copies = [&mut self.row, &mut self.col].into_iter().flat_map(|q| [&mut q.codes, &mut q.scales]);
        copies.into_iter().try_for_each(|b| poison(cuda, b))?;
        poison(cuda, &mut self.unpacked)
    }

    fn enqueue(&mut self, cuda: &Cuda) -> Result<(), Error> {
        let Self { cols, x, splits, shift, groups, amax, amax_rht, row, col, unpacked, values, .. } = self;
        let (x, cols, rounding) = (x.view(), *cols, stochastic(31));
        cuda.compute_groups(splits.view(), groups)?;
        cuda.group_hadamard_amax(GroupHadamardAmax {
            x,
            cols,
            groups,
            sign_mask: MASK,
            amax: amax.view_mut(),
            amax_rht: amax_rht.view_mut(),
        })?;
        let copies = GroupQuantize {
            x,
            cols,
            groups,
            rowwise: Some(Cast {
                amax: amax.view(),
                rounding: rounding[0],
                packed: Some(PackedOut {
                    codes: row.codes.view_mut(),
                    scales: row.scales.view_mut(),
                    layout: LAYOUT[0],
                }),
                unpacked: None,
            }),
            columnwise: Some(ColumnwiseCast {
                rht: Some(MASK),
                cast: Cast {
                    amax: amax_rht.view(),
                    rounding: rounding[1],
                    packed: Some(PackedOut {
                        codes: col.codes.view_mut(),
                        scales: col.scales.view_mut(),
                        layout: LAYOUT[1],
                    }),
                    unpacked: Some(unpacked.view_mut()),
                },
            }),
        };
        cuda.shifting_streams(shift.view(), || cuda.group_quantize(copies))?;
        cuda.dequantize(Dequantize {
            codes: col.codes.view(),
            scales: col.scales.view(),
            amax: amax_rht.view(),
            cols,
            groups,
            direction: Direction::Columnwise,
            layout: LAYOUT[1],
            out: values.view_mut(),
        })
    }

    fn download(&self, cuda: &Cuda) -> Result<Outputs, Error> {
        let copy = |q: &Nvfp4<DeviceBuffer<u8>, ()>| -> Result<_, Error> {
            let (codes, scales) = (cuda.download(q.codes.view())?, cuda.download(q.scales.view())?);
            Ok(Nvfp4 { codes, scales, amax: () })
        };
        Ok(Outputs {
            amax: cuda.download(self.amax.view())?,
            amax_rht: cuda.download(self.amax_rht.view())?,
            row: copy(&self.row)?,
            col: copy(&self.col)?,
            unpacked: cuda.download(self.unpacked.view())?,
            values: cuda.download(self.values.view())?,
        })
    }

    /// What the CPU makes of splits that the host knows, as it lies in buffers for the worst of splits: lines are
    /// longer, and each expert's token positions the same.
    fn on_the_cpu(&self, x: &[bf16], splits: &[i64], shift: u64) -> Result<Outputs, Error> {
        let (groups, [cols, k]) =
            (Groups::from_i64(splits, self.rows)?, [self.cols, self.groups.padded_rows()]);
        let rounding = stochastic(31).map(|rounding| shifted(rounding, shift));
        let layout = ScaleLayout::Plain;
        let form = |i: usize, unpacked| Form { rounding: rounding[i], packed: true, layout, unpacked };
        let setting =
            Setting { mask: Some(MASK), rowwise: Some(form(0, false)), columnwise: Some(form(1, true)) };
        let made = Case::new(x, cols, &groups, setting).run(&Cpu::new())?;
        let Made { amax, amax_rht, rowwise: Some(row), columnwise: Some(col) } = made else {
            unreachable!("both copies were asked for")
        };
        let from = groups.padded_rows();
        let scales = widened(&col.copy.packed.scales, from / BLOCK, k / BLOCK, cols);
        let mut swizzled = vec![0; LAYOUT[1].bytes(cols, k / BLOCK)];
        scale_layout::swizzle(&scales, cols, k / BLOCK, &mut swizzled);
        Ok(Outputs {
            amax,
            amax_rht,
            row: Nvfp4 { codes: row.copy.packed.codes, scales: row.copy.packed.scales, amax: () },
            col: Nvfp4 {
                codes: widened(&col.copy.packed.codes, from / 2, k / 2, cols),
                scales: swizzled,
                amax: (),
            },
            unpacked: widened(&col.copy.unpacked.expect("asked for"), from, k, cols),
            values: widened(&col.values, from, k, cols),
        })
    }

    fn same(&self, expected: &Outputs, got: &Outputs) -> Outcome {
        let (experts, [rows, cols, k]) =
            (self.groups.experts(), [self.rows, self.cols, self.groups.padded_rows()]);
        let swizzled = LAYOUT[1].bytes(cols, k / BLOCK);
        f32_bits("amax", &[experts], &expected.amax, &got.amax)?;
        f32_bits("amax after RHT", &[experts], &expected.amax_rht, &got.amax_rht)?;
        bytes("rowwise scales", &[rows, cols / BLOCK], &expected.row.scales, &got.row.scales)?;
        bytes("rowwise packed codes", &[rows, cols / 2], &expected.row.codes, &got.row.codes)?;
        bytes("columnwise swizzled scales", &[swizzled], &expected.col.scales, &got.col.scales)?;
        bytes("columnwise packed codes", &[cols, k / 2], &expected.col.codes, &got.col.codes)?;
        bf16_bits("columnwise unpacked", &[cols, k], &expected.unpacked, &got.unpacked)?;
        f32_bits("columnwise dequantized", &[cols, k], &expected.values, &got.values)
    }
}

/// Rounding with the random numbers of another stream.
fn shifted(rounding: Rounding, shift: u64) -> Rounding {
    match rounding {
        Rounding::Nearest => Rounding::Nearest,
        Rounding::Stochastic(random) => {
            Rounding::Stochastic(RandomStream { stream: random.stream.wrapping_add(shift), ..random })
        }
    }
}

/// Lines of `from` elements as the beginnings of lines of `to`; zeros behind.
fn widened<T: Copy + Default>(x: &[T], from: usize, to: usize, lines: usize) -> Vec<T> {
    let mut out = vec![T::default(); lines * to];
    for line in 0..lines {
        out[line * to..line * to + from].copy_from_slice(&x[line * from..(line + 1) * from]);
    }
    out
}

/// Splits, and what is wrong with them.
type Launch = (Vec<i64>, Option<&'static str>);

fn replays(experts: usize, rows: usize, cols: usize, launches: &[Launch]) -> Outcome {
    let cuda = cuda();
    let mut buffers = Buffers::new(cuda, experts, rows, cols)?;
    // Loads the kernels, with splits that no launch of the graph has.
    buffers.fill(cuda, &vec![bf16::ONE; rows * cols], &vec![0; experts], 0)?;
    buffers.enqueue(cuda)?;
    cuda.synchronize()?;
    let mut graph = cuda.capture(|| buffers.enqueue(cuda))?;
    for (i, (splits, wrong)) in launches.iter().enumerate() {
        let mut x = data::tensor(Kind::ALL[i % 5], rows * cols, 800 + i as u64);
        let counted = if wrong.is_some() { vec![0; experts] } else { splits.clone() };
        x[counted.iter().sum::<i64>() as usize * cols..].fill(bf16::NAN);
        // The streams are near 2^64, and some go around it.
        let shift = [0, 4, 8, 1 << 33][i % 4];
        let mut compared = || -> Outcome {
            let told = || match wrong {
                Some(place) => refused(cuda.synchronize(), place),
                None => Ok(cuda.synchronize()?),
            };
            let expected = buffers.on_the_cpu(&x, &counted, shift)?;
            buffers.fill(cuda, &x, splits, shift)?;
            // SAFETY: the buffers of the capture are alive, and only this thread uses them.
            called(unsafe { graph.launch() })?;
            told().in_case("graph")?;
            let launched = buffers.download(cuda)?;
            buffers.same(&expected, &launched).in_case("graph against CPU")?;
            buffers.fill(cuda, &x, splits, shift)?;
            buffers.enqueue(cuda)?;
            told().in_case("passes")?;
            buffers.same(&buffers.download(cuda)?, &launched).in_case("graph against passes")
        };
        compared().in_case(format!("launch {i}, splits {splits:?} of {rows} rows"))?;
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn a_graph_with_other_splits() {
    let good = |splits: [i64; 7]| (splits.to_vec(), None);
    let launches = [
        good([100, 0, 37, 513, 1, 16, 200]),
        good([0; 7]),
        good([0, 0, 0, 0, 0, 0, 1000]),
        good([1000, 0, 0, 0, 0, 0, 0]),
        good([142; 7]),
        good([1; 7]),
        (vec![10, -1, 10, 0, 0, 0, 0], Some("splits[1]")),
        good([0, 129, 127, 128, 0, 300, 0]),
        (vec![600, 0, 0, 0, 0, 0, 600], Some("sum of splits")),
        (vec![0, 0, 0, 0, 1001, 0, 0], Some("splits[4]")),
        (vec![i64::MAX, i64::MAX, i64::MIN, 2, 0, 0, 0], Some("splits[0]")),
        good([100, 0, 37, 513, 1, 16, 200]),
    ];
    must(replays(7, 1000, 400, &launches));
}

#[test]
#[ignore = "needs a GPU"]
fn a_graph_of_many_experts() {
    let of = |live: usize, seed| {
        (skewed(128, live, seed).into_iter().map(|split| split as i64).collect::<Vec<_>>(), None)
    };
    let launches = [of(4096, 1), of(4000, 2), of(130, 3), (vec![32; 128], None), (vec![0; 128], None)];
    must(replays(128, 4096, 128, &launches));
    // More experts than the thread block that computes their offsets has threads.
    let ones = |n: i64| (0..2100).map(|e| i64::from(e % n == 0)).collect::<Vec<_>>();
    must(replays(2100, 2200, 16, &[(ones(1), None), (ones(3), None), (vec![0; 2100], None)]));
}

#[test]
#[ignore = "needs a GPU"]
fn a_graph_of_one_expert_and_of_no_rows() {
    must(replays(
        1,
        129,
        16,
        &[(vec![129], None), (vec![1], None), (vec![130], Some("splits[0]")), (vec![0], None)],
    ));
    must(replays(3, 0, 32, &[(vec![0; 3], None), (vec![0, 1, 0], Some("splits[1]"))]));
}

#[test]
#[ignore = "needs a GPU"]
fn a_kernel_is_not_loaded_in_a_capture() {
    let cuda = another();
    let told = || -> Outcome {
        let groups = Groups::new(&[5, 3], 8).expect("fits");
        let (x, groups) = (cuda.upload(&data::normal(8 * 16, 1.0, 811))?, cuda.groups(&groups)?);
        let mut amax = cuda.empty(2)?;
        let mut pass =
            || cuda.group_amax(GroupAmax { x: x.view(), cols: 16, groups: &groups, amax: amax.view_mut() });
        refused(
            cuda.capture(&mut pass),
            "kernel: expected a kernel that is loaded before the graph, got group_amax",
        )?;
        pass()?;
        let mut graph = cuda.capture(pass)?;
        // SAFETY: the buffers of the capture are alive, and only this thread uses them.
        called(unsafe { graph.launch() })?;
        Ok(cuda.synchronize()?)
    };
    must(told());
}

/// Passes that take part in no sequence above, each alone in a graph.
#[test]
#[ignore = "needs a GPU"]
fn every_other_pass_in_a_capture() {
    let cuda = cuda();
    let (rows, cols, experts) = (330, 144, 3);
    let groups = Groups::new(&[100, 0, 200], rows).expect("fits");
    let host = data::normal(rows * cols, 1.0, 810);
    let recorded = |what: &str, mut pass: Box<dyn FnMut() -> Result<(), Error> + '_>| -> Outcome {
        // Once by itself, so that its kernels are loaded.
        pass()?;
        let mut graph = cuda.capture(pass).map_err(moe4_conformance::Failure::from).in_case(what)?;
        // SAFETY: the buffers of the capture are alive, and only this thread uses them.
        called(unsafe { graph.launch() })?;
        Ok(cuda.synchronize()?)
    };
    let compared = || -> Outcome {
        let (x, on_device) = (cuda.upload(&host)?, cuda.groups(&groups)?);

        let mut amax = cuda.upload(&[f32::NAN; 3])?;
        let mut pass =
            || cuda.group_amax(GroupAmax { x: x.view(), cols, groups: &on_device, amax: amax.view_mut() });
        recorded("group_amax", Box::new(&mut pass))?;
        let expected = drive::amax(&Cpu::new(), &host, cols, &groups)?;
        f32_bits("amax", &[experts], &expected, &cuda.download(amax.view())?)?;

        let shape = WeightShape { n: 96, k: 144 };
        let w = &host[..experts * shape.n * shape.k];
        let of_weights = cuda.upload(w)?;
        let mut codes = cuda.empty(w.len() / 2)?;
        let mut scales = cuda.empty(w.len() / BLOCK)?;
        let mut pass = || {
            cuda.quantize_weights(QuantizeWeights {
                w: DeviceMemory::split(of_weights.view(), experts),
                shape,
                codes: codes.view_mut(),
                scales: scales.view_mut(),
                unpacked: None,
                amax: amax.view_mut(),
            })
        };
        recorded("quantize_weights", Box::new(&mut pass))?;
        let expected = drive::quantize_weights(&Cpu::new(), w, experts, shape)?;
        f32_bits("amax of weights", &[experts], &expected.amax, &cuda.download(amax.view())?)?;
        bytes("codes of weights", &[w.len() / 2], &expected.codes, &cuda.download(codes.view())?)?;

        let mut back = cuda.empty::<f32>(w.len())?;
        let of_weights = cuda.groups(&Groups::new(&[shape.n; 3], experts * shape.n).expect("fits"))?;
        let mut pass = || {
            cuda.dequantize(Dequantize {
                codes: codes.view(),
                scales: scales.view(),
                amax: amax.view(),
                cols: shape.k,
                groups: &of_weights,
                direction: Direction::Rowwise,
                layout: ScaleLayout::Plain,
                out: back.view_mut(),
            })
        };
        recorded("dequantize", Box::new(&mut pass))?;

        let source: Vec<u32> = (0..rows as u32).rev().collect();
        let places = cuda.upload(&source)?;
        let mut moved = cuda.empty::<bf16>(rows * cols)?;
        let mut pass = || {
            let (x, source, out) = (x.view(), places.view(), moved.view_mut());
            cuda.permute(Permute { x, cols, source, out })
        };
        recorded("permute", Box::new(&mut pass))?;
        let expected = drive::permute(&Cpu::new(), &host, cols, &source)?;
        bf16_bits("permuted", &[rows, cols], &expected, &cuda.download(moved.view())?)?;
        let mut home = cuda.empty::<bf16>(rows * cols)?;
        let mut pass = || {
            let (y, slot, out) = (moved.view(), places.view(), home.view_mut());
            cuda.unpermute(Unpermute { y, cols, slot, top_k: 1, weights: None, out })
        };
        recorded("unpermute", Box::new(&mut pass))?;
        bf16_bits("back", &[rows, cols], &host, &cuda.download(home.view())?)
    };
    must(compared());
}
