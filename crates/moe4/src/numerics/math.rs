//! `exp`, `tanh` and the logistic function, for activations.
//!
//! System libraries differ in the last bits, and hardware approximations of 2^-11 move weight gradients by
//! percents. These are written out in `f32` operations without branches or fused multiply-add: the same bytes on
//! every machine, loops over them vectorize, and the relative error stays below 5e-7.
//!
//! The polynomials are those of the Cephes library (S. Moshier), files `expf.c` and `tanhf.c`.

/// The operations that activations need, so that each formula is written once for `f32` and `f64`.
pub trait Real:
    Copy
    + PartialOrd
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
{
    /// The nearest value of this type.
    fn from_f32(v: f32) -> Self;
    /// Clamps from above; NaN passes through.
    fn at_most(self, limit: Self) -> Self;
    /// Clamps from below; NaN passes through.
    fn at_least(self, limit: Self) -> Self;
    /// `(σ(x), σ'(x))` of the logistic function `1/(1+exp(-x))`.
    fn sigmoid(self) -> (Self, Self);
    /// `(tanh x, tanh' x)`.
    fn tanh(self) -> (Self, Self);
}

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
    fn sigmoid(self) -> (Self, Self) {
        sigmoid(self)
    }
    #[inline(always)]
    fn tanh(self) -> (Self, Self) {
        tanh(self)
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
pub fn exp(x: f32) -> f32 {
    // Beyond these bounds the result is infinite or zero anyway; NaN fails both comparisons and passes through.
    let x = x.at_most(89.0).at_least(-104.0);
    // Adding 1.5 · 2^23 leaves the nearest integer in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.500_000_06;
    let p = p * (r * r) + r + 1.0;
    // 2^n in two steps: n reaches 128 and -150, beyond what one exponent field holds.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    (p * power_of_two(half)) * power_of_two(n - half)
}

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `(σ(x), σ'(x))`, both from one exponential and without cancellation.
#[inline(always)]
pub fn sigmoid(x: f32) -> (f32, f32) {
    let e = exp(-x.abs());
    let r = 1.0 / (1.0 + e);
    (if x < 0.0 { e * r } else { r }, (e * r) * r)
}

/// `(tanh x, 1 - tanh² x)`, both from one exponential and without cancellation.
#[inline(always)]
pub fn tanh(x: f32) -> (f32, f32) {
    let e = exp(-2.0 * x.abs());
    let r = 1.0 / (1.0 + e);
    let large = (1.0 - e) * r;
    let z = x * x;
    let mut p = -5.704_988_7e-3;
    p = p * z + 2.063_908_8e-2;
    p = p * z + -5.373_971_6e-2;
    p = p * z + 1.333_144_2e-1;
    p = p * z + -0.333_332_83;
    let small = p * z * x + x;
    let t = if x.abs() < 0.625 { small } else { large.copysign(x) };
    (t, (4.0 * e) * (r * r))
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
