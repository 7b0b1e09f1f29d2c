//! [`Cuda`]: the backend, its memory, and its kernels, compiled when they are first needed.

use crate::compile::{Arch, Cache, CompileError, Compiler, Watch, log_progress};
use crate::driver::{
    Allocator, CallError, Device, DeviceBytes, Event, Graph, Kernel, Stream, Unavailable, fill, read,
};
use crate::faults::Faults;
use crate::groups::{DeviceGroups, GroupsExtent, host_arrays};
use crate::launch;
use crate::memory::{DeviceBuffer, DeviceMemory, DeviceView, DeviceViewMut};
use crate::variant::Variant;
use bytemuck::Pod;
use moe4::kernels::contract::*;
use moe4::kernels::{Backend, Capabilities, DeviceError, Element, Error, Misuse};
use moe4::tensor::Groups;
use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How the backend is set up.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// Which of the visible GPUs.
    pub ordinal: usize,
    /// Where compiled kernels are kept; the user's cache folder if absent.
    pub cache: Option<PathBuf>,
    /// Folders that are searched for NVRTC before the usual places.
    pub nvrtc: Vec<PathBuf>,
    /// Told of each compilation that the cache does not spare.
    pub watch: Watch,
    /// Which kernels multiply.
    pub products: Products,
    /// Where buffers come from; the driver's pool if absent.
    pub allocator: Option<Arc<dyn Allocator>>,
}

/// The kernels of the matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Products {
    /// The fastest for the GPU: wgmma on Hopper (sm_90), mma.sync elsewhere; where experts have few rows (32 on average)
    /// and weights are NVFP4, mma.sync with weights that are read packed, a quarter of the bytes.
    #[default]
    Fastest,
    /// mma.sync, which every GPU from sm_80 on has, with operands in BF16; for comparison.
    Portable,
}

impl Products {
    /// Whether products run on Hopper's matrix unit, where their operands allow it.
    pub(crate) fn use_wgmma(self, arch: Arch) -> bool {
        self == Products::Fastest && arch.has_wgmma()
    }

    /// Whether products of few rows an expert read weights as packed codes, where those allow it.
    pub(crate) fn use_packed_weights(self) -> bool {
        self == Products::Fastest
    }
}

/// The passes on one NVIDIA GPU, in the order of one stream. They return when the work is enqueued.
#[derive(Debug)]
pub struct Cuda {
    stream: Stream,
    shared: Arc<Shared>,
    /// The address of what is added to the streams of random numbers, or 0.
    stream_shift: AtomicU64,
}

/// What the backends on several streams of one GPU have in common; see [`Cuda::with_stream`].
#[derive(Debug)]
struct Shared {
    compiler: Compiler,
    cache: Cache,
    kernels: Mutex<HashMap<Variant, Arc<Kernel>>>,
    faults: Faults,
    products: Products,
    allocator: Option<Arc<dyn Allocator>>,
}

impl Cuda {
    /// On a stream of its own on the first GPU.
    pub fn new() -> Result<Self, Unavailable> {
        Self::open(&CudaOptions::default())
    }

    /// On a stream of its own.
    pub fn open(options: &CudaOptions) -> Result<Self, Unavailable> {
        let device = Arc::new(Device::open(options.ordinal)?);
        let stream = Stream::new(device.clone()).map_err(|e| setup(&device, e))?;
        Self::on_stream(stream, options)
    }

    /// On a stream that the caller has; `options.ordinal` is not looked at.
    pub fn on_stream(stream: Stream, options: &CudaOptions) -> Result<Self, Unavailable> {
        let compiler = Compiler::load_searching(&options.nvrtc)?.with_watch(options.watch.clone());
        let cache = options.cache.clone().map_or_else(Cache::for_user, Cache::at);
        let faults = Faults::new(&stream).map_err(|e| setup(stream.device(), e))?;
        log::info!("{}; NVRTC {}", stream.device().facts(), compiler.version());
        let CudaOptions { products, allocator, .. } = options.clone();
        let shared = Shared { compiler, cache, kernels: Mutex::default(), faults, products, allocator };
        Ok(Self { stream, shared: Arc::new(shared), stream_shift: AtomicU64::new(0) })
    }

    /// A backend on another stream of the same GPU, with the same options. The two share compiled kernels and what
    /// [`Cuda::synchronize`] tells of; nothing is allocated, so that it may be made while the stream is recorded.
    ///
    /// # Panics
    /// If the stream is of another GPU.
    pub fn with_stream(&self, stream: Stream) -> Self {
        let [own, other] = [&self.stream, &stream].map(|s| s.device().facts().ordinal);
        assert_eq!(own, other, "the GPU of a stream");
        Self { stream, shared: self.shared.clone(), stream_shift: AtomicU64::new(0) }
    }

    /// The stream that all passes go to.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The GPU.
    pub fn device(&self) -> &Device {
        self.stream.device()
    }

    /// Where compiled kernels are kept.
    pub fn cache(&self) -> &Cache {
        &self.shared.cache
    }

    /// The compiler of the kernels.
    pub fn compiler(&self) -> &Compiler {
        &self.shared.compiler
    }

    /// Whether products run on Hopper's matrix unit.
    pub(crate) fn multiplies_by_wgmma(&self) -> bool {
        self.shared.products.use_wgmma(self.device().facts().arch)
    }

    /// Whether products of few rows an expert read weights as packed codes.
    pub(crate) fn reads_packed_weights(&self) -> bool {
        self.shared.products.use_packed_weights()
    }

    /// Which kernels multiply.
    pub fn products(&self) -> Products {
        self.shared.products
    }

    /// Waits for all work, and tells what passes could find out only on the device: an index beyond a tensor, splits that
    /// do not fit. Such a pass wrote zeros where it had nothing to read.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.on(self.stream.synchronize())?;
        self.take_faults()
    }

    /// Tells what [`Cuda::synchronize`] would, as far as the device has come by now. Waits only if there is something to
    /// tell; tells nothing within a capture.
    pub fn check_faults(&self) -> Result<(), Error> {
        if !self.shared.faults.noticed() || self.on(self.stream.is_capturing())? {
            return Ok(());
        }
        self.take_faults()
    }

    /// Compiles and loads kernels before they are needed, such as before a capture; what the cache lacks is compiled on all
    /// cores at once.
    pub fn prepare(&self, variants: &[Variant]) -> Result<(), Error> {
        let facts = self.device().facts();
        let missing: BTreeSet<&Variant> = {
            let kernels = self.kernels();
            variants.iter().filter(|variant| !kernels.contains_key(variant)).collect()
        };
        let missing: Vec<Variant> = missing.into_iter().cloned().collect();
        let compiled = self.shared.compiler.load_all(&self.shared.cache, &missing, facts.arch, log_progress);
        let cubins = compiled.map_err(|e| self.not_compiled("compiling kernels".into(), &e))?;
        let mut kernels = self.kernels();
        for (variant, cubin) in missing.into_iter().zip(&cubins) {
            let kernel = self.load(&variant, cubin)?;
            kernels.entry(variant).or_insert(kernel);
        }
        Ok(())
    }

    /// Records what `work` enqueues as a graph. Outputs and groups are made before; kernels have run, or are
    /// [prepared](Cuda::prepare). Nothing that waits for the device may be called inside.
    pub fn capture(&self, work: impl FnOnce() -> Result<(), Error>) -> Result<Graph, Error> {
        let recording = self.on(Graph::record(&self.stream))?;
        let outcome = work();
        // Ended in any case: a stream left in capture would be of no more use.
        let graph = recording.end();
        outcome?;
        // Its kernels, and the notes that they write.
        let held: Vec<Arc<dyn Any + Send + Sync>> = vec![self.shared.clone()];
        Ok(self.on(graph)?.holding(held))
    }

    /// Milliseconds on the device that `work` takes, run by run.
    pub fn time(&self, runs: usize, mut work: impl FnMut() -> Result<(), Error>) -> Result<Vec<f32>, Error> {
        let mut marks = Vec::with_capacity(runs + 1);
        marks.push(self.on(Event::record(&self.stream))?);
        for _ in 0..runs {
            work()?;
            marks.push(self.on(Event::record(&self.stream))?);
        }
        self.synchronize()?;
        marks.windows(2).map(|pair| self.on(pair[0].elapsed_ms(&pair[1]))).collect()
    }

    /// Host data of any plain type, such as splits.
    pub fn upload_plain<T: Pod>(&self, host: &[T]) -> Result<DeviceBuffer<T>, Error> {
        self.outside_capture("upload")?;
        let mut bytes = self.bytes::<T>(host.len())?;
        self.on(bytes.write(bytemuck::cast_slice(host)))?;
        Ok(DeviceBuffer::new(bytes, host.len()))
    }

    /// New contents for a buffer that exists, such as one that a graph reads, in the order of the stream that it was
    /// made on. Returns when the host's data has been read.
    pub fn write<T: Pod>(&self, buffer: &mut DeviceBuffer<T>, host: &[T]) -> Result<(), Error> {
        self.outside_capture("write")?;
        let expected = buffer.view().len();
        if host.len() != expected {
            let shape = format!("[{expected}]");
            let (kernel, tensor, got) = ("write", "host data for a buffer", host.len());
            return Err(Misuse::Length { kernel, tensor, shape, expected, got }.into());
        }
        self.on(buffer.bytes.write(bytemuck::cast_slice(host)))
    }

    /// Groups for splits that only the device knows; filled by [`Cuda::compute_groups`]. Until then no expert has a row.
    pub fn empty_groups(&self, experts: usize, rows: usize) -> Result<DeviceGroups, Error> {
        self.outside_capture("empty_groups")?;
        let zeros = self.send(&vec![0; experts])?;
        self.groups_from(zeros.view(), rows)
    }

    /// Groups of `splits` `[E]` on the device for a tensor of `rows`, with token positions for any splits. As
    /// [`Cuda::compute_groups`] into new ones; a capture may hold it.
    pub fn groups_from(&self, splits: DeviceView<'_, i64>, rows: usize) -> Result<DeviceGroups, Error> {
        // The rules for splits are those of the host's groups.
        Groups::new(&vec![0; splits.len()], rows)?;
        let extent = GroupsExtent::for_any_splits(splits.len(), rows);
        let [.., len] = extent.layout();
        let arrays = self.bytes::<u64>(len)?;
        let mut groups = DeviceGroups::new(DeviceBuffer::new(arrays, len), extent);
        self.compute_groups(splits, &mut groups)?;
        Ok(groups)
    }

    /// A few numbers of the host, such as splits, in device memory. They travel as arguments of launches: a capture may
    /// hold them, and has the same ones each time.
    pub fn send(&self, numbers: &[i64]) -> Result<DeviceBuffer<i64>, Error> {
        let words: Vec<u64> = numbers.iter().map(|&n| n as u64).collect();
        Ok(DeviceBuffer::new(launch::addresses(self, &words)?, numbers.len()))
    }

    /// Fills `groups` from `splits` `[E]` on the device, in the order of the stream; a graph may hold this pass and be
    /// launched again with other splits. Splits that do not fit count as none, and [`Cuda::synchronize`] tells of them.
    pub fn compute_groups(
        &self,
        splits: DeviceView<'_, i64>,
        groups: &mut DeviceGroups,
    ) -> Result<(), Error> {
        launch::group_offsets(self, splits, groups)
    }

    /// Adds a number on the device, `shift` `[1]`, modulo 2^64 to the stream of all random numbers that `work` draws. A
    /// graph that holds such passes draws others whenever its owner has changed `shift` before a launch, in the order of the
    /// stream; without it a graph draws the same in each launch. A backward of the operator uses four streams a call, so
    /// that a shift of `4 · n` gives the bytes of the call `n` later.
    ///
    /// It holds for all passes that are enqueued meanwhile, by other threads too, but not for other backends on the same
    /// stream.
    ///
    /// # Panics
    /// If `shift` has not one element.
    pub fn shifting_streams<R>(&self, shift: DeviceView<'_, u64>, work: impl FnOnce() -> R) -> R {
        struct Reset<'a>(&'a AtomicU64, u64);
        impl Drop for Reset<'_> {
            fn drop(&mut self) {
                self.0.store(self.1, Ordering::Relaxed);
            }
        }
        assert_eq!(shift.len(), 1, "elements of a shift of streams");
        let before = self.stream_shift.swap(shift.address(), Ordering::Relaxed);
        let _reset = Reset(&self.stream_shift, before);
        work()
    }

    pub(crate) fn stream_shift(&self) -> u64 {
        self.stream_shift.load(Ordering::Relaxed)
    }

    /// The kernels that are loaded: those that have run, or were [prepared](Cuda::prepare).
    pub fn loaded(&self) -> Vec<Variant> {
        self.kernels().keys().cloned().collect()
    }

    fn kernels(&self) -> MutexGuard<'_, HashMap<Variant, Arc<Kernel>>> {
        self.shared.kernels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn kernel(&self, variant: &Variant) -> Result<Arc<Kernel>, Error> {
        if let Some(kernel) = self.kernels().get(variant) {
            return Ok(kernel.clone());
        }
        let wanted =
            || format!("expected a kernel that is loaded before the graph, got {variant} for the first time");
        let fix = "run the same passes once before the capture, or prepare their kernels";
        self.expect_no_capture("kernel", wanted, fix)?;
        // Not under the lock: who watches the compiler may call the backend. What two threads compile at once is the same.
        let Shared { compiler, cache, .. } = &*self.shared;
        let cubin = compiler
            .compile_cached(cache, variant, self.device().facts().arch)
            .map_err(|e| self.not_compiled(format!("compiling {variant}"), &e))?;
        let kernel = self.load(variant, &cubin)?;
        Ok(self.kernels().entry(variant.clone()).or_insert(kernel).clone())
    }

    fn load(&self, variant: &Variant, cubin: &[u8]) -> Result<Arc<Kernel>, Error> {
        // SAFETY: a cubin comes from NVRTC, or from a cache entry whose hash was checked.
        let loaded =
            unsafe { Kernel::load(self.stream.device(), cubin, variant.kernel, variant.to_string()) };
        self.on(loaded).map(Arc::new)
    }

    fn not_compiled(&self, call: String, error: &CompileError) -> DeviceError {
        DeviceError { device: self.device().facts().name.clone(), call, reason: error.to_string() }
    }

    /// A failed call as an error of this device.
    pub(crate) fn on<T>(&self, outcome: Result<T, CallError>) -> Result<T, Error> {
        outcome.map_err(|e| Error::Device(e.on(&self.device().facts().name)))
    }

    pub(crate) fn faults_address(&self) -> u64 {
        self.shared.faults.address()
    }

    /// Owned bytes of `len` elements for work on the stream.
    pub(crate) fn bytes<T>(&self, len: usize) -> Result<DeviceBytes, Error> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| Misuse::Value {
            what: "elements of a buffer".into(),
            expected: "as many as memory can hold",
            got: len.to_string(),
        })?;
        self.on(match &self.shared.allocator {
            Some(allocator) => DeviceBytes::from(&**allocator, &self.stream, bytes, size_of::<T>()),
            None => DeviceBytes::new(&self.stream, bytes),
        })
    }

    /// Whether buffers come from the driver's pool, and may change their stream.
    pub(crate) fn allocates_itself(&self) -> bool {
        self.shared.allocator.is_none()
    }

    /// Sets a view to zero bytes, in the order of the stream.
    pub(crate) fn clear<T>(&self, view: &DeviceViewMut<'_, T>) -> Result<(), Error> {
        // SAFETY: a mutable view is memory that nobody else uses until the stream has done this.
        self.on(unsafe { fill(&self.stream, view.address(), 0, view.len() * size_of::<T>()) })
    }

    fn take_faults(&self) -> Result<(), Error> {
        self.on(self.shared.faults.take(&self.stream))?
    }

    fn outside_capture(&self, what: &'static str) -> Result<(), Error> {
        let conflict = || "expected a stream that runs, got one that records a graph".into();
        let fix = "move data to and from the host before the capture or behind the launch";
        self.expect_no_capture(what, conflict, fix)
    }

    fn expect_no_capture(
        &self,
        what: &'static str,
        conflict: impl FnOnce() -> String,
        fix: &'static str,
    ) -> Result<(), Error> {
        match self.on(self.stream.is_capturing())? {
            true => Err(Misuse::Conflict { what, conflict: conflict(), fix }.into()),
            false => Ok(()),
        }
    }
}

fn setup(device: &Device, e: CallError) -> Unavailable {
    Unavailable::Setup { device: device.facts().name.clone(), reason: e.to_string() }
}

impl Backend for Cuda {
    type Memory = DeviceMemory;

    fn capabilities(&self) -> Capabilities {
        let facts = self.device().facts();
        let unit = if self.multiplies_by_wgmma() { "wgmma" } else { "mma.sync" };
        let few_rows = if self.reads_packed_weights() {
            ", of few rows an expert by mma.sync from packed weights"
        } else {
            ""
        };
        Capabilities {
            backend: "cuda",
            path: format!("{}, {}, products by {unit}{few_rows}", facts.name, facts.arch),
            nvfp4: true,
            bf16: true,
            stochastic_rounding: true,
            // All kernels but those for few rows an expert read BF16.
            unpacked_operands: true,
            products: true,
        }
    }

    fn groups(&self, groups: &Groups) -> Result<DeviceGroups, Error> {
        let (extent, arrays) = host_arrays(groups);
        Ok(DeviceGroups::new(self.upload_plain(&arrays)?, extent).of_live_rows(groups.live_rows()))
    }
    fn empty<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>, Error> {
        Ok(DeviceBuffer::new(self.bytes::<T>(len)?, len))
    }
    fn duplicate<T: Element>(&self, x: DeviceView<'_, T>) -> Result<DeviceBuffer<T>, Error> {
        let mut copy = self.empty(x.len())?;
        // SAFETY: a view is device memory that nobody writes, and the copy is another allocation.
        self.on(unsafe { copy.bytes.copy_from(x.address()) })?;
        Ok(copy)
    }
    fn upload<T: Element>(&self, host: &[T]) -> Result<DeviceBuffer<T>, Error> {
        self.upload_plain(host)
    }
    fn download<T: Element>(&self, x: DeviceView<'_, T>) -> Result<Vec<T>, Error> {
        self.outside_capture("download")?;
        let mut host = vec![T::default(); x.len()];
        // SAFETY: a view is device memory of its length.
        self.on(unsafe { read(&self.stream, x.address(), bytemuck::cast_slice_mut(&mut host)) })?;
        self.take_faults()?;
        Ok(host)
    }

    fn group_amax(&self, pass: GroupAmax<'_, DeviceMemory>) -> Result<(), Error> {
        launch::group_amax(self, pass)
    }
    fn group_hadamard_amax(&self, pass: GroupHadamardAmax<'_, DeviceMemory>) -> Result<(), Error> {
        launch::group_hadamard_amax(self, pass)
    }
    fn group_quantize(&self, pass: GroupQuantize<'_, DeviceMemory>) -> Result<(), Error> {
        launch::group_quantize(self, pass)
    }
    fn quantize_weights(&self, pass: QuantizeWeights<'_, DeviceMemory>) -> Result<(), Error> {
        launch::quantize_weights(self, pass)
    }
    fn dequantize(&self, pass: Dequantize<'_, DeviceMemory>) -> Result<(), Error> {
        launch::dequantize(self, pass)
    }
    fn grouped_gemm(&self, pass: GroupedGemm<'_, DeviceMemory>) -> Result<(), Error> {
        launch::grouped_gemm(self, pass)
    }
    fn grouped_gemm_act(&self, pass: GroupedGemmAct<'_, DeviceMemory>) -> Result<(), Error> {
        launch::grouped_gemm_act(self, pass)
    }
    fn grouped_gemm_dact(&self, pass: GroupedGemmDact<'_, DeviceMemory>) -> Result<(), Error> {
        launch::grouped_gemm_dact(self, pass)
    }
    fn grouped_wgrad(&self, pass: GroupedWgrad<'_, DeviceMemory>) -> Result<(), Error> {
        launch::grouped_wgrad(self, pass)
    }
    fn grouped_bias_grad(&self, pass: GroupedBiasGrad<'_, DeviceMemory>) -> Result<(), Error> {
        launch::grouped_bias_grad(self, pass)
    }
    fn permute(&self, pass: Permute<'_, DeviceMemory>) -> Result<(), Error> {
        launch::permute(self, pass)
    }
    fn unpermute(&self, pass: Unpermute<'_, DeviceMemory>) -> Result<(), Error> {
        launch::unpermute(self, pass)
    }
}
