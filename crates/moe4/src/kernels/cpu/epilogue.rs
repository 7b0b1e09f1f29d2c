//! What becomes of a stripe of accumulators: scaling, bias, activation, its backward, rounding.
//!
//! Outputs are whole rows, of which a stripe writes its columns. All widths are multiples of 16.

use super::gemm::{Block, Stripe};
use super::isa::multiversion;
use super::tile::Lanes;
use super::wide::Wide;
use crate::kernels::activation::{ActivationFn, GluLayout};
use crate::numerics::{BLOCK, bf16 as bf};
use half::bf16;
use std::ops::Range;

/// `row · alpha (+ bias · weight)` rounded to BF16; whole blocks.
#[inline(always)]
fn round_row<W: Wide>(acc: &[f32], alpha: f32, bias: Option<(&[f32], f32)>, out: &mut [bf16]) {
    for (i, out) in out.chunks_exact_mut(BLOCK).enumerate() {
        let mut v = W::splat(alpha).times(W::load(&acc[i * BLOCK..]));
        if let Some((bias, weight)) = bias {
            v = v.plus(W::load(&bias[i * BLOCK..]).times(W::splat(weight)));
        }
        v.narrow(out);
    }
}

multiversion! {
    /// A plain product's stripe to `out [rows, n]`. `prob` scales the bias.
    pub(super) fn plain<W: Wide>(
        stripe: &Stripe, block: Block<'_>, n: usize, alpha: f32, bias: Option<&[f32]>, prob: Option<&[f32]>, out: &mut [bf16],
    ) {
        for (i, out) in out.chunks_exact_mut(n).enumerate() {
            for piece in stripe.pieces() {
                let bias = bias.map(|b| (&b[piece.cols.clone()], prob.map_or(1.0, |p| p[i])));
                round_row::<W>(block.row(i, piece.at), alpha, bias, &mut out[piece.cols.clone()]);
            }
        }
    }
}

/// What FC1's and FC2 dgrad's epilogues know of the activation.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) layout: GluLayout,
    pub(super) ffn: usize,
    pub(super) n1: usize,
}

impl Shape {
    /// The features whose FC1 outputs a stripe holds.
    pub(super) fn features(self, stripe: &Stripe) -> Range<usize> {
        let cols = &stripe.first.cols;
        match stripe.second.is_some() || self.n1 == self.ffn {
            true => cols.clone(),
            // Gate and up lie together.
            false => cols.start / 2..cols.end / 2,
        }
    }

    /// The columns of `c` of some features: one range, or one in each half.
    pub(super) fn columns(self, features: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let (start, end) = (features.start, features.end);
        let [first, second] = if self.n1 == self.ffn {
            [Some(start..end), None]
        } else if self.layout == GluLayout::Halves {
            [Some(start..end), Some(self.ffn + start..self.ffn + end)]
        } else {
            [Some(2 * start..2 * end), None]
        };
        first.into_iter().chain(second)
    }
}

/// Sixteen values `stride` apart.
#[inline(always)]
fn gather<W: Wide>(row: &[bf16], start: usize, stride: usize) -> W {
    if stride == 1 {
        return W::widen(&row[start..]);
    }
    let mut lanes = [0.0; BLOCK];
    for (lane, v) in lanes.iter_mut().zip(row[start..].iter().step_by(stride)) {
        *lane = bf::to_f32(*v);
    }
    W::load(&lanes)
}

#[inline(always)]
fn scatter<W: Wide>(v: W, row: &mut [bf16], start: usize, stride: usize) {
    if stride == 1 {
        return v.narrow(&mut row[start..]);
    }
    let mut lanes = [bf16::ZERO; BLOCK];
    v.narrow(&mut lanes);
    for (v, lane) in row[start..].iter_mut().step_by(stride).zip(lanes) {
        *v = lane;
    }
}

multiversion! {
    /// FC1's stripe: its columns of `c [rows, N1]` and `h [rows, F]`.
    pub(super) fn act<W: Wide, A: ActivationFn>(
        f: A, shape: Shape, stripe: &Stripe, block: Block<'_>, alpha: f32, bias: Option<&[f32]>, prob: &[f32], c: &mut [bf16], h: &mut [bf16],
    ) {
        let Shape { layout, ffn, n1 } = shape;
        let rows = c.chunks_exact_mut(n1).zip(h.chunks_exact_mut(ffn)).zip(prob);
        for (i, ((c, h), &prob)) in rows.enumerate() {
            for piece in stripe.pieces() {
                let bias = bias.map(|b| (&b[piece.cols.clone()], 1.0));
                round_row::<W>(block.row(i, piece.at), alpha, bias, &mut c[piece.cols.clone()]);
            }
            for first in shape.features(stripe).step_by(BLOCK) {
                let run = layout.run(A::GATED, first, ffn);
                let g = gather::<W>(c, run.gate, run.stride);
                let u = gather::<W>(c, run.up, run.stride);
                // Forward and recompute do the same, so their bits agree.
                W::evaluate(f, g, u).value.times(W::splat(prob)).narrow(&mut h[first..]);
            }
        }
    }
}

/// Outputs of a run of rows of FC2 dgrad.
pub(super) struct DactOut<'a> {
    /// `[rows, N1]`.
    pub(super) dc: &'a mut [bf16],
    /// `[rows]`.
    pub(super) dprob: &'a mut [f32],
    /// `[rows, F]`.
    pub(super) h: Option<&'a mut [bf16]>,
    /// `[rows, F]`.
    pub(super) dh: Option<&'a mut [f32]>,
    /// `[rows]`: what `dprob` is the sum of, zero before the first stripe.
    pub(super) sums: Vec<Lanes>,
}

multiversion! {
    /// FC2 dgrad's stripe. `dprob` sums sixteen partial sums, one a lane, pairwise; it is right after the last stripe.
    pub(super) fn dact<W: Wide, A: ActivationFn>(
        f: A, shape: Shape, stripe: &Stripe, block: Block<'_>, alpha: f32, c: &[bf16], prob: &[f32], out: &mut DactOut<'_>,
    ) {
        let Shape { layout, ffn, n1 } = shape;
        let DactOut { dc, dprob, h, dh, sums } = out;
        let rows = c.chunks_exact(n1).zip(dc.chunks_exact_mut(n1)).zip(dprob.iter_mut().zip(sums)).zip(prob);
        for (i, (((c, dc), (dprob, sums)), &prob)) in rows.enumerate() {
            let acc = block.row(i, stripe.first.at);
            let mut partial = W::load(sums);
            for first in stripe.first.cols.clone().step_by(BLOCK) {
                let run = layout.run(A::GATED, first, ffn);
                let g = gather::<W>(c, run.gate, run.stride);
                let u = gather::<W>(c, run.up, run.stride);
                let d = W::splat(alpha).times(W::load(&acc[first - stripe.first.cols.start..]));
                let at = W::evaluate(f, g, u);
                partial = partial.plus(at.value.times(d));
                let scaled = d.times(W::splat(prob));
                scatter(scaled.times(at.dg), dc, run.gate, run.stride);
                if A::GATED {
                    scatter(scaled.times(at.du), dc, run.up, run.stride);
                }
                if let Some(h) = h {
                    at.value.times(W::splat(prob)).narrow(&mut h[i * ffn + first..]);
                }
                if let Some(dh) = dh {
                    d.store(&mut dh[i * ffn + first..]);
                }
            }
            partial.store(sums);
            *dprob = pairwise_sum(*sums);
        }
    }
}

#[inline(always)]
fn pairwise_sum(mut lanes: Lanes) -> f32 {
    let mut width = BLOCK / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

multiversion! {
    /// Sums of some columns of `rows [·, n]` in `f32`, rows in order.
    pub(super) fn column_sums(rows: &[bf16], of: Range<usize>, out: &mut [f32]) {
        let n = out.len();
        for row in rows.chunks_exact(n) {
            for (sum, &v) in out[of.clone()].iter_mut().zip(&row[of.clone()]) {
                *sum += bf::to_f32(v);
            }
        }
    }
}

multiversion! {
    /// A weight gradient's stripe to `out [rows, n]`, FP32.
    pub(super) fn wgrad_f32<W: Wide>(stripe: &Stripe, block: Block<'_>, n: usize, alpha: f32, accumulate: bool, out: &mut [f32]) {
        for (i, out) in out.chunks_exact_mut(n).enumerate() {
            for piece in stripe.pieces() {
                let acc = block.row(i, piece.at).chunks_exact(BLOCK);
                for (out, acc) in out[piece.cols.clone()].chunks_exact_mut(BLOCK).zip(acc) {
                    let product = W::splat(alpha).times(W::load(acc));
                    match accumulate {
                        true => W::load(out).plus(product).store(out),
                        // A sum with zero, as above: it has no negative zero.
                        false => W::splat(0.0).plus(product).stream(out),
                    }
                }
            }
        }
        W::finish();
    }
}

multiversion! {
    /// A weight gradient's stripe to `out [rows, n]`, BF16.
    pub(super) fn wgrad_bf16<W: Wide>(stripe: &Stripe, block: Block<'_>, n: usize, alpha: f32, accumulate: bool, out: &mut [bf16]) {
        for (i, out) in out.chunks_exact_mut(n).enumerate() {
            for piece in stripe.pieces() {
                let acc = block.row(i, piece.at).chunks_exact(BLOCK);
                for (out, acc) in out[piece.cols.clone()].chunks_exact_mut(BLOCK).zip(acc) {
                    let before = if accumulate { W::widen(out) } else { W::splat(0.0) };
                    before.plus(W::splat(alpha).times(W::load(acc))).narrow(out);
                }
            }
        }
    }
}
