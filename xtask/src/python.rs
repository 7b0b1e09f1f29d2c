//! `cargo xtask python`: builds the Python package and runs its tests, no GPU needed.
//!
//! ```text
//! provide target/python-venv: torch and the tools, pinned; 4 GB, since torch is linked against CUDA's libraries
//! maturin develop     the package, built as the other crates are for tests
//! mypy                its types, strictly
//! pytest              its tests
//! ```

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::totals::Totals;
use crate::{check, venv};

const REQUIREMENTS: &str = "bindings/python/tests/requirements.txt";

/// Builds and tests the package of the repository at `root`; `totals` receives the counts.
pub(crate) fn run(root: &Path, totals: &mut Totals) -> Result<()> {
    let environment = root.join("target/python-venv");
    let hint = "the wheels come from the Python package index that pip is configured for and exist for Linux, \
                Python 3.11 to 3.13; torch takes 4 GB of disk with its libraries; see pip's message above";
    let options = ["--no-deps", "--require-hashes", "--no-cache-dir"];
    venv::provide(&environment, &root.join(REQUIREMENTS), OsStr::new(venv::PYTHON), &options, hint)?;
    let python = environment.join("bin/python");
    let folder = root.join("bindings/python");
    let command = |module: &[&str]| {
        let mut command = Command::new(&python);
        command.current_dir(&folder).arg("-m").args(module);
        command.env("VIRTUAL_ENV", &environment).env("PYO3_PYTHON", &python);
        // The requirements are complete; maturin asks pip for the rest of torch's dependencies.
        command.env("PIP_NO_DEPS", "1");
        command
    };
    venv::execute(&mut command(&["maturin", "develop"]), "the package could not be built")?;
    venv::execute(&mut command(&["mypy"]), "the types do not agree")?;
    let mut tests = command(&["pytest", "-q", "--durations=5"]);
    match check::count_output(&mut tests, totals)? {
        status if status.success() => Ok(()),
        status => bail!("pytest ended with {status}; `cargo xtask python` repeats it alone"),
    }
}
