//! Sixteen numbers, or 32 of BF16, in a register of AVX-512: loads, maxima of magnitudes, bytes of lanes.

use crate::numerics::BLOCK;
use half::bf16;
use std::arch::x86_64::*;

pub(super) const MAGNITUDE: i32 = 0x7FFF_FFFF;
const INFINITY: i32 = 0x7F80_0000;

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn bits(v: __m512) -> __m512i {
    _mm512_castps_si512(v)
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn splat(v: i32) -> __m512i {
    _mm512_set1_epi32(v)
}

/// Sixteen BF16 values as f32.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn widen(v: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(v)))
}

/// Up to 32 elements of each of up to 16 rows from column `col` on, packed; zeros elsewhere.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn load_32(rows: &[bf16], cols: usize, col: usize) -> [__m512i; BLOCK] {
    let mask = if cols - col >= 32 { u32::MAX } else { (1 << (cols - col)) - 1 };
    let mut out = [_mm512_setzero_si512(); BLOCK];
    for (out, row) in out.iter_mut().zip(rows.chunks_exact(cols)) {
        let row = &row[col..];
        // SAFETY: masked elements are not read, and the others are in `row`.
        *out = unsafe { _mm512_maskz_loadu_epi16(mask, row.as_ptr().cast()) };
    }
    out
}

/// Packed BF16 without signs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn magnitudes(v: __m512i) -> __m512i {
    _mm512_and_si512(v, _mm512_set1_epi16(0x7FFF))
}

/// The larger of two magnitudes, by bits.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn larger(a: __m512, b: __m512) -> __m512 {
    _mm512_castsi512_ps(_mm512_max_epu32(bits(a), bits(b)))
}

/// The largest magnitude of each half of 16 vectors of packed BF16, as `f32`: first halves, second halves. Of what is not
/// finite the magnitude is that of its bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn half_amaxes(rows: &[__m512i; BLOCK]) -> [__m512; 2] {
    let mut eighths = [_mm512_setzero_si512(); 8];
    for (out, &[a, b]) in eighths.iter_mut().zip(rows.as_chunks::<2>().0) {
        let (a, b) = (magnitudes(a), magnitudes(b));
        *out = _mm512_max_epu16(_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b));
    }
    let mut quarters = [_mm512_setzero_si512(); 4];
    for (out, &[a, b]) in quarters.iter_mut().zip(eighths.as_chunks::<2>().0) {
        *out = _mm512_max_epu16(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    }
    let mut halves = [_mm512_setzero_si512(); 2];
    for (out, &[a, b]) in halves.iter_mut().zip(quarters.as_chunks::<2>().0) {
        *out = _mm512_max_epu16(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    // Each quarter of a register now holds the maxima of eight rows over a quarter of their columns.
    let [a, b] = halves;
    let max = _mm512_max_epu16(_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xDD>(a, b));
    let max = _mm512_permutexvar_epi64(_mm512_set_epi64(7, 6, 3, 2, 5, 4, 1, 0), max);
    [widen(_mm512_castsi512_si256(max)), widen(_mm512_extracti64x4_epi64::<1>(max))]
}

/// Eight bytes of packed codes of a row.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn pack_row(codes: __m512i) -> __m128i {
    _mm512_cvtepi64_epi8(_mm512_or_si512(codes, _mm512_srli_epi64::<28>(codes)))
}

/// Eight bytes each of one or two neighbouring blocks.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn store_codes(bytes: [__m128i; 2], out: &mut [u8]) {
    // SAFETY: sixteen or eight bytes.
    unsafe {
        match out.len() == BLOCK {
            true => _mm_storeu_si128(out.as_mut_ptr().cast(), _mm_unpacklo_epi64(bytes[0], bytes[1])),
            false => _mm_storel_epi64(out[..BLOCK / 2].as_mut_ptr().cast(), bytes[0]),
        }
    }
}

/// Sixteen bytes, one of each lane.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn lane_bytes(v: __m512i) -> [u8; BLOCK] {
    let mut out = [0; BLOCK];
    // SAFETY: sixteen bytes.
    unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(v)) }
    out
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn lanes(v: __m512) -> [f32; BLOCK] {
    let mut out = [0.0; BLOCK];
    // SAFETY: sixteen elements.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), v) }
    out
}

/// Which lanes hold the bits of an infinity, or of a NaN.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn not_finite(magnitudes: __m512) -> u16 {
    _mm512_cmpge_epi32_mask(bits(magnitudes), splat(INFINITY))
}
