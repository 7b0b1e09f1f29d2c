//! The suite that every backend passes.

use crate::support::cuda;
use moe4::kernels::Backend;
use moe4_conformance::checks::{Need, needing};

#[test]
#[ignore = "needs a GPU"]
fn conformance() {
    println!("{}", cuda().capabilities().path);
    let report = moe4_conformance::run(cuda());
    println!("{report}");
    assert!(report.passed());
    let without_products = if cuda().capabilities().products { vec![] } else { needing(Need::Products) };
    assert_eq!(report.skipped(), without_products);
}
