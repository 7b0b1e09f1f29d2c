//! A backend that is wrong on purpose fails the suite, in the checks that are there for its mistake.

use moe4_conformance::broken::{Expectation, Fault};
use moe4_conformance::checks::host_only;
use moe4_conformance::{Line, Verdict};

#[test]
fn every_fault_is_caught_where_it_should_be() {
    let mut missed = vec![];
    for Expectation { fault, what, caught_by } in Fault::all() {
        let report = fault.run(caught_by);
        let failed = report.failed();
        for name in caught_by.iter().filter(|name| !failed.contains(name)) {
            missed.push(format!("{fault:?} ({what}) passes '{name}'"));
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
fn zeroed_outputs_fail_every_check_that_looks_at_the_backend() {
    let report = Fault::ZeroedEverything.run_all();
    let passed = |line: &&Line| line.verdict == Verdict::Passed;
    let passed: Vec<_> = report.lines.iter().filter(passed).map(|line| line.name).collect();
    assert_eq!(passed, host_only(), "{report}");
}
