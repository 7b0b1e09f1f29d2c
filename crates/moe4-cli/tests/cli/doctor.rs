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

/// With a GPU it is checked as well; without, the reason is there and nothing fails.
#[test]
fn tells_of_each_gpu_or_why_cuda_is_off() {
    let text = Workspace::new().moe4(&["doctor"]).succeeds().stdout;
    let lines: Vec<_> = text.lines().filter(|line| line.trim().starts_with("cuda backend")).collect();
    assert!(!lines.is_empty(), "{text}");
    for line in lines {
        let found = line.contains(" GPU ") && line.contains("multiprocessors");
        assert!(found || line.contains("off: "), "{line}");
        if found && !line.contains("off: ") {
            assert!(text.contains("NVRTC") && text.contains("compiled kernels in"), "{text}");
            assert!(text.lines().any(|line| line.contains("cuda, GPU") && line.contains(" ok (")), "{text}");
        }
    }
}
