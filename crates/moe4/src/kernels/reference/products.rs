//! Grouped products and their epilogues.
//!
//! `mm(a, b)[i, j] = alpha · Σ_k a[i,k] · b[j,k]` in f64: operands are the exact `code · block scale`, `alpha` is the
//! product of the two global decode scales (1 for BF16 operands). An unpacked operand holds `code · block scale` already. `bf(v)` rounds to f32, then to bf16.

use super::quantize::{group_amax, group_amax_rht};
use super::rows::total;
use crate::kernels::activation::{ActivationFn, Evaluated, GluLayout, with_activation};
use crate::kernels::contract::*;
use crate::kernels::memory::Host;
use crate::numerics::scale::GlobalScale;
use crate::numerics::{BLOCK, bf16 as bf, e2m1, e4m3};
use crate::tensor::{Groups, Nvfp4};
use half::bf16;

type HostNvfp4<'a> = Nvfp4<&'a [u8], &'a [f32]>;

/// `code · block scale` at `[row, col]` of an operand with `k` columns.
fn value(q: &HostNvfp4<'_>, row: usize, col: usize, k: usize) -> f64 {
    let (even, odd) = e2m1::unpack(q.codes[row * (k / 2) + col / 2]);
    let code = if col.is_multiple_of(2) { even } else { odd };
    e2m1::decode(code) as f64 * e4m3::decode(q.scales[row * (k / BLOCK) + col / BLOCK]) as f64
}

fn decode_scale(amax: f32) -> f64 {
    GlobalScale::from_amax(amax).decode as f64
}

fn bf(v: f64) -> bf16 {
    bf::from_f32(v as f32)
}

/// `mm` of row `t` of expert `e` with every output column, as f64.
fn row_product(
    a: Operand<'_, Host>,
    w: &WeightOperand<'_, Host>,
    (shape, side): (WeightShape, Side),
    e: usize,
    t: usize,
) -> Vec<f64> {
    let (cols, contraction) = side.dims(shape);
    let (a_row, a_scale): (Vec<f64>, f64) = match a {
        Operand::Bf16(x) => ((0..contraction).map(|i| x[t * contraction + i].to_f64()).collect(), 1.0),
        Operand::Nvfp4(q) => {
            ((0..contraction).map(|i| value(&q, t, i, contraction)).collect(), decode_scale(q.amax[e]))
        }
        Operand::Unpacked(u) => (
            (0..contraction).map(|i| u.values[t * contraction + i].to_f64()).collect(),
            decode_scale(u.amax[e]),
        ),
    };
    let w_scale = match w {
        WeightOperand::Bf16(_) => 1.0,
        WeightOperand::Nvfp4 { packed, .. } => decode_scale(packed.amax[e]),
    };
    // the element of the stored weight [n, k] that meets output column j at contraction index i
    let weight = |j: usize, i: usize| {
        let (row, col) = match side {
            Side::Fprop => (j, i),
            Side::Dgrad => (i, j),
        };
        match w {
            WeightOperand::Bf16(w) => w[e][row * shape.k + col].to_f64(),
            WeightOperand::Nvfp4 { packed, .. } => value(packed, e * shape.n + row, col, shape.k),
        }
    };
    let sum = |j: usize| total((0..contraction).map(|i| a_row[i] * weight(j, i)));
    (0..cols).map(|j| (a_scale * w_scale) * sum(j)).collect()
}

/// Experts' rows with their expert.
fn live_rows(groups: &Groups) -> impl Iterator<Item = (usize, usize)> + '_ {
    (0..groups.experts()).flat_map(|e| groups.range(e).map(move |t| (e, t)))
}

pub(super) fn grouped_gemm(pass: GroupedGemm<'_, Host>) {
    let GroupedGemm { a, w, shape, side, groups, bias, out } = pass;
    let (cols, _) = side.dims(shape);
    out.fill(bf16::ZERO);
    for (e, t) in live_rows(groups) {
        for (j, product) in row_product(a, &w, (shape, side), e, t).into_iter().enumerate() {
            let bias = bias
                .as_ref()
                .map_or(0.0, |b| b.bias[e * cols + j] as f64 * b.prob.map_or(1.0, |prob| prob[t] as f64));
            out[t * cols + j] = bf(product + bias);
        }
    }
}

fn write_amax(x: &[bf16], cols: usize, groups: &Groups, out: Option<AmaxOut<'_, Host>>) {
    let Some(AmaxOut { amax, rht }) = out else { return };
    group_amax(x, cols, groups, amax);
    match rht {
        Some((RhtAmax::Exact(mask), out)) => group_amax_rht(x, cols, groups, mask, out),
        Some((RhtAmax::Bound, out)) => {
            out.iter_mut().zip(amax).for_each(|(out, amax)| *out = rht_amax_bound(*amax))
        }
        None => {}
    }
}

/// Value and derivatives of every feature of one row of `c`, in f64.
fn evaluate_row<A: ActivationFn>(f: A, layout: GluLayout, c: &[bf16], ffn: usize) -> Vec<Evaluated<f64>> {
    let at = |column: usize| c[column].to_f64();
    let feature = |i: usize| {
        let run = layout.run(A::GATED, i - i % 16, ffn);
        let step = i % 16 * run.stride;
        f.evaluate(at(run.gate + step), at(run.up + step))
    };
    (0..ffn).map(feature).collect()
}

pub(super) fn grouped_gemm_act(pass: GroupedGemmAct<'_, Host>) {
    let GroupedGemmAct { x, w1, b1, hidden, ffn, activation, layout, prob, groups, c, h, h_amax } = pass;
    let n1 = activation.fc1_rows(ffn);
    c.fill(bf16::ZERO);
    h.fill(bf16::ZERO);
    for (e, t) in live_rows(groups) {
        let product = row_product(x, &w1, (WeightShape { n: n1, k: hidden }, Side::Fprop), e, t);
        let c = &mut c[t * n1..(t + 1) * n1];
        for (j, product) in product.into_iter().enumerate() {
            c[j] = bf(product + b1.map_or(0.0, |b1| b1[e * n1 + j] as f64));
        }
        let act = with_activation!(activation, f => evaluate_row(f, layout, c, ffn));
        for (j, act) in act.into_iter().enumerate() {
            h[t * ffn + j] = bf(act.value * prob[t] as f64);
        }
    }
    write_amax(h, ffn, groups, h_amax);
}

pub(super) fn grouped_gemm_dact(pass: GroupedGemmDact<'_, Host>) {
    let GroupedGemmDact {
        dy,
        w2,
        hidden,
        ffn,
        activation,
        layout,
        c,
        prob,
        groups,
        dc,
        dprob,
        db1,
        dc_amax,
        h,
        dh,
    } = pass;
    let n1 = activation.fc1_rows(ffn);
    let (mut h, mut dh) = (h, dh);
    dc.fill(bf16::ZERO);
    dprob.fill(0.0);
    if let Some(h) = &mut h {
        h.fill(bf16::ZERO);
    }
    if let Some(dh) = &mut dh {
        dh.fill(0.0);
    }
    for (e, t) in live_rows(groups) {
        let product = row_product(dy, &w2, (WeightShape { n: hidden, k: ffn }, Side::Dgrad), e, t);
        let row = &c[t * n1..(t + 1) * n1];
        let act = with_activation!(activation, f => evaluate_row(f, layout, row, ffn));
        let mut sum = 0.0;
        for (j, (product, act)) in product.into_iter().zip(act).enumerate() {
            let d = product as f32 as f64; // dh is rounded to f32 here
            sum += act.value * d;
            let run = layout.run(activation.is_gated(), j - j % 16, ffn);
            let step = j % 16 * run.stride;
            let scaled = d * prob[t] as f64;
            dc[t * n1 + run.gate + step] = bf(scaled * act.dg);
            if activation.is_gated() {
                dc[t * n1 + run.up + step] = bf(scaled * act.du);
            }
            if let Some(h) = &mut h {
                h[t * ffn + j] = bf(act.value * prob[t] as f64);
            }
            if let Some(dh) = &mut dh {
                dh[t * ffn + j] = d as f32;
            }
        }
        dprob[t] = sum as f32;
    }
    if let Some(db1) = db1 {
        for e in 0..groups.experts() {
            for j in 0..n1 {
                db1[e * n1 + j] = total(groups.range(e).map(|t| dc[t * n1 + j].to_f64())) as f32;
            }
        }
    }
    write_amax(dc, n1, groups, dc_amax);
}

pub(super) fn grouped_wgrad(pass: GroupedWgrad<'_, Host>) {
    let GroupedWgrad { a, b, shape: WeightShape { n, k }, groups, dw } = pass;
    let tp = groups.padded_rows();
    // element [row of dW side, token position] of an operand
    let at = |q: &Operand<'_, Host>, row: usize, position: usize, width: usize| match q {
        Operand::Bf16(x) => x[position * width + row].to_f64(),
        Operand::Nvfp4(q) => value(q, row, position, tp),
        Operand::Unpacked(u) => u.values[row * tp + position].to_f64(),
    };
    let scale = |q: &Operand<'_, Host>, e: usize| q.amax().map_or(1.0, |amax| decode_scale(amax[e]));
    let product = |e: usize, i: usize, j: usize| {
        let tokens = if matches!(a, Operand::Bf16(_)) { groups.range(e) } else { groups.padded_range(e) };
        let sum = total(tokens.map(|t| at(&a, i, t, n) * at(&b, j, t, k)));
        (scale(&a, e) * scale(&b, e) * sum) as f32
    };
    write_grads(dw, groups, n, k, product);
}

fn write_grads(
    dw: WeightGrad<'_, Host>,
    groups: &Groups,
    n: usize,
    k: usize,
    product: impl Fn(usize, usize, usize) -> f32,
) {
    let accumulate = dw.mode == GradMode::Accumulate;
    let indices = || (0..n).flat_map(move |i| (0..k).map(move |j| (i, j)));
    let skip = |e: usize| accumulate && groups.range(e).is_empty();
    match dw.buffers {
        GradBuffers::F32(buffers) => {
            for (e, out) in buffers.into_iter().enumerate().filter(|(e, _)| !skip(*e)) {
                for (i, j) in indices() {
                    let before = if accumulate { out[i * k + j] } else { 0.0 };
                    out[i * k + j] = before + product(e, i, j);
                }
            }
        }
        GradBuffers::Bf16(buffers) => {
            for (e, out) in buffers.into_iter().enumerate().filter(|(e, _)| !skip(*e)) {
                for (i, j) in indices() {
                    let before = if accumulate { bf::to_f32(out[i * k + j]) } else { 0.0 };
                    out[i * k + j] = bf::from_f32(before + product(e, i, j));
                }
            }
        }
    }
}
