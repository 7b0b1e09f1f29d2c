//! Every call of the CUDA driver, its status checked. Nothing else in this crate talks to the driver.
//!
//! The functions are safe where a wrong argument can only be answered by a status; those that read or write memory
//! through an address, or destroy what may be in use, are unsafe and say what they need.

use super::error::CallError;
use super::module::Grid;
use cudarc::driver::sys;
use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;

pub(super) use sys::{CUcontext, CUdevice, CUevent, CUfunction, CUgraphExec, CUmodule, CUstream};

type Checked<T = ()> = Result<T, CallError>;

/// A handle that any thread may use: the driver locks where it must.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle<T>(pub(super) T);

// SAFETY: a handle is an opaque address inside the driver, whose calls may come from any thread.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

fn check(call: &'static str, status: sys::CUresult) -> Checked {
    if status == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let text = |get: unsafe fn(sys::CUresult, *mut *const std::ffi::c_char) -> sys::CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: the driver writes the address of a static string, or leaves null for a code that it does not know.
        unsafe {
            match get(status, &mut text) {
                sys::CUresult::CUDA_SUCCESS if !text.is_null() => {
                    CStr::from_ptr(text).to_string_lossy().into_owned()
                }
                _ => "unknown".into(),
            }
        }
    };
    Err(CallError {
        call,
        of: String::new(),
        code: status as u32,
        name: text(sys::cuGetErrorName),
        text: text(sys::cuGetErrorString),
    })
}

/// A call that writes one value through its first argument.
macro_rules! returning {
    ($call:ident ( $($argument:expr),* )) => {{
        let mut out = MaybeUninit::uninit();
        // SAFETY: the driver writes `out` if it reports success, and the other arguments are values.
        unsafe {
            check(stringify!($call), sys::$call(out.as_mut_ptr() $(, $argument)*))?;
            out.assume_init()
        }
    }};
}

macro_rules! calling {
    ($call:ident ( $($argument:expr),* )) => {
        // SAFETY: the arguments are values and handles that their owners keep alive.
        check(stringify!($call), unsafe { sys::$call($($argument),*) })
    };
}

/// Whether a driver library can be opened. Nothing else may be called if not.
pub(super) fn is_present() -> bool {
    // SAFETY: opening the driver's library runs its initializers and nothing of ours.
    unsafe { sys::is_culib_present() }
}

pub(super) fn init() -> Checked {
    calling!(cuInit(0))
}

/// As 13000 for 13.0.
pub(super) fn driver_version() -> Checked<i32> {
    Ok(returning!(cuDriverGetVersion()))
}

pub(super) fn device_count() -> Checked<i32> {
    Ok(returning!(cuDeviceGetCount()))
}

pub(super) fn device(ordinal: i32) -> Checked<CUdevice> {
    Ok(returning!(cuDeviceGet(ordinal)))
}

pub(super) fn device_name(device: CUdevice) -> Checked<String> {
    let mut name = [0 as std::ffi::c_char; 256];
    // SAFETY: the driver writes at most 256 bytes, a zero among them.
    unsafe {
        check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), 256, device))?;
        Ok(CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned())
    }
}

pub(super) fn device_memory(device: CUdevice) -> Checked<usize> {
    Ok(returning!(cuDeviceTotalMem_v2(device)))
}

pub(super) fn attribute(device: CUdevice, attribute: sys::CUdevice_attribute) -> Checked<i32> {
    Ok(returning!(cuDeviceGetAttribute(attribute, device)))
}

pub(super) fn primary_context(device: CUdevice) -> Checked<CUcontext> {
    Ok(returning!(cuDevicePrimaryCtxRetain(device)))
}

pub(super) fn release_primary_context(device: CUdevice) -> Checked {
    calling!(cuDevicePrimaryCtxRelease_v2(device))
}

pub(super) fn set_current(context: CUcontext) -> Checked {
    calling!(cuCtxSetCurrent(context))
}

/// Null if the thread has none.
pub(super) fn current() -> Checked<CUcontext> {
    Ok(returning!(cuCtxGetCurrent()))
}

/// Bytes that the pool of the device keeps and nobody uses.
pub(super) fn kept_memory(device: CUdevice) -> Checked<u64> {
    let pool = returning!(cuDeviceGetDefaultMemPool(device));
    let bytes = |attribute| {
        let mut bytes = 0_u64;
        calling!(cuMemPoolGetAttribute(pool, attribute, (&mut bytes as *mut u64).cast()))?;
        Ok(bytes)
    };
    let reserved = bytes(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
    Ok(reserved.saturating_sub(bytes(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?))
}

/// Freed memory stays with the pool of the device instead of going back to the driver at each synchronization.
pub(super) fn keep_freed_memory(device: CUdevice) -> Checked {
    let pool = returning!(cuDeviceGetDefaultMemPool(device));
    let mut all = u64::MAX;
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    calling!(cuMemPoolSetAttribute(pool, attribute, (&mut all as *mut u64).cast()))
}

/// Free and total bytes.
pub(super) fn memory_info() -> Checked<(usize, usize)> {
    let (mut free, mut total) = (0, 0);
    calling!(cuMemGetInfo_v2(&mut free, &mut total))?;
    Ok((free, total))
}

pub(super) fn create_stream() -> Checked<CUstream> {
    Ok(returning!(cuStreamCreate(sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32)))
}

pub(super) fn destroy_stream(stream: CUstream) -> Checked {
    calling!(cuStreamDestroy_v2(stream))
}

pub(super) fn synchronize(stream: CUstream) -> Checked {
    calling!(cuStreamSynchronize(stream))
}

pub(super) fn wait_event(stream: CUstream, event: CUevent) -> Checked {
    calling!(cuStreamWaitEvent(stream, event, 0))
}

pub(super) fn is_capturing(stream: CUstream) -> Checked<bool> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    calling!(cuStreamIsCapturing(stream, &mut status))?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

pub(super) fn begin_capture(stream: CUstream) -> Checked {
    calling!(cuStreamBeginCapture_v2(stream, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
}

/// Ends a capture and makes the graph ready to launch.
pub(super) fn end_capture(stream: CUstream) -> Checked<CUgraphExec> {
    let graph = {
        let mut graph = std::ptr::null_mut();
        calling!(cuStreamEndCapture(stream, &mut graph))?;
        graph
    };
    let ready = (|| Ok(returning!(cuGraphInstantiateWithFlags(graph, 0))))();
    calling!(cuGraphDestroy(graph))?;
    ready
}

pub(super) fn launch_graph(graph: CUgraphExec, stream: CUstream) -> Checked {
    calling!(cuGraphLaunch(graph, stream))
}

pub(super) fn destroy_graph(graph: CUgraphExec) -> Checked {
    calling!(cuGraphExecDestroy(graph))
}

pub(super) fn create_event() -> Checked<CUevent> {
    Ok(returning!(cuEventCreate(sys::CUevent_flags::CU_EVENT_DEFAULT as u32)))
}

pub(super) fn record_event(event: CUevent, stream: CUstream) -> Checked {
    calling!(cuEventRecord(event, stream))
}

pub(super) fn synchronize_event(event: CUevent) -> Checked {
    calling!(cuEventSynchronize(event))
}

pub(super) fn elapsed_ms(start: CUevent, end: CUevent) -> Checked<f32> {
    Ok(returning!(cuEventElapsedTime_v2(start, end)))
}

pub(super) fn destroy_event(event: CUevent) -> Checked {
    calling!(cuEventDestroy_v2(event))
}

/// `bytes > 0`.
pub(super) fn allocate(bytes: usize, stream: CUstream) -> Checked<u64> {
    Ok(returning!(cuMemAllocAsync(bytes, stream)))
}

/// # Safety
/// `address` comes from [`allocate`] and is used by nothing that is enqueued after this call.
pub(super) unsafe fn free(address: u64, stream: CUstream) -> Checked {
    // SAFETY: as required.
    check("cuMemFreeAsync", unsafe { sys::cuMemFreeAsync(address, stream) })
}

/// `bytes > 0`; host memory that all contexts of this process reach.
pub(super) fn allocate_pinned(bytes: usize) -> Checked<*mut c_void> {
    Ok(returning!(cuMemHostAlloc(bytes, sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP)))
}

/// Where the current device finds memory from [`allocate_pinned`].
pub(super) fn address_on_device(host: *mut c_void) -> Checked<u64> {
    Ok(returning!(cuMemHostGetDevicePointer_v2(host, 0)))
}

/// # Safety
/// `host` comes from [`allocate_pinned`] and nothing uses it any more.
pub(super) unsafe fn free_pinned(host: *mut c_void) -> Checked {
    // SAFETY: as required.
    check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(host) })
}

/// # Safety
/// `bytes` bytes at `address` are device memory that nobody else uses until the stream has done this.
pub(super) unsafe fn fill_bytes(address: u64, value: u8, bytes: usize, stream: CUstream) -> Checked {
    // SAFETY: as required.
    check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(address, value, bytes, stream) })
}

/// Host memory that is not pinned, as here, has been read when the call returns.
///
/// # Safety
/// `data.len()` bytes at `address` are device memory that nobody else uses until the stream has done this.
pub(super) unsafe fn copy_to_device(address: u64, data: &[u8], stream: CUstream) -> Checked {
    // SAFETY: as required; the source is a slice.
    check("cuMemcpyHtoDAsync", unsafe {
        sys::cuMemcpyHtoDAsync_v2(address, data.as_ptr().cast(), data.len(), stream)
    })
}

/// Waits until the data is there.
///
/// # Safety
/// `data.len()` bytes at `address` are device memory.
pub(super) unsafe fn copy_to_host(data: &mut [u8], address: u64, stream: CUstream) -> Checked {
    // SAFETY: as required; the slice stays borrowed until the stream has written it.
    unsafe {
        check(
            "cuMemcpyDtoHAsync",
            sys::cuMemcpyDtoHAsync_v2(data.as_mut_ptr().cast(), address, data.len(), stream),
        )?;
    }
    synchronize(stream)
}

/// # Safety
/// Both ranges are device memory, do not overlap, and nobody writes them until the stream has done this.
pub(super) unsafe fn copy_on_device(to: u64, from: u64, bytes: usize, stream: CUstream) -> Checked {
    // SAFETY: as required.
    check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream) })
}

/// # Safety
/// `image` is a complete cubin.
pub(super) unsafe fn load_module(image: &[u8]) -> Checked<CUmodule> {
    let mut module = std::ptr::null_mut();
    // SAFETY: as required: the driver reads as much as the image's own headers say.
    check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) })?;
    Ok(module)
}

pub(super) fn unload_module(module: CUmodule) -> Checked {
    calling!(cuModuleUnload(module))
}

pub(super) fn function(module: CUmodule, name: &CStr) -> Checked<CUfunction> {
    Ok(returning!(cuModuleGetFunction(module, name.as_ptr())))
}

/// More dynamic shared memory for each thread block than every kernel may have.
pub(super) fn allow_shared_memory(function: CUfunction, bytes: u32) -> Checked {
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    calling!(cuFuncSetAttribute(function, attribute, bytes as i32))
}

/// A description of a BF16 tensor for copies of boxes, lines of 128 bytes swizzled; zeros outside the tensor. `dims`
/// and `lines` (the box) from the innermost on, `strides` in bytes and without that of the innermost.
pub(super) fn encode_tensor_map(
    address: u64,
    dims: &[u64],
    strides: &[u64],
    lines: &[u32],
) -> Checked<[u64; 16]> {
    assert!(dims.len() == lines.len() && strides.len() + 1 == dims.len() && dims.len() <= 5);
    let steps = [1; 5];
    let mut map = MaybeUninit::uninit();
    // SAFETY: the slices are as long as the rank says; the address is written down and not followed.
    unsafe {
        check(
            "cuTensorMapEncodeTiled",
            sys::cuTensorMapEncodeTiled(
                map.as_mut_ptr(),
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                dims.len() as u32,
                address as *mut c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                lines.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            ),
        )?;
        Ok(map.assume_init().opaque)
    }
}

/// # Safety
/// `parameters` point to values of the kernel's parameter types, in order, and what they point to on the device stays
/// valid until the stream has run the kernel.
pub(super) unsafe fn launch(
    function: CUfunction,
    Grid { blocks: [x, y, z], threads, shared }: Grid,
    stream: CUstream,
    parameters: &mut [*mut c_void],
) -> Checked {
    // SAFETY: as required; the driver copies the parameters before it returns.
    check("cuLaunchKernel", unsafe {
        let none = std::ptr::null_mut();
        sys::cuLaunchKernel(function, x, y, z, threads, 1, 1, shared, stream, parameters.as_mut_ptr(), none)
    })
}
