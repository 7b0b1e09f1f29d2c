//! Operands of products, and their unpacking into panels.
//!
//! A panel holds `width` lanes (rows of A or columns of B) side by side along the contraction: `[k][width]` of
//! `f32`, where an element is the exact `code · block scale`, or the exact BF16 value.

#[cfg(target_arch = "x86_64")]
use super::codes_avx512;
#[cfg(target_arch = "x86_64")]
use super::isa::Kind;
use super::isa::{Isa, multiversion};
use crate::numerics::{BLOCK, bf16 as bf, e2m1, e4m3};
use half::bf16;
use std::ops::Range;

/// A stored matrix, or part of one, seen as lanes along a contraction.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    pub(super) values: Values<'a>,
    /// Elements of a stored row.
    pub(super) cols: usize,
    /// First row of the part.
    pub(super) row0: usize,
    /// First column of the part.
    pub(super) col0: usize,
    pub(super) along: Along,
}

/// Stored elements.
#[derive(Clone, Copy)]
pub(super) enum Values<'a> {
    Nvfp4 { codes: &'a [u8], scales: &'a [u8] },
    Bf16(&'a [bf16]),
}

/// The direction of the contraction in the stored matrix.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Along {
    /// Lanes are stored rows.
    Cols,
    /// Lanes are stored columns.
    Rows,
}

/// The values of both codes of a byte.
static PAIRS: [[f32; 2]; 256] = {
    let mut table = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = [e2m1::VALUES[byte & 15], e2m1::VALUES[byte >> 4]];
        byte += 1;
    }
    table
};

/// Lanes `lanes` and contraction indices `k` of `m` to `out`, `[k][width]`; lanes past the end are zero. For codes, `k`
/// starts and ends with a block.
pub(super) fn pack(
    isa: Isa,
    m: Matrix<'_>,
    lanes: Range<usize>,
    width: usize,
    k: Range<usize>,
    out: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if let (Kind::Amx | Kind::Avx512, Values::Nvfp4 { codes, scales }) = (isa.kind(), m.values) {
        // SAFETY: this kind exists only where detection found AVX-512.
        if unsafe { codes_avx512::pack(codes, scales, m, lanes.clone(), width, k.clone(), out) } {
            return;
        }
    }
    pack_each(isa, m, lanes, width, k, out);
}

multiversion! {
    /// [`pack`] one value or a pair of codes at a time.
    fn pack_each(m: Matrix<'_>, lanes: Range<usize>, width: usize, k: Range<usize>, out: &mut [f32]) {
        match (m.values, m.along) {
            (Values::Nvfp4 { codes, scales }, Along::Cols) => {
                for (out, k) in out.chunks_exact_mut(BLOCK * width).zip(k.step_by(BLOCK)) {
                    clear_unused(out, lanes.len(), width);
                    for (lane, row) in lanes.clone().enumerate() {
                        let block = (m.row0 + row) * (m.cols / BLOCK) + (m.col0 + k) / BLOCK;
                        let scale = e4m3::decode(scales[block]);
                        let bytes = &codes[block * (BLOCK / 2)..][..BLOCK / 2];
                        for (pair, &byte) in out.chunks_exact_mut(2 * width).zip(bytes) {
                            let [even, odd] = PAIRS[byte as usize];
                            pair[lane] = even * scale;
                            pair[width + lane] = odd * scale;
                        }
                    }
                }
            }
            (Values::Nvfp4 { codes, scales }, Along::Rows) => {
                let first = m.col0 + lanes.start;
                for (out, k) in out.chunks_exact_mut(width).zip(k) {
                    out[lanes.len()..].fill(0.0);
                    let row = (m.row0 + k) * m.cols + first;
                    for (i, pair) in out[..lanes.len()].chunks_exact_mut(2).enumerate() {
                        let at = row + 2 * i;
                        let scale = e4m3::decode(scales[at / BLOCK]);
                        let [even, odd] = PAIRS[codes[at / 2] as usize];
                        pair[0] = even * scale;
                        pair[1] = odd * scale;
                    }
                }
            }
            (Values::Bf16(x), Along::Cols) => {
                clear_unused(out, lanes.len(), width);
                for (lane, row) in lanes.enumerate() {
                    let x = &x[(m.row0 + row) * m.cols + m.col0..][k.clone()];
                    for (out, &v) in out.chunks_exact_mut(width).zip(x) {
                        out[lane] = bf::to_f32(v);
                    }
                }
            }
            (Values::Bf16(x), Along::Rows) => {
                for (out, k) in out.chunks_exact_mut(width).zip(k) {
                    out[lanes.len()..].fill(0.0);
                    let x = &x[(m.row0 + k) * m.cols + m.col0..][lanes.clone()];
                    for (out, &v) in out.iter_mut().zip(x) {
                        *out = bf::to_f32(v);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn clear_unused(out: &mut [f32], used: usize, width: usize) {
    if used < width {
        out.chunks_exact_mut(width).for_each(|out| out[used..].fill(0.0));
    }
}
