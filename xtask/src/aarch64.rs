//! `cargo xtask aarch64`: the library for AArch64, on any machine.
//!
//! ```text
//! provide the target's standard library: rustup target add
//! cargo clippy        the crates without foreign code of their own
//! cargo test          theirs and the conformance suite, emulated; `check` leaves that out
//! ```
//!
//! Tests need an emulator and a linker, on Debian those of the packages qemu-user-static and gcc-aarch64-linux-gnu.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::venv;

const TARGET: &str = "aarch64-unknown-linux-gnu";
/// As arguments.
const PACKAGES: [&str; 6] = ["-p", "moe4", "-p", "moe4-conformance", "-p", "moe4-cuda"];
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATORS: [&str; 2] = ["qemu-aarch64-static", "qemu-aarch64"];
/// Where Debian's cross packages keep the C library that the emulator loads.
const C_LIBRARY: &str = "/usr/aarch64-linux-gnu";

/// Compiles the crates of the repository at `root` for AArch64. Where the standard library of that target is not there and
/// cannot be had, this says so and does nothing: the code is the same.
pub(crate) fn check(root: &Path) -> Result<()> {
    if !provide_target() {
        println!("left out: rustup has no standard library of {TARGET} here and could not install it");
        return Ok(());
    }
    let mut command = cargo(root);
    command.arg("clippy").args(PACKAGES).args(["--target", TARGET, "--", "-D", "warnings"]);
    venv::execute(&mut command, "`cargo xtask aarch64` repeats it, with tests")
}

/// Runs the tests of the library and the conformance suite in an emulator; minutes.
pub(crate) fn test(root: &Path) -> Result<()> {
    let Some(emulator) = EMULATORS.into_iter().find(|program| starts(program)).filter(|_| starts(LINKER))
    else {
        bail!(
            "tests for {TARGET} need an emulator ({}) and a linker ({LINKER}); on Debian: apt install qemu-user-static \
             gcc-aarch64-linux-gnu",
            EMULATORS.join(" or ")
        );
    };
    let mut command = cargo(root);
    command.args(["test", "--target", TARGET, "-p", "moe4", "-p", "moe4-conformance", "--lib", "--tests"]);
    command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER);
    command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", format!("{emulator} -L {C_LIBRARY}"));
    venv::execute(&mut command, "see the tests above")
}

/// Whether the target's standard library is there, after an attempt to install it.
fn provide_target() -> bool {
    installed().unwrap_or(false)
        || (quiet(Command::new("rustup").args(["target", "add", TARGET])) && installed().unwrap_or(false))
}

fn installed() -> Result<bool> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).args(["--print", "target-libdir", "--target", TARGET]).output();
    let output = output.context("could not start rustc")?;
    Ok(output.status.success() && Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_dir())
}

/// Whether a program is there.
fn starts(program: &str) -> bool {
    quiet(Command::new(program).arg("--version"))
}

fn quiet(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    command
}
