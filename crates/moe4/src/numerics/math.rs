//! `exp`, `tanh` and the logistic function, for activations.
//!
//! System libraries differ in the last bits, and hardware approximations of 2^-11 move weight gradients by
//! percents. These are written out in `f32` operations without branches or fused multiply-add: the same bytes on
//! every machine, loops over them vectorize, and the relative error stays below 5e-7.
//!
//! The polynomials are those of the Cephes library (S. Moshier), files `expf.c` and `tanhf.c`.

use std::ops::{Add, Div, Mul, Sub};

/// The operations that activations need, so that each formula is written once for `f32`, for vectors of it, and for `f64`.
pub trait Real:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// The nearest value of this type.
    fn from_f32(v: f32) -> Self;
    /// Clamps from above; NaN passes through.
    fn at_most(self, limit: Self) -> Self;
    /// Clamps from below; NaN passes through.
    fn at_least(self, limit: Self) -> Self;
    /// `then` if `self < other`, else `otherwise`.
    fn if_less(self, other: Self, then: Self, otherwise: Self) -> Self;
    /// `(σ(x), σ'(x))` of the logistic function `1/(1+exp(-x))`.
    fn sigmoid(self) -> (Self, Self);
    /// `(tanh x, tanh' x)`.
    fn tanh(self) -> (Self, Self);
}

/// What the functions of this file take apart: `f32`, or each lane of a vector of it. The operations of [`Real`] have to be
/// single `f32` operations, rounded once.
pub trait Single: Real {
    /// Without its sign.
    fn magnitude(self) -> Self;
    /// With the sign of `other`.
    fn with_sign_of(self, other: Self) -> Self;
    /// `(self · 2^(n/2)) · 2^(n - n/2)` for `n = integer_bits(shifted) - integer_bits(ROUND)`, halves rounded down. Two steps,
    /// since `n` reaches 128 and -150, beyond what one exponent field holds.
    fn times_power(self, shifted: Self) -> Self;
}

/// `1.5 · 2^23`: adding it leaves the nearest integer in the low mantissa bits.
pub(crate) const ROUND: f32 = 12_582_912.0;

impl Real for f32 {
    #[inline(always)]
    fn from_f32(v: f32) -> Self {
        v
    }
    #[inline(always)]
    fn at_most(self, limit: Self) -> Self {
        if self > limit { limit } else { self }
    }
    #[inline(always)]
    fn at_least(self, limit: Self) -> Self {
        if self < limit { limit } else { self }
    }
    #[inline(always)]
    fn if_less(self, other: Self, then: Self, otherwise: Self) -> Self {
        if self < other { then } else { otherwise }
    }
    #[inline(always)]
    fn sigmoid(self) -> (Self, Self) {
        sigmoid(self)
    }
    #[inline(always)]
    fn tanh(self) -> (Self, Self) {
        tanh(self)
    }
}

impl Single for f32 {
    #[inline(always)]
    fn magnitude(self) -> Self {
        self.abs()
    }
    #[inline(always)]
    fn with_sign_of(self, other: Self) -> Self {
        self.copysign(other)
    }
    #[inline(always)]
    fn times_power(self, shifted: Self) -> Self {
        let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
        let half = n >> 1;
        (self * power_of_two(half)) * power_of_two(n - half)
    }
}

impl Real for f64 {
    fn from_f32(v: f32) -> Self {
        v as f64
    }
    fn at_most(self, limit: Self) -> Self {
        if self > limit { limit } else { self }
    }
    fn at_least(self, limit: Self) -> Self {
        if self < limit { limit } else { self }
    }
    fn if_less(self, other: Self, then: Self, otherwise: Self) -> Self {
        if self < other { then } else { otherwise }
    }
    fn sigmoid(self) -> (Self, Self) {
        let e = (-self.abs()).exp();
        let s = if self < 0.0 { e / (1.0 + e) } else { 1.0 / (1.0 + e) };
        (s, e / ((1.0 + e) * (1.0 + e)))
    }
    fn tanh(self) -> (Self, Self) {
        let e = (-2.0 * self.abs()).exp();
        (f64::tanh(self), 4.0 * e / ((1.0 + e) * (1.0 + e)))
    }
}

/// `e^x`. Overflows to infinity above 88.73, goes to 0 through the subnormals; NaN stays NaN.
#[inline(always)]
pub fn exp<S: Single>(x: S) -> S {
    let c = S::from_f32;
    // Beyond these bounds the result is infinite or zero anyway; NaN fails both comparisons and passes through.
    let x = x.at_most(c(89.0)).at_least(c(-104.0));
    let shifted = x * c(std::f32::consts::LOG2_E) + c(ROUND);
    let n = shifted - c(ROUND);
    let r = (x - n * c(0.693_359_4)) - n * c(-2.121_944_4e-4);
    let mut p = c(1.987_569_1e-4);
    p = p * r + c(1.398_199_9e-3);
    p = p * r + c(8.333_452e-3);
    p = p * r + c(4.166_579_6e-2);
    p = p * r + c(1.666_666_5e-1);
    p = p * r + c(0.500_000_06);
    (p * (r * r) + r + c(1.0)).times_power(shifted)
}

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `(σ(x), σ'(x))`, both from one exponential and without cancellation.
#[inline(always)]
pub fn sigmoid<S: Single>(x: S) -> (S, S) {
    let (zero, one) = (S::from_f32(0.0), S::from_f32(1.0));
    let e = exp(zero - x.magnitude());
    let r = one / (one + e);
    (x.if_less(zero, e * r, r), (e * r) * r)
}

/// `(tanh x, 1 - tanh² x)`, both from one exponential and without cancellation.
#[inline(always)]
pub fn tanh<S: Single>(x: S) -> (S, S) {
    let c = S::from_f32;
    let e = exp(c(-2.0) * x.magnitude());
    let r = c(1.0) / (c(1.0) + e);
    let large = (c(1.0) - e) * r;
    let z = x * x;
    let mut p = c(-5.704_988_7e-3);
    p = p * z + c(2.063_908_8e-2);
    p = p * z + c(-5.373_971_6e-2);
    p = p * z + c(1.333_144_2e-1);
    p = p * z + c(-0.333_332_83);
    let small = p * z * x + x;
    let t = x.magnitude().if_less(c(0.625), small, large.with_sign_of(x));
    (t, (c(4.0) * e) * (r * r))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs() -> impl Iterator<Item = f32> {
        (-200_000..=200_000).map(|i| i as f32 * 4.7e-4).chain((-2000..2000).map(|i| i as f32 * 1e-5))
    }

    /// Relative error, where the exact value is a normal `f32`.
    fn check(name: &str, x: f32, got: f32, exact: f64) {
        if exact.abs() < 1.2e-38 {
            assert!((got as f64 - exact).abs() < 1.2e-38, "{name}({x}) = {got:e}, expected {exact:e}");
        } else if exact < f32::MAX as f64 {
            let error = ((got as f64 - exact) / exact).abs();
            assert!(error < 5e-7, "{name}({x}) = {got:e}, expected {exact:e}, off by {error:e}");
        } else {
            assert_eq!(got, f32::INFINITY, "{name}({x})");
        }
    }

    #[test]
    fn close_to_the_exact_functions() {
        for x in inputs() {
            let wide = x as f64;
            check("exp", x, exp(x), wide.exp());
            let (s, ds) = Real::sigmoid(wide);
            check("sigmoid", x, sigmoid(x).0, s);
            check("sigmoid'", x, sigmoid(x).1, ds);
            let (t, dt) = Real::tanh(wide);
            check("tanh", x, tanh(x).0, t);
            check("tanh'", x, tanh(x).1, dt);
        }
    }

    #[test]
    fn special_values() {
        assert_eq!((exp(0.0), exp(f32::INFINITY), exp(f32::NEG_INFINITY)), (1.0, f32::INFINITY, 0.0));
        assert_eq!((sigmoid(f32::INFINITY).0, sigmoid(f32::NEG_INFINITY).0, sigmoid(0.0).0), (1.0, 0.0, 0.5));
        assert_eq!((tanh(f32::INFINITY).0, tanh(f32::NEG_INFINITY).0, tanh(0.0)), (1.0, -1.0, (0.0, 1.0)));
        assert!(exp(f32::NAN).is_nan() && sigmoid(f32::NAN).0.is_nan() && tanh(f32::NAN).0.is_nan());
    }
}
