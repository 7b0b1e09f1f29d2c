//! Tasks of the repository, run as `cargo xtask TASK`.
//!
//! - `check`: everything the continuous integration checks, in the same order.
//! - `kernels`: only the CUDA kernels, compiled for every architecture; with `--bless` it records what they need.
//! - `bench`: the CPU's shapes of `moe4 bench` with PyTorch beside it, recorded; what follows goes to `moe4 bench`.
//! - `python`: only the Python package, built and tested.
//! - `aarch64`: the library for AArch64, and its tests in an emulator.
//! - `picture`: draws docs/steps.svg from the records of `moe4 bench`.
//! - `layers`: only the rules on which module and which crate may use which (fast).

#![forbid(unsafe_code)]

mod aarch64;
mod bench;
mod check;
mod kernels;
mod layers;
mod paths;
mod picture;
mod python;
mod totals;
mod venv;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

const USAGE: &str = "usage: cargo xtask TASK

tasks:
  check             format, layers, clippy, AArch64, kernels, docs, tests, doc tests, the Python package
  kernels           compile the CUDA kernels for every architecture, no GPU needed
  kernels --bless   and record the registers and memory that they need
  bench [ARGS]      moe4 bench on the CPU beside PyTorch, which it installs, recorded in bench/record
  python            build the Python package and run its tests; installs torch (4 GB)
  aarch64           compile the library for AArch64 and run its tests in an emulator (qemu-user, a cross linker)
  picture           draw docs/steps.svg from bench/record
  layers            which module and which crate may use which";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["check"] => check::run(&repository_root()),
        ["kernels"] => kernels::run(&repository_root(), false),
        ["kernels", "--bless"] => kernels::run(&repository_root(), true),
        ["bench", ..] => bench::run(&repository_root(), &arguments[1..]),
        ["python"] => python::run(&repository_root(), &mut totals::Totals::default()),
        ["aarch64"] => aarch64::check(&repository_root()).and_then(|()| aarch64::test(&repository_root())),
        ["picture"] => picture::run(&repository_root()),
        ["layers"] => layers::run(&repository_root()),
        ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            Ok(())
        }
        _ => Err(anyhow::anyhow!("expected one task, got '{}'\n{USAGE}", arguments.join(" "))),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The folder above this package, known when it is compiled: tasks work from any folder.
fn repository_root() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_path_buf()
}
