//! Streams: our own, or one that a caller works on.

use super::device::Device;
use super::error::CallError;
use super::event::Event;
use super::raw::{self, CUstream, Handle};
use std::sync::Arc;

/// A queue of work on one GPU. Clones are the same stream.
#[derive(Clone, Debug)]
pub struct Stream {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    device: Arc<Device>,
    handle: Handle<CUstream>,
    owned: bool,
}

impl Stream {
    /// A new stream, which waits for no other.
    pub fn new(device: Arc<Device>) -> Result<Self, CallError> {
        device.bind()?;
        let handle = Handle(raw::create_stream()?);
        Ok(Self { inner: Arc::new(Inner { device, handle, owned: true }) })
    }

    /// A stream of another framework, given by its `CUstream` as an address; 0 is the legacy default stream.
    ///
    /// # Safety
    /// It belongs to the primary context of `device` and lives as long as this object, its clones, and all buffers made
    /// on it.
    pub unsafe fn borrow(device: Arc<Device>, handle: usize) -> Self {
        Self { inner: Arc::new(Inner { device, handle: Handle(handle as CUstream), owned: false }) }
    }

    /// Its GPU.
    pub fn device(&self) -> &Arc<Device> {
        &self.inner.device
    }

    /// Its `CUstream` as an address, as other frameworks name it.
    pub fn handle(&self) -> usize {
        self.inner.handle.0 as usize
    }

    /// Waits for all work enqueued so far.
    pub fn synchronize(&self) -> Result<(), CallError> {
        raw::synchronize(self.bound()?)
    }

    /// Lets what is enqueued from now on wait for the event.
    pub fn wait(&self, event: &Event) -> Result<(), CallError> {
        raw::wait_event(self.bound()?, event.handle())
    }

    /// Whether work goes into a graph instead of running.
    pub fn is_capturing(&self) -> Result<bool, CallError> {
        raw::is_capturing(self.bound()?)
    }

    /// One that nothing may be enqueued on.
    #[cfg(test)]
    pub(crate) fn for_tests(device: Arc<Device>) -> Self {
        let handle = Handle(std::ptr::null_mut());
        Self { inner: Arc::new(Inner { device, handle, owned: false }) }
    }

    /// The handle, with the device's context made this thread's.
    pub(super) fn bound(&self) -> Result<CUstream, CallError> {
        self.inner.device.bind()?;
        Ok(self.inner.handle.0)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        let destroyed = self.device.bind().and_then(|()| raw::destroy_stream(self.handle.0));
        if let Err(e) = destroyed {
            log::warn!("{}: {e}", self.device.facts().name);
        }
    }
}
