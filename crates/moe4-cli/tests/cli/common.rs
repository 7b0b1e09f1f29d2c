//! Helpers of the command line's tests: run `moe4`, make files, look at what is left.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use moe4::checkpoint::{Dtype, Element, TensorFile, TensorSpec, TensorWriter};
use tempfile::TempDir;

/// A folder for one test, removed at its end.
pub(crate) struct Workspace(TempDir);

impl Workspace {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs `moe4` in this folder.
    pub(crate) fn moe4(&self, arguments: &[&str]) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moe4"));
        Run::new(command.args(arguments).current_dir(self.0.path()))
    }

    /// Names of the files in this folder, sorted.
    pub(crate) fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).expect("a folder");
        let name = |entry: std::io::Result<fs::DirEntry>| {
            entry.expect("an entry").file_name().to_string_lossy().into_owned()
        };
        let mut names: Vec<_> = entries.map(name).collect();
        names.sort();
        names
    }

    pub(crate) fn open(&self, name: &str) -> TensorFile {
        TensorFile::open(self.path(name)).expect("a readable file")
    }

    /// Writes one tensor to a file.
    pub(crate) fn write<T: Element>(
        &self,
        file: &str,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
        data: &[T],
    ) {
        let specs = [TensorSpec::new(name, dtype, shape)];
        let mut writer = TensorWriter::create(self.path(file), &specs, &[]).expect("a writable file");
        writer.write(name, data).expect("a writable file");
        writer.finish().expect("a writable file");
    }
}

/// A finished run of `moe4`.
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    /// Standard error without its notes.
    pub(crate) stderr: String,
    /// Lines of standard error that begin with `note: `.
    pub(crate) notes: Vec<String>,
}

impl Run {
    pub(crate) fn new(command: &mut Command) -> Self {
        Self::of(command.output().expect("moe4 starts"))
    }

    pub(crate) fn of(Output { status, stdout, stderr }: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8 output");
        let stderr = text(stderr);
        let (notes, others): (Vec<_>, Vec<_>) =
            stderr.split_inclusive('\n').partition(|line| line.starts_with("note: "));
        let notes = notes.into_iter().map(|line| line.trim_end().to_owned()).collect();
        Self { code: status.code(), stdout: text(stdout), stderr: others.concat(), notes }
    }

    /// Exit code 0 and nothing but notes on standard error.
    pub(crate) fn succeeds(self) -> Self {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "{}", self.stdout);
        self
    }

    /// Exit code 1, and one line on standard error beside notes, which holds all of `parts`.
    pub(crate) fn fails_with(self, parts: &[&str]) -> Self {
        let Self { code, stderr, .. } = &self;
        assert_eq!(*code, Some(1), "{stderr}");
        assert!(stderr.starts_with("error: ") && stderr.lines().count() == 1, "not one line: {stderr}");
        for part in parts {
            assert!(stderr.contains(part), "expected '{part}' in: {stderr}");
        }
        self
    }
}

/// The folder of golden data from TransformerEngine's reference quantizer.
pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../moe4-conformance/golden").join(name)
}
