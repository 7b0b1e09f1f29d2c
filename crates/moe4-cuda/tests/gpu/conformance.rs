//! The suite that every backend passes.

use crate::support::{cuda, portable};
use moe4::kernels::Backend;
use moe4_cuda::Cuda;
use std::time::Instant;

fn passes(cuda: &Cuda) {
    println!("{}", cuda.capabilities().path);
    let start = Instant::now();
    let report = moe4_conformance::run_watched(cuda, |name| {
        println!("{:7.1} s  {name}", start.elapsed().as_secs_f64());
    });
    println!("{report}");
    assert!(report.passed());
    assert_eq!(report.skipped(), Vec::<&str>::new());
}

#[test]
#[ignore = "needs a GPU"]
fn conformance() {
    passes(cuda());
}

#[test]
#[ignore = "needs a GPU"]
fn conformance_of_portable_products() {
    passes(portable());
}
