//! What can go wrong with a file of tensors.

use std::io;
use std::path::PathBuf;

use safetensors::Dtype;

use super::printable;

/// A file that cannot be read or written as asked. Each variant says where, what was expected and what was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file cannot be opened.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Reading failed after the file was opened.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file does not start with a safetensors header.
    #[error("{} is not a safetensors file: {reason}", path.display())]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What about its header is wrong.
        reason: String,
    },
    /// The file's length is not what its header says.
    #[error(
        "{} holds {actual} bytes where its header needs {expected}: the file is {}; copy or download it again",
        path.display(),
        if actual < expected { "truncated" } else { "longer than its tensors" }
    )]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes that the header asks for, header included.
        expected: u64,
        /// Bytes in the file.
        actual: u64,
    },
    /// A tensor that is needed is not in the file.
    #[error("{} has no tensor '{}'; it has: {}", path.display(), printable(name), list(available))]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The tensor asked for.
        name: String,
        /// The tensors in the file.
        available: Vec<String>,
    },
    /// A tensor holds elements of another type.
    #[error(
        "tensor '{}' in {}: expected dtype {}, got {actual}",
        printable(name),
        path.display(),
        alternatives(expected)
    )]
    WrongDtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The dtypes that would do.
        expected: Vec<Dtype>,
        /// The dtype in the file.
        actual: Dtype,
    },
    /// A tensor has another shape.
    #[error("tensor '{}' in {}: expected shape {expected:?}, got {actual:?}", printable(name), path.display())]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The shape asked for.
        expected: Vec<usize>,
        /// The shape in the file.
        actual: Vec<usize>,
    },
    /// Writing failed; nothing was left behind.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file that was to be written.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The target exists and is no regular file.
    #[error("cannot write {}: it exists and is not a regular file; choose another name", path.display())]
    NotAFile {
        /// The target.
        path: PathBuf,
    },
    /// A tensor name cannot be used.
    #[error("cannot write tensor '{}' to {}: {reason}", printable(name), path.display())]
    BadName {
        /// The file that was to be written.
        path: PathBuf,
        /// The name.
        name: String,
        /// Why not.
        reason: &'static str,
    },
    /// Data handed to the writer does not match what was declared for the tensor.
    #[error(
        "tensor '{}' for {}: declared as {declared}, but the data given is {given}",
        printable(name),
        path.display()
    )]
    DataMismatch {
        /// The file that was to be written.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Dtype and shape declared.
        declared: String,
        /// What came.
        given: String,
    },
    /// A folder that is no model, or whose index and files disagree.
    #[error("{}: {problem}", path.display())]
    BadModel {
        /// The folder or file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The weights of a layer's experts are incomplete, inconsistent or damaged.
    #[error("tensor '{}' in {}: {problem}", printable(name), path.display())]
    BadExperts {
        /// The file, or the model if no file has the tensor.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// The caller asked to stop; nothing was left behind.
    #[error("interrupted at tensor '{}'; nothing was written", printable(name))]
    Interrupted {
        /// The tensor that would have been next.
        name: String,
    },
    /// Declared tensors were never written.
    #[error("cannot finish {}: not written yet: {}", path.display(), list(names))]
    Unwritten {
        /// The file that was to be written.
        path: PathBuf,
        /// The tensors that miss.
        names: Vec<String>,
    },
}

/// Names for a message of one line: the first ones, and how many more there are.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 24;
    if names.is_empty() {
        return "none".into();
    }
    let shown: Vec<_> = names.iter().take(SHOWN).map(|name| printable(name)).collect();
    let mut text = shown.join(", ");
    if names.len() > SHOWN {
        text.push_str(&format!(" and {} more", names.len() - SHOWN));
    }
    text
}

fn alternatives(dtypes: &[Dtype]) -> String {
    dtypes.iter().map(Dtype::to_string).collect::<Vec<_>>().join(" or ")
}
