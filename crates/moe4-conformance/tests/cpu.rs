//! The CPU backend passes the suite on every instruction set of this machine, and neither that choice nor the number
//! of threads changes a bit of any result or intermediate.

use moe4::kernels::cpu::{Cpu, Isa};
use moe4_conformance::checks::{large_steps, same_steps};
use moe4_conformance::{InCase, run, run_host_memory};
use rayon::ThreadPoolBuilder;

#[test]
fn every_check_passes_on_every_instruction_set() {
    for isa in Isa::available() {
        let cpu = Cpu::with_isa(isa);
        for report in [run(&cpu), run_host_memory(&cpu)] {
            assert!(report.passed(), "{report}");
            assert!(report.skipped().is_empty(), "{report}");
        }
    }
}

#[test]
fn threads_and_instructions_change_nothing() {
    let steps = |isa: Isa, threads: usize| {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads");
        pool.install(|| large_steps(&Cpu::with_isa(isa))).unwrap_or_else(|e| panic!("{isa}: {e}"))
    };
    let expected = steps(Isa::best(), 1);
    for isa in Isa::available() {
        for threads in [1, 2, 3, 7] {
            let outcome = same_steps(&expected, &steps(isa, threads));
            outcome.in_case(format!("{isa}, {threads} threads")).unwrap_or_else(|e| panic!("{e}"));
        }
    }
}
