//! E4M3 (the `fn` variant), the 8-bit format of block scales: bias 7, subnormals of step 2^-9, largest finite
//! value 448, no infinity, NaN at 0x7F and 0xFF.

/// The largest finite value.
pub const MAX: f32 = 448.0;

/// The NaN byte that marks a block with a non-finite element.
pub const NAN: u8 = 0x7F;

/// Nearest byte, ties to even, saturating at ±448. NaN gives 0x7F with the sign kept.
#[inline(always)]
pub fn encode(v: f32) -> u8 {
    let sign = ((v.to_bits() >> 24) & 0x80) as u8;
    let a = f32::from_bits(v.to_bits() & 0x7FFF_FFFF);
    let capped = a.min(MAX); // min drops NaN; it is restored below
    let bits = capped.to_bits();
    // Normal range: round the 23-bit mantissa to 3 bits, then move the exponent bias from 127 to 7.
    let normal = (bits.wrapping_add(0x7_FFFF + ((bits >> 20) & 1)) >> 20).wrapping_sub((127 - 7) << 3);
    // Below 2^-6 the step is 2^-9, which is one unit in the last place of 2^14: adding 2^14 rounds to it.
    let subnormal = (capped + 16384.0).to_bits().wrapping_sub(16384f32.to_bits());
    let magnitude = if capped < 0.015625 { subnormal } else { normal };
    sign | if a.is_nan() { NAN } else { magnitude as u8 }
}

/// The value of a byte, exactly.
#[inline(always)]
pub fn decode(byte: u8) -> f32 {
    VALUES[byte as usize]
}

/// The value of every byte.
pub const VALUES: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = value(byte as u8);
        byte += 1;
    }
    table
};

const fn value(byte: u8) -> f32 {
    let exponent = (byte >> 3) & 15;
    let mantissa = (byte & 7) as f32;
    let magnitude = if byte & 0x7F == 0x7F {
        f32::NAN
    } else if exponent == 0 {
        mantissa * 0.001953125 // 2^-9
    } else {
        // (1 + m/8) · 2^(exponent - 7)
        (1.0 + mantissa * 0.125) * f32::from_bits((exponent as u32 + 127 - 7) << 23)
    };
    if byte & 0x80 != 0 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_survives_the_round_trip() {
        for byte in 0..=255u8 {
            assert_eq!(encode(decode(byte)), byte, "{byte:#04x}");
        }
        assert_eq!((decode(0x7E), decode(0x01), decode(0x08)), (448.0, 0.001953125, 0.015625));
    }

    #[test]
    fn midpoints_go_to_the_even_byte_and_their_neighbours_to_the_nearer_one() {
        for low in 0..0x7Eu8 {
            let mid = (decode(low) + decode(low + 1)) * 0.5; // exact: 5 significant bits
            let even = low + (low & 1);
            assert_eq!(encode(mid), even, "{mid}");
            assert_eq!(encode(-mid), even | 0x80);
            assert_eq!(encode(f32::from_bits(mid.to_bits() - 1)), low);
            assert_eq!(encode(f32::from_bits(mid.to_bits() + 1)), low + 1);
        }
    }

    #[test]
    fn every_bf16_value_takes_the_nearest_byte() {
        for bits in 0..=u16::MAX {
            let v = crate::numerics::bf16::to_f32(half::bf16::from_bits(bits));
            let byte = encode(v);
            if v.is_nan() {
                assert_eq!(byte & 0x7F, NAN);
                continue;
            }
            let target = v.clamp(-MAX, MAX) as f64;
            let error = (decode(byte) as f64 - target).abs();
            for other in (0..=255u8).filter(|b| b & 0x7F != 0x7F) {
                assert!(error <= (decode(other) as f64 - target).abs(), "{v}: {byte:#04x}, {other:#04x}");
            }
        }
    }

    #[test]
    fn saturation_and_special_values() {
        assert_eq!((encode(449.0), encode(1e30), encode(f32::INFINITY)), (0x7E, 0x7E, 0x7E));
        assert_eq!((encode(-1e30), encode(0.0), encode(-0.0)), (0xFE, 0, 0x80));
        assert_eq!((encode(f32::NAN), encode(f32::MIN_POSITIVE)), (NAN, 0));
    }
}
