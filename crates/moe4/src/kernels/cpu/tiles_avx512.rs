//! Operands to AMX tiles with AVX-512.
//!
//! ```text
//! lanes are stored rows       one line holds 32 indices of a lane:     an A tile as it is, a B tile after a transpose
//! lanes are stored columns    one line holds a pair of 16 lanes:       a B tile as it is, an A tile after a transpose
//! code, scale  ->  BF16       a table of 16 values for each scale byte, looked up 32 at a time
//! ```
//!
//! Values are exact ([`unpacked`](crate::numerics::scale::unpacked)). What lies past the last lane or index is zero.

use super::amx::{DEPTH, LANES, Tile};
use super::matrix::{Along, Matrix, Values};
use crate::numerics::{BLOCK, e2m1, e4m3};
use std::arch::x86_64::*;
use std::ops::Range;

/// Which tile a product wants.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// A: a line for each lane.
    Lanes,
    /// B: a line for each pair of indices.
    Pairs,
}

/// Values of the codes under every scale byte, as BF16 bits.
#[repr(C, align(64))]
struct Table([[u16; 16]; 256]);

static TABLE: Table = {
    let mut table = [[0x7FC0; 16]; 256];
    let mut scale = 0;
    while scale < 256 {
        let mut code = 0;
        while code < 16 && scale & 0x7F != e4m3::NAN as usize {
            table[scale][code] = ((e2m1::VALUES[code] * e4m3::VALUES[scale]).to_bits() >> 16) as u16;
            code += 1;
        }
        scale += 1;
    }
    Table(table)
};

/// Lanes `lanes` and contraction indices `k` of `m`: `across` tiles of lanes for each 32 indices, one step after
/// the other. For codes, `k` starts and ends with a block, and so do lanes that are stored columns.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn pack(
    m: Matrix<'_>,
    form: Form,
    lanes: Range<usize>,
    across: usize,
    k: Range<usize>,
    out: &mut [Tile],
) {
    assert!(lanes.len() <= across * LANES, "{lanes:?} in {across} tiles");
    assert_eq!(out.len(), across * k.len().div_ceil(DEPTH), "{k:?}, {across} tiles across");
    let (row_range, col_range) = match m.along {
        Along::Cols => (&lanes, &k),
        Along::Rows => (&k, &lanes),
    };
    let (rows, cols) = (m.row0 + row_range.end, m.col0 + col_range.end);
    assert!(cols <= m.cols, "columns up to {cols} of {}", m.cols);
    if !lanes.is_empty() && !k.is_empty() {
        match m.values {
            Values::Bf16(x) => assert!((rows - 1) * m.cols + cols <= x.len(), "{rows} rows of {}", m.cols),
            Values::Nvfp4 { codes, scales } => {
                assert!([m.cols, m.col0 + col_range.start, cols].iter().all(|x| x.is_multiple_of(BLOCK)));
                let blocks = rows * (m.cols / BLOCK);
                assert!(blocks <= scales.len() && blocks * (BLOCK / 2) <= codes.len(), "{blocks} blocks");
            }
        }
    }
    for (step, out) in out.chunks_exact_mut(across).enumerate() {
        let first_k = k.start + step * DEPTH;
        let depth = (k.end - first_k).min(DEPTH);
        for (t, out) in out.iter_mut().enumerate() {
            let first = lanes.start + t * LANES;
            let used = lanes.end.saturating_sub(first).min(LANES);
            // SAFETY: the assertions above cover every element of these lanes and indices.
            let lines = unsafe { lines(m, first, used, first_k, depth) };
            let as_stored = (m.along == Along::Cols) == (form == Form::Lanes);
            let lines = if as_stored { lines } else { transpose(lines) };
            for (line, out) in lines.into_iter().zip(out.0.as_chunks_mut::<16>().0) {
                // SAFETY: a line of a tile is sixteen pairs.
                unsafe { _mm512_store_si512(out.as_mut_ptr().cast(), line) }
            }
        }
    }
}

/// Lines of the tile as the matrix is stored.
///
/// # Safety
/// `m` holds `used` lanes from `lane` on and `depth` indices from `k` on; blocks of codes are whole.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn lines(m: Matrix<'_>, lane: usize, used: usize, k: usize, depth: usize) -> [__m512i; 16] {
    let mut out = [_mm512_setzero_si512(); 16];
    match m.along {
        Along::Cols => {
            let at = |i: usize| (m.row0 + lane + i) * m.cols + m.col0 + k;
            for (i, out) in out.iter_mut().enumerate().take(used) {
                // SAFETY: the caller's promise.
                *out = unsafe {
                    match (m.values, depth) {
                        (Values::Bf16(x), DEPTH) => _mm512_loadu_si512(x.as_ptr().add(at(i)).cast()),
                        (Values::Bf16(x), _) => {
                            let mask = ((1u64 << depth) - 1) as u32;
                            _mm512_maskz_loadu_epi16(mask, x.as_ptr().add(at(i)).cast())
                        }
                        (Values::Nvfp4 { codes, scales }, DEPTH) => {
                            let block = at(i) / BLOCK;
                            decode(codes, scales, [block, block + 1])
                        }
                        (Values::Nvfp4 { codes, scales }, _) => {
                            let block = at(i) / BLOCK;
                            _mm512_maskz_mov_epi16(0xFFFF, decode(codes, scales, [block; 2]))
                        }
                    }
                };
            }
        }
        Along::Rows if used > 0 => {
            let at = |i: usize| (m.row0 + k + i) * m.cols + m.col0 + lane;
            let mask = ((1u32 << used) - 1) as __mmask16;
            for (pair, out) in out.iter_mut().enumerate().take(depth.div_ceil(2)) {
                let [even, odd] = [2 * pair, 2 * pair + 1];
                // SAFETY: the caller's promise.
                let [even, odd] = unsafe {
                    match m.values {
                        Values::Bf16(x) => {
                            let row = |i: usize| x.as_ptr().add(at(i)).cast::<i16>();
                            let second = if odd < depth { mask } else { 0 };
                            [
                                _mm256_maskz_loadu_epi16(mask, row(even)),
                                _mm256_maskz_loadu_epi16(second, row(odd.min(depth - 1))),
                            ]
                        }
                        Values::Nvfp4 { codes, scales } => {
                            let both = decode(codes, scales, [even, odd].map(|i| at(i) / BLOCK));
                            [_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64::<1>(both)]
                        }
                    }
                };
                let high = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(odd));
                *out = _mm512_or_si512(_mm512_cvtepu16_epi32(even), high);
            }
        }
        Along::Rows => {}
    }
    out
}

/// The values of two blocks of sixteen codes, the first in the lower half.
///
/// # Safety
/// Both blocks are there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn decode(codes: &[u8], scales: &[u8], [low, high]: [usize; 2]) -> __m512i {
    const BYTES: usize = BLOCK / 2;
    // SAFETY: the caller's promise; a row of the table is 32 bytes.
    let (bytes, table) = unsafe {
        let row = |block: usize| {
            let scale = *scales.get_unchecked(block);
            _mm256_load_si256(TABLE.0[scale as usize].as_ptr().cast())
        };
        let bytes = _mm_loadl_epi64(codes.as_ptr().add(low * BYTES).cast());
        let upper = _mm_loadl_epi64(codes.as_ptr().add(high * BYTES).cast());
        let table = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(row(low)), row(high));
        (_mm_unpacklo_epi64(bytes, upper), table)
    };
    // Both nibbles of a byte to the two words of a lane; words of the upper half look in the upper half.
    let wide = _mm512_cvtepu8_epi32(bytes);
    let spread = _mm512_or_si512(wide, _mm512_slli_epi32::<12>(wide));
    let half = _mm512_inserti64x4::<1>(_mm512_setzero_si512(), _mm256_set1_epi16(16));
    let index = _mm512_or_si512(_mm512_and_si512(spread, _mm512_set1_epi16(15)), half);
    _mm512_permutexvar_epi16(index, table)
}

/// 16 x 16 pairs, transposed.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
    let mut a = r;
    for i in 0..8 {
        a[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    let mut b = a;
    for i in 0..4 {
        for j in 0..2 {
            b[4 * i + 2 * j] = _mm512_unpacklo_epi64(a[4 * i + j], a[4 * i + j + 2]);
            b[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a[4 * i + j], a[4 * i + j + 2]);
        }
    }
    // b[4i + j] holds, in each quarter q, column 4q + j of rows 4i to 4i + 3.
    let mut out = b;
    for j in 0..4 {
        let low = _mm512_shuffle_i32x4::<0x88>(b[j], b[4 + j]);
        let high = _mm512_shuffle_i32x4::<0x88>(b[8 + j], b[12 + j]);
        out[j] = _mm512_shuffle_i32x4::<0x88>(low, high);
        out[8 + j] = _mm512_shuffle_i32x4::<0xDD>(low, high);
        let low = _mm512_shuffle_i32x4::<0xDD>(b[j], b[4 + j]);
        let high = _mm512_shuffle_i32x4::<0xDD>(b[8 + j], b[12 + j]);
        out[4 + j] = _mm512_shuffle_i32x4::<0x88>(low, high);
        out[12 + j] = _mm512_shuffle_i32x4::<0xDD>(low, high);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics::scale;
    use half::bf16;

    #[test]
    fn the_table_holds_the_unpacked_values() {
        for (byte, row) in TABLE.0.iter().enumerate() {
            for (code, bits) in row.iter().enumerate() {
                assert_eq!(*bits, scale::unpacked(code as u8, byte as u8).to_bits(), "{code} {byte:#04x}");
            }
        }
    }

    /// Both forms of both directions, with lanes and indices that end within a tile.
    #[test]
    fn every_element_is_in_its_place() {
        if !is_x86_feature_detected!("avx512bw") || !is_x86_feature_detected!("avx512dq") {
            return;
        }
        let (rows, cols) = (96, 112);
        let x: Vec<bf16> = (0..rows * cols).map(|i| bf16::from_bits(i as u16 + 1)).collect();
        let codes: Vec<u8> = (0..rows * cols / 2).map(|i| (i * 89 % 256) as u8).collect();
        let scales: Vec<u8> = (0..rows * cols / BLOCK).map(|i| (i * 5 % 127) as u8).collect();
        for values in [Values::Bf16(&x), Values::Nvfp4 { codes: &codes, scales: &scales }] {
            for along in [Along::Cols, Along::Rows] {
                for form in [Form::Lanes, Form::Pairs] {
                    let packed = matches!(values, Values::Nvfp4 { .. });
                    let tail = if packed { 16 } else { 3 };
                    let m = Matrix { values, cols, row0: 16, col0: 32, along };
                    let (lanes, k) = (16..16 + 16 + tail, 16..16 + 32 + tail);
                    let mut out = vec![Tile([!0; 256]); 2 * 2];
                    // SAFETY: the features are there.
                    unsafe { pack(m, form, lanes.clone(), 2, k.clone(), &mut out) };
                    for (lane, index) in (0..32).flat_map(|lane| (0..64).map(move |index| (lane, index))) {
                        let (line, pair) = match form {
                            Form::Lanes => (lane % 16, index % 32 / 2),
                            Form::Pairs => (index % 32 / 2, lane % 16),
                        };
                        let word = out[index / 32 * 2 + lane / 16].0[line * 16 + pair];
                        let got = (word >> (16 * (index % 2))) as u16;
                        let expected = if lane >= lanes.len() || index >= k.len() {
                            0
                        } else {
                            let (lane, index) = (lanes.start + lane, k.start + index);
                            let at = match along {
                                Along::Cols => (m.row0 + lane) * cols + m.col0 + index,
                                Along::Rows => (m.row0 + index) * cols + m.col0 + lane,
                            };
                            match values {
                                Values::Bf16(x) => x[at].to_bits(),
                                Values::Nvfp4 { .. } => {
                                    let code = codes[at / 2] >> (4 * (at % 2)) & 15;
                                    scale::unpacked(code, scales[at / BLOCK]).to_bits()
                                }
                            }
                        };
                        assert_eq!(got, expected, "lane {lane}, index {index}");
                    }
                }
            }
        }
    }
}
