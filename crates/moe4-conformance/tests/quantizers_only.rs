//! A backend without products runs every check of its quantizers, says which others it skips, and refuses the operator.

use half::bf16;
use moe4::kernels::cpu::Cpu;
use moe4::kernels::reference::Reference;
use moe4::kernels::{Backend, Error};
use moe4::mlp::{GroupedMlpConfig, Needs, RandomSeed};
use moe4::tensor::Groups;
use moe4_conformance::alter::{Altered, QuantizersOnly};
use moe4_conformance::checks::{Need, needing};
use moe4_conformance::drive::Step;
use moe4_conformance::{run, run_host_memory, run_only};

#[test]
fn checks_of_quantizers_use_no_product() {
    let reference = Altered { inner: &Reference, alteration: QuantizersOnly };
    let report = run(&reference);
    assert!(report.passed(), "{report}");
    assert_eq!(report.skipped(), needing(Need::Products));
    assert!(report.to_string().contains("  skip  golden/gemm: backend has no products\n"), "{report}");
    let ran = report.lines.len() - report.skipped().len();
    assert!(ran >= 40, "{report}");
    assert!(report.to_string().contains(&format!("0 of {ran} checks failed, ")), "{report}");
}

#[test]
fn nothing_but_skipped_checks_is_no_pass() {
    let cpu = Altered { inner: &Cpu::new(), alteration: QuantizersOnly };
    for report in [run_only(&cpu, &["property/products"]), run_host_memory(&cpu)] {
        assert!(report.failed().is_empty() && !report.passed(), "{report}");
    }
}

#[test]
fn the_operator_is_refused_before_its_first_pass() {
    let cpu = Altered { inner: &Cpu::new(), alteration: QuantizersOnly };
    assert!(!cpu.capabilities().products);
    let config = GroupedMlpConfig::new(1, 16, 16);
    let (x, w1, w2) = (vec![bf16::ONE; 16], vec![bf16::ONE; 32 * 16], vec![bf16::ONE; 16 * 16]);
    let step = Step {
        config,
        groups: &Groups::single(1),
        x: &x,
        w1: &w1,
        w2: &w2,
        biases: None,
        prob: &[1.0],
        dy: &x,
        needs: Needs::ALL,
        random: RandomSeed { seed: 1, call: 0 },
        weights_per_expert: false,
        accumulate_onto: None,
        delayed: false,
        traced: true,
    };
    let refused = step.run(&cpu).unwrap_err();
    let Error::Unsupported(refused) = refused else { panic!("{refused}") };
    assert_eq!(
        refused.to_string(),
        "backend 'cpu' does not support matrix products (the operator); \
         use a backend whose capabilities list products, such as cpu"
    );
}
