//! What can go wrong: the caller's mistake, something a backend cannot do, or the device itself.
#![forbid(unsafe_code)]

use super::Capabilities;
use crate::tensor::GroupsError;

/// Any failure of a kernel or of the operator.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// Arguments that do not fit together. Nothing was computed or written.
    #[error(transparent)]
    Misuse(#[from] Misuse),
    /// Correct arguments that this backend cannot serve. Nothing was computed or written.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The device or its driver failed. Outputs are unspecified.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl From<GroupsError> for Error {
    fn from(e: GroupsError) -> Self {
        Error::Misuse(e.into())
    }
}

/// Arguments that do not fit together.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Misuse {
    /// A tensor has the wrong number of elements.
    #[error("{kernel}: {tensor} of shape {shape}: expected {expected} elements, got {got}")]
    Length {
        /// The pass or operator call.
        kernel: &'static str,
        /// The tensor's name.
        tensor: &'static str,
        /// The shape it should have.
        shape: String,
        /// Elements of that shape.
        expected: usize,
        /// Elements found.
        got: usize,
    },
    /// A dimension is not a multiple of what the format needs.
    #[error("{what}: expected a positive multiple of {multiple}, got {got}; {fix}")]
    Multiple {
        /// The dimension.
        what: &'static str,
        /// The unit.
        multiple: usize,
        /// The value found.
        got: usize,
        /// What to do.
        fix: &'static str,
    },
    /// A parameter outside its range.
    #[error("{what}: expected {expected}, got {got}")]
    Value {
        /// The parameter.
        what: String,
        /// Its range.
        expected: &'static str,
        /// The value found.
        got: String,
    },
    /// Two arguments contradict each other.
    #[error("{what}: {conflict}; {fix}")]
    Conflict {
        /// The argument at fault.
        what: &'static str,
        /// Expected and found.
        conflict: String,
        /// What to do.
        fix: &'static str,
    },
    /// Splits that do not fit.
    #[error(transparent)]
    Groups(#[from] GroupsError),
}

/// Something that a backend cannot do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("backend '{backend}' does not support {what}; {fix}")]
pub struct Unsupported {
    /// The backend's name.
    pub backend: String,
    /// What is missing.
    pub what: String,
    /// What to do.
    pub fix: String,
}

impl Unsupported {
    /// What the pass `pass` of a backend without products says, and the operator before its first pass.
    pub fn products(backend: &Capabilities, pass: &str) -> Self {
        Self {
            backend: backend.backend.into(),
            what: format!("matrix products ({pass})"),
            fix: "use a backend whose capabilities list products, such as cpu".into(),
        }
    }
}

/// A failure of a device or its driver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{device}: {call} failed: {reason}")]
pub struct DeviceError {
    /// The device.
    pub device: String,
    /// The call that failed.
    pub call: String,
    /// The device's own code and message.
    pub reason: String,
}

/// `expected` elements for `shape`, or the error that says so.
pub(crate) fn expect_len(
    kernel: &'static str,
    tensor: &'static str,
    shape: &[usize],
    got: usize,
) -> Result<(), Misuse> {
    // A product that overflows is larger than any tensor.
    let expected =
        shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size)).unwrap_or(usize::MAX);
    if got == expected && expected != usize::MAX {
        return Ok(());
    }
    Err(Misuse::Length { kernel, tensor, shape: format!("{shape:?}"), expected, got })
}

/// The operator's needs against what a backend can do.
pub(crate) fn require(backend: &Capabilities, nvfp4: bool, stochastic: bool) -> Result<(), Unsupported> {
    if !backend.products {
        return Err(Unsupported::products(backend, "the operator"));
    }
    let missing = if nvfp4 && !backend.nvfp4 {
        ("NVFP4 operands", "use precision bf16 or another backend")
    } else if !nvfp4 && !backend.bf16 {
        ("BF16 operands", "use precision nvfp4 or another backend")
    } else if nvfp4 && stochastic && !backend.stochastic_rounding {
        ("stochastic rounding", "set gradient_rounding to nearest or use another backend")
    } else {
        return Ok(());
    };
    let (what, fix) = missing;
    Err(Unsupported { backend: backend.backend.into(), what: what.into(), fix: fix.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_overflow_fit_no_tensor() {
        assert_eq!(expect_len("k", "x", &[2, 3], 6), Ok(()));
        for shape in [[1 << 63, 2], [usize::MAX, 3]] {
            for got in [0, usize::MAX] {
                assert!(expect_len("k", "x", &shape, got).is_err(), "{shape:?} {got}");
            }
        }
        assert_eq!(expect_len("k", "x", &[0, usize::MAX], 0), Ok(()));
    }
}
