//! One suite of checks, run against every backend of moe4.
#![forbid(unsafe_code)]

pub mod alter;
pub mod checks;
pub mod compare;
pub mod data;
pub mod drive;
pub mod exact;
pub mod golden;
pub mod judge;
pub mod mlp_rule;
mod report;
mod subject;

pub use report::{Failure, InCase, Line, Outcome, Report};
pub use subject::Subject;

use checks::Check;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs every check.
pub fn run<B: Subject>(backend: &B) -> Report {
    run_checks(backend, checks::all())
}

/// Runs the checks of these names.
///
/// # Panics
/// If no check has one of the names.
pub fn run_only<B: Subject>(backend: &B, names: &[&str]) -> Report {
    let mut checks = checks::all::<B>();
    for name in names {
        assert!(checks.iter().any(|check| check.name == *name), "no check is named {name}");
    }
    checks.retain(|check| names.contains(&check.name));
    run_checks(backend, checks)
}

fn run_checks<B: Subject>(backend: &B, checks: Vec<Check<B>>) -> Report {
    let capabilities = backend.capabilities();
    let line = |Check { name, run }: Check<B>| {
        let outcome = catch_unwind(AssertUnwindSafe(|| run(backend))).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
            Err(Failure::new(format!("panicked: {}", text.unwrap_or_default())))
        });
        Line { name, outcome }
    };
    Report {
        backend: format!("{} ({})", capabilities.backend, capabilities.path),
        lines: checks.into_iter().map(line).collect(),
    }
}
