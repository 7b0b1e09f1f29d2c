//! Panels of `f32` from 4-bit codes with AVX-512: 16 lanes at a time, `code · scale` by a table in a register.
//!
//! ```text
//! lanes are stored rows:     gather 8 bytes of codes from 16 rows; for each of 16 indices: shift, look up, scale
//! lanes are stored columns:  for each index, 16 codes and one scale: spread, look up, scale
//! ```
//!
//! The values are those of [`super::matrix::pack`] for every other instruction set: a product of a code and a scale is
//! exact.

use super::matrix::{Along, Matrix};
use crate::numerics::{BLOCK, e2m1, e4m3};
use std::arch::x86_64::*;
use std::ops::Range;

/// Sixteen lanes of a panel, of which some may lie past the operand's last or past the panel's edge.
#[derive(Clone, Copy)]
struct Strip {
    /// First lane within the panel.
    lane: usize,
    /// Lanes of the operand.
    used: usize,
    /// Lanes of the panel.
    stored: usize,
}

/// See [`super::matrix::pack`]; `k` is a range of whole blocks. False, and nothing done, for lanes that are stored
/// columns and do not fill blocks.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn pack(
    codes: &[u8],
    scales: &[u8],
    m: Matrix<'_>,
    lanes: Range<usize>,
    width: usize,
    k: Range<usize>,
    out: &mut [f32],
) -> bool {
    let whole = |x: usize| x.is_multiple_of(BLOCK);
    if m.along == Along::Rows && !(whole(m.col0 + lanes.start) && whole(lanes.len())) {
        return false;
    }
    assert_eq!(out.len(), k.len() * width, "{k:?} of {width} lanes");
    let stride = m.cols / BLOCK;
    for lane in (0..width).step_by(BLOCK) {
        let used = lanes.len().saturating_sub(lane).min(BLOCK);
        let strip = Strip { lane, used, stored: (width - lane).min(BLOCK) };
        let steps = Steps { rest: out.chunks_exact_mut(width), strip };
        let first = lanes.start + lane;
        match m.along {
            Along::Cols => {
                let block = (m.row0 + first) * stride + (m.col0 + k.start) / BLOCK;
                rows(codes, scales, stride, block..block + k.len() / BLOCK, steps);
            }
            Along::Rows => {
                let block = (m.row0 + k.start) * stride + (m.col0 + first) / BLOCK;
                columns(codes, scales, stride, block, steps);
            }
        }
    }
    true
}

/// The lowest `n` of 16 lanes.
fn mask(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

/// What one strip writes, an index of the contraction after another.
struct Steps<'a> {
    rest: std::slice::ChunksExactMut<'a, f32>,
    strip: Strip,
}

impl Steps<'_> {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn put(&mut self, values: __m512) {
        let step = self.rest.next().expect("as many indices as the panel has");
        let step = &mut step[self.strip.lane..][..self.strip.stored];
        // SAFETY: masked lanes are not written, and the others are `step`.
        unsafe { _mm512_mask_storeu_ps(step.as_mut_ptr(), mask(step.len()), values) }
    }
}

/// `code · scale` of the low four bits of each lane.
#[inline]
#[target_feature(enable = "avx512f")]
fn decode(codes: __m512i, scale: __m512) -> __m512 {
    // SAFETY: the table has sixteen elements.
    let table = unsafe { _mm512_loadu_ps(e2m1::VALUES.as_ptr()) };
    _mm512_mul_ps(_mm512_permutexvar_ps(codes, table), scale)
}

/// Lanes are rows, `stride` blocks apart; `blocks` are those of the first.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn rows(codes: &[u8], scales: &[u8], stride: usize, blocks: Range<usize>, mut steps: Steps<'_>) {
    const BYTES: usize = BLOCK / 2;
    let used = steps.strip.used;
    if used > 0 {
        let end = blocks.end + (used - 1) * stride;
        assert!(end * BYTES <= codes.len(), "block {end} of {} bytes of codes", codes.len());
    }
    let lanes = mask(used);
    let bytes = |lanes: usize| _mm512_set1_epi64((lanes * stride * BYTES) as i64);
    let low = _mm512_mullo_epi64(_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), bytes(1));
    let high = _mm512_add_epi64(low, bytes(8));
    let evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    let odds = _mm512_or_si512(evens, _mm512_set1_epi32(1));
    for block in blocks {
        let mut scale = [0.0; BLOCK];
        for (lane, scale) in scale[..used].iter_mut().enumerate() {
            *scale = e4m3::VALUES[scales[block + lane * stride] as usize];
        }
        let base = codes.as_ptr().wrapping_add(block * BYTES);
        // SAFETY: gathers read the eight bytes of one block of each used row, and the assertion above covers the
        // last; `scale` has sixteen elements.
        let (scale, low, high) = unsafe {
            let zero = _mm512_setzero_si512();
            (
                _mm512_loadu_ps(scale.as_ptr()),
                _mm512_mask_i64gather_epi64::<1>(zero, lanes as __mmask8, low, base.cast()),
                _mm512_mask_i64gather_epi64::<1>(zero, (lanes >> 8) as __mmask8, high, base.cast()),
            )
        };
        // The first and the second four bytes of every row.
        for half in [evens, odds] {
            let mut word = _mm512_permutex2var_epi32(low, half, high);
            for _ in 0..BLOCK / 2 {
                steps.put(decode(word, scale));
                word = _mm512_srli_epi32::<4>(word);
            }
        }
    }
}

/// Lanes are columns: a whole block of every stored row, `stride` blocks apart from `block` on, or none.
#[inline]
#[target_feature(enable = "avx512f")]
fn columns(codes: &[u8], scales: &[u8], stride: usize, block: usize, mut steps: Steps<'_>) {
    let half = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    let shift = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
    for block in (block..).step_by(stride).take(steps.rest.len()) {
        if steps.strip.used == 0 {
            steps.put(_mm512_setzero_ps());
            continue;
        }
        let (codes, _) = codes.as_chunks::<{ BLOCK / 2 }>();
        let word = _mm512_set1_epi64(i64::from_le_bytes(codes[block]));
        let nibbles = _mm512_srlv_epi32(_mm512_permutexvar_epi32(half, word), shift);
        steps.put(decode(nibbles, _mm512_set1_ps(e4m3::VALUES[scales[block] as usize])));
    }
}
