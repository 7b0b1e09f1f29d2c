//! Tensors in and out of safetensors files.
//!
//! A file is an 8-byte little-endian header length, a JSON header (`name → dtype, shape, byte range`), and the
//! tensors' bytes, row-major and little-endian, without gaps.
//!
//! - [`TensorFile`] reads the header once, checks all of it against the file's length, and then reads one tensor
//!   at a time with positioned reads: memory holds what was asked for, never the file.
//! - [`TensorWriter`] writes the header first and then one tensor at a time, into a temporary file beside the
//!   target. Only [`TensorWriter::finish`] gives it the target's name, so that a reader sees the old file or the
//!   whole new one; on any failure the temporary file is removed.
//!
//! - [`ModelFiles`] opens a whole model, shards included; [`ExpertLayer`] finds the experts in it, in the names and
//!   formats of other programs, and [`convert`] takes them from one format to another.
//!
//! Every error of this module names the file and the tensor, what was expected and what was found.
//!
//! Files are read rather than memory-mapped: a mapping of a file that another process truncates ends the program
//! with a signal, where a read ends in an error.

#![forbid(unsafe_code)]

mod convert;
mod element;
mod error;
mod experts;
mod model;
mod printable;
mod reader;
mod writer;

#[cfg(test)]
mod tests;

pub use convert::{ConvertProgress, Converted, convert};
pub use element::Element;
pub use error::CheckpointError;
pub use experts::{ExpertFormat, ExpertLayer, Projection, StoredNvfp4};
pub use model::ModelFiles;
pub use printable::printable;
pub use reader::{TensorFile, TensorInfo};
pub use safetensors::Dtype;
pub use writer::{TensorSpec, TensorWriter};

// Tensors are read into and written from memory as they lie there.
const _: () = assert!(cfg!(target_endian = "little"), "safetensors files are little-endian");
