//! `cargo xtask check`: the steps of the continuous integration, as data.
//!
//! Steps run in order and the first failure ends the run, naming the step and the command that repeats it alone.
//! Cheap steps come first. Tests go through `cargo nextest` where it is installed, else through `cargo test`.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::totals::Totals;
use crate::{aarch64, kernels, layers, python};

/// What a step does.
enum Action {
    /// Run cargo with these arguments; success is exit status 0.
    Cargo(&'static [&'static str]),
    /// Run cargo with these arguments and one environment variable.
    CargoWith(&'static [&'static str], (&'static str, &'static str)),
    /// Run tests: these arguments follow `nextest run` or `test`, the last list only `test`.
    Tests(&'static [&'static str], &'static [&'static str]),
    /// Doc tests, which nextest does not run.
    DocTests(&'static [&'static str]),
    /// The layer rules, in this process.
    Layers,
    /// The library, compiled for AArch64.
    Aarch64,
    /// The CUDA kernels, compiled for every architecture.
    Kernels,
    /// The Python package, built and tested.
    Python,
}

struct Step {
    name: &'static str,
    action: Action,
}

const STEPS: &[Step] = &[
    Step { name: "format", action: Action::Cargo(&["fmt", "--all", "--check"]) },
    Step { name: "layers", action: Action::Layers },
    Step {
        name: "clippy",
        action: Action::Cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    },
    Step {
        name: "clippy, library without default features",
        action: Action::Cargo(&[
            "clippy",
            "-p",
            "moe4",
            "--no-default-features",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ]),
    },
    Step { name: "clippy, library on AArch64", action: Action::Aarch64 },
    Step { name: "kernels", action: Action::Kernels },
    Step {
        name: "docs",
        action: Action::CargoWith(&["doc", "--workspace", "--no-deps"], ("RUSTDOCFLAGS", "-D warnings")),
    },
    Step {
        name: "tests, library without default features",
        action: Action::Tests(&["-p", "moe4", "--no-default-features"], &["--lib", "--tests"]),
    },
    Step {
        name: "tests",
        action: Action::Tests(&["--workspace"], &["--lib", "--bins", "--tests", "--examples"]),
    },
    // Includes the README's Rust code, which the library's crate carries as a doc test.
    Step { name: "doc tests", action: Action::DocTests(&["test", "--workspace", "--doc"]) },
    // Last: the download of torch is the longest wait that a first run may have, and says nothing of Rust.
    Step { name: "Python package", action: Action::Python },
];

/// Which program runs the tests.
#[derive(Clone, Copy, PartialEq)]
enum Runner {
    Nextest,
    CargoTest,
}

/// Runs every step in the repository at `root`; fails at the first step that fails.
pub(crate) fn run(root: &Path) -> Result<()> {
    let runner = detect_runner(root);
    let start = Instant::now();
    let mut totals = Totals::default();
    for (index, step) in STEPS.iter().enumerate() {
        println!("\n=== {}/{} {} ===", index + 1, STEPS.len(), step.name);
        let step_start = Instant::now();
        let outcome = run_step(root, runner, &step.action, &mut totals);
        let verdict = if outcome.is_ok() { "ok" } else { "FAILED" };
        println!("=== {}: {verdict} ({:.1} s) ===", step.name, step_start.elapsed().as_secs_f64());
        if outcome.is_err() {
            println!("\n{totals}");
        }
        outcome.with_context(|| format!("step '{}' failed", step.name))?;
    }
    println!("\nall {} steps passed in {:.1} s\n{totals}", STEPS.len(), start.elapsed().as_secs_f64());
    Ok(())
}

fn run_step(root: &Path, runner: Runner, action: &Action, totals: &mut Totals) -> Result<()> {
    match *action {
        Action::Layers => layers::run(root),
        Action::Aarch64 => aarch64::check(root),
        Action::Kernels => kernels::run(root, false),
        Action::Python => python::run(root, totals),
        Action::Cargo(arguments) => execute(cargo(root).args(arguments)),
        Action::CargoWith(arguments, (name, value)) => execute(cargo(root).args(arguments).env(name, value)),
        Action::DocTests(arguments) => {
            execute_counting(cargo(root).args(arguments), Runner::CargoTest, totals)
        }
        Action::Tests(arguments, targets) => match runner {
            Runner::Nextest => {
                let command = &mut cargo(root);
                execute_counting(
                    command.args(["nextest", "run", "--no-fail-fast"]).args(arguments),
                    runner,
                    totals,
                )
            }
            Runner::CargoTest => {
                let command = &mut cargo(root);
                execute_counting(
                    command.args(["test", "--no-fail-fast"]).args(arguments).args(targets),
                    runner,
                    totals,
                )
            }
        },
    }
}

/// Cargo as the one that runs this task, so that one toolchain serves the whole check.
fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    command
}

fn detect_runner(root: &Path) -> Runner {
    let found = cargo(root)
        .args(["nextest", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if found { Runner::Nextest } else { Runner::CargoTest }
}

fn execute(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("could not start {}", shown(command)))?;
    if !status.success() {
        bail!("{} ended with {status}", shown(command));
    }
    Ok(())
}

/// Like [`execute`], and reads the runner's closing lines on the way. They come on standard error with nextest
/// and on standard output with cargo test; the other stream goes straight through.
fn execute_counting(command: &mut Command, runner: Runner, totals: &mut Totals) -> Result<()> {
    match runner {
        Runner::Nextest => command.stderr(Stdio::piped()),
        Runner::CargoTest => command.stdout(Stdio::piped()),
    };
    // Colour codes would hide the closing lines.
    command.env("CARGO_TERM_COLOR", "never");
    let mut child = command.spawn().with_context(|| format!("could not start {}", shown(command)))?;
    if let Some(stream) = child.stderr.take() {
        forward(stream, &mut std::io::stderr(), totals)?;
    }
    if let Some(stream) = child.stdout.take() {
        forward(stream, &mut std::io::stdout(), totals)?;
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("{} ended with {status}", shown(command));
    }
    Ok(())
}

/// Runs a program, passes its standard output on and reads closing lines of tests on the way.
pub(crate) fn count_output(command: &mut Command, totals: &mut Totals) -> Result<ExitStatus> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child =
        command.stdout(Stdio::piped()).spawn().with_context(|| format!("could not start {program}"))?;
    if let Some(stream) = child.stdout.take() {
        forward(stream, &mut std::io::stdout(), totals)?;
    }
    Ok(child.wait()?)
}

fn forward(from: impl Read, to: &mut impl Write, totals: &mut Totals) -> Result<()> {
    let mut reader = BufReader::new(from);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line)? > 0 {
        to.write_all(&line)?;
        totals.read_line(&String::from_utf8_lossy(&line));
        line.clear();
    }
    Ok(())
}

/// The command as one would type it.
fn shown(command: &Command) -> String {
    let arguments: Vec<_> = command.get_args().map(|argument| argument.to_string_lossy()).collect();
    format!("`cargo {}`", arguments.join(" "))
}
