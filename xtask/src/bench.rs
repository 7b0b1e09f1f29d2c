//! `moe4 bench` on this machine's CPU with its peers beside it, in one run, recorded.
//!
//! ```text
//! provide target/peers-venv: PyTorch in the version of bench/peers/requirements.txt; some gigabytes
//! cargo run --release -p moe4-cli -- bench --backend cpu --peers <python> --record bench/record <arguments>
//! ```

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::venv;

const REQUIREMENTS: &str = "bench/peers/requirements.txt";
const RECORD: &str = "bench/record";

/// Runs the task; `arguments` go to `moe4 bench` as they are, and a `--record` among them instead of `bench/record`.
pub(crate) fn run(root: &Path, arguments: &[String]) -> Result<()> {
    let environment = root.join("target/peers-venv");
    let python = environment.join("bin/python");
    for line in about_the_machine(&python, has_gpu(), has_bf16()) {
        println!("{line}");
    }
    let hint = "the wheels come from the Python package index that pip is configured for; torch takes gigabytes of disk";
    venv::provide(&environment, &root.join(REQUIREMENTS), OsStr::new(venv::PYTHON), &[], hint)?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let bench = ["-p", "moe4-cli", "--", "bench", "--backend", "cpu", "--peers"];
    let mut command = Command::new(cargo);
    // Not from another folder: paths among the arguments are the caller's.
    command.args(["run", "--release", "--manifest-path"]).arg(root.join("Cargo.toml"));
    command.args(bench).arg(&python).args(record(root, arguments)).args(arguments);
    venv::execute(&mut command, "see its message above")
}

/// Where records go, unless the arguments say it.
fn record(root: &Path, arguments: &[String]) -> Vec<PathBuf> {
    let said = arguments.iter().any(|argument| argument == "--record" || argument.starts_with("--record="));
    if said { vec![] } else { vec!["--record".into(), root.join(RECORD)] }
}

/// What is compared with what here, before minutes are spent.
fn about_the_machine(python: &Path, gpu: bool, bf16: bool) -> Vec<String> {
    let mut lines = vec!["measuring this machine's CPU, with PyTorch on the same cores".to_owned()];
    if gpu {
        lines.push(format!(
            "its GPU is left alone; `moe4 bench --backend cuda --peers {}` measures that",
            python.display()
        ));
    }
    if !bf16 {
        lines.push(
            "it has no BF16 products (AVX512-BF16): PyTorch then computes BF16 in FP32, moe4 by FP32 vectors, and \
             ratios tell little of a machine that has them"
                .to_owned(),
        );
    }
    lines
}

/// Whether NVIDIA's driver shows a GPU.
fn has_gpu() -> bool {
    let listed = std::fs::read_dir("/proc/driver/nvidia/gpus");
    listed.is_ok_and(|mut gpus| gpus.next().is_some())
}

#[cfg(target_arch = "x86_64")]
fn has_bf16() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_bf16() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_elsewhere_replaces_the_default() {
        let at = |arguments: &[&str]| {
            let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
            record(Path::new("/repository"), &arguments)
        };
        assert_eq!(at(&["--runs", "3"]), [Path::new("--record"), Path::new("/repository/bench/record")]);
        assert!(at(&["--record", "elsewhere"]).is_empty() && at(&["--record=elsewhere"]).is_empty());
    }

    #[test]
    fn what_is_special_about_a_machine_is_said_at_once() {
        let lines = |gpu, bf16| about_the_machine(Path::new("python"), gpu, bf16);
        assert_eq!(lines(false, true).len(), 1);
        assert!(lines(true, true)[1].contains("--backend cuda --peers python"));
        assert!(lines(false, false)[1].contains("AVX512-BF16"));
    }
}
