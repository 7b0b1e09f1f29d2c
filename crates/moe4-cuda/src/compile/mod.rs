//! The compile floor: from embedded CUDA sources to cubins, with NVRTC, at run time.
//!
//! | part | what |
//! |---|---|
//! | [`Arch`] | compute capability and the compiler's name of it |
//! | [`Compiler`] | NVRTC, found and asked once; source text to cubin |
//! | [`Cache`] | cubins on disk, by a hash of everything that they depend on |
//! | [`compile_jobs`] | many compilations on a few threads, with progress |
//! | [`Watch`] | told when a kernel is compiled that the cache did not have |
//!
//! A GPU loads what [`Compiler::load_all`] returns:
//!
//! ```text
//! for each variant, on a few threads:
//!     key   = sha256(source, headers, NVRTC version, architecture, options)
//!     cubin = cache[key], or else compiled and kept
//! ```
//!
//! Bytes are promised, so nothing may reorder or fuse arithmetic: no fast math, and no contraction of a product and
//! a sum into one fma. A kernel that wants an fma says so.

mod arch;
mod cache;
mod compiler;
mod error;
mod jobs;
mod key;
mod library;
mod raw;
mod watch;

pub use arch::{Arch, ArchError};
pub use cache::Cache;
pub use compiler::{Compiled, Compiler, Sources};
pub use error::{Attempt, CompileError, LoadError};
pub use jobs::{Job, Progress, compile_jobs, log_progress};
pub use key::Key;
pub use library::Version;
pub use watch::{Compiling, Watch};
