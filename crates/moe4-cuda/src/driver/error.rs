//! What the driver answers when it does not do as asked, and why a machine has no usable GPU.
#![forbid(unsafe_code)]

use crate::compile::{ArchError, LoadError};
use moe4::kernels::DeviceError;

/// A driver call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}{}: {name} ({code}): {text}", if .of.is_empty() { String::new() } else { format!(" of {of}") })]
pub struct CallError {
    /// The driver's function.
    pub call: &'static str,
    /// What it was called for: a kernel with its grid, a number of bytes; may be empty.
    pub of: String,
    /// The driver's code.
    pub code: u32,
    /// The code's name, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: String,
    /// The driver's explanation.
    pub text: String,
}

impl CallError {
    /// The same failure, saying what the call was for.
    pub(crate) fn of(mut self, what: impl Into<String>) -> Self {
        self.of = what.into();
        self
    }

    /// As an error of the contract.
    pub(crate) fn on(self, device: &str) -> DeviceError {
        let call =
            if self.of.is_empty() { self.call.into() } else { format!("{} of {}", self.call, self.of) };
        DeviceError {
            device: device.into(),
            call,
            reason: format!("{} ({}): {}", self.name, self.code, self.text),
        }
    }
}

/// Why the CUDA backend cannot run here.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Unavailable {
    /// No driver library.
    #[error("no NVIDIA driver: libcuda.so.1 was not found; install the driver, or use the cpu backend")]
    NoDriver,
    /// The driver does not start.
    #[error("the NVIDIA driver does not start: {0}")]
    Init(CallError),
    /// A driver without GPUs.
    #[error("expected GPU {ordinal}, got {count} GPUs; check CUDA_VISIBLE_DEVICES, or use the cpu backend")]
    NoDevice {
        /// The GPU asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// A GPU that no kernel is written for.
    #[error("{device}: {reason}")]
    Arch {
        /// The GPU.
        device: String,
        /// What is wrong with its compute capability.
        reason: ArchError,
    },
    /// No compiler.
    #[error(transparent)]
    Compiler(#[from] LoadError),
    /// A call failed while the backend was set up.
    #[error("{device}: {reason}")]
    Setup {
        /// The GPU.
        device: String,
        /// What failed.
        reason: String,
    },
}
