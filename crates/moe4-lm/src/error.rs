//! What can go wrong, told once: what was expected, what was found, where, and what to do about it.

use std::path::{Path, PathBuf};

/// An error of the language model, its training loop or its run folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is out of range or contradicts another one.
    #[error("{setting} is {got}, but must be {expected}")]
    Setting {
        /// The setting's name, as in `config.toml`.
        setting: &'static str,
        /// The value found.
        got: String,
        /// What the setting allows.
        expected: String,
    },
    /// The settings ask for a model larger than can be trained here.
    #[error(
        "expected a model of at most {most} parameters, got {}: make --hidden, --ffn, --experts or --layers smaller",
        got.map_or_else(|| format!("more than {}", usize::MAX), |got| got.to_string())
    )]
    TooManyParameters {
        /// Parameters of the model; None if the number overflows.
        got: Option<usize>,
        /// The largest number allowed.
        most: usize,
    },
    /// A graph was run backward a second time.
    #[error("the experts' backward pass ran twice over one forward pass; run the forward pass again")]
    Reused,
    /// The text is too short for the configured context.
    #[error(
        "{path} holds {got} bytes, but training with a context of {context} needs at least {needed}: give more text or a smaller --context"
    )]
    TextTooShort {
        /// The file, or the name of the shipped text.
        path: String,
        /// Bytes found.
        got: usize,
        /// Bytes needed.
        needed: usize,
        /// The configured context.
        context: usize,
    },
    /// A file or folder could not be read or written.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// The verb: read, write, create.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// The output folder already holds something.
    #[error("{0} is not empty: choose another --out, or continue the run in it with --resume {0}")]
    OutNotEmpty(PathBuf),
    /// A file of a run folder is not what this program writes.
    #[error("{path} is no usable part of a moe4 run: {reason}")]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The text of a resumed run is not the one that it was started with.
    #[error("{path} is not the text that this run was started with: give the same file, or start a new run")]
    TextChanged {
        /// The file, or the name of the shipped text.
        path: String,
    },
    /// The loss became infinite or NaN.
    #[error("the loss became {loss} in step {step}: try a smaller --lr")]
    Diverged {
        /// The step, counted from 1.
        step: usize,
        /// The loss.
        loss: f32,
    },
    /// The expert operator refused its inputs.
    #[error("expert layer: {0}")]
    Operator(#[from] moe4::kernels::Error),
    /// The picture could not be drawn.
    #[error("cannot draw {path}: {reason}")]
    Plot {
        /// The picture.
        path: PathBuf,
        /// What the drawing library said.
        reason: String,
    },
}

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }

    pub(crate) fn foreign(path: &Path, reason: impl ToString) -> Self {
        Self::Foreign { path: path.to_owned(), reason: reason.to_string() }
    }

    pub(crate) fn setting(setting: &'static str, got: impl ToString, expected: impl Into<String>) -> Self {
        Self::Setting { setting, got: got.to_string(), expected: expected.into() }
    }
}
