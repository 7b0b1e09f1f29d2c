//! Largest magnitudes, before and after the RHT.

#[cfg(target_arch = "x86_64")]
use super::isa::Kind;
use super::isa::{Isa, multiversion};
use super::parallel::reduce_max;
#[cfg(target_arch = "x86_64")]
use super::quantize_avx512;
use super::tile::{self, Lanes};
use crate::kernels::contract::{GroupAmax, GroupHadamardAmax};
use crate::kernels::memory::Host;
use crate::numerics::BLOCK;
use crate::numerics::hadamard::SignMask;
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// Rows of one task: a few tiles, so that small experts still spread over threads.
const ROWS: usize = 4 * BLOCK;

pub(super) fn group_amax(isa: Isa, pass: GroupAmax<'_, Host>) {
    let GroupAmax { x, cols, groups, amax } = pass;
    let blocks = groups.row_blocks(ROWS);
    let found: Vec<f32> =
        blocks.par_iter().map(|b| block_amax(isa, &x[b.rows.start * cols..b.rows.end * cols])).collect();
    reduce_max(groups, &blocks, found.into_iter(), amax);
}

pub(super) fn group_hadamard_amax(isa: Isa, pass: GroupHadamardAmax<'_, Host>) {
    let GroupHadamardAmax { x, cols, groups, sign_mask, amax, amax_rht } = pass;
    let blocks = groups.row_blocks(ROWS);
    let found: Vec<[f32; 2]> = blocks
        .par_iter()
        .map(|b| {
            columns_hadamard_amax(isa, &x[b.rows.start * cols..b.rows.end * cols], cols, 0..cols, sign_mask)
        })
        .collect();
    reduce_max(groups, &blocks, found.iter().map(|a| a[0]), amax);
    reduce_max(groups, &blocks, found.iter().map(|a| a[1]), amax_rht);
}

/// The largest finite magnitude.
pub(super) fn block_amax(isa: Isa, x: &[bf16]) -> f32 {
    let found = match isa.kind() {
        // SAFETY: this kind exists only where detection found AVX-512.
        #[cfg(target_arch = "x86_64")]
        Kind::Amx | Kind::Avx512 => unsafe { quantize_avx512::amax(x) },
        _ => None,
    };
    found.unwrap_or_else(|| block_amax_of_finite(isa, x))
}

multiversion! {
    /// [`block_amax`] of anything.
    fn block_amax_of_finite(x: &[bf16]) -> f32 {
        let mut amax: Lanes = [0.0; BLOCK];
        let vectors = x.chunks_exact(BLOCK);
        for (lane, &v) in amax.iter_mut().zip(vectors.remainder()) {
            *lane = tile::max_finite(*lane, crate::numerics::bf16::to_f32(v));
        }
        for vector in vectors {
            for (lane, v) in amax.iter_mut().zip(tile::widen(vector)) {
                *lane = tile::max_finite(*lane, v);
            }
        }
        tile::horizontal_max(amax)
    }
}

multiversion! {
    /// The largest finite magnitude of some columns of whole rows.
    pub(super) fn columns_amax(rows: &[bf16], cols: usize, of: Range<usize>) -> f32 {
        let mut amax: Lanes = [0.0; BLOCK];
        for row in rows.chunks_exact(cols) {
            for vector in row[of.clone()].chunks_exact(BLOCK) {
                for (lane, v) in amax.iter_mut().zip(tile::widen(vector)) {
                    *lane = tile::max_finite(*lane, v);
                }
            }
        }
        tile::horizontal_max(amax)
    }
}

/// The largest finite magnitude of some columns of whole rows, before and after the RHT along groups of 16 rows.
pub(super) fn columns_hadamard_amax(
    isa: Isa,
    rows: &[bf16],
    cols: usize,
    of: Range<usize>,
    mask: SignMask,
) -> [f32; 2] {
    let found = match isa.kind() {
        // SAFETY: this kind exists only where detection found AVX-512.
        #[cfg(target_arch = "x86_64")]
        Kind::Amx | Kind::Avx512 if of.end.is_multiple_of(BLOCK) || of.end == cols => unsafe {
            quantize_avx512::hadamard_amax(rows, cols, of.clone(), mask)
        },
        _ => None,
    };
    found.unwrap_or_else(|| hadamard_amax_of_finite(isa, rows, cols, of, mask))
}

multiversion! {
    /// [`columns_hadamard_amax`] of anything.
    fn hadamard_amax_of_finite(rows: &[bf16], cols: usize, of: Range<usize>, mask: SignMask) -> [f32; 2] {
        let mut amax = [[0.0; BLOCK]; 2];
        for band in rows.chunks(BLOCK * cols.max(1)) {
            for col in of.clone().step_by(BLOCK) {
                let mut tile = tile::load(band, cols, col);
                let before = tile::column_amax(&tile);
                tile::rht(&mut tile, mask);
                let after = tile::column_amax(&tile);
                for lane in 0..BLOCK {
                    amax[0][lane] = tile::max_finite(amax[0][lane], before[lane]);
                    amax[1][lane] = tile::max_finite(amax[1][lane], after[lane]);
                }
            }
        }
        amax.map(tile::horizontal_max)
    }
}
