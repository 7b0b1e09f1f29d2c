//! The CPU backend passes the suite on every instruction set of this machine and on any number of threads.

use moe4::kernels::cpu::{Cpu, Isa};
use moe4_conformance::run;

#[test]
fn every_check_passes_on_every_instruction_set() {
    for isa in Isa::available() {
        let report = run(&Cpu::with_isa(isa));
        assert!(report.passed(), "{report}");
    }
}
