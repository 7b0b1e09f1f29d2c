//! Each pass of the operator alone, fed with the stored inputs of its stage.

use crate::compare::{ensure, f32_bits};
use crate::drive::{
    Cast, Gemm, GemmAct, GemmDact, Grads, Packed, Quantize, Side, Wgrad, amax, hadamard_amax,
    quantize_weights,
};
use crate::golden::{self, MlpGolden};
use crate::mlp_rule::exact_copy;
use crate::report::{InCase, Outcome};
use moe4::kernels::Backend;
use moe4::kernels::contract::{self, GradMode, WeightShape};
use moe4::numerics::hadamard::SignMask;

fn each(check: impl Fn(&MlpGolden) -> Outcome) -> Outcome {
    golden::mlp().iter().try_for_each(|golden| check(golden).in_case(&golden.file.name))
}

/// Amaxes, scales and codes of the stored `x`, `h`, `dy` and `dc`, both directions.
pub(super) fn quantize<B: Backend>(b: &B) -> Outcome {
    each(|golden| {
        for name in ["x", "h", "dy", "dc"] {
            let (x, cols) = (golden.file.bf16(name), golden.cols(name));
            let (before, after) = hadamard_amax(b, &x, cols, &golden.groups, SignMask::DEFAULT)?;
            f32_bits(
                &format!("{name}_amax"),
                &[before.len()],
                &golden.file.f32(&format!("{name}_amax")),
                &before,
            )?;
            let plain = amax(b, &x, cols, &golden.groups)?;
            f32_bits(&format!("{name}_amax by its own pass"), &[before.len()], &before, &plain)?;
            let case = Quantize {
                x: &x,
                cols,
                groups: &golden.groups,
                rowwise: Some(Cast::nearest(&before)),
                columnwise: Some((Some(SignMask::DEFAULT), Cast::nearest(&after))),
            };
            let (row, col) = case.run(b)?;
            exact_copy(name, cols, &golden.packed(name, ""), &row.expect("asked for"))?;
            let (width, stored) = (golden.groups.padded_rows(), golden.packed(name, "_col"));
            exact_copy(&format!("{name} columnwise"), width, &stored, &col.expect("asked for"))?;
        }
        let bound = golden.file.f32("dc_bound4");
        let post = golden.file.f32("dc_amax_col");
        ensure(post.iter().zip(&bound).all(|(post, bound)| post <= bound), || "dc_bound4 is no bound".into())
    })
}

/// Codes, scales and amaxes of the stored weights.
pub(super) fn weights<B: Backend>(b: &B) -> Outcome {
    each(|golden| {
        for (name, shape) in weight_shapes(golden) {
            let w = golden.file.bf16(name);
            let got = quantize_weights(b, &w, golden.groups.experts(), shape)?;
            exact_copy(name, shape.k, &golden.packed(name, ""), &got)?;
        }
        Ok(())
    })
}

fn weight_shapes(golden: &MlpGolden) -> [(&'static str, WeightShape); 2] {
    let w1 = WeightShape { n: golden.n1(), k: golden.hidden };
    [("w1", w1), ("w2", WeightShape { n: golden.hidden, k: golden.ffn })]
}

fn stored(golden: &MlpGolden, name: &str, suffix: &str) -> Side {
    Side::Nvfp4(golden.packed(name, suffix))
}

/// `c`, `h` and `h`'s amaxes from the stored `x` and `w1`.
pub(super) fn gemm_act<B: Backend>(b: &B) -> Outcome {
    each(|golden| {
        let prob = golden.file.f32("prob");
        let case = GemmAct {
            x: &stored(golden, "x", ""),
            w1: &stored(golden, "w1", ""),
            b1: None,
            hidden: golden.hidden,
            ffn: golden.ffn,
            activation: golden.activation,
            layout: golden.layout,
            prob: &prob,
            groups: &golden.groups,
            amax: Some(SignMask::DEFAULT),
        };
        let got = case.run(b)?;
        golden.by_token("c").stage_bf16(&golden.file.bf16("c"), &got.c)?;
        golden.by_token("h").stage_bf16(&golden.file.bf16("h"), &got.h)?;
        let (before, after) = got.amax.expect("asked for");
        f32_bits("h_amax of the epilogue", &[before.len()], &golden.file.f32("h_amax"), &before)?;
        f32_bits("h_amax_col of the epilogue", &[after.len()], &golden.file.f32("h_amax_col"), &after)
    })
}

/// `y` from the stored `h` and `w2`, `dx` from the stored `dc` and `w1`.
pub(super) fn gemm<B: Backend>(b: &B) -> Outcome {
    each(|golden| {
        let [(_, w1), (_, w2)] = weight_shapes(golden);
        for (out, a, w, shape, side) in
            [("y", "h", "w2", w2, contract::Side::Fprop), ("dx", "dc", "w1", w1, contract::Side::Dgrad)]
        {
            let (a, w) = (stored(golden, a, ""), stored(golden, w, ""));
            let got = Gemm { a: &a, w: &w, shape, side, groups: &golden.groups, bias: None }.run(b)?;
            golden.by_token(out).stage_bf16(&golden.file.bf16(out), &got)?;
        }
        Ok(())
    })
}

/// `dh`, `dc`, `dprob`, `dc`'s amaxes and `h` again from the stored `dy`, `w2` and `c`.
pub(super) fn gemm_dact<B: Backend>(b: &B) -> Outcome {
    each(|golden| {
        let (c, prob) = (golden.file.bf16("c"), golden.file.f32("prob"));
        let case = GemmDact {
            dy: &stored(golden, "dy", ""),
            w2: &stored(golden, "w2", ""),
            hidden: golden.hidden,
            ffn: golden.ffn,
            activation: golden.activation,
            layout: golden.layout,
            c: &c,
            prob: &prob,
            groups: &golden.groups,
            extras: Some(SignMask::DEFAULT),
        };
        let got = case.run(b)?;
        let extras = got.extras.expect("asked for");
        golden.by_token("dh").stage_f32(&golden.file.f32("dh"), &extras.dh)?;
        golden.by_token("dc").stage_bf16(&golden.file.bf16("dc"), &got.dc)?;
        golden.by_token("h").stage_bf16(&golden.file.bf16("h"), &extras.h)?;
        golden.by_token("dprob").stage_f32(&golden.file.f32("dprob"), &got.dprob)?;
        let (before, after) = extras.amax;
        f32_bits("dc_amax of the epilogue", &[before.len()], &golden.file.f32("dc_amax"), &before)?;
        f32_bits("dc_amax_col of the epilogue", &[after.len()], &golden.file.f32("dc_amax_col"), &after)
    })
}

/// `dw2` from the stored `dy` and `h`, `dw1` from the stored `dc` and `x`.
pub(super) fn wgrad<B: Backend>(b: &B) -> Outcome {
    each(|golden| {
        let [(_, w1), (_, w2)] = weight_shapes(golden);
        for (out, a, input, shape) in [("dw2", "dy", "h", w2), ("dw1", "dc", "x", w1)] {
            let (a, input) = (stored(golden, a, "_col"), stored(golden, input, "_col"));
            let before = Grads::poison(golden.groups.experts(), shape);
            let (mode, groups) = (GradMode::Overwrite, &golden.groups);
            let got = Wgrad { a: &a, b: &input, shape, groups, mode, before }.run(b)?;
            golden.by_expert(out).stage_f32(&golden.file.f32(out), &got.into_f32())?;
        }
        Ok(())
    })
}

/// The columnwise operand of a weight is the transpose of the rowwise one: `dx` by dgrad equals `dx` by fprop with
/// weights stored the other way round.
pub(super) fn dgrad_is_fprop_of_the_transpose<B: Backend>(b: &B) -> Outcome {
    each(|golden| {
        let experts = golden.groups.experts();
        let [(_, WeightShape { n, k }), _] = weight_shapes(golden);
        let w = golden.file.bf16("w1");
        let at = |i: usize| w[i / (n * k) * n * k + i % n * k + i / n % k];
        let transposed: Vec<_> = (0..experts * n * k).map(at).collect();
        let quantized = |w: &[_], shape| quantize_weights(b, w, experts, shape);
        let (plain, other): (Packed, Packed) =
            (quantized(&w, WeightShape { n, k })?, quantized(&transposed, WeightShape { n: k, k: n })?);
        let dc = stored(golden, "dc", "");
        let run = |w: Packed, shape, side| {
            Gemm { a: &dc, w: &Side::Nvfp4(w), shape, side, groups: &golden.groups, bias: None }.run(b)
        };
        let dgrad = run(plain, WeightShape { n, k }, contract::Side::Dgrad)?;
        let fprop = run(other, WeightShape { n: k, k: n }, contract::Side::Fprop)?;
        golden.by_token("dx").stage_bf16(&golden.file.bf16("dx"), &fprop)?;
        golden.by_token("dx").stage_bf16(&fprop, &dgrad)
    })
}
