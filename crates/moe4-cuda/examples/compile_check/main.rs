//! Compiles every kernel of the catalog for every checked architecture, without a GPU, and compares what each needs
//! with the table under version control. Run by `cargo xtask kernels`.
//!
//! ```text
//! compile_check --nvrtc FOLDER --table FILE [--bless]
//!
//! for each variant, for each of sm_90a, sm_100a, sm_103a, sm_120a:
//!     compile it as at run time, and ask the assembler what it used
//!     any message of the compiler fails; so do spills where the catalog forbids them
//! registers, shared memory, stack and spills must be those of FILE; --bless writes them there
//! ```
//!
//! Before that, probes that warn or spill on purpose must be found: a check that sees nothing would pass everything.
#![forbid(unsafe_code)]

mod probes;
mod ptxas;
mod table;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use moe4_cuda::catalog::CatalogEntry;
use moe4_cuda::compile::{Arch, CompileError, Compiled, Compiler, Job, compile_jobs};

use crate::ptxas::Report;
use crate::table::Row;

const USAGE: &str = "usage: compile_check --nvrtc FOLDER --table FILE [--bless]";

/// Asks the assembler for the resources of each function.
const VERBOSE: &[&str] = &["--ptxas-options=-v"];

struct Arguments {
    nvrtc: PathBuf,
    table: PathBuf,
    bless: bool,
}

fn main() -> ExitCode {
    match arguments(std::env::args().skip(1)).and_then(|arguments| run(&arguments)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn arguments(mut given: impl Iterator<Item = String>) -> Result<Arguments> {
    let (mut nvrtc, mut table, mut bless) = (None, None, false);
    while let Some(argument) = given.next() {
        match argument.as_str() {
            "--nvrtc" => nvrtc = given.next(),
            "--table" => table = given.next(),
            "--bless" => bless = true,
            other => bail!("unknown argument '{other}'\n{USAGE}"),
        }
    }
    match (nvrtc, table) {
        (Some(nvrtc), Some(table)) => Ok(Arguments { nvrtc: nvrtc.into(), table: table.into(), bless }),
        _ => bail!("{USAGE}"),
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let compiler = Compiler::load_from(&arguments.nvrtc)?;
    println!("NVRTC {} from {}", compiler.version(), compiler.path().display());
    let compiler = probes::run(compiler)?;
    let start = Instant::now();
    let mut findings = compile(&compiler, &moe4_cuda::catalog());
    let text = table::render(compiler.version(), &mut findings.rows);
    println!("{} compilations in {:.1} s", findings.total, start.elapsed().as_secs_f64());
    // A table that lacks the kernels that did not compile is not worth a comparison.
    if findings.rows.len() == findings.total {
        if arguments.bless {
            fs::write(&arguments.table, text)
                .with_context(|| format!("writing {}", arguments.table.display()))?;
            println!("written: {}", arguments.table.display());
        } else {
            findings.problems.extend(compare(&arguments.table, &text)?);
        }
    }
    if !findings.problems.is_empty() {
        bail!("problems with the kernels: {}\n{}", findings.problems.len(), findings.problems.join("\n"));
    }
    println!("kernels: no messages, no forbidden spills, resources as recorded");
    Ok(())
}

/// What is wrong with the recorded table, as one problem.
fn compare(path: &Path, text: &str) -> Result<Option<String>> {
    let recorded = fs::read_to_string(path)
        .with_context(|| format!("reading {}; `cargo xtask kernels --bless` makes it", path.display()))?;
    let differences = table::differences(&recorded, text);
    if differences.is_empty() {
        return Ok(None);
    }
    Ok(Some(format!(
        "{} differs (registers / shared / stack / spill stores / spill loads); if it is meant to, run \
         `cargo xtask kernels --bless`:\n{}",
        path.display(),
        differences.join("\n")
    )))
}

struct Findings {
    total: usize,
    rows: Vec<Row>,
    problems: Vec<String>,
}

fn compile(compiler: &Compiler, catalog: &[CatalogEntry]) -> Findings {
    let (entries, jobs): (Vec<&CatalogEntry>, Vec<Job>) = catalog
        .iter()
        .flat_map(|entry| Arch::CHECKED.map(|arch| (entry, arch)))
        .filter(|(entry, arch)| entry.runs_on(*arch))
        .map(|(entry, arch)| (entry, Job { variant: entry.variant.clone(), arch }))
        .unzip();
    let mut findings = Findings { total: jobs.len(), rows: Vec::new(), problems: Vec::new() };
    let results = compile_timed(compiler, &jobs);
    for ((job, entry), (result, _)) in jobs.into_iter().zip(entries).zip(results) {
        let report = result.map_err(|error| error.to_string()).and_then(|compiled| {
            Report::of(&compiled.log, job.variant.kernel)
                .map_err(|reason| format!("{} for {}: {reason}", job.variant, job.arch))
        });
        match report {
            Err(problem) => findings.problems.push(problem),
            Ok(report) => {
                findings.problems.extend(problem(&job, entry.no_spills && job.arch.number() >= 90, &report));
                findings.rows.push(Row { job, usage: report.usage });
            }
        }
    }
    findings
}

/// What is wrong with a variant that compiled.
fn problem(job: &Job, no_spills: bool, report: &Report) -> Option<String> {
    let mut reasons = report.complaints.clone();
    if no_spills && report.usage.spills() {
        let (stores, loads) = (report.usage.spill_stores, report.usage.spill_loads);
        reasons.push(format!(
            "expected no spills, got {stores} bytes stored and {loads} loaded: use fewer registers, or allow spills \
             in the catalog"
        ));
    }
    let reasons = (!reasons.is_empty()).then(|| reasons.join("\n  "));
    reasons.map(|reasons| format!("{} for {}:\n  {reasons}", job.variant, job.arch))
}

/// Compiles the jobs on all cores, with a line for each.
fn compile_timed(compiler: &Compiler, jobs: &[Job]) -> Vec<(Result<Compiled, CompileError>, Duration)> {
    let threads = std::thread::available_parallelism().map_or(1, Into::into);
    let work = |job: &Job| {
        let start = Instant::now();
        (compiler.compile_with(&job.variant, job.arch, VERBOSE), start.elapsed())
    };
    compile_jobs(jobs, threads, work, |progress| {
        println!("  {}/{} {} for {}", progress.done, progress.total, progress.job.variant, progress.job.arch);
    })
}

#[cfg(test)]
mod tests {
    use moe4_cuda::compile::{Arch, Job};
    use moe4_cuda::variant::Variant;

    use super::{Report, arguments, problem};
    use crate::ptxas::Usage;

    fn parsed(line: &str) -> bool {
        arguments(line.split_whitespace().map(String::from)).is_ok()
    }

    #[test]
    fn both_paths_are_needed() {
        assert!(parsed("--nvrtc a --table b"));
        assert!(parsed("--bless --table b --nvrtc a"));
        for wrong in ["", "--nvrtc a", "--table b", "--nvrtc a --table", "--nvrtc a --table b c"] {
            assert!(!parsed(wrong), "{wrong}");
        }
    }

    #[test]
    fn messages_and_forbidden_spills_are_problems() {
        let variant = Variant { kernel: "k", defines: vec![("N", 1)] };
        let job = Job { variant, arch: Arch::new(9, 0).unwrap() };
        let report = |spill_loads, complaints: &[&str]| Report {
            usage: Usage { spill_loads, ..Usage::default() },
            complaints: complaints.iter().map(ToString::to_string).collect(),
        };
        assert_eq!(problem(&job, true, &report(0, &[])), None);
        assert_eq!(problem(&job, false, &report(4, &[])), None);
        let spilled = problem(&job, true, &report(4, &[])).unwrap();
        assert!(spilled.starts_with("k N=1 for sm_90a:\n  expected no spills"), "{spilled}");
        assert_eq!(problem(&job, false, &report(0, &["warning"])).unwrap(), "k N=1 for sm_90a:\n  warning");
    }
}
