//! moe4
pub mod checkpoint;
pub mod kernels;
pub mod numerics;
pub mod tensor;
