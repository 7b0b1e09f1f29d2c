//! The CUDA backend: the passes of [`moe4::kernels`] on NVIDIA GPUs, with the same bytes as on a CPU.
//!
//! ```no_run
//! use moe4::kernels::Backend;
//!
//! let cuda = moe4_cuda::Cuda::new()?;
//! println!("{}", cuda.capabilities().path);
//! # Ok::<(), moe4_cuda::driver::Unavailable>(())
//! ```
//!
//! Passes return when they are enqueued on the backend's stream, and never wait for the device. Splits live there: kernels
//! read them, so that a sequence of passes can be recorded in a graph and launched again with other splits.
//!
//! | module | what |
//! |---|---|
//! | [`Cuda`] | the backend |
//! | [`CudaPages`] | pages of a paged stash, in device memory or pinned host memory |
//! | [`driver`] | devices, streams, events, graphs: every call of the driver, checked |
//! | [`compile`] | from source to cubin: NVRTC, and a cache on disk |
//! | [`variant`] | the kernels and the choices that each is compiled for |
//! | [`sources`] | their CUDA sources, embedded |
//! | [`mod@catalog`] | every kind of variant that is launched |

mod backend;
pub mod catalog;
pub mod compile;
pub mod driver;
mod faults;
mod groups;
mod launch;
mod marks;
mod memory;
mod pages;
pub mod sources;
pub mod variant;

pub use backend::{Cuda, CudaOptions, Products};
pub use catalog::{CatalogEntry, catalog};
pub use groups::DeviceGroups;
pub use memory::{DeviceBuffer, DeviceMemory, DeviceView, DeviceViewMut};
pub use pages::{Behind, CudaPages, Incoming, PageHome};
