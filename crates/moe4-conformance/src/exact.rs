//! Exact products and how far a correct implementation may be from them.
//!
//! Operands are the exact `code · block scale` (or BF16), sums are f64. An implementation that accumulates `K` exact
//! products in f32, in any order, and multiplies once by `alpha` rounded to f32 is off by at most
//! `(K + 2) · 2^-24 · alpha · Σ|terms|`. Rounding to BF16 adds half a unit in the last place. Both bounds belong to
//! one element and hold for every data; nothing is measured and nothing is averaged.
//!
//! A matrix unit may read subnormal BF16 operands as 0 and turn subnormal sums into 0, which matters only where operands
//! are not quantized: terms of a code and a scale are far from there.

use crate::compare::Expected;
use crate::drive::{Gemm, Grads, Side, Wgrad};
use half::bf16;
use moe4::kernels::contract::{self, GradMode};
use moe4::numerics::scale::GlobalScale;
use moe4::numerics::{BLOCK, bf16 as bf, e2m1, e4m3};
use moe4::tensor::Groups;

/// The relative error of one f32 operation.
const UNIT: f64 = 1.0 / (1u64 << 24) as f64;
/// The smallest f32.
const TINY: f64 = 1.401298464324817e-45;

/// A sum and the sum of its terms' magnitudes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    /// The exact value.
    pub value: f64,
    /// What cancels in it.
    pub magnitude: f64,
    /// How many terms.
    pub terms: usize,
}

impl FromIterator<f64> for Sum {
    fn from_iter<I: IntoIterator<Item = f64>>(terms: I) -> Self {
        terms.into_iter().fold(Sum::default(), |sum, term| Sum {
            value: sum.value + term,
            magnitude: sum.magnitude + term.abs(),
            terms: sum.terms + 1,
        })
    }
}

impl Sum {
    /// The same with one more term.
    pub fn plus(self, term: f64) -> Self {
        Sum { value: self.value + term, magnitude: self.magnitude + term.abs(), terms: self.terms + 1 }
    }

    /// Times `alpha`, which an implementation rounds to f32 (to a subnormal, if it is that small).
    fn scaled(self, alpha: f64) -> Scaled {
        let slack = TINY * (1.0 + self.magnitude);
        Scaled { sum: Sum { value: self.value * alpha, magnitude: self.magnitude * alpha, ..self }, slack }
    }

    /// As an f32 result.
    pub fn f32(self) -> Expected {
        Scaled { sum: self, slack: TINY }.f32()
    }
}

#[derive(Clone, Copy)]
struct Scaled {
    sum: Sum,
    slack: f64,
}

impl Scaled {
    fn f32(self) -> Expected {
        let Scaled { sum: Sum { value, magnitude, terms }, slack } = self;
        Expected { value, bound: (terms + 2) as f64 * UNIT * magnitude + slack }
    }
}

/// Half a unit in the last place of the BF16 numbers around `v`.
fn half_ulp(v: f64) -> f64 {
    let exponent = v.abs().max(f32::MIN_POSITIVE as f64).log2().floor();
    (exponent - 8.0).exp2()
}

/// The same value after one rounding to BF16.
pub fn rounded(e: Expected) -> Expected {
    Expected { value: e.value, bound: e.bound + half_ulp(e.value.abs() + e.bound) }
}

fn code_values(codes: &[u8], scales: &[u8], k: usize) -> Vec<f64> {
    let value = |(i, code): (usize, u8)| {
        let (row, col) = (i / k, i % k);
        e2m1::decode(code) as f64 * e4m3::decode(scales[row * (k / BLOCK) + col / BLOCK]) as f64
    };
    crate::compare::unpack(codes).into_iter().enumerate().map(value).collect()
}

/// Values `[rows, k]` of an operand, without the global scale.
pub fn values(side: &Side, k: usize) -> Vec<f64> {
    match side {
        Side::Bf16(x) => x.iter().map(|&v| bf::to_f32(v) as f64).collect(),
        Side::Nvfp4(q) | Side::Unpacked(q, _) => code_values(&q.codes, &q.scales, k),
    }
}

/// What a matrix unit may lose of a sum of products of BF16 operands.
fn flushed(pairs: impl Iterator<Item = (f64, f64)>) -> f64 {
    const NORMAL: f64 = f32::MIN_POSITIVE as f64;
    let subnormal = |x: f64| x != 0.0 && x.abs() < NORMAL;
    let lost = |(a, b): (f64, f64)| if subnormal(a) || subnormal(b) { (a * b).abs() } else { 0.0 };
    pairs.map(|pair| if pair.0 * pair.1 == 0.0 { 0.0 } else { lost(pair) + NORMAL }).sum()
}

fn decode_scale(side: &Side, expert: usize) -> f64 {
    side.packed().map_or(1.0, |q| GlobalScale::from_amax(q.amax[expert]).decode as f64)
}

/// `[T, output columns]` before rounding to BF16; zero past the last expert's rows.
pub fn gemm(case: &Gemm<'_>) -> Vec<Expected> {
    let Gemm { a, w, shape, side, groups, bias } = case;
    let (cols, contraction) = side.dims(*shape);
    let (a_values, w_values) = (values(a, contraction), values(w, shape.k));
    let mut out = vec![Expected::exactly(0.0); groups.rows() * cols];
    for e in 0..groups.experts() {
        let alpha = decode_scale(a, e) * decode_scale(w, e);
        let weight = |j: usize, i: usize| {
            let (row, col) = if *side == contract::Side::Fprop { (j, i) } else { (i, j) };
            w_values[(e * shape.n + row) * shape.k + col]
        };
        for t in groups.range(e) {
            let row = &a_values[t * contraction..(t + 1) * contraction];
            for j in 0..cols {
                let sum: Sum = row.iter().enumerate().map(|(i, a)| a * weight(j, i)).collect();
                let mut product = sum.scaled(alpha);
                if a.packed().is_none() && w.packed().is_none() {
                    product.slack += flushed(row.iter().enumerate().map(|(i, &a)| (a, weight(j, i))));
                }
                if let Some(bias) = bias {
                    let scale = bias.prob.map_or(1.0, |prob| prob[t] as f64);
                    product.sum = product.sum.plus(bias.bias[e * cols + j] as f64 * scale);
                }
                out[t * cols + j] = product.f32();
            }
        }
    }
    out
}

/// `[E, n, k]`, added to what the buffers hold where the case accumulates, rounded to their type.
pub fn wgrad(case: &Wgrad<'_>) -> Vec<Expected> {
    let (n, k, groups) = (case.shape.n, case.shape.k, case.groups);
    let (a, b) = (values(case.a, groups.padded_rows()), values(case.b, groups.padded_rows()));
    let quantized = case.a.packed().is_some();
    let before = |i: usize| match &case.before {
        Grads::F32(dw) => dw[i] as f64,
        Grads::Bf16(dw) => bf::to_f32(dw[i]) as f64,
    };
    let mut out = Vec::with_capacity(groups.experts() * n * k);
    for e in 0..groups.experts() {
        let alpha = decode_scale(case.a, e) * decode_scale(case.b, e);
        let tokens = if quantized { groups.padded_range(e) } else { groups.range(e) };
        let at = |x: &[f64], row: usize, width: usize, t: usize| {
            if quantized { x[row * groups.padded_rows() + t] } else { x[t * width + row] }
        };
        for i in 0..n {
            for j in 0..k {
                let pairs = tokens.clone().map(|t| (at(&a, i, n, t), at(&b, j, k, t)));
                let sum: Sum = pairs.clone().map(|(a, b)| a * b).collect();
                let mut product = sum.scaled(alpha);
                if !quantized {
                    product.slack += flushed(pairs);
                }
                let accumulate = case.mode == GradMode::Accumulate;
                if accumulate {
                    product.sum = product.sum.plus(before((e * n + i) * k + j));
                }
                let untouched = accumulate && groups.range(e).is_empty();
                out.push(match &case.before {
                    _ if untouched || product.sum.magnitude == 0.0 => Expected::exactly(product.sum.value),
                    Grads::F32(_) => product.f32(),
                    Grads::Bf16(_) => rounded(product.f32()),
                });
            }
        }
    }
    out
}

/// The largest finite magnitude of each expert's rows.
pub fn amax(x: &[bf16], cols: usize, groups: &Groups) -> Vec<f32> {
    let of_expert = |e: usize| {
        let rows = groups.range(e);
        let finite = x[rows.start * cols..rows.end * cols].iter().map(|&v| bf::to_f32(v).abs());
        finite.filter(|v| v.is_finite()).fold(0.0, f32::max)
    };
    (0..groups.experts()).map(of_expert).collect()
}
