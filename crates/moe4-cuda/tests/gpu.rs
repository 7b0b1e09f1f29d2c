//! The backend on a GPU. These tests are left out where there is none; run them with `cargo test -p moe4-cuda --test gpu --
//! --ignored --test-threads 1`.

use moe4::kernels::Backend;
use moe4_cuda::Cuda;

fn cuda() -> Cuda {
    Cuda::new().unwrap_or_else(|e| panic!("{e}"))
}

#[test]
#[ignore = "needs a GPU"]
fn conformance() {
    let cuda = cuda();
    println!("{}", cuda.capabilities().path);
    let report = moe4_conformance::run(&cuda);
    println!("{report}");
    assert!(report.passed());
}
