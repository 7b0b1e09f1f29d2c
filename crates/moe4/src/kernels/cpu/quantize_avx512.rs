//! Quantization with AVX-512: a row of a tile in a register, no branch but for blocks that hold a NaN or an infinity.
//!
//! ```text
//! rowwise     16 rows x 32 columns: amaxes of all 32 blocks by one tree of maxima over packed BF16 magnitudes
//! columnwise  16 x 16: signs, butterfly, rounding, maxima in registers; codes gather in one u32 a column and half
//! magnitude to code, a = min(|v|, 6):
//!     m = 2^(22 + max(exponent of a, 0)) + 6 units in its last place
//!     t = a + m            rounds a to the grid of its binade, in whole units of m; ties to even; downwards if stochastic
//!     code = (t + (t >> 22)) mod 8, of the bits of t: units, plus two codes for each binade. The 6 takes the bias off.
//! Philox      eight draws in the even halves of a register, the other eight in another
//! ```
//!
//! The bytes are those of [`super::tile`].

use super::tile;
use crate::numerics::hadamard::SignMask;
use crate::numerics::rounding::{RandomStream, Rounding};
use crate::numerics::scale::GlobalScale;
use crate::numerics::{BLOCK, e4m3, philox};
use half::bf16;
use std::arch::x86_64::*;

/// Sixteen vectors.
type Rows = [__m512; BLOCK];

const MAGNITUDE: i32 = 0x7FFF_FFFF;
const EXPONENT: i32 = 0x7F80_0000;
const INFINITY: i32 = EXPONENT;
const ONE: i32 = 0x3F80_0000;

#[inline]
#[target_feature(enable = "avx512f")]
fn bits(v: __m512) -> __m512i {
    _mm512_castps_si512(v)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn splat(v: i32) -> __m512i {
    _mm512_set1_epi32(v)
}

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
fn nearest(v: __m512) -> __m512i {
    let a = capped_magnitude(v);
    code(v, _mm512_add_ps(a, binade(a, GRID)))
}

/// [`e2m1::encode_stochastic`](crate::numerics::e2m1::encode_stochastic) of numbers; `random` are bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn stochastic(v: __m512, random: __m512i) -> __m512i {
    let a = capped_magnitude(v);
    // step / 256 is a power of two, so the product is exact.
    let t = _mm512_fmadd_ps(_mm512_cvtepi32_ps(random), binade(a, -(9 << 23)), a);
    const DOWN: i32 = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    code(v, _mm512_add_round_ps::<DOWN>(t, binade(t, GRID)))
}

/// What the block scales of an expert are made with.
#[derive(Clone, Copy)]
struct Scaler {
    /// `S_enc / 6`.
    sixth: f32,
    decode: f32,
}

impl Scaler {
    fn new(global: GlobalScale) -> Self {
        Self { sixth: global.encode * (1.0 / 6.0), decode: global.decode }
    }

    /// Scale bytes of sixteen blocks by their amaxes, which are finite, and what multiplies their elements.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn of(self, amax: __m512) -> (__m512i, __m512) {
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

/// The four words of sixteen neighbouring draws, lane by lane.
#[inline]
#[target_feature(enable = "avx512f")]
fn draws(stream: RandomStream, position: u64) -> [__m512i; 4] {
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
fn draw_bytes(stream: RandomStream, position: u64) -> [[u8; BLOCK]; BLOCK] {
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

/// Sixteen BF16 values as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn widen(v: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(v)))
}

/// Up to 32 elements of each of up to 16 rows from column `col` on, packed; zeros elsewhere.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load_32(rows: &[bf16], cols: usize, col: usize) -> [__m512i; BLOCK] {
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
fn magnitudes(v: __m512i) -> __m512i {
    _mm512_and_si512(v, _mm512_set1_epi16(0x7FFF))
}

/// The larger of two magnitudes, by bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn larger(a: __m512, b: __m512) -> __m512 {
    _mm512_castsi512_ps(_mm512_max_epu32(bits(a), bits(b)))
}

/// The largest magnitude of each half of 16 vectors of packed BF16, as `f32`: first halves, second halves. Of what is not
/// finite the magnitude is that of its bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn half_amaxes(rows: &[__m512i; BLOCK]) -> [__m512; 2] {
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
fn pack_row(codes: __m512i) -> __m128i {
    _mm512_cvtepi64_epi8(_mm512_or_si512(codes, _mm512_srli_epi64::<28>(codes)))
}

/// Eight bytes each of one or two neighbouring blocks.
#[inline]
#[target_feature(enable = "avx512f")]
fn store_codes(bytes: [__m128i; 2], out: &mut [u8]) {
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
fn lane_bytes(v: __m512i) -> [u8; BLOCK] {
    let mut out = [0; BLOCK];
    // SAFETY: sixteen bytes.
    unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(v)) }
    out
}

#[inline]
#[target_feature(enable = "avx512f")]
fn lanes(v: __m512) -> [f32; BLOCK] {
    let mut out = [0.0; BLOCK];
    // SAFETY: sixteen elements.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), v) }
    out
}

/// Which lanes hold the bits of an infinity, or of a NaN.
#[inline]
#[target_feature(enable = "avx512f")]
fn not_finite(magnitudes: __m512) -> u16 {
    _mm512_cmpge_epi32_mask(bits(magnitudes), splat(INFINITY))
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics::{e2m1, philox::philox4x32};

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

    fn available() -> bool {
        is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
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
