//! [`CudaPages`]: the pages of a paged stash, in device memory or in pinned host memory.
//!
//! ```text
//! write    main ──event──> side: copy tensors to pages; tensors freed on side, behind the copy
//! read     side: allocate, copy pages to tensors ──event──> main, when the tensors are first asked for
//! ```
//!
//! Copies run on a stream of their own, beside the passes of the backend's stream, and the host never waits. All of
//! them are on that one stream, so pages can be reused as soon as they were read by an enqueued copy.
//!
//! Where the host knows the splits, a copy takes pages for live rows alone. Where only the device knows them, it takes pages
//! for the most rows that there can be, and a kernel reads the number from the groups and moves what is alive. One kernel
//! serves both, and both homes of the pages: it writes host memory through the bus, a few thread blocks being enough for that.

use crate::backend::Cuda;
use crate::driver::{CallError, DeviceBytes, Event, Kernel, PinnedBytes, Stream, fill};
use crate::groups::DeviceGroups;
use crate::launch::{MOST_PARTS, PAGE_LIMIT, PartArgument, Store, WORD, copy_pages, copy_pages_variant};
use crate::memory::{DeviceBuffer, DeviceMemory};
use moe4::kernels::pages::{AnyBuffer, ElementType, Live, NotWritten, PageId, PagePool, Part, PartShape};
use moe4::kernels::{Element, Error, Extent, Misuse};
use std::sync::Arc;

/// Where the pages are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageHome {
    /// In device memory: it neither grows nor fragments.
    Device,
    /// In pinned host memory: device memory is free until the backward needs the tensors.
    PinnedHost,
}

/// A pool of pages for tensors of one GPU. See `PagedStash::over` of `moe4::mlp`.
#[derive(Debug)]
pub struct CudaPages {
    main: Stream,
    side: Stream,
    kernels: [Arc<Kernel>; 2],
    home: Home,
    page_bytes: usize,
    pages: PageId,
}

#[derive(Debug)]
enum Home {
    Device(DeviceBytes),
    PinnedHost(PinnedBytes),
}

/// A mark that the side stream reaches when a copy is done. The main stream waits for it at the latest when this is
/// dropped, so that memory which the copy uses can then be freed in the order of the main stream.
#[derive(Debug)]
pub struct Behind {
    event: Option<Event>,
    main: Stream,
}

impl Behind {
    fn join(&mut self) -> Result<(), CallError> {
        self.event.take().map_or(Ok(()), |event| self.main.wait(&event))
    }
}

impl Drop for Behind {
    fn drop(&mut self) {
        if let Err(e) = self.join() {
            log::warn!("{}: {e}", self.main.device().facts().name);
        }
    }
}

/// Tensors that are being copied out of pages.
#[derive(Debug)]
pub struct Incoming {
    parts: Vec<Part<DeviceMemory>>,
    behind: Behind,
}

/// A tensor in a store: how much of it, and where.
struct Placed {
    shape: PartShape,
    /// Bytes of the tensor that are in pages, from its begin.
    stored: usize,
    at: usize,
}

/// Each tensor behind the one before, from a multiple of [`WORD`] on; and the end of the last.
fn place(groups: &DeviceGroups, shapes: &[PartShape]) -> (Vec<Placed>, usize) {
    let rows = groups.known_live_rows().unwrap_or(groups.rows());
    let mut end = 0;
    let placed = shapes.iter().map(|&shape| {
        let stored = match shape.live {
            Live::All | Live::Positions { .. } => shape.bytes(),
            Live::Rows { cols } => rows * cols * shape.element.bytes(),
        };
        let at = end;
        end = (at + stored).next_multiple_of(WORD);
        Placed { shape, stored, at }
    });
    (placed.collect(), end)
}

impl Placed {
    /// What the kernel is told of the tensor at `address`.
    fn argument(&self, groups: &DeviceGroups, address: u64) -> PartArgument {
        let [live_rows, live_positions] = groups.live_counts();
        let bytes = self.shape.bytes();
        let (line, count, per, shift) = match self.shape.live {
            Live::All => (bytes, 0, 0, 0),
            Live::Rows { cols } => (bytes, live_rows, (cols * self.shape.element.bytes()) as u32, 0),
            // The host's splits leave no position to nobody.
            Live::Positions { per } if groups.known_live_rows().is_some() => {
                (groups.padded_rows() / per, 0, 0, 0)
            }
            Live::Positions { per } => (groups.padded_rows() / per, live_positions, 1, per.ilog2()),
        };
        let (bytes, line, at) = (bytes as u64, line as u64, self.at as u64);
        PartArgument { tensor: address, bytes, line, at, count, per, shift }
    }
}

fn address(buffer: &AnyBuffer<DeviceMemory>) -> u64 {
    match buffer {
        AnyBuffer::U8(b) => b.view().address(),
        AnyBuffer::F32(b) => b.view().address(),
        AnyBuffer::Bf16(b) => b.view().address(),
    }
}

/// Later work on the buffer, its end included, is on `stream`.
fn order_by(buffer: &mut AnyBuffer<DeviceMemory>, stream: &Stream) {
    match buffer {
        AnyBuffer::U8(b) => b.bytes.order_by(stream),
        AnyBuffer::F32(b) => b.bytes.order_by(stream),
        AnyBuffer::Bf16(b) => b.bytes.order_by(stream),
    }
}

impl CudaPages {
    /// `pages` pages of `page_bytes` each, for tensors of `cuda`, whose stream is the main one. Compiles its kernels.
    ///
    /// Errors: a page size that is no multiple of 16 below 2^28; memory that there is not; a backend with an
    /// [allocator](crate::CudaOptions::allocator) of another framework.
    pub fn new(cuda: &Cuda, home: PageHome, page_bytes: usize, pages: PageId) -> Result<Self, Error> {
        let main = cuda.stream().clone();
        if !cuda.allocates_itself() {
            return Err(Error::Misuse(Misuse::Conflict {
                what: "pages",
                conflict: "expected a backend with the driver's pool of memory, got one with an allocator"
                    .into(),
                fix: "leave CudaOptions::allocator out: buffers go from stream to stream here",
            }));
        }
        if page_bytes == 0 || !page_bytes.is_multiple_of(WORD) || page_bytes >= PAGE_LIMIT {
            return Err(Error::Misuse(Misuse::Value {
                what: "pages: bytes of a page".into(),
                expected: "a multiple of 16 below 2^28",
                got: page_bytes.to_string(),
            }));
        }
        let kernels = [cuda.kernel(&copy_pages_variant(false))?, cuda.kernel(&copy_pages_variant(true))?];
        let side = cuda.on(Stream::new(main.device().clone()))?;
        let bytes = page_bytes * pages as usize;
        let home = match home {
            PageHome::Device => Home::Device(cuda.on(DeviceBytes::new(&side, bytes))?),
            PageHome::PinnedHost => Home::PinnedHost(cuda.on(PinnedBytes::new(&side, bytes))?),
        };
        Ok(Self { main, side, kernels, home, page_bytes, pages })
    }

    /// The stream of the copies.
    pub fn side_stream(&self) -> &Stream {
        &self.side
    }

    fn on<T>(&self, outcome: Result<T, CallError>) -> Result<T, Error> {
        outcome.map_err(|e| Error::Device(e.on(&self.main.device().facts().name)))
    }

    fn outside_capture(&self) -> Result<(), Error> {
        if !self.on(self.main.is_capturing())? {
            return Ok(());
        }
        let conflict = "expected a stream that runs, got one that records a graph".into();
        let fix = "move tensors into pages and out of them outside of a capture";
        Err(Misuse::Conflict { what: "pages", conflict, fix }.into())
    }

    /// Enqueues a copy between `parts` and `pages`; the mark behind it.
    ///
    /// # Safety
    /// The parts are device memory of their sizes. They, the groups and the pages are used by nothing else on the device
    /// until the side stream has reached the mark, except for reads of the groups.
    unsafe fn copy(
        &self,
        restore: bool,
        groups: &DeviceGroups,
        pages: &[PageId],
        placed: &[Placed],
        parts: &[Part<DeviceMemory>],
        bytes: usize,
    ) -> Result<Behind, Error> {
        let argument = |(placed, part): (&Placed, &Part<_>)| placed.argument(groups, address(&part.buffer));
        let in_pages = |(placed, _): &(&Placed, &Part<_>)| placed.stored > 0;
        let arguments: Vec<_> = placed.iter().zip(parts).filter(in_pages).map(argument).collect();
        if arguments.len() > MOST_PARTS {
            return Err(Error::Misuse(Misuse::Value {
                what: "pages: tensors of a copy".into(),
                expected: "at most 8",
                got: arguments.len().to_string(),
            }));
        }
        let (pool, most_blocks) = match &self.home {
            Home::Device(bytes) => (bytes.address(), 1024),
            Home::PinnedHost(bytes) => (bytes.address(), 64),
        };
        let store = Store { pool, page_bytes: self.page_bytes, pages, parts: &arguments, bytes, most_blocks };
        // SAFETY: as required; `place` gave each part its own bytes of the store.
        self.on(unsafe { copy_pages(&self.kernels[usize::from(restore)], &self.side, store) })?;
        let event = Some(self.on(Event::record(&self.side))?);
        Ok(Behind { event, main: self.main.clone() })
    }

    fn enqueue_write(
        &self,
        groups: &DeviceGroups,
        pages: &[PageId],
        parts: &[Part<DeviceMemory>],
    ) -> Result<Behind, Error> {
        self.outside_capture()?;
        let shapes: Vec<PartShape> = parts.iter().map(Part::shape).collect();
        let (placed, bytes) = place(groups, &shapes);
        self.on(self.side.wait(&self.on(Event::record(&self.main))?))?;
        // SAFETY: the tensors are owned, and written by nothing that the main stream has not been given before the event;
        // `write` frees them behind the copy, and the groups outlive the mark as long as its owner drops it first.
        unsafe { self.copy(false, groups, pages, &placed, parts, bytes) }
    }

    fn empty<T: Element>(&self, placed: &Placed) -> Result<DeviceBuffer<T>, Error> {
        let len = placed.shape.len;
        let buffer = DeviceBuffer::new(self.on(DeviceBytes::new(&self.side, len * size_of::<T>()))?, len);
        let dead = placed.shape.bytes() - placed.stored;
        // SAFETY: the end of an allocation of the side stream that nobody has seen yet.
        let cleared = unsafe { fill(&self.side, buffer.view().address() + placed.stored as u64, 0, dead) };
        self.on(cleared)?;
        Ok(buffer)
    }
}

impl PagePool for CudaPages {
    type Memory = DeviceMemory;
    type Writing = Behind;
    type Reading = Incoming;

    fn page_bytes(&self) -> usize {
        self.page_bytes
    }
    fn pages(&self) -> PageId {
        self.pages
    }
    fn bytes(&self, groups: &DeviceGroups, shapes: &[PartShape]) -> usize {
        place(groups, shapes).1
    }

    fn write(
        &self,
        groups: &DeviceGroups,
        pages: &[PageId],
        mut parts: Vec<Part<DeviceMemory>>,
    ) -> Result<Behind, NotWritten<DeviceMemory>> {
        match self.enqueue_write(groups, pages, &parts) {
            Ok(behind) => {
                parts.iter_mut().for_each(|part| order_by(&mut part.buffer, &self.side));
                Ok(behind)
            }
            Err(error) => Err(NotWritten { error, parts }),
        }
    }

    fn read(&self, groups: &DeviceGroups, pages: &[PageId], shapes: &[PartShape]) -> Result<Incoming, Error> {
        self.outside_capture()?;
        let (placed, bytes) = place(groups, shapes);
        let part = |placed: &Placed| -> Result<_, Error> {
            let buffer = match placed.shape.element {
                ElementType::U8 => AnyBuffer::U8(self.empty(placed)?),
                ElementType::F32 => AnyBuffer::F32(self.empty(placed)?),
                ElementType::Bf16 => AnyBuffer::Bf16(self.empty(placed)?),
            };
            Ok(Part { buffer, live: placed.shape.live })
        };
        let parts = placed.iter().map(part).collect::<Result<Vec<_>, _>>()?;
        // SAFETY: the tensors are new on the side stream, and go to the main stream behind the mark.
        let behind = unsafe { self.copy(true, groups, pages, &placed, &parts, bytes) }?;
        Ok(Incoming { parts, behind })
    }

    fn finish(&self, reading: Incoming) -> Result<Vec<Part<DeviceMemory>>, Error> {
        let Incoming { mut parts, mut behind } = reading;
        self.on(behind.join())?;
        parts.iter_mut().for_each(|part| order_by(&mut part.buffer, &self.main));
        Ok(parts)
    }
}
