//! The oracle passes its own suite.

use moe4::kernels::reference::Reference;

#[test]
fn every_check_passes() {
    let report = moe4_conformance::run(&Reference);
    assert!(report.passed(), "{report}");
}
