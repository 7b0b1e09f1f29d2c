//! The oracle passes its own suite.

use moe4::kernels::reference::Reference;
use moe4_conformance::{run, run_host_memory};

#[test]
fn every_check_passes() {
    for report in [run(&Reference), run_host_memory(&Reference)] {
        assert!(report.passed(), "{report}");
        assert!(report.skipped().is_empty(), "{report}");
    }
}
