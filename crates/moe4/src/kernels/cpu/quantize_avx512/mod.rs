//! Quantization with AVX-512: a row of a tile in a register, no branch but for blocks that hold a NaN or an infinity.
//!
//! ```text
//! rowwise     16 rows x 32 columns: amaxes of all 32 blocks by one tree of maxima over packed BF16 magnitudes
//! columnwise  16 x 16: signs, butterfly, rounding, maxima in registers; codes gather in one u32 a column and half
//! ```
//!
//! The bytes are those of [`super::tile`].

mod draws;
mod encode;
mod registers;

use super::tile;
use crate::numerics::hadamard::SignMask;
use crate::numerics::rounding::{RandomStream, Rounding};
use crate::numerics::scale::GlobalScale;
use crate::numerics::{BLOCK, e4m3};
use draws::{draw_bytes, draws};
use encode::{Scaler, nearest, stochastic};
use half::bf16;
use registers::*;
use std::arch::x86_64::*;

/// Sixteen vectors.
type Rows = [__m512; BLOCK];

/// Rowwise blocks of up to 16 rows. `position` is that of the first block; those of a row follow each other.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn quantize_rows(
    x: &[bf16],
    cols: usize,
    global: GlobalScale,
    rounding: Rounding,
    position: u64,
    codes: &mut [u8],
    scales: &mut [u8],
) {
    let (rows, blocks) = (x.len() / cols, cols / BLOCK);
    let scaler = Scaler::new(global);
    let mut random = [[[0; BLOCK]; BLOCK]; BLOCK];
    for col in (0..cols).step_by(2 * BLOCK) {
        let first = col / BLOCK;
        if let Rounding::Stochastic(stream) = rounding
            && first.is_multiple_of(BLOCK)
        {
            for (row, random) in random.iter_mut().enumerate().take(rows) {
                *random = draw_bytes(stream, position + (row * blocks + first) as u64);
            }
        }
        let packed = load_32(x, cols, col);
        let amax = half_amaxes(&packed);
        let bad = [not_finite(amax[0]), not_finite(amax[1])];
        let [(s0, m0), (s1, m1)] = [scaler.of(amax[0]), scaler.of(amax[1])];
        let (s, m) = ([lane_bytes(s0), lane_bytes(s1)], [lanes(m0), lanes(m1)]);
        let halves = (blocks - first).min(2);
        for (row, packed) in packed.iter().enumerate().take(rows) {
            let mut bytes = [_mm_setzero_si128(); 2];
            let values = [_mm512_castsi512_si256(*packed), _mm512_extracti64x4_epi64::<1>(*packed)];
            for half in 0..2 {
                let v = _mm512_mul_ps(widen(values[half]), _mm512_set1_ps(m[half][row]));
                let code = match rounding {
                    Rounding::Nearest => nearest(v),
                    Rounding::Stochastic(_) => {
                        let random = &random[row][(first + half) % BLOCK];
                        // SAFETY: sixteen bytes.
                        let random = unsafe { _mm_loadu_si128(random.as_ptr().cast()) };
                        stochastic(v, _mm512_cvtepu8_epi32(random))
                    }
                };
                bytes[half] = pack_row(code);
            }
            let mut both = [0; BLOCK];
            // SAFETY: sixteen bytes.
            unsafe { _mm_storeu_si128(both.as_mut_ptr().cast(), _mm_unpacklo_epi64(bytes[0], bytes[1])) };
            let at = row * blocks + first;
            codes[at * (BLOCK / 2)..(at + halves) * (BLOCK / 2)]
                .copy_from_slice(&both[..halves * (BLOCK / 2)]);
            for half in 0..halves {
                scales[at + half] = s[half][row];
            }
        }
        if bad != [0, 0] {
            for (half, row) in (0..halves).flat_map(|half| (0..rows).map(move |row| (half, row))) {
                if bad[half] >> row & 1 == 1 {
                    let at = row * blocks + first + half;
                    codes[at * (BLOCK / 2)..][..BLOCK / 2].fill(0);
                    scales[at] = e4m3::NAN;
                }
            }
        }
    }
}

/// Up to 16 elements of each of up to 16 rows from column `col` on; zeros elsewhere.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn load(rows: &[bf16], cols: usize, col: usize) -> Rows {
    let mask = if cols - col >= BLOCK { u16::MAX } else { (1 << (cols - col)) - 1 };
    let mut out = [_mm512_setzero_ps(); BLOCK];
    for (out, row) in out.iter_mut().zip(rows.chunks_exact(cols)) {
        let row = &row[col..];
        // SAFETY: masked elements are not read, and the others are in `row`.
        *out = widen(unsafe { _mm256_maskz_loadu_epi16(mask, row.as_ptr().cast()) });
    }
    out
}

/// The RHT of every column before the rounding to BF16.
#[inline]
#[target_feature(enable = "avx512f")]
fn transform(mut x: Rows, mask: SignMask) -> Rows {
    for (v, sign) in x.iter_mut().zip(mask.sign_bits()) {
        *v = _mm512_castsi512_ps(_mm512_xor_si512(bits(*v), splat(sign as i32)));
    }
    x = butterfly::<1>(x);
    x = butterfly::<2>(x);
    x = butterfly::<4>(x);
    x = butterfly::<8>(x);
    // Loops, here and below: closures given to functions that are not compiled for AVX-512 would stay calls.
    for v in &mut x {
        *v = _mm512_mul_ps(*v, _mm512_set1_ps(0.25));
    }
    x
}

#[inline]
#[target_feature(enable = "avx512f")]
fn butterfly<const STRIDE: usize>(x: Rows) -> Rows {
    let mut out = x;
    for pair in 0..BLOCK / 2 {
        let i = pair / STRIDE * 2 * STRIDE + pair % STRIDE;
        out[i] = _mm512_add_ps(x[i], x[i + STRIDE]);
        out[i + STRIDE] = _mm512_sub_ps(x[i], x[i + STRIDE]);
    }
    out
}

/// To BF16, ties to even. A NaN stays one, since those here have no bits below.
#[inline]
#[target_feature(enable = "avx512f")]
fn round(v: __m512) -> __m512 {
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits(v)), splat(1));
    let sum = _mm512_add_epi32(_mm512_add_epi32(bits(v), splat(0x7FFF)), odd);
    _mm512_castsi512_ps(_mm512_and_si512(sum, splat(0xFFFF_0000u32 as i32)))
}

/// The largest magnitude of each column, by bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn column_amax(x: &Rows) -> __m512 {
    let mut max = _mm512_setzero_si512();
    for v in x {
        max = _mm512_max_epu32(max, _mm512_and_si512(bits(*v), splat(MAGNITUDE)));
    }
    _mm512_castsi512_ps(max)
}

/// Sixteen columnwise blocks from column `col` on: for each, eight bytes of codes, and a scale.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn quantize_columns(
    band: &[bf16],
    cols: usize,
    col: usize,
    rht: Option<SignMask>,
    global: GlobalScale,
    random: Option<(RandomStream, u64)>,
) -> ([u64; BLOCK], [u8; BLOCK]) {
    let mut x = load(band, cols, col);
    if let Some(mask) = rht {
        x = transform(x, mask);
        for v in &mut x {
            *v = round(*v);
        }
    }
    let amax = column_amax(&x);
    let bad = not_finite(amax);
    let (scale, multiplier) = Scaler::new(global).of(amax);
    let mut halves = [_mm512_setzero_si512(); 2];
    #[allow(clippy::manual_map, reason = "`map` is not compiled for AVX-512")]
    let words = random.map(|(stream, position)| draws(stream, position));
    // From the last row to the first, so that a shift makes room for the next.
    for (half, out) in halves.iter_mut().enumerate() {
        for i in (0..8).rev() {
            let row = 8 * half + i;
            let v = _mm512_mul_ps(x[row], multiplier);
            let code = match words {
                None => nearest(v),
                Some(words) => {
                    let shift = _mm_cvtsi32_si128(8 * (row % 4) as i32);
                    let random = _mm512_and_si512(_mm512_srl_epi32(words[row / 4], shift), splat(0xFF));
                    stochastic(v, random)
                }
            };
            *out = _mm512_or_si512(_mm512_slli_epi32::<4>(*out), code);
        }
    }
    // Both halves of a column side by side, columns in order.
    let low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    let high = _mm512_add_epi32(low, splat(8));
    let mut codes = [0; BLOCK];
    for (order, out) in [low, high].into_iter().zip(codes.as_chunks_mut::<8>().0) {
        let joined = _mm512_permutex2var_epi32(halves[0], order, halves[1]);
        // SAFETY: eight numbers of 64 bits.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), joined) };
    }
    let mut scales = lane_bytes(scale);
    for lane in (0..BLOCK).filter(|lane| bad >> lane & 1 == 1) {
        (codes[lane], scales[lane]) = (0, e4m3::NAN);
    }
    (codes, scales)
}

/// The largest magnitude of some columns before and after the RHT; `None` if one of them is not finite.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn hadamard_amax(
    rows: &[bf16],
    cols: usize,
    of: std::ops::Range<usize>,
    mask: SignMask,
) -> Option<[f32; 2]> {
    let mut amax = [_mm512_setzero_ps(); 2];
    for band in rows.chunks(BLOCK * cols.max(1)) {
        for col in of.clone().step_by(BLOCK) {
            let x = load(band, cols, col);
            let after = column_amax(&transform(x, mask));
            amax = [larger(amax[0], column_amax(&x)), larger(amax[1], after)];
        }
    }
    // Rounding is monotonous: the largest rounded magnitude is the largest one, rounded.
    amax[1] = round(amax[1]);
    if not_finite(amax[0]) | not_finite(amax[1]) != 0 {
        return None;
    }
    Some([tile::horizontal_max(lanes(amax[0])), tile::horizontal_max(lanes(amax[1]))])
}

/// The largest magnitude of packed BF16; `None` if one of them is not finite.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn amax(x: &[bf16]) -> Option<f32> {
    let mut max = [_mm512_setzero_si512(); 4];
    let (chunks, rest) = x.as_chunks::<128>();
    for chunk in chunks {
        for (i, max) in max.iter_mut().enumerate() {
            // SAFETY: 32 of the 128 elements.
            let v = unsafe { _mm512_loadu_si512(chunk.as_ptr().add(32 * i).cast()) };
            *max = _mm512_max_epu16(*max, magnitudes(v));
        }
    }
    for chunk in rest.chunks(32) {
        let mask = ((1u64 << chunk.len()) - 1) as u32;
        // SAFETY: masked elements are not read.
        let v = unsafe { _mm512_maskz_loadu_epi16(mask, chunk.as_ptr().cast()) };
        max[0] = _mm512_max_epu16(max[0], magnitudes(v));
    }
    let max = _mm512_max_epu16(_mm512_max_epu16(max[0], max[1]), _mm512_max_epu16(max[2], max[3]));
    let mut lanes = [0u16; 32];
    // SAFETY: 32 numbers of 16 bits.
    unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), max) };
    let max = lanes.into_iter().fold(0, u16::max);
    (max < 0x7F80).then(|| f32::from_bits((max as u32) << 16))
}

/// A band of 16 rows of a weight in 16 x 16 tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn quantize_square_tiles(
    rows: &[bf16],
    k: usize,
    global: GlobalScale,
    codes: &mut [u8],
    scales: &mut [u8],
) {
    /// Columns whose tiles are scaled together: 16 vectors of two tiles.
    const COLS: usize = BLOCK * 2 * BLOCK;
    let blocks = k / BLOCK;
    let scaler = Scaler::new(global);
    for first in (0..k).step_by(COLS) {
        let columns = || (first..k.min(first + COLS)).step_by(2 * BLOCK);
        let mut maxima = [_mm512_setzero_si512(); BLOCK];
        for (max, col) in maxima.iter_mut().zip(columns()) {
            for v in load_32(rows, k, col) {
                *max = _mm512_max_epu16(*max, magnitudes(v));
            }
        }
        let amax = half_amaxes(&maxima);
        let bad = [not_finite(amax[0]), not_finite(amax[1])];
        let [(s0, m0), (s1, m1)] = [scaler.of(amax[0]), scaler.of(amax[1])];
        let (s, m) = ([lane_bytes(s0), lane_bytes(s1)], [lanes(m0), lanes(m1)]);
        for (pair, col) in columns().enumerate() {
            let halves = ((k - col) / BLOCK).min(2);
            let block = col / BLOCK;
            for (row, packed) in load_32(rows, k, col).iter().enumerate() {
                let values = [_mm512_castsi512_si256(*packed), _mm512_extracti64x4_epi64::<1>(*packed)];
                let mut bytes = [_mm_setzero_si128(); 2];
                for half in 0..2 {
                    let v = _mm512_mul_ps(widen(values[half]), _mm512_set1_ps(m[half][pair]));
                    bytes[half] = pack_row(nearest(v));
                }
                let at = row * blocks + block;
                store_codes(bytes, &mut codes[at * (BLOCK / 2)..(at + halves) * (BLOCK / 2)]);
                for half in 0..halves {
                    let finite = bad[half] >> pair & 1 == 0;
                    scales[at + half] = if finite { s[half][pair] } else { e4m3::NAN };
                    if !finite {
                        codes[(at + half) * (BLOCK / 2)..][..BLOCK / 2].fill(0);
                    }
                }
            }
        }
    }
}

/// Whether tests may call the functions here.
#[cfg(test)]
fn available() -> bool {
    is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}
