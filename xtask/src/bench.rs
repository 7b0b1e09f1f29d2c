//! `moe4 bench` on this machine's CPU with its peers beside it, in one run, recorded.
//!
//! PyTorch is installed once, in the version that `bench/peers/requirements.txt` names, in a virtual environment below
//! the target folder; it takes some gigabytes.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::venv;

const REQUIREMENTS: &str = "bench/peers/requirements.txt";

/// Runs the task; `arguments` go to `moe4 bench` as they are.
pub(crate) fn run(root: &Path, arguments: &[String]) -> Result<()> {
    let environment = root.join("target/peers-venv");
    let hint = "the wheels come from the Python package index that pip is configured for; torch takes gigabytes of disk";
    venv::provide(&environment, &root.join(REQUIREMENTS), OsStr::new(venv::PYTHON), &[], hint)?;
    let python = environment.join("bin/python");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let bench = ["run", "--release", "-p", "moe4-cli", "--", "bench", "--backend", "cpu", "--peers"];
    let mut command = Command::new(cargo);
    command
        .current_dir(root)
        .args(bench)
        .arg(&python)
        .arg("--record")
        .arg(root.join("bench/record"))
        .args(arguments);
    venv::execute(&mut command, "see its message above")
}
