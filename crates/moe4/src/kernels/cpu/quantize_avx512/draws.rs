//! The random bytes of sixteen neighbouring blocks at a time, by Philox: eight draws in the even halves of a register, the
//! other eight in another.

use crate::numerics::rounding::RandomStream;
use crate::numerics::{BLOCK, philox};
use std::arch::x86_64::*;

/// The four words of sixteen neighbouring draws, lane by lane.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn draws(stream: RandomStream, position: u64) -> [__m512i; 4] {
    // Lanes of 64 bits, of which the low halves count: the even and the odd draws.
    let even = _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0);
    let first = _mm512_add_epi64(even, _mm512_set1_epi64(position as i64));
    let second = _mm512_add_epi64(first, _mm512_set1_epi64(1));
    let (m0, m1) = (word(philox::MULTIPLIERS[0]), word(philox::MULTIPLIERS[1]));
    let (low, high) = (word(stream.stream as u32), word((stream.stream >> 32) as u32));
    let mut state = [
        [first, _mm512_srli_epi64::<32>(first), low, high],
        [second, _mm512_srli_epi64::<32>(second), low, high],
    ];
    let mut key = [stream.seed as u32, (stream.seed >> 32) as u32];
    for round in 0..philox::ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(philox::WEYL[0]), key[1].wrapping_add(philox::WEYL[1])];
        }
        let (k0, k1) = (word(key[0]), word(key[1]));
        for c in &mut state {
            let (p0, p1) = (_mm512_mul_epu32(m0, c[0]), _mm512_mul_epu32(m1, c[2]));
            let c0 = _mm512_ternarylogic_epi64::<0x96>(_mm512_srli_epi64::<32>(p1), c[1], k0);
            let c2 = _mm512_ternarylogic_epi64::<0x96>(_mm512_srli_epi64::<32>(p0), c[3], k1);
            *c = [c0, p1, c2, p0];
        }
    }
    let [a, b] = state;
    let mut joined = a;
    for (a, b) in joined.iter_mut().zip(b) {
        *a = _mm512_mask_mov_epi32(*a, 0xAAAA, _mm512_slli_epi64::<32>(b));
    }
    joined
}

/// A number in the low half of every 64-bit lane.
#[inline]
#[target_feature(enable = "avx512f")]
fn word(v: u32) -> __m512i {
    _mm512_set1_epi64(v as i64)
}

/// The bytes of sixteen draws, draw by draw.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn draw_bytes(stream: RandomStream, position: u64) -> [[u8; BLOCK]; BLOCK] {
    let [w0, w1, w2, w3] = draws(stream, position);
    let (a, b) = (_mm512_unpacklo_epi32(w0, w1), _mm512_unpackhi_epi32(w0, w1));
    let (c, d) = (_mm512_unpacklo_epi32(w2, w3), _mm512_unpackhi_epi32(w2, w3));
    // Quarter q of vector j holds draw 4q + j.
    let vectors = [
        _mm512_unpacklo_epi64(a, c),
        _mm512_unpackhi_epi64(a, c),
        _mm512_unpacklo_epi64(b, d),
        _mm512_unpackhi_epi64(b, d),
    ];
    let mut out = [[0; BLOCK]; BLOCK];
    for (j, v) in vectors.into_iter().enumerate() {
        let quarters = [
            _mm512_castsi512_si128(v),
            _mm512_extracti32x4_epi32::<1>(v),
            _mm512_extracti32x4_epi32::<2>(v),
            _mm512_extracti32x4_epi32::<3>(v),
        ];
        for (q, quarter) in quarters.into_iter().enumerate() {
            // SAFETY: sixteen bytes.
            unsafe { _mm_storeu_si128(out[4 * q + j].as_mut_ptr().cast(), quarter) }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::quantize_avx512::available;
    use crate::numerics::philox::philox4x32;

    #[test]
    fn draws_are_those_of_philox() {
        if !available() {
            return;
        }
        for position in [0, 7, u32::MAX as u64 - 5, (3 << 32) - 16, 1 << 44] {
            let stream = RandomStream { seed: 0x1234_5678_9ABC_DEF0, stream: 0xFEDC_BA98_0000_0007 };
            // SAFETY: the features are there.
            let bytes = unsafe { draw_bytes(stream, position) };
            for (i, bytes) in bytes.into_iter().enumerate() {
                assert_eq!(bytes, stream.block(position + i as u64), "{position} + {i}");
                let word = philox4x32(stream.seed, stream.stream, position + i as u64)[1];
                assert_eq!(bytes[4..8], word.to_le_bytes());
            }
        }
    }
}
