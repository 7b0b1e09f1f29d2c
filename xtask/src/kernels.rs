//! `cargo xtask kernels [--bless]`: compiles every CUDA kernel for every checked architecture, without a GPU.
//!
//! The compiler is NVRTC from a pinned Python wheel, so that nobody needs a CUDA toolkit and everybody gets the same
//! registers. This task only brings it: it keeps a virtual environment in `target/`, made again when the
//! requirements change, and hands NVRTC's folder to the example `compile_check` of moe4-cuda, which loads it the way
//! the backend does.
//!
//! ```text
//! stamp = requirements, written after the installation ended well
//! if target/kernels-venv/stamp differs: remove the folder, python3 -m venv, pip install, write the stamp
//! cargo run -p moe4-cuda --example compile_check -- --nvrtc <folder> --table <resources.md> [--bless]
//! ```

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

const REQUIREMENTS: &str = "xtask/kernels-requirements.txt";
const TABLE: &str = "crates/moe4-cuda/kernels/resources.md";
const PYTHON: &str = "python3";

/// Checks the kernels of the repository at `root`, or with `bless` records what they need.
pub(crate) fn run(root: &Path, bless: bool) -> Result<()> {
    let environment = root.join("target/kernels-venv");
    let requirements = root.join(REQUIREMENTS);
    provide(&environment, &requirements, OsStr::new(PYTHON))?;
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

/// Makes the virtual environment unless it holds exactly what the requirements say.
fn provide(environment: &Path, requirements: &Path, python: &OsStr) -> Result<()> {
    let wanted =
        fs::read_to_string(requirements).with_context(|| format!("reading {}", requirements.display()))?;
    let stamp = environment.join("stamp");
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    // Also one that was left half made: without a stamp nothing in it counts.
    match fs::remove_dir_all(environment) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("removing {}", environment.display()));
        }
        _ => {}
    }
    println!("kernels: making {}", environment.display());
    execute(
        Command::new(python).args(["-m", "venv"]).arg(environment),
        "this task installs its compiler with Python 3 and its venv module (on Debian: python3-venv)",
    )?;
    println!("kernels: installing {}", requirements.display());
    execute(
        Command::new(environment.join("bin/python"))
            .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"])
            .args(["--require-hashes", "--requirement"])
            .arg(requirements),
        "the wheels come from the Python package index that pip is configured for and exist for Linux on x86-64 and \
         AArch64; see pip's message above",
    )?;
    fs::write(&stamp, wanted).with_context(|| format!("writing {}", stamp.display()))
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

fn execute(command: &mut Command, hint: &str) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    match command.stdin(Stdio::null()).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => {
            let arguments: Vec<_> = command.get_args().map(OsStr::to_string_lossy).collect();
            bail!("`{program} {}` ended with {status}: {hint}", arguments.join(" "))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => bail!("{program} is not installed: {hint}"),
        Err(error) => bail!("could not start {program}: {error}: {hint}"),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs;

    use super::{find_nvrtc, nvrtc_folder, provide};

    #[test]
    fn a_stamped_environment_is_kept_and_any_other_made_anew() {
        let root = tempfile::tempdir().unwrap();
        let (environment, requirements) = (root.path().join("venv"), root.path().join("requirements.txt"));
        // No such program: whatever needs Python fails, and says so.
        let provide = || provide(&environment, &requirements, OsStr::new("no-such-python"));
        fs::write(&requirements, "wheel==1").unwrap();
        let message = provide().unwrap_err().to_string();
        assert!(message.contains("no-such-python is not installed"), "{message}");

        fs::create_dir_all(&environment).unwrap();
        fs::write(environment.join("stamp"), "wheel==1").unwrap();
        provide().unwrap();

        fs::write(&requirements, "wheel==2").unwrap();
        provide().unwrap_err();
        assert!(!environment.exists(), "what was installed before must not stay");
    }

    #[test]
    fn a_command_that_fails_is_named_with_its_hint() {
        let root = tempfile::tempdir().unwrap();
        let requirements = root.path().join("requirements.txt");
        fs::write(&requirements, "wheel==1").unwrap();
        let error = provide(&root.path().join("venv"), &requirements, OsStr::new("false")).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("`false -m venv") && message.contains("python3-venv"), "{message}");
    }

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
