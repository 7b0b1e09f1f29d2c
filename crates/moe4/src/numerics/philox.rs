//! Philox4x32-10, the counter-based generator behind stochastic rounding.
//!
//! Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A draw is a pure function
//! of a 64-bit key and a 128-bit counter, so any element's random bits can be computed by any thread in any order.

pub(crate) const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
pub(crate) const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
pub(crate) const ROUNDS: usize = 10;

/// The four 32-bit words for `key` (low word first) and the counter `[offset lo, offset hi, stream lo, stream hi]`.
#[inline(always)]
pub fn philox4x32(key: u64, stream: u64, offset: u64) -> [u32; 4] {
    let mut k = [key as u32, (key >> 32) as u32];
    let mut c = [offset as u32, (offset >> 32) as u32, stream as u32, (stream >> 32) as u32];
    for round in 0..ROUNDS {
        if round > 0 {
            k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
        }
        let p0 = MULTIPLIERS[0] as u64 * c[0] as u64;
        let p1 = MULTIPLIERS[1] as u64 * c[2] as u64;
        c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known-answer vectors published with Random123.
    #[test]
    fn known_answers() {
        assert_eq!(philox4x32(0, 0, 0), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(
            philox4x32(u64::MAX, u64::MAX, u64::MAX),
            [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]
        );
        assert_eq!(
            philox4x32(0x299f31d0_a4093822, 0x03707344_13198a2e, 0x85a308d3_243f6a88),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }
}
