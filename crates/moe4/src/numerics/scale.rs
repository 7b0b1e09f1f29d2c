//! The two levels of NVFP4 scaling: a global scale per tensor (here: per expert) and an E4M3 scale per block.
//!
//! ```text
//! S_enc = min(2688 / amax, FLT_MAX)         2688 = 448 · 6; one true division; 1 when amax is 0
//! S_dec = 1 / S_enc                         may be subnormal
//! s     = E4M3(min(block_amax · (S_enc · fl(1/6)), 448))
//! e     = min(1 / (f32(s) · S_dec), FLT_MAX)
//! code  = E2M1(x · e)
//! ```
//!
//! The order of every operation is part of the contract: multiplying by a reciprocal instead of dividing, or
//! dividing `x` instead of multiplying by `e`, changes bytes.

use super::{e2m1, e4m3};
use half::bf16;

/// `448 · 6`: the largest magnitude that a block can hold under a global scale of 1.
pub const RANGE: f32 = e4m3::MAX * e2m1::MAX;

/// The encode and decode scale of one tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GlobalScale {
    /// `S_enc`: multiplies values on the way in.
    pub encode: f32,
    /// `S_dec = 1 / S_enc`: multiplies values on the way out.
    pub decode: f32,
}

impl GlobalScale {
    /// From the largest finite magnitude of the tensor. An `amax` of 0 gives 1.
    #[inline(always)]
    pub fn from_amax(amax: f32) -> Self {
        let encode = if amax == 0.0 { 1.0 } else { (RANGE / amax).min(f32::MAX) };
        Self { encode, decode: 1.0 / encode }
    }

    /// The E4M3 scale of a block whose largest finite magnitude is `block_amax`.
    #[inline(always)]
    pub fn block_scale(self, block_amax: f32) -> u8 {
        e4m3::encode((block_amax * (self.encode * (1.0 / 6.0))).min(f32::MAX).min(e4m3::MAX))
    }

    /// What each element of a block with scale byte `scale` is multiplied by before it is rounded to E2M1.
    ///
    /// A block scale that rounded to zero gives `FLT_MAX`: codes become ±6 under a zero scale, value 0.
    #[inline(always)]
    pub fn multiplier(self, scale: u8) -> f32 {
        (1.0 / (e4m3::decode(scale) * self.decode)).min(f32::MAX)
    }
}

/// The factor of a product of two quantized operands: the product of their decode scales, computed in `f64`.
///
/// Capped at `FLT_MAX`, so that a zero sum stays zero when both operands are near the top of the BF16 range.
#[inline]
pub fn product_alpha(amax_a: f32, amax_b: f32) -> f32 {
    let (a, b) = (GlobalScale::from_amax(amax_a), GlobalScale::from_amax(amax_b));
    ((a.decode as f64 * b.decode as f64) as f32).min(f32::MAX)
}

/// The value of a code under its block scale, without the global scale: `code · f32(scale)`.
///
/// Exact: two significant bits times four. A negative code under a scale of zero and code 8 under any scale give -0. A
/// NaN scale gives the quiet NaN 0x7FC0, whatever the code.
#[inline(always)]
pub fn unpacked(code: u8, scale: u8) -> bf16 {
    if scale & 0x7F == e4m3::NAN {
        return bf16::from_bits(0x7FC0);
    }
    super::bf16::from_f32(e2m1::decode(code) * e4m3::decode(scale))
}

/// The value of a code: `((f32(scale) · amax) · fl(1/2688)) · code`, in this order.
///
/// Where `scale · amax` exceeds `FLT_MAX` the value is infinite, and that of a code of zero is NaN. Every NaN is the quiet
/// 0x7FC0_0000, so that its bits do not depend on the hardware.
#[inline(always)]
pub fn dequantize(code: u8, scale: u8, amax: f32) -> f32 {
    let value = ((e4m3::decode(scale) * amax) * (1.0 / RANGE)) * e2m1::decode(code);
    if value.is_nan() { f32::from_bits(0x7FC0_0000) } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_tensor() {
        let g = GlobalScale::from_amax(0.0);
        assert_eq!((g.encode, g.decode), (1.0, 1.0));
        assert_eq!(g.block_scale(0.0), 0);
        assert_eq!(g.multiplier(0), f32::MAX);
        assert_eq!(dequantize(0, 0, 0.0), 0.0);
    }

    #[test]
    fn unpacked_values_are_exact_and_keep_their_sign() {
        for (code, scale) in (0..16).flat_map(|code| (0..0x7F).map(move |scale| (code, scale))) {
            let exact = e2m1::decode(code) * e4m3::decode(scale);
            assert_eq!(unpacked(code, scale).to_f32().to_bits(), exact.to_bits(), "{code} {scale:#04x}");
        }
        assert_eq!([unpacked(8, 0x38), unpacked(15, 0)].map(bf16::to_bits), [0x8000; 2]);
        assert!((0..16).all(|code| unpacked(code, e4m3::NAN).to_bits() == 0x7FC0));
    }

    #[test]
    fn extreme_amaxes_stay_finite() {
        for amax in [f32::from_bits(1), f32::MIN_POSITIVE, 1e-30, 1.0, 1e5, f32::MAX] {
            let g = GlobalScale::from_amax(amax);
            assert!(
                g.encode.is_finite() && g.encode > 0.0 && g.decode.is_finite() && g.decode > 0.0,
                "{amax:e}"
            );
            assert_ne!(g.block_scale(amax) & 0x7F, e4m3::NAN);
            assert!(g.multiplier(g.block_scale(amax)).is_finite());
        }
    }

    #[test]
    fn every_nan_is_the_same() {
        let nan = |code, scale, amax| dequantize(code, scale, amax).to_bits() == 0x7FC0_0000;
        assert!((0..16).all(|code| nan(code, e4m3::NAN, 1.0)));
        // 448 · 3e38 is infinite, and no zero times infinity.
        assert!(nan(0, 0x7E, 3e38) && nan(8, 0x7E, 3e38));
        assert_eq!(dequantize(9, 0x7E, 3e38), f32::NEG_INFINITY);
    }

    #[test]
    fn large_inputs_survive_the_global_scale() {
        let g = GlobalScale::from_amax(1e5);
        let s = g.block_scale(1e5);
        let code = e2m1::encode(1e5 * g.multiplier(s));
        assert!((dequantize(code, s, 1e5) - 1e5).abs() < 1.0);
    }

    #[test]
    fn multiplying_by_the_reciprocal_is_not_dividing() {
        // arch-hdl-lang/arch-com#905: the contract multiplies by `1/(s · S_dec)`.
        let (v, s) = (0.02392577938735485_f64 as f32, 0.013671875f32);
        assert_eq!(e2m1::encode(v * (1.0 / s)), 4);
        assert_eq!(e2m1::encode(v / s), 3);
    }

    #[test]
    fn an_alpha_beyond_f32_keeps_zero_sums_zero() {
        assert_eq!(0.0 * product_alpha(f32::MAX, f32::MAX), 0.0);
    }
}
