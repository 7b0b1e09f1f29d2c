//! Numbers to E2M1 codes, and amaxes to E4M3 scales, sixteen at a time.
//!
//! ```text
//! magnitude to code, a = min(|v|, 6):
//!     m = 2^(22 + max(exponent of a, 0)) + 6 units in its last place
//!     t = a + m            rounds a to the grid of its binade, in whole units of m; ties to even; downwards if stochastic
//!     code = (t + (t >> 22)) mod 8, of the bits of t: units, plus two codes for each binade. The 6 takes the bias off.
//! ```

use super::registers::{MAGNITUDE, bits, splat};
use crate::numerics::e4m3;
use crate::numerics::scale::GlobalScale;
use std::arch::x86_64::*;

const EXPONENT: i32 = 0x7F80_0000;
const ONE: i32 = 0x3F80_0000;

/// The exponent of `a >= 0` as bits, that of 1 at least, plus `more`.
#[inline]
#[target_feature(enable = "avx512f")]
fn binade(a: __m512, more: i32) -> __m512 {
    let exponent = _mm512_max_epi32(_mm512_and_si512(bits(a), splat(EXPONENT)), splat(ONE));
    _mm512_castsi512_ps(_mm512_add_epi32(exponent, splat(more)))
}

/// What is added to a magnitude, see the head of this file.
const GRID: i32 = (22 << 23) + 6;

/// Codes with their signs from `v` and `t`, in the low four bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn code(v: __m512, t: __m512) -> __m512i {
    let code = _mm512_add_epi32(bits(t), _mm512_srli_epi32::<22>(bits(t)));
    let sign = _mm512_srli_epi32::<28>(bits(v));
    // The low three bits of the code, the others of the sign.
    _mm512_ternarylogic_epi32::<0xCA>(splat(7), code, sign)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn capped_magnitude(v: __m512) -> __m512 {
    _mm512_min_ps(_mm512_castsi512_ps(_mm512_and_si512(bits(v), splat(MAGNITUDE))), _mm512_set1_ps(6.0))
}

/// [`e2m1::encode`](crate::numerics::e2m1::encode) of numbers.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn nearest(v: __m512) -> __m512i {
    let a = capped_magnitude(v);
    code(v, _mm512_add_ps(a, binade(a, GRID)))
}

/// [`e2m1::encode_stochastic`](crate::numerics::e2m1::encode_stochastic) of numbers; `random` are bytes.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn stochastic(v: __m512, random: __m512i) -> __m512i {
    let a = capped_magnitude(v);
    // step / 256 is a power of two, so the product is exact.
    let t = _mm512_fmadd_ps(_mm512_cvtepi32_ps(random), binade(a, -(9 << 23)), a);
    const DOWN: i32 = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    code(v, _mm512_add_round_ps::<DOWN>(t, binade(t, GRID)))
}

/// What the block scales of an expert are made with.
#[derive(Clone, Copy)]
pub(super) struct Scaler {
    /// `S_enc / 6`.
    sixth: f32,
    decode: f32,
}

impl Scaler {
    pub(super) fn new(global: GlobalScale) -> Self {
        Self { sixth: global.encode * (1.0 / 6.0), decode: global.decode }
    }

    /// Scale bytes of sixteen blocks by their amaxes, which are finite, and what multiplies their elements.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn of(self, amax: __m512) -> (__m512i, __m512) {
        let d = _mm512_min_ps(_mm512_mul_ps(amax, _mm512_set1_ps(self.sixth)), _mm512_set1_ps(e4m3::MAX));
        let odd = _mm512_and_si512(_mm512_srli_epi32::<20>(bits(d)), splat(1));
        let rounded = _mm512_add_epi32(_mm512_add_epi32(bits(d), splat(0x7_FFFF)), odd);
        let normal = _mm512_sub_epi32(_mm512_srli_epi32::<20>(rounded), splat(120 << 3));
        let magic = _mm512_set1_ps(16384.0);
        let subnormal = _mm512_sub_epi32(bits(_mm512_add_ps(d, magic)), bits(magic));
        let small = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(d, _mm512_set1_ps(0.015625));
        let scale = _mm512_mask_mov_epi32(normal, small, subnormal);
        // Back to f32: the exponent's bias from 7 to 127, or steps of 2^-9.
        let value = _mm512_castsi512_ps(_mm512_slli_epi32::<20>(_mm512_add_epi32(scale, splat(120 << 3))));
        let steps = _mm512_mul_ps(_mm512_cvtepi32_ps(scale), _mm512_set1_ps(0.001953125));
        let subnormal = _mm512_cmplt_epi32_mask(scale, splat(8));
        let value = _mm512_mask_mov_ps(value, subnormal, steps);
        let divisor = _mm512_mul_ps(value, _mm512_set1_ps(self.decode));
        let multiplier = _mm512_div_ps(_mm512_set1_ps(1.0), divisor);
        (scale, _mm512_min_ps(multiplier, _mm512_set1_ps(f32::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::quantize_avx512::available;
    use crate::kernels::cpu::quantize_avx512::registers::{lane_bytes, lanes};
    use crate::numerics::e2m1;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn encode(v: [f32; 16], random: Option<u8>) -> [u8; 16] {
        // SAFETY: sixteen elements.
        let v = unsafe { _mm512_loadu_ps(v.as_ptr()) };
        lane_bytes(match random {
            None => nearest(v),
            Some(random) => stochastic(v, splat(random as i32)),
        })
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn scale(global: GlobalScale, amax: [f32; 16]) -> ([u8; 16], [f32; 16]) {
        // SAFETY: sixteen elements.
        let (scale, multiplier) = Scaler::new(global).of(unsafe { _mm512_loadu_ps(amax.as_ptr()) });
        (lane_bytes(scale), lanes(multiplier))
    }

    /// Around every BF16 value that is a number: the scalar functions.
    #[test]
    fn codes_are_those_of_the_scalar_functions() {
        if !available() {
            return;
        }
        for high in (0..=u16::MAX).filter(|high| high & 0x7FFF < 0x7F80) {
            let lows = [0u32, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
            let v: [f32; 16] = std::array::from_fn(|i| f32::from_bits((high as u32) << 16 | lows[i % 8]));
            // SAFETY: the features are there.
            assert_eq!(unsafe { encode(v, None) }, v.map(e2m1::encode), "{v:?}");
            for random in [0, 1, 127, 128, 254, 255, high as u8] {
                // SAFETY: the features are there.
                let got = unsafe { encode(v, Some(random)) };
                assert_eq!(got, v.map(|v| e2m1::encode_stochastic(v, random)), "{v:?} {random}");
            }
        }
        let infinite = [f32::INFINITY, f32::NEG_INFINITY].repeat(8).try_into().expect("sixteen");
        // SAFETY: the features are there.
        assert_eq!(unsafe { encode(infinite, None) }[..2], [7, 15]);
    }

    #[test]
    fn scales_are_those_of_the_scalar_functions() {
        if !available() {
            return;
        }
        for amax in [0.0, f32::from_bits(1), 1e-38, 1e-3, 1.0, 448.0, 2688.0, 1e5, 3e38, f32::MAX] {
            let global = GlobalScale::from_amax(amax);
            for high in (0..0x7F80u16).step_by(16) {
                let blocks: [f32; 16] =
                    std::array::from_fn(|i| f32::from_bits((high as u32 + i as u32) << 16));
                // SAFETY: the features are there.
                let (scale, multiplier) = unsafe { scale(global, blocks) };
                assert_eq!(scale, blocks.map(|b| global.block_scale(b)), "{amax} {blocks:?}");
                assert_eq!(multiplier, scale.map(|s| global.multiplier(s)), "{amax} {blocks:?}");
            }
        }
    }
}
