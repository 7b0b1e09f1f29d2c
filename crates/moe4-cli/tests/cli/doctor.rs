//! `moe4 doctor`.

use crate::common::Workspace;

#[test]
fn tells_what_runs_and_checks_its_bytes() {
    let run = Workspace::new().moe4(&["doctor"]).succeeds();
    for part in ["processor", "memory", "cpu backend", "cuda backend", "self-check", "cpu, portable"] {
        assert!(run.stdout.contains(part), "'{part}' is not in:\n{}", run.stdout);
    }
    let checked = run.stdout.lines().filter(|line| line.contains(" comparisons, "));
    assert!(
        checked.clone().count() >= 2 && checked.clone().all(|line| line.contains(" ok (")),
        "{}",
        run.stdout
    );
}
