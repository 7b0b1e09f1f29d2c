//! Device memory, allocated and freed in the order of a stream; pinned host memory that a device reaches.

use super::error::CallError;
use super::raw::{self, Handle};
use super::stream::Stream;
use std::ffi::c_void;

/// Owned bytes of device memory. Freed behind all work that is on its stream when it is dropped.
#[derive(Debug)]
pub(crate) struct DeviceBytes {
    /// 0 if empty.
    address: u64,
    len: usize,
    stream: Stream,
}

impl DeviceBytes {
    /// Unspecified contents.
    pub(crate) fn new(stream: &Stream, len: usize) -> Result<Self, CallError> {
        let address = match len {
            0 => 0,
            _ => raw::allocate(len, stream.bound()?).map_err(|e| e.of(format!("{len} bytes")))?,
        };
        Ok(Self { address, len, stream: stream.clone() })
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
        if self.address == 0 {
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
