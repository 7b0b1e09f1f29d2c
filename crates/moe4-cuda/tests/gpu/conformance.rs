//! The suite that every backend passes.

use crate::support::{cuda, every_epilogue, portable};
use moe4::kernels::Backend;
use moe4_cuda::Cuda;
use moe4_cuda::catalog::{copy_variants, operator_variants};
use std::time::Instant;

fn passes(cuda: &Cuda) {
    println!("{}", cuda.capabilities().path);
    let start = Instant::now();
    // On all cores: as they come, hundreds of kernels compile one after the other.
    let arch = cuda.device().facts().arch;
    let of_choice = |(activation, layout)| operator_variants(&activation, layout, cuda.products(), arch);
    let variants: Vec<_> = every_epilogue().flat_map(of_choice).chain(copy_variants()).collect();
    cuda.prepare(&variants).unwrap();
    println!("{:7.1} s  {} kernels are there", start.elapsed().as_secs_f64(), cuda.loaded().len());
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
