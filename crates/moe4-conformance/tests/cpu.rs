//! The CPU backend passes the suite on every instruction set of this machine. The number of threads changes no bit of any
//! result or intermediate; nor does the choice among vector instructions. Matrix tiles add up in an order of their own.

use half::bf16;
use moe4::kernels::contract::{GroupedGemm, Operand, Side, WeightOperand, WeightShape};
use moe4::kernels::cpu::{Cpu, Isa};
use moe4::kernels::reference::Reference;
use moe4::kernels::{Backend, Host};
use moe4::tensor::Groups;
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
    let vectors =
        Isa::available().into_iter().find(|isa| !isa.has_tiles()).expect("portable code is always there");
    let by_vectors = steps(vectors, 1);
    for isa in Isa::available() {
        let expected = if isa.has_tiles() { steps(isa, 1) } else { by_vectors.clone() };
        for threads in [1, 2, 3, 7] {
            let outcome = same_steps(&expected, &steps(isa, threads));
            outcome.in_case(format!("{isa}, {threads} threads")).unwrap_or_else(|e| panic!("{e}"));
        }
    }
}

/// Longer than what is packed at a time. Small whole numbers: every sum is exact, in any order.
#[test]
fn a_long_contraction_is_the_reference_to_the_bit() {
    let (groups, shape) = (Groups::single(115), WeightShape { n: 48, k: 4112 });
    let whole = |len: usize, factor: usize| -> Vec<bf16> {
        (0..len).map(|i| bf16::from_f32((i * factor % 7) as f32 - 3.0)).collect()
    };
    let (a, w) = (whole(groups.rows() * shape.k, 5), whole(shape.n * shape.k, 3));
    fn product<B: Backend<Memory = Host>>(
        b: &B,
        g: &Groups,
        s: WeightShape,
        a: &[bf16],
        w: &[bf16],
    ) -> Vec<bf16> {
        let mut out = vec![bf16::ZERO; g.rows() * s.n];
        let (a, w) = (Operand::Bf16(a), WeightOperand::Bf16(vec![w]));
        let pass =
            GroupedGemm { a, w, shape: s, side: Side::Fprop, groups: g, bias: None, out: &mut out[..] };
        b.grouped_gemm(pass).expect("a product");
        out
    }
    let expected = product(&Reference, &groups, shape, &a, &w);
    assert!(expected.iter().any(|v| *v != bf16::ZERO));
    for isa in Isa::available() {
        assert!(product(&Cpu::with_isa(isa), &groups, shape, &a, &w) == expected, "{isa}");
    }
}
