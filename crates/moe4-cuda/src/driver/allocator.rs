//! Where a backend's memory comes from, if not from the pool of the driver: another framework's allocator in the same
//! process, so that both draw on one stock of memory.
#![forbid(unsafe_code)]

use super::stream::Stream;
use std::any::Any;
use std::fmt;

/// What keeps an allocation: dropped, it gives the memory back.
pub type Owner = Box<dyn Any + Send + Sync>;

/// Memory for the work of one stream.
pub struct Allocation {
    /// Where it begins: a multiple of 256.
    pub address: u64,
    /// Gives the memory back when it is dropped, on whatever thread, while work that uses it may still be on the stream:
    /// the memory may be used again by what is enqueued there from then on, and by others once that work is done.
    pub owner: Owner,
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocation").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Gives device memory to a backend. The default, without one, is the driver's pool (`cuMemAllocAsync`).
///
/// A result's buffer can be turned into its [`Owner`] by [`DeviceBuffer::into_owner`](crate::DeviceBuffer::into_owner),
/// which hands the memory to the framework that it came from, without a copy.
pub trait Allocator: fmt::Debug + Send + Sync {
    /// `bytes` bytes, at least one, of unspecified contents, for work on `stream`. They will hold elements of `element`
    /// bytes, 1, 2, 4 or 8, for a framework whose memory has types. Called on the thread that calls the backend; within a
    /// capture as well.
    ///
    /// # Errors
    /// Why there is no such memory.
    fn allocate(&self, bytes: usize, element: usize, stream: &Stream) -> Result<Allocation, String>;
}
