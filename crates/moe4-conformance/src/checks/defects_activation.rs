//! Faults that users met elsewhere in activations: entries 22 to 24. Entry 25 is the second invariant.

use crate::compare::{ensure, widen};
use crate::data;
use crate::drive::{GemmAct, GemmDact, GemmDactOut, Side};
use crate::judge;
use crate::report::{Failure, InCase, Outcome};
use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::activation::{Activation, ClampedQgeglu, GluLayout, SituGlu, TanhSrelu};
use moe4::mlp::{GroupedMlp, GroupedMlpConfig};
use moe4::numerics::bf16 as bf;
use moe4::numerics::hadamard::SignMask;
use moe4::tensor::Groups;

const FFN: usize = 32;
const ROWS: usize = 16;

/// The `dact` pass on a given `c`; `dy` and `w2` are such that every `dh` is 1.
fn dact<B: Backend>(b: &B, activation: Activation, c: &[bf16]) -> Result<GemmDactOut, Failure> {
    let mut w2 = vec![bf16::ZERO; 16 * FFN];
    w2[..FFN].fill(bf16::ONE);
    let case = GemmDact {
        dy: &Side::Bf16(vec![bf16::ONE; ROWS * 16]),
        w2: &Side::Bf16(w2),
        hidden: 16,
        ffn: FFN,
        activation,
        layout: GluLayout::Halves,
        c,
        prob: &[1.0; ROWS],
        groups: &Groups::single(ROWS),
        extras: Some(SignMask::DEFAULT),
    };
    let out = case.run(b)?;
    judge::gemm_dact(&case, &out)?;
    Ok(out)
}

fn clamped(limit: f32, alpha: f32) -> Activation {
    Activation::ClampedQgeglu(ClampedQgeglu { limit, alpha, offset: 1.0 })
}

/// 22: beyond a clamp the gradient is 0, at the limit it passes; `alpha` appears in it, by finite differences.
pub(super) fn clamp_gradient<B: Backend>(b: &B) -> Outcome {
    let limit = 4.0;
    let above = bf16::from_bits(bf::from_f32(limit).to_bits() + 1);
    let at = bf::from_f32(limit);
    // gate, up, whether the gate's gradient passes, whether the up's does
    let cases = [
        (at, at, true, true),
        (above, bf16::ONE, false, true),
        (bf16::ONE, above, true, false),
        (bf16::ONE, -above, true, false),
        (bf16::ONE, -at, true, true),
        (bf::from_f32(1e4), bf::from_f32(1e4), false, false),
        (-above, bf16::ONE, true, true),
    ];
    let mut c = vec![bf16::ZERO; ROWS * 2 * FFN];
    for (f, (gate, up, ..)) in cases.into_iter().enumerate() {
        (c[f], c[FFN + f]) = (gate, up);
    }
    let out = dact(b, clamped(limit, 1.702), &c)?;
    for (f, (gate, up, dg, du)) in cases.into_iter().enumerate() {
        let passes = |v: bf16| bf::to_f32(v) != 0.0;
        ensure(passes(out.dc[f]) == dg && passes(out.dc[FFN + f]) == du, || {
            let got = (out.dc[f], out.dc[FFN + f]);
            format!("gate {gate}, up {up}, limit {limit}: gradients pass {:?}, got {got:?}", (dg, du))
        })?;
    }
    for (i, activation) in
        [clamped(7.0, 1.3), clamped(7.0, 0.6), Activation::SituGlu(SituGlu { beta1: 2.0, beta2: 3.0 })]
            .into_iter()
            .enumerate()
    {
        finite_differences(b, activation, 230 + i as u64).in_case(activation)?;
    }
    Ok(())
}

/// `dc` against central differences of the activation's value in f64.
fn finite_differences<B: Backend>(b: &B, activation: Activation, seed: u64) -> Outcome {
    let c = data::normal(ROWS * 2 * FFN, 1.5, seed);
    let got = widen(&dact(b, activation, &c)?.dc);
    let step = 1e-4;
    let value = |g: f64, u: f64| judge::evaluate(activation, g, u).value;
    for t in 0..ROWS {
        for f in 0..FFN {
            let [g, u] = [f, FFN + f].map(|at| bf::to_f32(c[t * 2 * FFN + at]) as f64);
            let dg = (value(g + step, u) - value(g - step, u)) / (2.0 * step);
            let du = (value(g, u + step) - value(g, u - step)) / (2.0 * step);
            for (name, at, expected) in [("gate", f, dg), ("up", FFN + f, du)] {
                let got = got[t * 2 * FFN + at];
                // Half a BF16 unit, and the differences' own error.
                let bound = expected.abs() / 256.0 + 1e-5;
                ensure((got - expected).abs() <= bound, || {
                    format!("{name} gradient at ({g}, {u}): expected {expected:e} ± {bound:.1e}, got {got:e}")
                })?;
            }
        }
    }
    Ok(())
}

/// 23: parameters reach the backward, and bad ones are refused before there are any tokens.
pub(super) fn parameters<B: Backend>(b: &B) -> Outcome {
    let c = data::normal(ROWS * 2 * FFN, 3.0, 240);
    let differ = |one: Activation, other: Activation| -> Outcome {
        let width = ROWS * one.fc1_rows(FFN);
        let (a, b) = (dact(b, one, &c[..width])?, dact(b, other, &c[..width])?);
        ensure(a.dc != b.dc && a.dprob != b.dprob, || format!("{one} and {other} have the same gradients"))
    };
    let tanh = |s| Activation::TanhSrelu(TanhSrelu { s });
    let situ = |beta1, beta2| Activation::SituGlu(SituGlu { beta1, beta2 });
    let offset = |offset| Activation::ClampedQgeglu(ClampedQgeglu { limit: 2.0, alpha: 1.0, offset });
    differ(tanh(1.5), tanh(16.0))?;
    differ(situ(4.0, 25.0), situ(2.0, 25.0))?;
    differ(situ(4.0, 25.0), situ(4.0, 8.0))?;
    differ(clamped(2.0, 1.0), clamped(7.0, 1.0))?;
    differ(clamped(2.0, 1.0), clamped(2.0, 1.702))?;
    differ(offset(1.0), offset(0.5))?;
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for activation in
            [tanh(bad), situ(bad, 1.0), situ(1.0, bad), clamped(bad, 1.0), clamped(1.0, bad), offset(bad)]
        {
            let config = GroupedMlpConfig { activation, ..GroupedMlpConfig::new(1, 16, FFN) };
            let message = GroupedMlp::new(config).err().map(|e| e.to_string()).unwrap_or_default();
            ensure(message.contains(activation.name()) && message.contains("parameter"), || {
                format!("{activation}: expected an error that names the parameter, got '{message}'")
            })?;
        }
    }
    Ok(())
}

/// 24: beyond a limit the input no longer matters, and up to it the limit does not.
pub(super) fn clamp_acts<B: Backend>(b: &B) -> Outcome {
    let run = |limit: f32, scale: f32| -> Result<Vec<bf16>, Failure> {
        let x: Vec<bf16> =
            data::normal(ROWS * 16, 1.0, 250).iter().map(|v| bf::from_f32(bf::to_f32(*v) * scale)).collect();
        let case = GemmAct {
            x: &Side::Bf16(x),
            w1: &Side::Bf16(data::normal(2 * FFN * 16, 1.0, 251)),
            b1: None,
            hidden: 16,
            ffn: FFN,
            activation: clamped(limit, 1.702),
            layout: GluLayout::Halves,
            prob: &[1.0; ROWS],
            groups: &Groups::single(ROWS),
            amax: None,
        };
        let out = case.run(b)?;
        judge::gemm_act(&case, &out)?;
        Ok(out.h)
    };
    let (tight, loose) = (run(2.0, 1.0)?, run(1e4, 1.0)?);
    ensure(tight != loose, || "a limit of 2 changed nothing on inputs of size 4".into())?;
    let largest = tight.iter().map(|v| bf::to_f32(v.to_owned()).abs()).fold(0.0, f32::max);
    // (2 + 1) · 2 · σ(3.404), and a rounding
    ensure(largest <= 6.0, || format!("under a limit of 2 the activation reaches {largest}"))?;
    ensure(run(100.0, 0.125)? == run(1e4, 0.125)?, || "a limit out of reach changed a result".into())
}
