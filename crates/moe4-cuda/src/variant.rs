//! Kernels, and the choices that are made when they are compiled.
//!
//! A kernel is one file `kernels/<name>.cu` with one entry point `extern "C" __global__ void <name>(...)`. What a
//! launch knows beforehand (directions, rounding, sign mask) reaches it as preprocessor definitions, so that a branch
//! never costs an instruction of the inner loop.
#![forbid(unsafe_code)]

use std::fmt;

/// A kernel with its compile-time choices.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Variant {
    /// Base name of the source file and name of the entry point.
    pub kernel: &'static str,
    /// Preprocessor definitions, in a fixed order.
    pub defines: Vec<(&'static str, u32)>,
}

impl fmt::Display for Variant {
    /// As `group_quantize ROWWISE=1 COLUMNWISE=0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kernel)?;
        self.defines.iter().try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}
