//! Verdicts on the outputs of a product pass.
//!
//! Every output is compared with what exact arithmetic makes of the pass's own inputs and, where an epilogue reads
//! what the pass has just rounded, of the backend's own intermediate. So a bound covers one stage, and one BF16 unit
//! in `c` does not excuse anything in `h`.

use crate::compare::{Expected, all_zero, f32_bits, widen, widen_f32, within};
use crate::drive::{Gemm, GemmAct, GemmActOut, GemmDact, GemmDactOut, Grads, Wgrad, hadamard_amax};
use crate::exact::{self, Sum, rounded};
use crate::report::Outcome;
use half::bf16;
use moe4::kernels::activation::{Activation, ActivationFn, Evaluated, GluLayout};
use moe4::kernels::contract::{Side, WeightShape};
use moe4::kernels::reference::Reference;
use moe4::numerics::bf16 as bf;
use moe4::numerics::hadamard::SignMask;
use moe4::tensor::Groups;

/// `grouped_gemm`: each element within its bound, rows of nobody zero.
pub fn gemm(case: &Gemm<'_>, out: &[bf16]) -> Outcome {
    let cols = case.side.dims(case.shape).0;
    let expected = live(exact::gemm(case), cols, case.groups, rounded);
    within("out", &[case.groups.rows(), cols], &expected, &widen(out))?;
    past_the_end("out", out, cols, case.groups)
}

/// `round` applied to experts' rows alone: the others stay exactly zero.
fn live(
    mut expected: Vec<Expected>,
    cols: usize,
    groups: &Groups,
    round: impl Fn(Expected) -> Expected,
) -> Vec<Expected> {
    expected[..groups.live_rows() * cols].iter_mut().for_each(|e| *e = round(*e));
    expected
}

fn past_the_end<T: bytemuck::Pod + std::fmt::Debug>(
    name: &str,
    x: &[T],
    cols: usize,
    groups: &Groups,
) -> Outcome {
    let first = groups.live_rows() * cols;
    all_zero(&format!("{name} past sum(splits)"), first, &x[first..])
}

/// `grouped_wgrad`: each element within its bound, with what the buffers held before.
pub fn wgrad(case: &Wgrad<'_>, out: &Grads) -> Outcome {
    let got = match out {
        Grads::F32(dw) => widen_f32(dw),
        Grads::Bf16(dw) => widen(dw),
    };
    within("dw", &[case.groups.experts(), case.shape.n, case.shape.k], &exact::wgrad(case), &got)
}

/// Value and derivatives in f64.
pub fn evaluate(activation: Activation, g: f64, u: f64) -> Evaluated<f64> {
    match activation {
        Activation::SwiGlu(f) => f.evaluate(g, u),
        Activation::Srelu(f) => f.evaluate(g, u),
        Activation::TanhSrelu(f) => f.evaluate(g, u),
        Activation::SituGlu(f) => f.evaluate(g, u),
        Activation::ClampedQgeglu(f) => f.evaluate(g, u),
    }
}

/// What an activation accurate to about 1e-6 may be off by, of the terms that it adds up.
const ACCURACY: f64 = 4e-6;

fn near(value: f64, terms: f64) -> Expected {
    Expected { value, bound: ACCURACY * terms + 1e-37 }
}

/// Magnitude of the two terms of `∂act/∂g`, which cancel where a gate has its minimum.
fn gate_terms(activation: Activation, g: f64, u: f64, dg: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match activation {
        Activation::SwiGlu(_) => {
            let s = sigmoid(g);
            u.abs() * (s + g.abs() * s * (1.0 - s))
        }
        Activation::Srelu(_) | Activation::TanhSrelu(_) => dg.abs(),
        Activation::SituGlu(p) => {
            let (s, t) = (sigmoid(g), (g / p.beta1 as f64).tanh());
            let up = p.beta2 as f64 * (u / p.beta2 as f64).tanh();
            up.abs() * ((1.0 - t * t) * s + (p.beta1 as f64 * t).abs() * s * (1.0 - s))
        }
        Activation::ClampedQgeglu(p) => {
            let (alpha, limit) = (p.alpha as f64, p.limit as f64);
            let (s, up) = (sigmoid(alpha * g), u.clamp(-limit, limit).abs() + p.offset as f64);
            if dg == 0.0 { 0.0 } else { up * (s + alpha * g.abs() * s * (1.0 - s)) }
        }
    }
}

/// Magnitude of the terms of the value: an offset may cancel an up projection.
fn value_terms(activation: Activation, g: f64, u: f64, value: f64) -> f64 {
    match activation {
        Activation::ClampedQgeglu(p) => {
            let (m, limit) = (g.min(p.limit as f64), p.limit as f64);
            let gate = (m / (1.0 + (-(p.alpha as f64) * m).exp())).abs();
            gate * (u.clamp(-limit, limit).abs() + p.offset as f64)
        }
        _ => value.abs(),
    }
}

/// One feature of a row of `c`: where its gate and up lie, and the activation there.
struct Feature {
    gate: usize,
    up: usize,
    value: Expected,
    dg: Expected,
    du: Expected,
}

fn features(
    activation: Activation,
    layout: GluLayout,
    row: &[bf16],
    ffn: usize,
) -> impl Iterator<Item = Feature> + '_ {
    (0..ffn).map(move |f| {
        let run = layout.run(activation.is_gated(), f - f % 16, ffn);
        let step = f % 16 * run.stride;
        let (gate, up) = (run.gate + step, run.up + step);
        let (g, u) = (bf::to_f32(row[gate]) as f64, bf::to_f32(row[up]) as f64);
        let Evaluated { value, dg, du } = evaluate(activation, g, u);
        Feature {
            gate,
            up,
            value: near(value, value_terms(activation, g, u, value)),
            dg: near(dg, gate_terms(activation, g, u, dg)),
            du: near(du, du.abs()),
        }
    })
}

fn times(e: Expected, factor: f64) -> Expected {
    let value = e.value * factor;
    Expected { value, bound: e.bound * factor.abs() + value.abs() / (1u64 << 22) as f64 }
}

/// `h` from `c` and the probabilities.
pub fn h_from_c(
    (activation, layout): (Activation, GluLayout),
    c: &[bf16],
    ffn: usize,
    prob: &[f32],
    groups: &Groups,
) -> Vec<Expected> {
    let n1 = activation.fc1_rows(ffn);
    let mut out = vec![Expected::exactly(0.0); groups.rows() * ffn];
    for t in 0..groups.live_rows() {
        let row = &c[t * n1..(t + 1) * n1];
        for (f, feature) in features(activation, layout, row, ffn).enumerate() {
            out[t * ffn + f] = rounded(times(feature.value, prob[t] as f64));
        }
    }
    out
}

fn amaxes(
    name: &str,
    x: &[bf16],
    cols: usize,
    groups: &Groups,
    mask: SignMask,
    got: &(Vec<f32>, Vec<f32>),
) -> Outcome {
    let (before, after) = hadamard_amax(&Reference, x, cols, groups, mask)?;
    f32_bits(&format!("{name}_amax"), &[groups.experts()], &before, &got.0)?;
    f32_bits(&format!("{name}_amax after RHT {mask}"), &[groups.experts()], &after, &got.1)
}

/// `grouped_gemm_act`: `c`, then `h` from that `c`, then the amaxes of that `h`.
pub fn gemm_act(case: &GemmAct<'_>, out: &GemmActOut) -> Outcome {
    let (groups, n1) = (case.groups, case.n1());
    let product = Gemm {
        a: case.x,
        w: case.w1,
        shape: WeightShape { n: n1, k: case.hidden },
        side: Side::Fprop,
        groups,
        bias: case.b1.map(|bias| crate::drive::Bias { bias, prob: None }),
    };
    let c = live(exact::gemm(&product), n1, groups, rounded);
    within("c", &[groups.rows(), n1], &c, &widen(&out.c))?;
    past_the_end("c", &out.c, n1, groups)?;
    let h = h_from_c((case.activation, case.layout), &out.c, case.ffn, case.prob, groups);
    within("h", &[groups.rows(), case.ffn], &h, &widen(&out.h))?;
    past_the_end("h", &out.h, case.ffn, groups)?;
    match (&out.amax, case.amax) {
        (Some(got), Some(mask)) => amaxes("h", &out.h, case.ffn, groups, mask, got),
        _ => Ok(()),
    }
}

/// `grouped_gemm_dact` with its extras: `dh`, then everything else from that `dh` and the given `c`.
pub fn gemm_dact(case: &GemmDact<'_>, out: &GemmDactOut) -> Outcome {
    let (groups, n1, ffn) = (case.groups, case.n1(), case.ffn);
    let (Some(extras), Some(mask)) = (&out.extras, case.extras) else { return Ok(()) };
    let product = Gemm {
        a: case.dy,
        w: case.w2,
        shape: WeightShape { n: case.hidden, k: ffn },
        side: Side::Dgrad,
        groups,
        bias: None,
    };
    within("dh", &[groups.rows(), ffn], &exact::gemm(&product), &widen_f32(&extras.dh))?;
    past_the_end("dh", &extras.dh, ffn, groups)?;

    let mut dc = vec![Expected::exactly(0.0); groups.rows() * n1];
    let mut dprob = vec![Expected::exactly(0.0); groups.rows()];
    for t in 0..groups.live_rows() {
        let row = &case.c[t * n1..(t + 1) * n1];
        let (mut sum, mut slack) = (Sum::default(), 0.0);
        for (f, feature) in features(case.activation, case.layout, row, ffn).enumerate() {
            let dh = extras.dh[t * ffn + f] as f64;
            let scaled = dh * case.prob[t] as f64;
            dc[t * n1 + feature.gate] = rounded(times(feature.dg, scaled));
            if case.activation.is_gated() {
                dc[t * n1 + feature.up] = rounded(times(feature.du, scaled));
            }
            sum = sum.plus(feature.value.value * dh);
            slack += feature.value.bound * dh.abs();
        }
        let Expected { value, bound } = sum.f32();
        dprob[t] = Expected { value, bound: bound + slack };
    }
    within("dc", &[groups.rows(), n1], &dc, &widen(&out.dc))?;
    past_the_end("dc", &out.dc, n1, groups)?;
    within("dprob", &[groups.rows()], &dprob, &widen_f32(&out.dprob))?;
    past_the_end("dprob", &out.dprob, 1, groups)?;

    let db1 = |i: usize| {
        let column = groups.range(i / n1).map(|t| bf::to_f32(out.dc[t * n1 + i % n1]) as f64);
        column.collect::<Sum>().f32()
    };
    let db1: Vec<_> = (0..groups.experts() * n1).map(db1).collect();
    within("db1", &[groups.experts(), n1], &db1, &widen_f32(&extras.db1))?;
    let h = h_from_c((case.activation, case.layout), case.c, ffn, case.prob, groups);
    within("recomputed h", &[groups.rows(), ffn], &h, &widen(&extras.h))?;
    past_the_end("recomputed h", &extras.h, ffn, groups)?;
    amaxes("dc", &out.dc, n1, groups, mask, &extras.amax)
}
