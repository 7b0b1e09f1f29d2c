//! E2M1, the 4-bit floating-point format: one sign bit, two exponent bits, one mantissa bit.
//!
//! Code `s eem` stands for the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 (codes 0 to 7); bit 3 is the sign. There is
//! no infinity and no NaN. Codes are kept in the low nibble of a `u8`; two are packed in a byte, the even element
//! in the low nibble.
//!
//! The encoders count the thresholds that a magnitude has passed instead of branching, so that loops over them
//! vectorize.

/// The magnitude of codes 0 to 7.
pub const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The largest magnitude.
pub const MAX: f32 = 6.0;

/// The value of every code, sign included.
pub const VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Nearest code, ties to the even code, saturating at ±6. The sign survives, also that of a zero result (so -0.0
/// gives code 8). NaN gives +6 (code 7), as the hardware conversion does.
#[inline(always)]
pub fn encode(v: f32) -> u8 {
    let a = v.abs();
    // `>` where the tie goes down to the even code, `>=` where it goes up.
    let code = (a > 0.25) as u8
        + (a >= 0.75) as u8
        + (a > 1.25) as u8
        + (a >= 1.75) as u8
        + (a > 2.5) as u8
        + (a >= 3.5) as u8
        + (a > 5.0) as u8;
    finish(v, code)
}

/// Stochastic rounding with 8 random bits: `t = |v| + random/256 · step(|v|)`, then down to the grid.
///
/// `step` is the distance between neighbouring magnitudes at `|v|`: 0.5 below 2, 1 below 4, else 2. The
/// probability of rounding up is `floor(256 · frac)/256` for a distance `frac` above the lower neighbour.
/// Saturation, sign and NaN as in [`encode`].
#[inline(always)]
pub fn encode_stochastic(v: f32, random: u8) -> u8 {
    let a = v.abs();
    let step = if a < 2.0 {
        0.5
    } else if a < 4.0 {
        1.0
    } else {
        2.0
    };
    let t = a + (random as f32 * (1.0 / 256.0)) * step;
    let code = (t >= 0.5) as u8
        + (t >= 1.0) as u8
        + (t >= 1.5) as u8
        + (t >= 2.0) as u8
        + (t >= 3.0) as u8
        + (t >= 4.0) as u8
        + (t >= 6.0) as u8;
    finish(v, code)
}

#[inline(always)]
fn finish(v: f32, magnitude: u8) -> u8 {
    let sign = ((v.to_bits() >> 28) & 8) as u8;
    if v.is_nan() { 7 } else { magnitude | sign }
}

/// The value of the code in the low nibble of `code`.
#[inline(always)]
pub fn decode(code: u8) -> f32 {
    VALUES[(code & 15) as usize]
}

/// Packs two codes: the even element goes to the low nibble.
#[inline(always)]
pub fn pack(even: u8, odd: u8) -> u8 {
    (even & 15) | (odd << 4)
}

/// The codes of the even and the odd element of a packed byte.
#[inline(always)]
pub fn unpack(byte: u8) -> (u8, u8) {
    (byte & 15, byte >> 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics::bf16;

    /// Nearest by searching all codes, ties to the even one: slow and obvious.
    fn nearest(v: f32) -> u8 {
        if v.is_nan() {
            return 7;
        }
        let a = (v.abs() as f64).min(6.0);
        let distance = |c: u8| (MAGNITUDES[c as usize] as f64 - a).abs();
        let best = (0..8u8)
            .min_by(|&x, &y| distance(x).total_cmp(&distance(y)).then((x & 1).cmp(&(y & 1))))
            .unwrap();
        best | if v.is_sign_negative() { 8 } else { 0 }
    }

    #[test]
    fn all_codes_decode_and_encode_to_themselves() {
        for code in 0..16 {
            assert_eq!(encode(decode(code)), code);
            for random in 0..=255 {
                assert_eq!(encode_stochastic(decode(code), random), code, "a grid point never moves");
            }
        }
    }

    #[test]
    fn every_bf16_value_takes_the_nearest_code() {
        for bits in 0..=u16::MAX {
            let v = bf16::to_f32(half::bf16::from_bits(bits));
            assert_eq!(encode(v), nearest(v), "{v}");
        }
    }

    #[test]
    fn ties_infinities_nan_and_zeros() {
        let ties = [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)];
        for (v, code) in ties {
            assert_eq!(encode(v), code);
            assert_eq!(encode(-v), code | 8);
        }
        assert_eq!((encode(6.01), encode(f32::INFINITY), encode(f32::NEG_INFINITY)), (7, 7, 15));
        assert_eq!((encode(f32::NAN), encode(-f32::NAN), encode_stochastic(f32::NAN, 0)), (7, 7, 7));
        assert_eq!((encode(0.0), encode(-0.0), encode_stochastic(-0.0, 255)), (0, 8, 8));
        assert_eq!((encode_stochastic(f32::INFINITY, 9), encode_stochastic(-7.0, 0)), (7, 15));
    }

    #[test]
    fn stochastic_rounding_is_unbiased_to_the_8_random_bits() {
        for i in 0..=1536 {
            let v = i as f32 / 256.0;
            let mean = (0..=255).map(|r| decode(encode_stochastic(v, r)) as f64).sum::<f64>() / 256.0;
            let step = if v < 2.0 {
                0.5
            } else if v < 4.0 {
                1.0
            } else {
                2.0
            };
            assert!(mean <= v as f64 && v as f64 - mean < step / 256.0, "{v}: {mean}");
        }
    }

    #[test]
    fn packing_is_reversible() {
        for byte in 0..=255 {
            let (even, odd) = unpack(byte);
            assert_eq!(pack(even, odd), byte);
        }
    }
}
