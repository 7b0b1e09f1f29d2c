//! Operands whose BF16 values are in memory give the bytes of packed ones: pass by pass, and in the whole operator,
//! which uses them where a backend asks for them.

use super::invariants::{Inputs, configurations, not_zero, same, same_trace};
use crate::alter::{Altered, UnpackedOperands};
use crate::compare::{alive, bf16_bits, f32_bits};
use crate::data;
use crate::drive::{
    Bias, Cast, Gemm, GemmAct, GemmActOut, GemmDact, GemmDactOut, Grads, Quantize, Side, Step, Wgrad,
    hadamard_amax, quantize_weights,
};
use crate::report::{Failure, InCase, Outcome};
use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::activation::{Activation, GluLayout};
use moe4::kernels::contract::{self, GradMode, WeightShape};
use moe4::kernels::reference::Reference;
use moe4::numerics::hadamard::SignMask;
use moe4::tensor::Groups;

/// Splits, rows, hidden and ffn: less than a tile, ragged, several tiles, an empty expert at either end.
const SHAPES: [(&[usize], usize, usize, usize); 4] = [
    (&[5, 0, 17, 1], 30, 32, 32),
    (&[0, 100, 33], 133, 144, 96),
    (&[129, 64, 0], 200, 80, 160),
    (&[3], 3, 16, 32),
];

/// Each pair of forms; the first is packed.
fn forms(packed: Side) -> [Side; 2] {
    let unpacked = packed.clone().unpacked();
    [packed, unpacked]
}

/// Both copies of a tensor whose experts differ in size, so that their global scales do too.
fn copies(cols: usize, groups: &Groups, seed: u64) -> Result<[Side; 2], Failure> {
    let mut x = data::normal(groups.rows() * cols, 1.0, seed);
    for e in 0..groups.experts() {
        let rows = groups.range(e);
        let factor = bf16::from_f32((e + 1) as f32 * 0.75);
        x[rows.start * cols..rows.end * cols].iter_mut().for_each(|v| *v *= factor);
    }
    let (before, after) = hadamard_amax(&Reference, &x, cols, groups, SignMask::DEFAULT)?;
    let case = Quantize {
        x: &x,
        cols,
        groups,
        rowwise: Some(Cast::nearest(&before)),
        columnwise: Some((Some(SignMask::DEFAULT), Cast::nearest(&after))),
    };
    let (row, col) = case.run(&Reference)?;
    Ok([Side::Nvfp4(row.expect("asked for")), Side::Nvfp4(col.expect("asked for"))])
}

fn weights(experts: usize, shape: WeightShape, seed: u64) -> Result<[Side; 2], Failure> {
    let w = data::normal(experts * shape.n * shape.k, 0.5, seed);
    Ok(forms(Side::Nvfp4(quantize_weights(&Reference, &w, experts, shape)?)))
}

fn each_shape(check: impl Fn(&Groups, usize, usize, u64) -> Outcome) -> Outcome {
    for (i, (splits, rows, hidden, ffn)) in SHAPES.into_iter().enumerate() {
        let groups = Groups::new(splits, rows).expect("fits");
        check(&groups, hidden, ffn, 900 + 10 * i as u64)
            .in_case(format!("splits {splits:?} of {rows} rows, H={hidden} F={ffn}"))?;
    }
    Ok(())
}

/// Runs every pair of forms but the packed one, and compares each with it.
fn each_form<T>(
    [a, b]: [&[Side; 2]; 2],
    run: impl Fn(&Side, &Side) -> Result<T, Failure>,
    same: impl Fn(&T, &T) -> Outcome,
) -> Outcome {
    let packed = run(&a[0], &b[0])?;
    for (i, j) in [(1, 0), (0, 1), (1, 1)] {
        let name = |i| ["packed", "unpacked"][i];
        same(&packed, &run(&a[i], &b[j])?).in_case(format!("{} with {}", name(i), name(j)))?;
    }
    Ok(())
}

/// `grouped_gemm`, both sides, with a bias.
pub(super) fn gemm<B: Backend>(b: &B) -> Outcome {
    each_shape(|groups, hidden, ffn, seed| {
        let shape = WeightShape { n: ffn, k: hidden };
        let w = weights(groups.experts(), shape, seed)?;
        let prob = data::normal_f32(groups.rows(), seed + 1);
        for side in [contract::Side::Fprop, contract::Side::Dgrad] {
            let (cols, contraction) = side.dims(shape);
            let [row, _] = copies(contraction, groups, seed + 2)?;
            let bias = data::normal_f32(groups.experts() * cols, seed + 3);
            let bias = Some(Bias { bias: &bias, prob: Some(&prob) });
            let run = |a: &Side, w: &Side| {
                let out = Gemm { a, w, shape, side, groups, bias }.run(b)?;
                alive("out", &out)?;
                Ok(out)
            };
            let same = |x: &Vec<bf16>, y: &Vec<bf16>| bf16_bits("out", &[groups.rows(), cols], x, y);
            each_form([&forms(row), &w], run, same).in_case(format!("{side:?}"))?;
        }
        Ok(())
    })
}

fn same_amaxes(name: &str, expected: &(Vec<f32>, Vec<f32>), got: &(Vec<f32>, Vec<f32>)) -> Outcome {
    f32_bits(&format!("{name} amax"), &[expected.0.len()], &expected.0, &got.0)?;
    f32_bits(&format!("{name} amax after RHT"), &[expected.1.len()], &expected.1, &got.1)
}

/// `grouped_gemm_act` and `grouped_gemm_dact` with everything they can write.
pub(super) fn epilogues<B: Backend>(b: &B) -> Outcome {
    each_shape(|groups, hidden, ffn, seed| {
        let activations =
            [(Activation::SWIGLU, GluLayout::Interleaved32), (Activation::SRELU, GluLayout::Halves)];
        for (activation, layout) in activations {
            let (experts, n1) = (groups.experts(), activation.fc1_rows(ffn));
            let prob = data::normal_f32(groups.rows(), seed);
            let b1 = data::normal_f32(experts * n1, seed + 1);
            let w1 = weights(experts, WeightShape { n: n1, k: hidden }, seed + 2)?;
            let w2 = weights(experts, WeightShape { n: hidden, k: ffn }, seed + 3)?;
            let [x, _] = copies(hidden, groups, seed + 4)?;
            let [dy, _] = copies(hidden, groups, seed + 5)?;
            let mask = Some(SignMask::DEFAULT);
            let (b1, prob) = (Some(&b1[..]), &prob[..]);
            let act = |x: &Side, w1: &Side| -> Result<GemmActOut, Failure> {
                let case = GemmAct { x, w1, b1, hidden, ffn, activation, layout, prob, groups, amax: mask };
                let out = case.run(b)?;
                alive("h", &out.h)?;
                Ok(out)
            };
            let same_act = |x: &GemmActOut, y: &GemmActOut| -> Outcome {
                bf16_bits("c", &[groups.rows(), n1], &x.c, &y.c)?;
                bf16_bits("h", &[groups.rows(), ffn], &x.h, &y.h)?;
                same_amaxes("h", x.amax.as_ref().expect("asked for"), y.amax.as_ref().expect("asked for"))
            };
            each_form([&forms(x.clone()), &w1], act, same_act).in_case(format!("{activation}, forward"))?;
            let c = act(&x, &w1[0])?.c;
            let dact = |dy: &Side, w2: &Side| -> Result<GemmDactOut, Failure> {
                let case =
                    GemmDact { dy, w2, hidden, ffn, activation, layout, c: &c, prob, groups, extras: mask };
                let out = case.run(b)?;
                alive("dc", &out.dc)?;
                Ok(out)
            };
            let same_dact = |x: &GemmDactOut, y: &GemmDactOut| -> Outcome {
                bf16_bits("dc", &[groups.rows(), n1], &x.dc, &y.dc)?;
                f32_bits("dprob", &[groups.rows()], &x.dprob, &y.dprob)?;
                let (x, y) = (x.extras.as_ref().expect("asked for"), y.extras.as_ref().expect("asked for"));
                f32_bits("db1", &[experts, n1], &x.db1, &y.db1)?;
                bf16_bits("h again", &[groups.rows(), ffn], &x.h, &y.h)?;
                f32_bits("dh", &[groups.rows(), ffn], &x.dh, &y.dh)?;
                same_amaxes("dc", &x.amax, &y.amax)
            };
            each_form([&forms(dy), &w2], dact, same_dact).in_case(format!("{activation}, backward"))?;
        }
        Ok(())
    })
}

/// `grouped_wgrad`, overwritten and accumulated; the two operands may have different forms.
pub(super) fn wgrad<B: Backend>(b: &B) -> Outcome {
    each_shape(|groups, hidden, ffn, seed| {
        let shape = WeightShape { n: ffn, k: hidden };
        let ([_, dy], [_, x]) = (copies(shape.n, groups, seed)?, copies(shape.k, groups, seed + 1)?);
        let len = groups.experts() * shape.n * shape.k;
        for (mode, before) in [
            (GradMode::Overwrite, Grads::poison(groups.experts(), shape)),
            (GradMode::Accumulate, Grads::F32(data::normal_f32(len, seed + 2))),
        ] {
            let run = |a: &Side, input: &Side| -> Result<Vec<f32>, Failure> {
                let case = Wgrad { a, b: input, shape, groups, mode, before: before.clone() };
                let dw = case.run(b)?.into_f32();
                alive("dw", &dw)?;
                Ok(dw)
            };
            let same =
                |x: &Vec<f32>, y: &Vec<f32>| f32_bits("dw", &[groups.experts(), shape.n, shape.k], x, y);
            each_form([&forms(dy.clone()), &forms(x.clone())], run, same).in_case(format!("{mode:?}"))?;
        }
        Ok(())
    })
}

/// A step on a backend that asks for unpacked operands, and on one that does not.
pub(super) fn operator<B: Backend>(b: &B) -> Outcome {
    for (i, config) in configurations().into_iter().enumerate() {
        for recompute_activation in [false, true] {
            let config = moe4::mlp::GroupedMlpConfig { recompute_activation, ..config.clone() };
            let label =
                format!("{} {} recompute={recompute_activation}", config.activation, config.precision);
            let case = || -> Outcome {
                let inputs = Inputs::new(config, &[21, 0, 1, 32, 16], 77, 4000 + i as u64);
                let run = |wish, traced| {
                    let step = Step { traced, ..inputs.step() };
                    step.run(&Altered { inner: b, alteration: UnpackedOperands(wish) })
                };
                let (packed, unpacked) = (run(false, true)?, run(true, true)?);
                not_zero(&packed)?;
                same(&packed, &unpacked)?;
                same_trace(&packed, &unpacked)?;
                // Nobody wants codes: none are written.
                same(&packed, &run(true, false)?).in_case("without a trace")
            };
            case().in_case(label)?;
        }
    }
    Ok(())
}
