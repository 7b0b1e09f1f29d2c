//! The CUDA backend: the passes of [`moe4::kernels`] on NVIDIA GPUs, with the same bytes as on a CPU.
//!
//! | module | what |
//! |---|---|
//! | [`variant`] | the kernels and the choices that each is compiled for |
//! | [`sources`] | their CUDA sources, embedded |
//! | [`mod@catalog`] | every variant that is launched |
//! | [`compile`] | from source to cubin: NVRTC, and a cache on disk |

pub mod catalog;
pub mod compile;
pub mod sources;
pub mod variant;

pub use catalog::{CatalogEntry, catalog};
