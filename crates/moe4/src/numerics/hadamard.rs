//! The 16-point randomized Hadamard transform (RHT).
//!
//! `y = ((s ∘ x) · H16) · 0.25` with signs `s` from a 16-bit mask and the natural-order Sylvester matrix
//! `H[i][j] = (-1)^popcount(i & j)`. With the factor 1/4 the transform is orthogonal and `|y| <= 4 max|x|`.
//!
//! The order of the additions is part of the contract, since one BF16 unit before the cast flips codes: signs
//! first, then the butterfly in `f32` with strides 1, 2, 4, 8, then the factor, then one rounding to BF16.

use super::{BLOCK, bf16};
use std::fmt;
use std::str::FromStr;

/// Which of the 16 inputs of a transform are negated: bit `i` set negates element `i`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SignMask(pub u16);

impl SignMask {
    /// The mask of the published NVFP4 recipe: `+ + + - + - - - - - - + - + - -`.
    pub const DEFAULT: SignMask = SignMask(0xD7E8);
    /// The unsigned transform.
    pub const NONE: SignMask = SignMask(0);

    /// `-1.0` or `1.0` for element `i`.
    #[inline(always)]
    pub fn sign(self, i: usize) -> f32 {
        if self.0 >> i & 1 == 1 { -1.0 } else { 1.0 }
    }

    /// The 16 signs as XOR masks for `f32` bit patterns.
    #[inline(always)]
    pub fn sign_bits(self) -> [u32; BLOCK] {
        std::array::from_fn(|i| ((self.0 >> i & 1) as u32) << 31)
    }
}

impl Default for SignMask {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl fmt::Display for SignMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:04X}", self.0)
    }
}

impl fmt::Debug for SignMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SignMask({self})")
    }
}

/// A sign mask that is not a 16-bit number.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected a 16-bit sign mask such as 0xD7E8 or 0, got '{0}'")]
pub struct ParseSignMaskError(String);

impl FromStr for SignMask {
    type Err = ParseSignMaskError;

    /// Reads hexadecimal after `0x`, else decimal.
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let parsed = match s.strip_prefix("0x").or_else(|| s.strip_prefix("0X")) {
            Some(hex) => u16::from_str_radix(hex, 16),
            None => s.parse(),
        };
        parsed.map(SignMask).map_err(|_| ParseSignMaskError(s.to_owned()))
    }
}

/// The transform of one group, rounded once to BF16 (returned as exact `f32`).
#[inline(always)]
pub fn rht(mut x: [f32; BLOCK], mask: SignMask) -> [f32; BLOCK] {
    for (v, sign) in x.iter_mut().zip(mask.sign_bits()) {
        *v = f32::from_bits(v.to_bits() ^ sign);
    }
    let mut stride = 1;
    while stride < BLOCK {
        let mut start = 0;
        while start < BLOCK {
            for i in start..start + stride {
                let (a, b) = (x[i], x[i + stride]);
                x[i] = a + b;
                x[i + stride] = a - b;
            }
            start += 2 * stride;
        }
        stride *= 2;
    }
    x.map(|v| bf16::round(v * 0.25))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matrix(x: [f32; 16], mask: SignMask) -> [f64; 16] {
        std::array::from_fn(|j| {
            (0..16)
                .map(|i| {
                    x[i] as f64
                        * mask.sign(i) as f64
                        * if (i & j).count_ones() % 2 == 1 { -0.25 } else { 0.25 }
                })
                .sum()
        })
    }

    #[test]
    fn default_mask_has_the_published_signs() {
        let signs: String =
            (0..16).map(|i| if SignMask::DEFAULT.sign(i) < 0.0 { '-' } else { '+' }).collect();
        assert_eq!(signs, "+++-+------+-+--");
    }

    #[test]
    fn masks_parse_and_print() {
        assert_eq!("0xD7E8".parse(), Ok(SignMask::DEFAULT));
        assert_eq!("0".parse(), Ok(SignMask::NONE));
        assert_eq!(SignMask::DEFAULT.to_string(), "0xD7E8");
        for bad in ["", "0x", "0x10000", "-1", "d7e8", "off"] {
            assert!(bad.parse::<SignMask>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn small_integers_are_transformed_exactly(x in prop::array::uniform16(-8i32..=8), mask: u16) {
            // Sums of 16 such integers over 4 need at most 8 significant bits: no rounding anywhere.
            let x = x.map(|v| v as f32);
            let expected = matrix(x, SignMask(mask));
            prop_assert_eq!(rht(x, SignMask(mask)).map(f64::from), expected);
        }

        #[test]
        fn amax_grows_at_most_four_times(x in prop::array::uniform16(-1e3f32..1e3), mask: u16) {
            let x = x.map(bf16::round);
            let before = x.iter().fold(0f32, |m, v| m.max(v.abs()));
            let after = rht(x, SignMask(mask)).iter().fold(0f32, |m, v| m.max(v.abs()));
            prop_assert!(after <= bf16::round(4.0 * before));
        }
    }
}
