//! [`Cuda`]: the backend, its memory, and its kernels, compiled when they are first needed.

use crate::compile::{Cache, Compiler, Watch, log_progress};
use crate::driver::{CallError, Device, DeviceBytes, Event, Graph, Kernel, Stream, Unavailable, fill, read};
use crate::faults;
use crate::groups::{DeviceGroups, GroupsExtent, host_arrays};
use crate::launch;
use crate::memory::{DeviceBuffer, DeviceMemory, DeviceView, DeviceViewMut};
use crate::variant::Variant;
use bytemuck::Pod;
use moe4::kernels::contract::*;
use moe4::kernels::{Backend, Capabilities, DeviceError, Element, Error, Misuse};
use moe4::tensor::Groups;
use std::any::Any;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

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
}

/// The kernels of the matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Products {
    /// The fastest for the GPU: wgmma on Hopper (sm_90), mma.sync elsewhere; where experts have few rows (64 on average)
    /// and weights are NVFP4, mma.sync with weights that are read packed, a quarter of the bytes.
    #[default]
    Fastest,
    /// mma.sync, which every GPU from sm_80 on has, with operands in BF16; for comparison.
    Portable,
}

/// The passes on one NVIDIA GPU, in the order of one stream. They return when the work is enqueued.
#[derive(Debug)]
pub struct Cuda {
    stream: Stream,
    compiler: Compiler,
    cache: Cache,
    kernels: Mutex<HashMap<Variant, Arc<Kernel>>>,
    faults: Arc<DeviceBuffer<u64>>,
    products: Products,
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
        let none = [faults::NONE; faults::KINDS];
        let mut bytes =
            DeviceBytes::new(&stream, size_of_val(&none)).map_err(|e| setup(stream.device(), e))?;
        bytes.write(bytemuck::bytes_of(&none)).map_err(|e| setup(stream.device(), e))?;
        let faults = Arc::new(DeviceBuffer::new(bytes, none.len()));
        log::info!("{}; NVRTC {}", stream.device().facts(), compiler.version());
        Ok(Self { stream, compiler, cache, kernels: Mutex::default(), faults, products: options.products })
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
        &self.cache
    }

    /// The compiler of the kernels.
    pub fn compiler(&self) -> &Compiler {
        &self.compiler
    }

    /// Whether products run on Hopper's matrix unit.
    pub(crate) fn multiplies_by_wgmma(&self) -> bool {
        self.products == Products::Fastest && self.device().facts().arch.has_wgmma()
    }

    /// Whether products of few rows an expert read weights as packed codes.
    pub(crate) fn reads_packed_weights(&self) -> bool {
        self.products == Products::Fastest
    }

    /// Waits for all work, and tells what passes could find out only on the device: an index beyond a tensor, splits that
    /// do not fit. Such a pass wrote zeros where it had nothing to read.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.on(self.stream.synchronize())?;
        self.take_faults()
    }

    /// Compiles and loads kernels before they are needed, such as before a capture; what the cache lacks is compiled on all
    /// cores at once.
    pub fn prepare(&self, variants: &[Variant]) -> Result<(), Error> {
        let facts = self.device().facts();
        let compiled = self.compiler.load_all(&self.cache, variants, facts.arch, log_progress);
        compiled.map_err(|e| DeviceError {
            device: facts.name.clone(),
            call: "compiling kernels".into(),
            reason: e.to_string(),
        })?;
        variants.iter().try_for_each(|v| self.kernel(v).map(drop))
    }

    /// Records what `work` enqueues as a graph. Outputs and groups are made before; kernels have run, or are
    /// [prepared](Cuda::prepare). Nothing that waits for the device may be called inside.
    pub fn capture(&self, work: impl FnOnce() -> Result<(), Error>) -> Result<Graph, Error> {
        let recording = self.on(Graph::record(&self.stream))?;
        let outcome = work();
        // Ended in any case: a stream left in capture would be of no more use.
        let graph = recording.end();
        outcome?;
        let kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let mut held: Vec<Arc<dyn Any + Send + Sync>> = vec![self.faults.clone()];
        held.extend(kernels.values().map(|kernel| kernel.clone() as Arc<dyn Any + Send + Sync>));
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
        let mut bytes = self.on(DeviceBytes::new(&self.stream, size_of_val(host)))?;
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
        // The rules for splits are those of the host's groups.
        let zeros: Vec<i64> = Groups::new(&vec![0; experts], rows)?.splits().map(|s| s as i64).collect();
        let extent = GroupsExtent::for_any_splits(experts, rows);
        let [.., len] = extent.layout();
        let arrays = self.on(DeviceBytes::new(&self.stream, len * size_of::<u64>()))?;
        let mut groups = DeviceGroups::new(DeviceBuffer::new(arrays, len), extent);
        let zeros = self.upload_plain(&zeros)?;
        self.compute_groups(zeros.view(), &mut groups)?;
        Ok(groups)
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

    pub(crate) fn kernel(&self, variant: &Variant) -> Result<Arc<Kernel>, Error> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(variant) {
            return Ok(kernel.clone());
        }
        let name = variant.to_string();
        let facts = self.device().facts();
        let cubin =
            self.compiler.compile_cached(&self.cache, variant, facts.arch).map_err(|e| DeviceError {
                device: facts.name.clone(),
                call: format!("compiling {name}"),
                reason: e.to_string(),
            })?;
        // SAFETY: a cubin comes from NVRTC, or from a cache entry whose hash was checked.
        let loaded = unsafe { Kernel::load(self.stream.device(), &cubin, variant.kernel, name) };
        let kernel = Arc::new(self.on(loaded)?);
        kernels.insert(variant.clone(), kernel.clone());
        Ok(kernel)
    }

    /// A failed call as an error of this device.
    pub(crate) fn on<T>(&self, outcome: Result<T, CallError>) -> Result<T, Error> {
        outcome.map_err(|e| Error::Device(e.on(&self.device().facts().name)))
    }

    pub(crate) fn faults_address(&self) -> u64 {
        self.faults.view().address()
    }

    /// Sets a view to zero bytes, in the order of the stream.
    pub(crate) fn clear<T>(&self, view: &DeviceViewMut<'_, T>) -> Result<(), Error> {
        // SAFETY: a mutable view is memory that nobody else uses until the stream has done this.
        self.on(unsafe { fill(&self.stream, view.address(), 0, view.len() * size_of::<T>()) })
    }

    fn take_faults(&self) -> Result<(), Error> {
        let mut details = [faults::NONE; faults::KINDS];
        let address = self.faults_address();
        // SAFETY: the buffer of faults has as many bytes.
        self.on(unsafe { read(&self.stream, address, bytemuck::bytes_of_mut(&mut details)) })?;
        if let Err(fault) = faults::first(&details) {
            // SAFETY: the same buffer. A fault that another thread causes in between may be lost with this one.
            self.on(unsafe { fill(&self.stream, address, 0xFF, size_of_val(&details)) })?;
            return Err(fault);
        }
        Ok(())
    }

    fn outside_capture(&self, what: &'static str) -> Result<(), Error> {
        if !self.on(self.stream.is_capturing())? {
            return Ok(());
        }
        let conflict = "expected a stream that runs, got one that records a graph".into();
        let fix = "move data to and from the host before the capture or behind the launch";
        Err(Misuse::Conflict { what, conflict, fix }.into())
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
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| Misuse::Value {
            what: "elements of a buffer".into(),
            expected: "as many as memory can hold",
            got: len.to_string(),
        })?;
        Ok(DeviceBuffer::new(self.on(DeviceBytes::new(&self.stream, bytes))?, len))
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
