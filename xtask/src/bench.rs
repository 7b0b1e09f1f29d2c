//! `moe4 bench` on this machine's CPU with its peers beside it, in one run, recorded.
//!
//! PyTorch is installed once, in the version that `bench/peers/requirements.txt` names, in a virtual environment below
//! the target folder; it takes some gigabytes.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Runs the task; `arguments` go to `moe4 bench` as they are.
pub(crate) fn run(root: &Path, arguments: &[String]) -> Result<()> {
    let environment = root.join("target").join("peers-venv");
    let python = environment.join("bin").join("python");
    if !python.exists() {
        must(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
    }
    let requirements = root.join("bench").join("peers").join("requirements.txt");
    must(Command::new(&python).args(["-m", "pip", "install", "--quiet", "--requirement"]).arg(requirements))?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let bench = ["run", "--release", "-p", "moe4-cli", "--", "bench", "--backend", "cpu", "--peers"];
    let record = root.join("bench").join("record");
    must(
        Command::new(cargo)
            .current_dir(root)
            .args(bench)
            .arg(&python)
            .arg("--record")
            .arg(record)
            .args(arguments),
    )
}

/// Runs a command to its end, which has to be a success.
fn must(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(())
}
