//! Faults that users met elsewhere in grouped products: entries 16 to 21, and what 2 and 10 mean for products.

use super::defects_quantize::{rowwise, with_a_tiny_block};
use super::invariants::{Inputs, not_zero, same};
use crate::compare::{alive, all_zero, bf16_bits, ensure, equal, f32_bits};
use crate::data;
use crate::drive::{
    BiasGrad, Cast, Gemm, Grads, Quantize, Side, Wgrad, amax, hadamard_amax, quantize_weights,
};
use crate::judge;
use crate::report::{Failure, InCase, Outcome};
use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::contract::{self, GradMode, WeightShape};
use moe4::kernels::reference::Reference;
use moe4::mlp::{GroupedMlpConfig, Precision};
use moe4::numerics::bf16 as bf;
use moe4::numerics::hadamard::SignMask;
use moe4::tensor::Groups;

/// 2: a product with a block whose scale underflowed is no NaN.
pub(super) fn scale_underflow<B: Backend>(b: &B) -> Outcome {
    let (rows, cols) = (16, 32);
    let (shape, side, groups) = (WeightShape { n: 16, k: cols }, contract::Side::Fprop, Groups::single(rows));
    let a = Side::Nvfp4(rowwise(b, &with_a_tiny_block(), cols)?);
    let w = Side::Nvfp4(quantize_weights(b, &data::normal(16 * cols, 1.0, 3), 1, shape)?);
    let product = Gemm { a: &a, w: &w, shape, side, groups: &groups, bias: None };
    let out = product.run(b)?;
    judge::gemm(&product, &out)?;
    alive("out", &out)?;
    ensure(out.iter().all(|v| v.is_finite()), || "a product with a tiny block is not finite".into())
}

/// 10: a damaged element shows in the output: its row is NaN, the others are what they were.
pub(super) fn non_finite_blocks<B: Backend>(b: &B) -> Outcome {
    let (rows, cols, groups) = (32, 48, Groups::single(32));
    let (shape, side) = (WeightShape { n: 16, k: cols }, contract::Side::Fprop);
    let w = Side::Nvfp4(quantize_weights(b, &data::normal(16 * cols, 1.0, 12), 1, shape)?);
    let mut x = data::normal(rows * cols, 1.0, 10);
    for damage in [bf16::INFINITY, bf16::NEG_INFINITY, bf16::NAN] {
        let mut product = |v: bf16| -> Result<Vec<bf16>, Failure> {
            x[20 * cols + 37] = v;
            let a = Side::Nvfp4(rowwise(b, &x, cols)?);
            Ok(Gemm { a: &a, w: &w, shape, side, groups: &groups, bias: None }.run(b)?)
        };
        let (clean, out) = (product(bf16::ZERO)?, product(damage)?);
        let row = 20 * 16..21 * 16;
        ensure(clean[row.clone()].iter().all(|v| v.is_finite()), || "a clean row is not finite".into())?;
        ensure(out[row.clone()].iter().all(|v| v.is_nan()), || {
            format!("{damage} in the input: its row is not all NaN")
        })?;
        bf16_bits("rows before", &[20, 16], &clean[..row.start], &out[..row.start])?;
        bf16_bits("rows after", &[11, 16], &clean[row.end..], &out[row.end..])?;
    }
    Ok(())
}

/// Both operands of a wgrad, quantized columnwise by the backend's own passes.
fn columnwise<B: Backend>(b: &B, x: &[bf16], cols: usize, groups: &Groups) -> Result<Side, Failure> {
    let (_, after) = hadamard_amax(b, x, cols, groups, SignMask::DEFAULT)?;
    let columnwise = Some((Some(SignMask::DEFAULT), Cast::nearest(&after)));
    let (_, col) = Quantize { x, cols, groups, rowwise: None, columnwise }.run(b)?;
    Ok(Side::Nvfp4(col.expect("asked for")))
}

/// 16: the splits of a real report; experts without tokens get exactly zero into dirty memory.
pub(super) fn reported_splits<B: Backend>(b: &B) -> Outcome {
    let splits = [162, 0, 2577, 446, 0, 83];
    let rows: usize = splits.iter().sum();
    let (shape, groups) = (WeightShape { n: 16, k: 32 }, Groups::new(&splits, rows).expect("fits"));
    let (dy, x) = (data::normal(rows * 16, 1.0, 160), data::normal(rows * 32, 1.0, 161));
    let plain = [Side::Bf16(dy.clone()), Side::Bf16(x.clone())];
    let packed = [columnwise(b, &dy, 16, &groups)?, columnwise(b, &x, 32, &groups)?];
    for [a, input] in [plain, packed] {
        let (mode, before) = (GradMode::Overwrite, Grads::poison(splits.len(), shape));
        let case = Wgrad { a: &a, b: &input, shape, groups: &groups, mode, before };
        let got = case.run(b)?;
        judge::wgrad(&case, &got)?;
        let dw = got.into_f32();
        for e in [1, 4] {
            all_zero(&format!("dw of expert {e} without tokens"), e * 512, &dw[e * 512..(e + 1) * 512])?;
        }
    }
    Ok(())
}

/// 17: accumulation into FP32 and BF16 buffers; an expert without tokens leaves even a NaN alone.
pub(super) fn accumulation<B: Backend>(b: &B) -> Outcome {
    let (shape, groups) = (WeightShape { n: 32, k: 16 }, Groups::new(&[20, 0, 12], 40).expect("fits"));
    let slab = shape.n * shape.k;
    let (mut dy, mut x) = (data::normal(40 * 32, 1.0, 170), data::normal(40 * 16, 1.0, 171));
    dy[32 * 32..].fill(bf16::NAN);
    x[32 * 16..].fill(bf16::NAN);
    let plain = [Side::Bf16(dy.clone()), Side::Bf16(x.clone())];
    let packed = [columnwise(b, &dy, 32, &groups)?, columnwise(b, &x, 16, &groups)?];
    for [a, input] in [plain, packed] {
        let run = |mode, before: Grads| -> Result<Grads, Failure> {
            let case = Wgrad { a: &a, b: &input, shape, groups: &groups, mode, before };
            let got = case.run(b)?;
            judge::wgrad(&case, &got)?;
            Ok(got)
        };
        let filled = data::normal_f32(3 * slab, 172);
        let rounded: Vec<bf16> = filled.iter().map(|&v| bf::from_f32(v)).collect();
        let narrow_poison = Grads::Bf16(vec![bf16::NAN; 3 * slab]);
        for (wide, narrow) in [
            (run(GradMode::Overwrite, Grads::poison(3, shape))?, run(GradMode::Overwrite, narrow_poison)?),
            (
                run(GradMode::Accumulate, Grads::F32(filled.clone()))?,
                run(GradMode::Accumulate, Grads::Bf16(rounded.clone()))?,
            ),
        ] {
            ensure(matches!((wide, narrow), (Grads::F32(_), Grads::Bf16(_))), || {
                "buffer types changed".into()
            })?;
        }
        // Twice the same batch is twice the gradient, to the two roundings of the sum.
        let once = run(GradMode::Overwrite, Grads::poison(3, shape))?.into_f32();
        let twice = run(GradMode::Accumulate, Grads::F32(once.clone()))?.into_f32();
        let doubled: Vec<f32> = once.iter().map(|v| v + v).collect();
        f32_bits("dw accumulated onto itself", &[3, shape.n, shape.k], &doubled, &twice)?;
        let mut before = filled.clone();
        let odd = f32::from_bits(0x7FC1_2345);
        before[slab..2 * slab].fill(odd);
        let case = Wgrad {
            a: &a,
            b: &input,
            shape,
            groups: &groups,
            mode: GradMode::Accumulate,
            before: Grads::F32(before),
        };
        let dw = case.run(b)?.into_f32();
        f32_bits("dw of an expert without tokens", &[slab], &vec![odd; slab], &dw[slab..2 * slab])?;
    }
    Ok(())
}

/// 18: no tokens at all, tokens of nobody only, and an empty last expert.
pub(super) fn all_empty<B: Backend>(b: &B) -> Outcome {
    for precision in [Precision::Nvfp4, Precision::Bf16] {
        for (splits, rows) in [([0, 0, 0], 0), ([0, 0, 0], 19), ([0, 17, 0], 17), ([0, 0, 16], 20)] {
            let config = GroupedMlpConfig { precision, bias: true, ..GroupedMlpConfig::new(3, 32, 16) };
            let inputs = Inputs::new(config, &splits, rows, 180);
            let case = || -> Outcome {
                let out = inputs.step().run(b)?;
                equal("elements of y", &[1], &[rows * 32], &[out.y.len()])?;
                let live = inputs.groups.live_rows();
                if live > 0 {
                    not_zero(&out)?;
                }
                all_zero("y", live * 32, &out.y[live * 32..])?;
                for (name, dw) in [("dw1", &out.dw1), ("dw2", &out.dw2), ("db1", &out.db1), ("db2", &out.db2)]
                {
                    let dw = dw.as_ref().ok_or_else(|| Failure::new(format!("{name} was asked for")))?;
                    for e in (0..3).filter(|&e| splits[e] == 0) {
                        let slab = dw.len() / 3;
                        all_zero(&format!("{name} of expert {e}"), e * slab, &dw[e * slab..(e + 1) * slab])?;
                    }
                    ensure(dw.iter().all(|v| v.is_finite()), || format!("{name} is not finite"))?;
                }
                Ok(())
            };
            case().in_case(format!("{precision}, splits {splits:?} of {rows} rows"))?;
        }
    }
    Ok(())
}

/// 19: expert boundaries inside a 128-row tile, whole experts across several.
pub(super) fn boundaries<B: Backend>(b: &B) -> Outcome {
    for precision in [Precision::Nvfp4, Precision::Bf16] {
        let config = GroupedMlpConfig { precision, ..GroupedMlpConfig::new(4, 32, 16) };
        let splits = [100, 60, 1, 150];
        let inputs = Inputs::new(config, &splits, 320, 190);
        let all = inputs.step().run(b)?;
        not_zero(&all)?;
        for e in 0..4 {
            let alone = inputs.expert_alone(e).step().run(b)?;
            let rows = inputs.groups.range(e);
            let label = format!("{precision}, y of expert {e}, alone against grouped");
            bf16_bits(&label, &[splits[e], 32], &alone.y, &all.y[rows.start * 32..rows.end * 32])?;
            let dw = |x: &Option<Vec<f32>>| x.clone().ok_or_else(|| Failure::new("dw1 was asked for"));
            let (one, grouped) = (dw(&alone.dw1)?, dw(&all.dw1)?);
            f32_bits(&label.replace("y of", "dw1 of"), &[32, 32], &one, &grouped[e * 1024..(e + 1) * 1024])?;
        }
    }
    Ok(())
}

/// 20: one tensor of all weights, or one tensor an expert.
pub(super) fn weights_apart<B: Backend>(b: &B) -> Outcome {
    for precision in [Precision::Nvfp4, Precision::Bf16] {
        let config = GroupedMlpConfig { precision, bias: true, ..GroupedMlpConfig::new(3, 32, 48) };
        let inputs = Inputs::new(config, &[10, 0, 22], 40, 200);
        let together = inputs.step().run(b)?;
        not_zero(&together)?;
        let mut step = inputs.step();
        step.weights_per_expert = true;
        same(&together, &step.run(b)?).in_case(precision)?;
    }
    Ok(())
}

/// 21: two batches of different sizes, one after the other.
pub(super) fn growing_batches<B: Backend>(b: &B) -> Outcome {
    let shape = WeightShape { n: 16, k: 32 };
    let w = Side::Nvfp4(quantize_weights(&Reference, &data::normal(2 * 16 * 32, 1.0, 210), 2, shape)?);
    for rows in [1536, 3072, 48] {
        let groups = Groups::new(&[rows / 3, rows - rows / 3], rows).expect("fits");
        let x = data::normal(rows * 32, 1.0, 211);
        let cast = Some(Cast::nearest(&amax(&Reference, &x, 32, &groups)?));
        let case = Quantize { x: &x, cols: 32, groups: &groups, rowwise: cast, columnwise: None };
        let (row, _) = case.run(&Reference)?;
        let a = Side::Nvfp4(row.expect("asked for"));
        let case = Gemm { a: &a, w: &w, shape, side: contract::Side::Fprop, groups: &groups, bias: None };
        judge::gemm(&case, &case.run(b)?).in_case(format!("{rows} rows"))?;
    }
    Ok(())
}

/// The bias of FC2: `db2` sums over each expert's tokens, `dprob` is added to.
pub(super) fn bias_grad<B: Backend>(b: &B) -> Outcome {
    let (hidden, groups) = (48, Groups::new(&[19, 0, 5], 30).expect("fits"));
    let live = groups.live_rows();
    let mut dy = data::normal(30 * hidden, 1.0, 220);
    dy[live * hidden..].fill(bf16::NAN);
    let (b2, prob) = (data::normal_f32(3 * hidden, 221), data::probabilities(30, 222));
    let mut dprob = data::normal_f32(30, 223);
    dprob[live..].fill(0.0);
    let case = BiasGrad { dy: &dy, hidden, b2: &b2, prob: &prob, groups: &groups, dprob: &dprob };
    let (got, db2) = case.run(b)?;
    let at = |t: usize, j: usize| bf::to_f32(dy[t * hidden + j]) as f64;
    let mut expected = vec![];
    for e in 0..3 {
        for j in 0..hidden {
            let sum: crate::exact::Sum = groups.range(e).map(|t| prob[t] as f64 * at(t, j)).collect();
            expected.push(sum.f32());
        }
    }
    crate::compare::within("db2", &[3, hidden], &expected, &crate::compare::widen_f32(&db2))?;
    let mut expected = vec![crate::compare::Expected::exactly(0.0); 30];
    for e in 0..3 {
        for t in groups.range(e) {
            let sum: crate::exact::Sum = (0..hidden).map(|j| b2[e * hidden + j] as f64 * at(t, j)).collect();
            expected[t] = sum.plus(dprob[t] as f64).f32();
        }
    }
    crate::compare::within("dprob", &[30], &expected, &crate::compare::widen_f32(&got))
}
