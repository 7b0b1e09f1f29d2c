//! Rounding to bfloat16.
//!
//! [`round`] stays in `f32` and has no branches, so that loops over it vectorize; it agrees with
//! `half::bf16::from_f32` on every input (ties to even, subnormals kept, overflow to infinity, NaN stays NaN).

use half::bf16;

/// The BF16 value nearest to `v`, as an `f32`. Ties go to the even mantissa.
#[inline(always)]
pub fn round(v: f32) -> f32 {
    f32::from_bits((bits(v) as u32) << 16)
}

/// The BF16 bit pattern nearest to `v`.
#[inline(always)]
pub fn bits(v: f32) -> u16 {
    let b = v.to_bits();
    // Adding just under half a unit in the last place, plus the parity bit, carries exactly when rounding to
    // nearest even goes up.
    let nearest = b.wrapping_add(0x7FFF + ((b >> 16) & 1));
    let quiet_nan = b | 0x0040_0000;
    let is_nan = (b & 0x7FFF_FFFF) > 0x7F80_0000;
    ((if is_nan { quiet_nan } else { nearest }) >> 16) as u16
}

/// [`bits`] as a typed value.
#[inline(always)]
pub fn from_f32(v: f32) -> bf16 {
    bf16::from_bits(bits(v))
}

/// The exact `f32` value of `v`.
#[inline(always)]
pub fn to_f32(v: bf16) -> f32 {
    f32::from_bits((v.to_bits() as u32) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bf16_value_survives_the_round_trip() {
        for b in 0..=u16::MAX {
            let v = bf16::from_bits(b);
            let back = from_f32(to_f32(v));
            assert!(back.to_bits() == b || (v.is_nan() && back.is_nan()), "{b:#06x}");
        }
    }

    #[test]
    fn agrees_with_half_around_every_value_and_midpoint() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let v = f32::from_bits(((high as u32) << 16) | low);
                let (ours, theirs) = (from_f32(v), bf16::from_f32(v));
                assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{v:e}");
            }
        }
    }
}
