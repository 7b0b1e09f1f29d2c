//! The suite that every backend passes.

use crate::support::{cuda, portable};
use moe4::kernels::Backend;
use moe4_cuda::catalog::copy_variants;
use moe4_cuda::{Cuda, catalog};
use std::time::Instant;

fn passes(cuda: &Cuda) {
    println!("{}", cuda.capabilities().path);
    let start = Instant::now();
    // On all cores: as they come, two hundred kernels compile one after the other.
    let arch = cuda.device().facts().arch;
    let mut variants: Vec<_> = catalog().into_iter().filter(|e| e.runs_on(arch)).map(|e| e.variant).collect();
    variants.extend(copy_variants());
    cuda.prepare(&variants).unwrap();
    println!("{:7.1} s  {} kernels are there", start.elapsed().as_secs_f64(), variants.len());
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
