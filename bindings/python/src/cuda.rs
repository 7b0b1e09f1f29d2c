//! Work on a GPU: on torch's current stream, in torch's memory, without waiting.
//!
//! ```text
//! first call for a GPU     find NVRTC, open the backend; it and its kernels stay for the life of the process
//! each call                a backend on torch's current stream of the calling thread
//!                          release the interpreter's lock, enqueue the passes on this thread, take the lock again
//! a buffer                 a tensor of torch's caching allocator: `TorchMemory`
//! a kernel not compiled    a line in the log `moe4`; after it Python's signal handlers, and no more passes if one raises
//! ```
//!
//! What torch knows, it decides: ordinals are torch's (the driver sees the same `CUDA_VISIBLE_DEVICES`), the context is
//! the primary one, which is torch's, and after a call the thread has the context that it had before.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use moe4::kernels::activation::Activation;
use moe4::kernels::{Backend, Error, Interruptible};
use moe4::mlp::GluLayout;
use moe4::mlp::RandomSeed;
use moe4_cuda::catalog::operator_variants;
use moe4_cuda::compile::{Compiling, Watch};
use moe4_cuda::driver::{Allocation, Allocator, CallError, CurrentContext, Device, Event, Stream};
use moe4_cuda::{Cuda, CudaOptions, DeviceBuffer, DeviceGroups, DeviceMemory};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyTuple};

use crate::place::{Checked, Failure, Place};
use crate::seed::Seed;
use crate::splits::Splits;
use crate::torch::{Dtype, Handed, Torch};

/// A GPU as all calls share it.
struct Gpu {
    /// On a stream of its own, which only stands for the GPU.
    backend: Cuda,
    empty: Arc<Empty>,
    /// `torch._C._cuda_getCurrentRawStream`
    current_stream: Py<PyAny>,
}

/// An empty tensor of each dtype that buffers have, from which others are made; no two of the same size.
#[derive(Debug)]
struct Empty([(Dtype, Py<PyAny>); 4]);

impl Empty {
    fn new(py: Python<'_>, ordinal: usize) -> PyResult<Self> {
        let (torch, device) = (py.import("torch")?, ordinal_of(py, ordinal)?);
        let empty = |dtype| {
            let arguments = [("dtype", Torch::get(py)?.object(dtype).bind(py)), ("device", &device)];
            let empty = torch.call_method("empty", (0,), Some(&arguments.into_py_dict(py)?))?;
            Ok::<_, PyErr>((dtype, empty.unbind()))
        };
        Ok(Self([empty(Dtype::U8)?, empty(Dtype::Bf16)?, empty(Dtype::F32)?, empty(Dtype::I64)?]))
    }

    /// Elements of so many bytes.
    fn tensor<'py>(
        &self,
        py: Python<'py>,
        element: usize,
        shape: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (_, empty) =
            self.0.iter().find(|(dtype, _)| dtype.bytes() == element).expect("sizes of elements");
        empty.bind(py).call_method1(intern!(py, "new_empty"), (shape,))
    }
}

/// The GPUs that were used by a process.
struct Opened {
    process: u32,
    gpus: HashMap<usize, Arc<Gpu>>,
}

/// Locked for moments and never while Python code runs, under the interpreter's lock, which a fork also takes: a child
/// never finds it locked. Not dropped: at exit the driver may be gone before us.
static OPENED: Mutex<Option<Opened>> = Mutex::new(None);

thread_local! {
    /// What Python raised within work: in the allocator, or in a handler of a signal.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// Whether no pass is to begin any more, because of that.
    static STOP: AtomicBool = const { AtomicBool::new(false) };
}

/// A GPU's memory, and the backend on the stream that was torch's current one.
pub(crate) struct OnCuda {
    gpu: Arc<Gpu>,
    backend: Cuda,
}

impl OnCuda {
    /// On torch's current stream of this thread.
    pub(crate) fn current(py: Python<'_>, ordinal: usize) -> PyResult<Self> {
        let gpu = match find(ordinal)? {
            Some(gpu) => gpu,
            None => open(py, ordinal)?,
        };
        let handle: usize = gpu.current_stream.bind(py).call1((ordinal,))?.extract()?;
        let device = gpu.backend.stream().device().clone();
        // SAFETY: torch's streams belong to the device's primary context. It keeps its own for the life of the process;
        // who gives it another keeps that while work is on it, as for torch's own operations.
        let backend = gpu.backend.with_stream(unsafe { Stream::borrow(device, handle) });
        Ok(Self { gpu, backend })
    }

    /// torch's number of the GPU.
    pub(crate) fn ordinal(&self) -> usize {
        self.backend.device().facts().ordinal
    }

    /// Orders work for memory that was made at `earlier` and is used and freed here: this place's stream waits for what
    /// is enqueued there, and `work` for that stream is over before the memory is used again.
    pub(crate) fn after<R>(&self, earlier: &Self, work: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        let (now, then) = (self.backend.stream(), earlier.backend.stream());
        if now.handle() == then.handle() {
            return work();
        }
        let wait = |waiting: &Stream, on: &Stream| waiting.wait(&Event::record(on)?);
        let device = self.backend.device();
        let failed = |e: CallError| PyRuntimeError::new_err(format!("{}: {e}", device.facts().name));
        let _context = kept_context(device)?;
        wait(now, then).map_err(failed)?;
        let outcome = work();
        wait(then, now).map_err(failed)?;
        outcome
    }
}

impl Place for OnCuda {
    type Memory = DeviceMemory;
    type Backend<'b> = Interruptible<'b, Cuda>;

    fn run<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Interruptible<'_, Cuda>) -> Result<R, Failure> + Send,
    ) -> PyResult<R> {
        RAISED.take(); // of work that panicked
        let outcome = py.detach(|| {
            let _context = kept_context(self.backend.device()).checked()?;
            self.backend.check_faults().map_err(earlier).checked()?;
            STOP.with(|stop| {
                stop.store(false, Ordering::Relaxed);
                work(&Interruptible::new(&self.backend, stop))
            })
        });
        match RAISED.take() {
            Some(raised) => Err(raised),
            None => outcome.map_err(Failure::raise),
        }
    }

    fn groups(backend: &Interruptible<'_, Cuda>, splits: &Splits) -> Result<DeviceGroups, Failure> {
        match splits {
            Splits::Host(groups) => Ok(backend.groups(groups)?),
            Splits::Gpu(..) => Self::groups_for_any(backend, splits),
        }
    }

    fn groups_for_any(backend: &Interruptible<'_, Cuda>, splits: &Splits) -> Result<DeviceGroups, Failure> {
        let cuda = backend.inner();
        match splits {
            Splits::Host(groups) => {
                let numbers: Vec<i64> = groups.splits().map(|split| split as i64).collect();
                Ok(cuda.groups_from(cuda.send(&numbers)?.view(), groups.rows())?)
            }
            Splits::Gpu(splits, rows) => Ok(cuda.groups_from(splits.device_i64(), *rows)?),
        }
    }

    fn seeded<R>(
        backend: &Interruptible<'_, Cuda>,
        seed: &Seed,
        work: impl FnOnce(RandomSeed) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        match seed {
            Seed::Host(seed) => work(*seed),
            Seed::Gpu(tensor) => {
                backend.inner().shifting_streams(tensor.device_word(), || work(RandomSeed::default()))
            }
        }
    }

    fn hand_over<'py, T: Handed>(
        &self,
        py: Python<'py>,
        buffer: DeviceBuffer<T>,
        shape: &[usize],
    ) -> PyResult<Bound<'py, PyAny>> {
        assert_eq!(buffer.view().len(), shape.iter().product::<usize>(), "a buffer of shape {shape:?}");
        let shape = PyTuple::new(py, shape)?;
        match buffer.into_owner().and_then(|owner| owner.downcast::<TorchMemory>().ok()) {
            // Not a view of it, which could not be written in place like any other tensor.
            Some(memory) => memory.0.bind(py).call_method1(intern!(py, "resize_"), (shape,)),
            None => self.gpu.empty.tensor(py, T::DTYPE.bytes(), &shape),
        }
    }
}

/// A flat tensor. Dropped without the interpreter's lock, it is queued until somebody takes the lock, which the
/// next allocation does first.
struct TorchMemory(Py<PyAny>);

/// torch's caching allocator, for the current stream of the calling thread: memory counts in its statistics, its errors
/// are torch's, and a capture has it from the graph's own pool.
#[derive(Debug)]
struct TorchAllocator {
    empty: Arc<Empty>,
}

impl Allocator for TorchAllocator {
    fn allocate(&self, bytes: usize, element: usize, _: &Stream) -> Result<Allocation, String> {
        Python::attach(|py| {
            let make = || {
                let tensor = self.empty.tensor(py, element, &PyTuple::new(py, [bytes / element])?)?;
                let address = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
                Ok(Allocation { address, owner: Box::new(TorchMemory(tensor.unbind())) })
            };
            make().map_err(|error: PyErr| {
                let reason = error.to_string();
                RAISED.set(Some(error));
                reason
            })
        })
    }
}

/// What kernels found wrong with data of an earlier call.
fn earlier(error: Error) -> PyErr {
    PyValueError::new_err(format!("{error}; an earlier call on this GPU was given it"))
}

fn kept_context(device: &Device) -> PyResult<CurrentContext> {
    CurrentContext::keep(device).map_err(|e| PyRuntimeError::new_err(format!("{}: {e}", device.facts().name)))
}

/// The GPU, if it was used before.
fn find(ordinal: usize) -> PyResult<Option<Arc<Gpu>>> {
    let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    match &*opened {
        Some(opened) if opened.process != std::process::id() => Err(PyRuntimeError::new_err(
            "cannot use a GPU in a forked child of a process that used one; start processes by the method 'spawn' of \
             multiprocessing",
        )),
        Some(opened) => Ok(opened.gpus.get(&ordinal).cloned()),
        None => Ok(None),
    }
}

fn open(py: Python<'_>, ordinal: usize) -> PyResult<Arc<Gpu>> {
    let torch = py.import("torch")?;
    let cuda = torch.getattr("cuda")?;
    if cuda.call_method0("is_current_stream_capturing")?.extract()? {
        return Err(PyRuntimeError::new_err(
            "expected a call before the capture of a graph, got the first one of this process within it; run the same \
             step once before, so that kernels are compiled and loaded",
        ));
    }
    let empty = Arc::new(Empty::new(py, ordinal)?);
    let options = CudaOptions {
        ordinal,
        nvrtc: nvrtc_folders(py)?,
        watch: Watch::stopping(watch),
        allocator: Some(Arc::new(TorchAllocator { empty: empty.clone() })),
        ..CudaOptions::default()
    };
    let current_stream = torch.getattr("_C")?.getattr("_cuda_getCurrentRawStream")?.unbind();
    let before = cuda.call_method0("current_device")?;
    let backend = py.detach(|| Cuda::open(&options));
    cuda.call_method1("set_device", (before,))?;
    let backend = backend.map_err(|e| PyRuntimeError::new_err(format!("cuda:{ordinal}: {e}")))?;
    let gpu = Arc::new(Gpu { backend, empty, current_stream });
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let opened = opened.get_or_insert_with(|| Opened { process: std::process::id(), gpus: HashMap::new() });
    // If another thread was as early, its GPU stays and ours goes.
    Ok(opened.gpus.entry(ordinal).or_insert(gpu).clone())
}

fn ordinal_of(py: Python<'_>, ordinal: usize) -> PyResult<Bound<'_, PyAny>> {
    Ok(format!("cuda:{ordinal}").into_pyobject(py)?.into_any())
}

/// Folders beside the torch that is imported where its wheels put NVRTC.
pub(crate) fn nvrtc_folders(py: Python<'_>) -> PyResult<Vec<PathBuf>> {
    let file: PathBuf = py.import("torch")?.getattr("__file__")?.extract()?;
    let Some(packages) = file.parent().and_then(Path::parent) else { return Ok(Vec::new()) };
    let folders = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"].map(|folder| packages.join(folder));
    Ok(folders.into_iter().filter(|folder| folder.is_dir()).collect())
}

/// Called on the thread that asked for the kernel, without the interpreter's lock.
fn watch(event: Compiling<'_>) -> ControlFlow<()> {
    Python::attach(|py| {
        let outcome = match event {
            Compiling::Begins(variant) => log(py, &format!("compiling {variant}, once for this GPU")),
            Compiling::Ended(_) => py.check_signals(),
        };
        let Err(raised) = outcome else { return ControlFlow::Continue(()) };
        RAISED.set(Some(raised));
        STOP.with(|stop| stop.store(true, Ordering::Relaxed));
        ControlFlow::Break(())
    })
}

fn log(py: Python<'_>, message: &str) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", ("moe4",))?;
    logger.call_method1("info", ("%s", message)).map(drop)
}

/// Compiles and loads what a grouped MLP with this activation needs, on all cores at once.
#[pyfunction]
pub(crate) fn compile_kernels(
    py: Python<'_>,
    ordinal: usize,
    activation: &str,
    glu_layout: &str,
) -> PyResult<()> {
    let activation: Activation =
        activation.parse().map_err(|e| PyValueError::new_err(format!("activation: {e}")))?;
    let layout: GluLayout =
        glu_layout.parse().map_err(|e| PyValueError::new_err(format!("glu_layout: {e}")))?;
    OnCuda::current(py, ordinal)?.run(py, |backend| {
        let cuda = backend.inner();
        let arch = cuda.device().facts().arch;
        let variants = operator_variants(&activation, layout, cuda.products(), arch);
        Ok(cuda.prepare(&variants)?)
    })
}

/// Raises what kernels found wrong on a GPU, all work of which is over.
#[pyfunction]
pub(crate) fn raise_faults(py: Python<'_>, ordinal: usize) -> PyResult<()> {
    let Some(gpu) = find(ordinal)? else { return Ok(()) };
    let outcome = py.detach(|| {
        let _context = kept_context(gpu.backend.device()).checked()?;
        gpu.backend.synchronize().map_err(Failure::from)
    });
    outcome.map_err(Failure::raise)
}
