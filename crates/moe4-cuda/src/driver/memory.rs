//! Device memory, allocated and freed in the order of a stream; pinned host memory that a device reaches.

use super::allocator::{Allocation, Allocator, Owner};
use super::error::CallError;
use super::raw::{self, Handle};
use super::stream::Stream;
use std::ffi::c_void;
use std::sync::atomic::AtomicU64;

/// Owned bytes of device memory. Freed behind all work that is on its stream when it is dropped.
#[derive(Debug)]
pub(crate) struct DeviceBytes {
    /// 0 if empty.
    address: u64,
    len: usize,
    stream: Stream,
    /// What frees the memory when it is dropped; none for memory of the driver's own pool.
    owner: Option<Owner>,
}

impl DeviceBytes {
    /// Unspecified contents, from the pool of the driver.
    pub(crate) fn new(stream: &Stream, len: usize) -> Result<Self, CallError> {
        let address = match len {
            0 => 0,
            _ => raw::allocate(len, stream.bound()?).map_err(|e| e.of(format!("{len} bytes")))?,
        };
        Ok(Self { address, len, stream: stream.clone(), owner: None })
    }

    /// Unspecified contents for elements of `element` bytes, from `allocator`, which is not asked for nothing.
    pub(crate) fn from(
        allocator: &dyn Allocator,
        stream: &Stream,
        len: usize,
        element: usize,
    ) -> Result<Self, CallError> {
        if len == 0 {
            return Ok(Self { address: 0, len, stream: stream.clone(), owner: None });
        }
        let Allocation { address, owner } =
            allocator.allocate(len, element, stream).map_err(|reason| refused(len, reason))?;
        Ok(Self { address, len, stream: stream.clone(), owner: Some(owner) })
    }

    /// What an allocator gave, which frees the memory when it is dropped; `None` if it comes from the driver's pool, to
    /// which it goes back, or is empty.
    pub(crate) fn into_owner(mut self) -> Option<Owner> {
        self.owner.take().inspect(|_| self.address = 0)
    }

    /// Where it lies.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// From now on work on it is on `stream`, and it is freed behind that; the caller has ordered the two streams.
    pub(crate) fn order_by(&mut self, stream: &Stream) {
        self.stream = stream.clone();
    }

    /// All of it from the host. Returns when the host's data has been read.
    pub(crate) fn write(&mut self, data: &[u8]) -> Result<(), CallError> {
        assert_eq!(data.len(), self.len);
        if data.is_empty() {
            return Ok(());
        }
        // SAFETY: the range is this allocation, borrowed for writing, and later use of it is on the same stream.
        unsafe { raw::copy_to_device(self.address, data, self.stream.bound()?) }
    }

    /// All of it from elsewhere on the device.
    ///
    /// # Safety
    /// As many bytes at `from` are device memory, not part of this allocation, and stay unchanged until the stream has
    /// read them.
    pub(crate) unsafe fn copy_from(&mut self, from: u64) -> Result<(), CallError> {
        if self.len == 0 {
            return Ok(());
        }
        // SAFETY: as required, and the destination is this allocation.
        unsafe { raw::copy_on_device(self.address, from, self.len, self.stream.bound()?) }
    }
}

impl Drop for DeviceBytes {
    fn drop(&mut self) {
        if self.address == 0 || self.owner.is_some() {
            return;
        }
        let freed = self.stream.bound().and_then(|stream| {
            // SAFETY: nothing borrows this allocation any more, so nothing that uses it is enqueued after this.
            unsafe { raw::free(self.address, stream) }
        });
        if let Err(e) = freed {
            log::warn!("{}: {e}", self.stream.device().facts().name);
        }
    }
}

/// An allocator's refusal, as the driver would tell it.
fn refused(len: usize, reason: String) -> CallError {
    CallError {
        call: "Allocator::allocate",
        of: format!("{len} bytes"),
        code: cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32,
        name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
        text: reason,
    }
}

/// Owned bytes of host memory that never move, and that kernels read and write. Freed when the stream that uses them
/// is done.
#[derive(Debug)]
pub(crate) struct PinnedBytes {
    /// Null if empty.
    host: Handle<*mut c_void>,
    /// Where the device finds it.
    address: u64,
    stream: Stream,
}

impl PinnedBytes {
    /// Unspecified contents.
    pub(crate) fn new(stream: &Stream, len: usize) -> Result<Self, CallError> {
        stream.bound()?;
        let mut pinned = Self { host: Handle(std::ptr::null_mut()), address: 0, stream: stream.clone() };
        if len > 0 {
            pinned.host = Handle(raw::allocate_pinned(len).map_err(|e| e.of(format!("{len} bytes")))?);
            pinned.address = raw::address_on_device(pinned.host.0)?;
        }
        Ok(pinned)
    }

    /// Where it lies, for the device.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// The word at the beginning, as it is now; the device may be writing it.
    ///
    /// # Panics
    /// If it is empty.
    pub(crate) fn word(&self) -> &AtomicU64 {
        assert!(!self.host.0.is_null(), "a word of no bytes");
        // SAFETY: pinned memory is aligned to pages and was asked for in whole words; it lives as long as `self`, and
        // whoever else writes it is the device, word by word.
        unsafe { AtomicU64::from_ptr(self.host.0.cast()) }
    }
}

impl Drop for PinnedBytes {
    fn drop(&mut self) {
        if self.host.0.is_null() {
            return;
        }
        let freed = self.stream.synchronize().and_then(|()| {
            // SAFETY: only work on this stream used it, and that is done.
            unsafe { raw::free_pinned(self.host.0) }
        });
        if let Err(e) = freed {
            log::warn!("{}: {e}", self.stream.device().facts().name);
        }
    }
}

/// `bytes` bytes at `address` set to `value`, in the order of `stream`.
///
/// # Safety
/// The range is device memory that nothing else uses until the stream has done this.
pub(crate) unsafe fn fill(stream: &Stream, address: u64, value: u8, bytes: usize) -> Result<(), CallError> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: as required.
    unsafe { raw::fill_bytes(address, value, bytes, stream.bound()?) }
}

/// Device memory to the host; waits for all work on `stream`.
///
/// # Safety
/// `data.len()` bytes at `address` are device memory.
pub(crate) unsafe fn read(stream: &Stream, address: u64, data: &mut [u8]) -> Result<(), CallError> {
    if data.is_empty() {
        return Ok(());
    }
    // SAFETY: as required.
    unsafe { raw::copy_to_host(data, address, stream.bound()?) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Device;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Gives addresses that nobody uses, and counts what is alive.
    #[derive(Debug, Default)]
    struct Counting {
        alive: Arc<AtomicUsize>,
    }

    struct Counted(Arc<AtomicUsize>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    impl Allocator for Counting {
        fn allocate(&self, bytes: usize, _: usize, _: &Stream) -> Result<Allocation, String> {
            if bytes > 1000 {
                return Err("no more than 1000 bytes".into());
            }
            self.alive.fetch_add(1, Ordering::Relaxed);
            Ok(Allocation { address: 4096, owner: Box::new(Counted(self.alive.clone())) })
        }
    }

    #[test]
    fn memory_of_an_allocator_is_freed_by_its_owner() {
        let (allocator, stream) = (Counting::default(), Stream::for_tests(Device::for_tests()));
        let alive = || allocator.alive.load(Ordering::Relaxed);
        let bytes = DeviceBytes::from(&allocator, &stream, 10, 1).unwrap();
        assert_eq!((bytes.address(), alive()), (4096, 1));
        drop(bytes);
        assert_eq!(alive(), 0);

        let owner = DeviceBytes::from(&allocator, &stream, 10, 1).unwrap().into_owner().unwrap();
        assert!(owner.is::<Counted>() && alive() == 1, "the owner outlives the buffer");
        drop(owner);
        assert_eq!(alive(), 0);
    }

    #[test]
    fn an_allocator_is_asked_for_no_empty_memory_and_may_refuse() {
        let (allocator, stream) = (Counting::default(), Stream::for_tests(Device::for_tests()));
        let empty = DeviceBytes::from(&allocator, &stream, 0, 1).unwrap();
        assert_eq!((empty.address(), allocator.alive.load(Ordering::Relaxed)), (0, 0));
        assert!(empty.into_owner().is_none());
        let message = DeviceBytes::from(&allocator, &stream, 2000, 1).unwrap_err().to_string();
        assert!(message.contains("2000 bytes") && message.contains("no more than 1000"), "{message}");
    }
}
