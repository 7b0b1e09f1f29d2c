//! Values and amaxes that training rarely sees, where kernels leave their usual path: byte for byte as on the CPU.

use crate::cases::{Case, Form, Setting, same_copy, settings, stochastic};
use crate::support::{cuda, must};
use half::bf16;
use moe4::kernels::activation::{Activation, GluLayout};
use moe4::kernels::contract::WeightShape;
use moe4::kernels::cpu::Cpu;
use moe4::numerics::bf16 as bf;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::Rounding;
use moe4::tensor::{Groups, ScaleLayout};
use moe4_conformance::compare::bf16_bits;
use moe4_conformance::data::{self, Random};
use moe4_conformance::drive::{GemmDact, Side, quantize_weights_apart, quantize_weights_together};
use moe4_conformance::{Failure, InCase, Outcome};

/// A random sign and mantissa at `exponent`, which may be subnormal in BF16; 0 below them.
fn at(random: &mut Random, exponent: i32) -> bf16 {
    let mantissa = 1.0 + random.below(128) as f64 / 128.0;
    let sign = if random.below(2) == 0 { -1.0 } else { 1.0 };
    bf::from_f32((sign * mantissa * f64::from(exponent).exp2()) as f32)
}

/// Expert `e` has magnitudes around 2^k for the e-th exponent; the 16 x 16 blocks of its tensor fall from there in
/// powers of two down to scales that underflow.
fn ladder(cols: usize) -> (Vec<bf16>, Groups) {
    let exponents = (-140..=127).step_by(3);
    let splits: Vec<usize> = exponents.clone().enumerate().map(|(e, _)| 16 + e * 7 % 33).collect();
    let rows = splits.iter().sum();
    let mut random = Random::new(700);
    let mut x = Vec::with_capacity(rows * cols);
    for (exponent, &rows) in exponents.zip(&splits) {
        for i in 0..rows * cols {
            let (row, col) = (i / cols, i % cols);
            let below = (row / 16 + col / 16) % 24 + random.below(3);
            x.push(at(&mut random, exponent - below as i32));
        }
    }
    (x, Groups::new(&splits, rows).expect("all rows are some expert's"))
}

/// The default transform and none, to nearest and stochastically, values beside codes and alone.
fn few_settings() -> Vec<Setting> {
    let forms = |packed| {
        [[Rounding::Nearest; 2], stochastic(7)].map(|rounding| {
            let layout = ScaleLayout::Plain;
            rounding.map(|rounding| Some(Form { rounding, packed, layout, unpacked: true }))
        })
    };
    let forms = [forms(true), forms(false)].concat();
    let masks = [Some(SignMask::DEFAULT), None].into_iter();
    let with = |mask| forms.iter().map(move |&[rowwise, columnwise]| Setting { mask, rowwise, columnwise });
    masks.flat_map(with).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn every_power_of_two() {
    let cols = 384;
    let (x, groups) = ladder(cols);
    for setting in settings(71) {
        must(Case::new(&x, cols, &groups, setting).as_on_the_cpu(cuda()).in_case(format!("{setting:?}")));
    }
}

/// Too small, so that scales and elements saturate; too large, so that scales are subnormal or underflow.
#[test]
#[ignore = "needs a GPU"]
fn amaxes_far_from_the_data() {
    let cols = 384;
    let (x, groups) = ladder(cols);
    let factors = [-200, -60, -30, -10, -4, -2, -1, 1, 2, 4, 8, 10, 12, 13, 14, 15, 16, 17, 18, 19, 40, 200];
    for setting in few_settings() {
        let compared = |what: String, given: &(dyn Fn(f32) -> f32 + Sync)| {
            let case = Case { given, ..Case::new(&x, cols, &groups, setting) };
            must(case.as_on_the_cpu(cuda()).in_case(format!("{what}, {setting:?}")));
        };
        for k in factors {
            let times = |amax: f32| ((f64::from(amax) * f64::from(k).exp2()) as f32).min(f32::MAX);
            compared(format!("amaxes times 2^{k}"), &times);
        }
        // A factor that is no power of two, so that quotients round.
        compared("amaxes times 0.7".into(), &|amax| amax * 0.7);
        for amax in [0.0, f32::from_bits(1), 1e-40, f32::MIN_POSITIVE, 1.0, 2688.0, f32::MAX] {
            compared(format!("all amaxes {amax:e}"), &|_| amax);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn subnormals() {
    let (cols, splits) = (272, [100, 16, 1, 0, 83, 200]);
    let groups = Groups::new(&splits, 400).expect("fits");
    let mut random = Random::new(710);
    // Expert by expert fewer bits, down to the smallest number of all.
    let expert = |row: usize| (0..splits.len()).find(|&e| groups.range(e).contains(&row)).unwrap_or(0);
    let x: Vec<bf16> = (0..400 * cols)
        .map(|i| {
            let magnitude = random.below(0x80 >> expert(i / cols)).max(usize::from(i % 3 == 0)) as u16;
            bf16::from_bits(magnitude | (random.below(2) as u16) << 15)
        })
        .collect();
    for setting in settings(72) {
        must(Case::new(&x, cols, &groups, setting).as_on_the_cpu(cuda()).in_case(format!("{setting:?}")));
    }
}

/// Sums of sixteen values near the largest number overflow, in the first or the last of the transform's steps, or do
/// not.
#[test]
#[ignore = "needs a GPU"]
fn transforms_that_overflow() {
    let cols = 272;
    let groups = Groups::new(&[100, 35, 1, 0, 164], 310).expect("fits");
    for exponent in [127, 126, 125, 124, 123] {
        let mut random = Random::new(720 + exponent as u64);
        let mut x: Vec<bf16> = (0..310 * cols)
            .map(|_| {
                let below = if random.below(4) == 0 { random.below(12) as i32 } else { 0 };
                at(&mut random, exponent - below)
            })
            .collect();
        // Columns whose signs are those of the default mask, so that one sum takes all magnitudes.
        for (i, v) in x.iter_mut().enumerate().filter(|(i, _)| i % cols % 5 == 0) {
            let sign = SignMask::DEFAULT.sign(i / cols % 16);
            *v = bf16::from_bits(v.to_bits() & 0x7FFF | u16::from(sign < 0.0) << 15);
        }
        for setting in few_settings() {
            let case = Case::new(&x, cols, &groups, setting);
            must(case.as_on_the_cpu(cuda()).in_case(format!("around 2^{exponent}, {setting:?}")));
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn infinities_and_nan_sprinkled() {
    let (rows, cols) = (1000, 272);
    let groups = Groups::new(&[300, 0, 17, 1, 501, 100], rows).expect("fits");
    let mut x = data::normal(rows * cols, 1.0, 730);
    let mut random = Random::new(731);
    // Payloads of NaN, quiet and signalling; the largest and the smallest numbers; -0.
    let rare = [0x7FC0, 0xFFC0, 0x7F81, 0xFFFF, 0x7F80, 0xFF80, 0x7F7F, 0xFF7F, 0x0001, 0x8001, 0x8000];
    for _ in 0..rows * cols / 97 {
        x[random.below(rows * cols)] = bf16::from_bits(rare[random.below(rare.len())]);
    }
    // An expert without a finite value.
    x[317 * cols..318 * cols].fill(bf16::NAN);
    for setting in settings(73) {
        must(Case::new(&x, cols, &groups, setting).as_on_the_cpu(cuda()).in_case(format!("{setting:?}")));
    }
}

/// Each weight around a power of two of its own, then with rare values sprinkled in.
#[test]
#[ignore = "needs a GPU"]
fn weights_of_every_power_of_two() {
    let shape = WeightShape { n: 48, k: 272 };
    let mut random = Random::new(740);
    let mut w: Vec<Vec<bf16>> = (-140..=127)
        .step_by(3)
        .map(|exponent| {
            let below = |i: usize| (i / shape.k / 16 * 5 + i % shape.k / 16) as i32 % 24;
            (0..shape.n * shape.k).map(|i| at(&mut random, exponent - below(i))).collect()
        })
        .collect();
    let compared = |w: &[Vec<bf16>]| -> Outcome {
        let w: Vec<&[bf16]> = w.iter().map(|w| &w[..]).collect();
        let expected = quantize_weights_apart(&Cpu::new(), &w, shape, true)?;
        let apart = quantize_weights_apart(cuda(), &w, shape, true)?;
        let together = quantize_weights_together(cuda(), &w.concat(), w.len(), shape, true)?;
        [("weights", apart), ("weights in one tensor", together)].iter().try_for_each(|(name, got)| {
            same_copy(name, [w.len() * shape.n, shape.k], ScaleLayout::Plain, &expected, got)
        })
    };
    must(compared(&w));
    for (e, w) in w.iter_mut().enumerate() {
        for _ in 0..e % 5 {
            let rare = [bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY, bf16::MAX, bf16::NEG_ZERO];
            w[random.below(shape.n * shape.k)] = rare[e % rare.len()];
        }
    }
    must(compared(&w));
}

/// A gate far out sends its warp the long way of the exponential, which has the bits of the short one beside it.
#[test]
#[ignore = "needs a GPU"]
fn far_gates_change_no_neighbour() {
    let (rows, hidden, ffn) = (150, 144, 208);
    let (activation, layout, groups) = (Activation::SWIGLU, GluLayout::Halves, Groups::single(rows));
    let n1 = activation.fc1_rows(ffn);
    let is_far = |col: usize| col < ffn && col.is_multiple_of(32);
    let checked = || -> Outcome {
        let dy = Side::Bf16(data::normal(rows * hidden, 1.0, 940));
        let w2 = Side::Bf16(data::normal(hidden * ffn, 0.2, 941));
        let prob = data::probabilities(rows, 942);
        let near = data::normal(rows * n1, 15.0, 943);
        let near: Vec<_> = near.iter().map(|v| bf16::from_f32(v.to_f32().clamp(-86.5, 86.5))).collect();
        // dc and h of the features whose gate is the same in both runs.
        let run = |c: &[bf16]| -> Result<(Vec<bf16>, Vec<bf16>), Failure> {
            let (dy, w2, prob, groups, extras) = (&dy, &w2, &prob, &groups, Some(SignMask::DEFAULT));
            let out =
                GemmDact { dy, w2, hidden, ffn, activation, layout, c, prob, groups, extras }.run(cuda())?;
            let extras = out.extras.ok_or_else(|| Failure::new("everything was asked for"))?;
            let others = |x: &[bf16], cols: usize| {
                let same = x.iter().enumerate().filter(|(i, _)| !is_far(i % cols % ffn));
                same.map(|(_, v)| *v).collect::<Vec<_>>()
            };
            Ok((others(&out.dc, n1), others(&extras.h, ffn)))
        };
        let far =
            near.iter().enumerate().map(|(i, v)| if is_far(i % n1) { bf16::from_f32(100.0) } else { *v });
        let (short, long) = (run(&near)?, run(&far.collect::<Vec<_>>())?);
        bf16_bits("dc", &[short.0.len()], &short.0, &long.0)?;
        bf16_bits("h", &[short.1.len()], &short.1, &long.1)
    };
    must(checked());
}
