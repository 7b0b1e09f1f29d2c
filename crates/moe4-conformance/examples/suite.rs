//! The suite on the CPU backend, with the time at which each check starts: how to run it on a backend of your own.
//!
//! ```text
//! cargo run --release -p moe4-conformance --example suite
//! ```

use moe4::kernels::cpu::Cpu;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let start = Instant::now();
    let report = moe4_conformance::run_watched(&Cpu::new(), |name| {
        println!("{:7.1} s  {name}", start.elapsed().as_secs_f64());
    });
    print!("{report}");
    if report.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
