//! moe4
pub mod checkpoint;
