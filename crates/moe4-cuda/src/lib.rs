//! The CUDA backend: the passes of [`moe4::kernels`] on NVIDIA GPUs, with the same bytes as on a CPU.
//!
//! | module | what |
//! |---|---|
//! | [`variant`] | the kernels and the choices that each is compiled for |

pub mod variant;
