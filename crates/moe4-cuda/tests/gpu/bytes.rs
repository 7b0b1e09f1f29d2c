//! Tensors of a few million elements, larger than those of the suite: byte for byte as on the CPU.

use crate::cases::{Case, settings};
use crate::support::{bf16_values, cuda, must, skewed};
use half::bf16;
use moe4::kernels::contract::NO_ROW;
use moe4::kernels::cpu::Cpu;
use moe4::tensor::Groups;
use moe4_conformance::compare::bf16_bits;
use moe4_conformance::data::{self, Kind, Random};
use moe4_conformance::drive::{permute, unpermute};
use moe4_conformance::{InCase, Outcome};

/// Every setting with one kind of data; over the shapes, with several.
fn shape(experts: usize, live: usize, cols: usize) -> Outcome {
    let rows = live + 37;
    let groups = Groups::new(&skewed(experts, live, cols as u64), rows).expect("all rows are some expert's");
    for (k, kind) in Kind::ALL.into_iter().enumerate() {
        let mut x = data::tensor(kind, rows * cols, (experts * cols + k) as u64);
        x[live * cols..].fill(bf16::NAN);
        let settings = settings(cols as u64).into_iter().enumerate();
        for (_, setting) in settings.filter(|(i, _)| (i + experts + cols / 16) % Kind::ALL.len() == k) {
            let case = Case::new(&x, cols, &groups, setting);
            let compared = || {
                let expected = case.run(&Cpu::new())?;
                if kind != Kind::Zeros {
                    case.alive(&expected)?;
                }
                case.same(&expected, &case.run(cuda())?)
            };
            compared().in_case(format!("{experts} experts, {live} rows of {cols}, {kind:?}, {setting:?}"))?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn copies_of_8_experts_4096_columns() {
    must(shape(8, 1000, 4096));
}

#[test]
#[ignore = "needs a GPU"]
fn copies_of_128_experts_2048_columns() {
    must(shape(128, 2000, 2048));
}

#[test]
#[ignore = "needs a GPU"]
fn copies_of_16_experts_2688_columns() {
    must(shape(16, 1500, 2688));
}

#[test]
#[ignore = "needs a GPU"]
fn copies_of_8_experts_48_columns() {
    must(shape(8, 60_000, 48));
}

#[test]
#[ignore = "needs a GPU"]
fn copies_of_128_experts_48_columns() {
    must(shape(128, 40_001, 48));
}

#[test]
#[ignore = "needs a GPU"]
fn rows_there_and_back() {
    for (i, (tokens, cols, top_k)) in
        [(3000, 2048, 2), (1000, 2688, 8), (30_000, 48, 4), (700, 2049, 3)].into_iter().enumerate()
    {
        for kind in [Kind::Normal, Kind::Wide, Kind::Outlier] {
            let compared = || -> Outcome {
                let mut random = Random::new(610 + i as u64);
                let mut x = data::tensor(kind, tokens * cols, 620 + i as u64);
                (x[0], x[cols], x[tokens * cols - 1]) = (bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY);
                // Each token in `top_k` places or none, in any order; unlike a permutation, also twice in one place.
                let slots = tokens * top_k;
                let mut pick = |n: usize| if random.below(9) == 0 { NO_ROW } else { random.below(n) as u32 };
                let source: Vec<u32> = (0..slots).map(|_| pick(tokens)).collect();
                let slot: Vec<u32> = (0..slots).map(|_| pick(slots)).collect();
                let cpu = Cpu::new();
                let y = permute(&cpu, &x, cols, &source)?;
                bf16_bits("permuted", &[slots, cols], &y, &permute(cuda(), &x, cols, &source)?)?;
                let weights = data::normal_f32(slots, 630 + i as u64);
                for weights in [None, Some(&weights[..])] {
                    let expected = unpermute(&cpu, &y, cols, (&slot, top_k), weights)?;
                    let got = unpermute(cuda(), &y, cols, (&slot, top_k), weights)?;
                    bf16_values("unpermuted", &[tokens, cols], &expected, &got)?;
                }
                Ok(())
            };
            must(compared().in_case(format!("{tokens} tokens of {cols}, top {top_k}, {kind:?}")));
        }
    }
}
