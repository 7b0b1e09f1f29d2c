//! moe4
pub mod kernels;
pub mod numerics;
pub mod tensor;
