//! What goes wrong before a kernel exists: no compiler, or a compilation that fails.
//!
//! The two are different types: without NVRTC a program can go on with another backend; a kernel that does not
//! compile is a defect.
#![forbid(unsafe_code)]

use std::fmt;

use super::{Arch, Version};
use crate::variant::Variant;

/// A place where NVRTC was looked for, and why it was not taken from there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// Path of a library or folder, or a bare name that the loader resolves.
    pub place: String,
    /// What was found instead.
    pub reason: String,
}

/// No usable NVRTC: the places tried, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    /// Every place and its reason.
    pub tried: Vec<Attempt>,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "no usable NVRTC, the compiler of CUDA kernels; tried:")?;
        for Attempt { place, reason } in &self.tried {
            writeln!(f, "  {place}: {reason}")?;
        }
        f.write_str(
            "install the CUDA toolkit 12.9 or later, or the Python wheel nvidia-cuda-nvrtc and name its folder \
             that holds libnvrtc.so.*",
        )
    }
}

impl std::error::Error for LoadError {}

/// A variant that could not be compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// No source has the kernel's name.
    #[error("kernel {kernel}: no source of that name; known: {}", .known.join(", "))]
    UnknownKernel {
        /// The name that was asked for.
        kernel: &'static str,
        /// Names that have a source.
        known: Vec<&'static str>,
    },
    /// This NVRTC does not know the architecture.
    #[error(
        "NVRTC {version} does not compile for {arch}; it knows {}; {}",
        listed(.supported),
        fix(*.arch)
    )]
    UnsupportedArch {
        /// The architecture that was asked for.
        arch: Arch,
        /// Version of the NVRTC that was found.
        version: Version,
        /// What it compiles for, as 90 for sm_90.
        supported: Vec<u32>,
    },
    /// A source, a name or an option holds a NUL character, which C strings cannot.
    #[error("{variant} for {arch}: NUL character in {place}; remove it")]
    Nul {
        /// The variant.
        variant: Variant,
        /// The architecture.
        arch: Arch,
        /// Which text holds it.
        place: String,
    },
    /// The watch broke a list of compilations off.
    #[error("stopped on request when {done} of {total} kernels were compiled")]
    Stopped {
        /// Those that were there by then.
        done: usize,
        /// All of the list.
        total: usize,
    },
    /// NVRTC reported a failure.
    #[error("{variant} for {arch}: {call} failed with code {code} ({reason})\n{log}")]
    Nvrtc {
        /// The variant.
        variant: Variant,
        /// The architecture.
        arch: Arch,
        /// The function of NVRTC that failed.
        call: &'static str,
        /// Its code.
        code: i32,
        /// NVRTC's name of the code.
        reason: String,
        /// The compiler's messages, if it got that far.
        log: String,
    },
}

fn listed(archs: &[u32]) -> String {
    archs.iter().map(|number| format!("sm_{number}")).collect::<Vec<_>>().join(", ")
}

/// Which NVRTC is the first to know an architecture, by its release notes.
fn fix(arch: Arch) -> String {
    match arch.number() {
        ..=90 => "an NVRTC of CUDA 12 or 13 does: install the CUDA toolkit 12.9 or 13".into(),
        91..=102 | 120 => "use NVRTC 12.8 or later".into(),
        103 | 121 => "use NVRTC 12.9 or later".into(),
        number => format!("use a later NVRTC, if one knows sm_{number}"),
    }
}
