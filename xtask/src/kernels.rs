//! `cargo xtask kernels [--bless]`: compiles every CUDA kernel for every checked architecture, without a GPU.
//!
//! The compiler is NVRTC from a pinned Python wheel, so that nobody needs a CUDA toolkit and everybody gets the same
//! registers. This task only brings it: it keeps a virtual environment in `target/`, made again when the
//! requirements change, and hands NVRTC's folder to the example `compile_check` of moe4-cuda, which loads it the way
//! the backend does.
//!
//! ```text
//! provide target/kernels-venv, see the module venv
//! cargo run -p moe4-cuda --example compile_check -- --nvrtc <folder> --table <resources.md> [--bless]
//! ```

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::venv;

const REQUIREMENTS: &str = "xtask/kernels-requirements.txt";
const TABLE: &str = "crates/moe4-cuda/kernels/resources.md";

/// Checks the kernels of the repository at `root`, or with `bless` records what they need.
pub(crate) fn run(root: &Path, bless: bool) -> Result<()> {
    let environment = root.join("target/kernels-venv");
    let requirements = root.join(REQUIREMENTS);
    let hint = "the wheels come from the Python package index that pip is configured for and exist for Linux on \
                x86-64 and AArch64; see pip's message above";
    venv::provide(&environment, &requirements, OsStr::new(venv::PYTHON), &["--require-hashes"], hint)?;
    let nvrtc = nvrtc_folder(&environment)?;
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root).args(["run", "--package", "moe4-cuda", "--example", "compile_check", "--"]);
    command.arg("--nvrtc").arg(nvrtc).arg("--table").arg(root.join(TABLE));
    if bless {
        command.arg("--bless");
    }
    let status = command.status().context("could not start cargo")?;
    if !status.success() {
        bail!("the kernels' check ended with {status}; `cargo xtask kernels` repeats it alone");
    }
    Ok(())
}

/// The folder of NVRTC below a virtual environment, wherever the wheel puts it.
fn nvrtc_folder(environment: &Path) -> Result<PathBuf> {
    let lib = environment.join("lib");
    find_nvrtc(&lib).with_context(|| {
        format!(
            "no libnvrtc.so.* below {}: expected the wheel of {REQUIREMENTS} to hold it; remove {} to install anew",
            lib.display(),
            environment.display()
        )
    })
}

fn find_nvrtc(folder: &Path) -> Option<PathBuf> {
    let mut entries: Vec<PathBuf> = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    let named = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc.so."))
    };
    if entries.iter().any(named) {
        return Some(folder.to_path_buf());
    }
    // Links lead out of the environment, as lib64 does to lib.
    entries.iter().filter(|path| path.is_dir() && !path.is_symlink()).find_map(|path| find_nvrtc(path))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{find_nvrtc, nvrtc_folder};

    #[test]
    fn the_library_is_found_at_any_depth() {
        let root = tempfile::tempdir().unwrap();
        assert!(nvrtc_folder(root.path()).unwrap_err().to_string().contains("no libnvrtc.so.*"));
        let folder = root.path().join("lib/python3.11/site-packages/nvidia/cu13/lib");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("libnvrtc-builtins.so.13.0"), "").unwrap();
        assert_eq!(find_nvrtc(root.path()), None);
        fs::write(folder.join("libnvrtc.so.13"), "").unwrap();
        assert_eq!(nvrtc_folder(root.path()).unwrap(), folder);
    }
}
