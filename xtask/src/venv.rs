//! Virtual environments of Python with pinned packages, kept in `target/`.
//!
//! ```text
//! stamp = requirements, written after the installation ended well
//! if the stamp differs: remove the folder, python3 -m venv, pip install, write the stamp
//! ```

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The Python that environments are made with.
pub(crate) const PYTHON: &str = "python3";

/// Makes the virtual environment unless it holds exactly what the requirements say.
///
/// `options` are further ones of `pip install`, `hint` says what the packages need if they cannot be installed.
pub(crate) fn provide(
    environment: &Path,
    requirements: &Path,
    python: &OsStr,
    options: &[&str],
    hint: &str,
) -> Result<()> {
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
    println!("making {}", environment.display());
    execute(
        Command::new(python).args(["-m", "venv"]).arg(environment),
        "this task installs its tools with Python 3 and its venv module (on Debian: python3-venv)",
    )?;
    println!("installing {}", requirements.display());
    execute(
        Command::new(environment.join("bin/python"))
            .args([
                "-m",
                "pip",
                "install",
                "--disable-pip-version-check",
                "--progress-bar",
                "off",
                "--no-input",
            ])
            .args(options)
            .arg("--requirement")
            .arg(requirements),
        hint,
    )?;
    fs::write(&stamp, wanted).with_context(|| format!("writing {}", stamp.display()))
}

/// Runs a command to its end; `hint` goes with the error.
pub(crate) fn execute(command: &mut Command, hint: &str) -> Result<()> {
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

    use super::provide;

    #[test]
    fn a_stamped_environment_is_kept_and_any_other_made_anew() {
        let root = tempfile::tempdir().unwrap();
        let (environment, requirements) = (root.path().join("venv"), root.path().join("requirements.txt"));
        // No such program: whatever needs Python fails, and says so.
        let provide = || provide(&environment, &requirements, OsStr::new("no-such-python"), &[], "");
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
        let error =
            provide(&root.path().join("venv"), &requirements, OsStr::new("false"), &[], "").unwrap_err();
        let message = error.to_string();
        assert!(message.contains("`false -m venv") && message.contains("python3-venv"), "{message}");
    }
}
