//! Loaded kernels and their launch.

use super::error::CallError;
use super::raw::{self, CUfunction, CUmodule, Handle};
use super::stream::Stream;
use bytemuck::NoUninit;
use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::device::Device;

/// Dynamic shared memory that every kernel may have, in bytes.
const USUAL_SHARED: u32 = 48 << 10;

/// Thread blocks in each dimension, threads of a block, and its dynamic shared memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: u32,
    pub(crate) shared: u32,
}

impl Grid {
    /// Of these sizes, without dynamic shared memory.
    pub(crate) fn new(blocks: [u32; 3], threads: u32) -> Self {
        Self { blocks, threads, shared: 0 }
    }

    /// With so much dynamic shared memory.
    pub(crate) fn with_shared(self, shared: u32) -> Self {
        Self { shared, ..self }
    }
}

/// A kernel in a context.
#[derive(Debug)]
pub(crate) struct Kernel {
    name: String,
    function: Handle<CUfunction>,
    module: Handle<CUmodule>,
    device: Arc<Device>,
    /// Dynamic shared memory that it may have.
    shared: AtomicU32,
}

impl Kernel {
    /// Loads `entry` from a cubin. `name` is for messages.
    ///
    /// # Safety
    /// `cubin` is a complete cubin.
    pub(crate) unsafe fn load(
        device: &Arc<Device>,
        cubin: &[u8],
        entry: &str,
        name: String,
    ) -> Result<Self, CallError> {
        device.bind()?;
        // SAFETY: as required.
        let module = Handle(unsafe { raw::load_module(cubin) }.map_err(|e| e.of(name.clone()))?);
        let entry = CString::new(entry).expect("kernels have plain names");
        match raw::function(module.0, &entry) {
            Ok(function) => Ok(Self {
                name,
                function: Handle(function),
                module,
                device: device.clone(),
                shared: USUAL_SHARED.into(),
            }),
            Err(e) => {
                raw::unload_module(module.0).unwrap_or_else(|e| log::warn!("{name}: {e}"));
                Err(e.of(name))
            }
        }
    }

    /// Enqueues the kernel.
    ///
    /// # Safety
    /// The arguments are those of the kernel, in order and of the same layout, and the device memory that they name is
    /// as large as the kernel takes it to be and lives until the stream has run it.
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        grid: Grid,
        arguments: Arguments<'_>,
    ) -> Result<(), CallError> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        let Arguments { mut pointers, shape: (names, sizes), .. } = arguments;
        let stream = stream.bound()?;
        let enqueue = |pointers: &mut [_]| {
            if grid.shared > self.shared.load(Ordering::Relaxed) {
                raw::allow_shared_memory(self.function.0, grid.shared)?;
                self.shared.store(grid.shared, Ordering::Relaxed);
            }
            // SAFETY: as required.
            unsafe { raw::launch(self.function.0, grid, stream, pointers) }
        };
        enqueue(&mut pointers).map_err(|e| {
            let Grid { blocks, threads, .. } = grid;
            e.of(format!("{} for {names} {sizes:?}, on {blocks:?} blocks of {threads} threads", self.name))
        })
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        let unloaded = self.device.bind().and_then(|()| raw::unload_module(self.module.0));
        if let Err(e) = unloaded {
            log::warn!("{}: {e}", self.name);
        }
    }
}

/// Arguments of a launch, in order, and the shape that they are of, for messages.
pub(crate) struct Arguments<'a> {
    pointers: Vec<*mut c_void>,
    shape: (&'static str, [usize; 3]),
    borrowed: std::marker::PhantomData<&'a ()>,
}

impl<'a> Arguments<'a> {
    /// Of a shape such as `[T, cols, E]` and its sizes.
    pub(crate) fn of(names: &'static str, sizes: [usize; 3]) -> Self {
        Self { pointers: Vec::new(), shape: (names, sizes), borrowed: std::marker::PhantomData }
    }

    /// The next argument: a number, an address, or a structure of the same layout as the kernel's.
    pub(crate) fn with<T: NoUninit>(mut self, value: &'a T) -> Self {
        // The driver only reads through these.
        self.pointers.push((value as *const T).cast_mut().cast());
        self
    }
}
