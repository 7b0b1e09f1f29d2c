//! The suite that every backend passes.

use crate::support::{cuda, portable};
use moe4::kernels::Backend;
use moe4::kernels::activation::{Activation, GluLayout};
use moe4_cuda::Cuda;
use moe4_cuda::catalog::{copy_variants, operator_variants};
use std::time::Instant;

fn passes(cuda: &Cuda) {
    println!("{}", cuda.capabilities().path);
    let start = Instant::now();
    // On all cores: as they come, hundreds of kernels compile one after the other.
    let mut variants = copy_variants();
    for activation in Activation::all() {
        for layout in GluLayout::ALL.into_iter().filter(|layout| layout.check(&activation, 32).is_ok()) {
            let arch = cuda.device().facts().arch;
            variants.extend(operator_variants(&activation, layout, cuda.products(), arch));
        }
    }
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
