//! Number formats and transforms: the arithmetic that every backend must reproduce to the bit.
//!
//! Everything here works on single values or on one block of 16, is pure, and depends on nothing but IEEE-754
//! `f32` arithmetic in the written order (no fused multiply-add, subnormals kept). The larger passes in
//! [`crate::kernels`] are these functions applied to tensors.
#![forbid(unsafe_code)]

pub mod bf16;
pub mod e2m1;
pub mod e4m3;
pub mod hadamard;
pub mod math;
pub mod philox;
pub mod rounding;
pub mod scale;

/// Elements that share one block scale.
pub const BLOCK: usize = 16;
