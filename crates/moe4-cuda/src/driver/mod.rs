//! The driver floor: devices, streams, memory, modules, events and graphs of CUDA, each call checked.
//!
//! `raw` holds every call of the driver with its status turned into a [`CallError`]; the types around it own what
//! they create and release it when dropped. A machine without a driver or a usable GPU gets an [`Unavailable`] that
//! says which of the two, and nothing else is called.

mod allocator;
mod device;
mod error;
mod event;
mod graph;
mod memory;
mod module;
mod raw;
mod stream;
mod tensor_map;

pub use allocator::{Allocation, Allocator, Owner};
pub use device::{CurrentContext, Device, DeviceFacts};
pub use error::{CallError, Unavailable};
pub use event::Event;
pub use graph::{Graph, Recording};
pub(crate) use memory::{DeviceBytes, PinnedBytes, fill, read};
pub(crate) use module::{Arguments, Grid, Kernel};
pub use stream::Stream;
pub(crate) use tensor_map::TensorMap;
