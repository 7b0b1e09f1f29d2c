//! Quantization with given amaxes, in both directions, and of weights.

use super::isa::{Isa, multiversion};
use super::parallel::{carve, carve_rows};
use super::tile::{self, Lanes};
use crate::kernels::contract::{Cast, ColumnwiseCast, GroupQuantize, QuantizeWeights, WeightShape};
use crate::kernels::memory::Host;
use crate::numerics::rounding::{Rounding, columnwise_position, rowwise_position};
use crate::numerics::scale::GlobalScale;
use crate::numerics::{BLOCK, e2m1, e4m3};
use crate::tensor::Groups;
use half::bf16;
use rayon::prelude::*;

/// Rows of one rowwise task.
const ROWS: usize = 2 * BLOCK;
/// Columns of one columnwise task: one cache line of BF16.
const COLS: usize = 2 * BLOCK;

pub(super) fn group_quantize(isa: Isa, pass: GroupQuantize<'_, Host>) {
    let GroupQuantize { x, cols, groups, rowwise, columnwise } = pass;
    if let Some(cast) = rowwise {
        quantize_rowwise(isa, x, cols, groups, cast);
    }
    if let Some(cast) = columnwise {
        quantize_columnwise(isa, x, cols, groups, cast);
    }
}

fn quantize_rowwise(isa: Isa, x: &[bf16], cols: usize, groups: &Groups, cast: Cast<'_, Host>) {
    let Cast { amax, rounding, codes, scales } = cast;
    let blocks = groups.row_blocks(ROWS);
    let codes = carve_rows(codes, cols / 2, &blocks);
    let scales = carve_rows(scales, cols / BLOCK, &blocks);
    blocks.par_iter().zip(codes).zip(scales).for_each(|((block, codes), scales)| {
        let x = &x[block.rows.start * cols..block.rows.end * cols];
        let global = GlobalScale::from_amax(amax[block.expert]);
        quantize_rows(
            isa,
            x,
            global,
            rounding,
            rowwise_position(block.token, 0, cols / BLOCK),
            codes,
            scales,
        );
    });
}

multiversion! {
    /// Consecutive rowwise blocks, the first at `position`.
    fn quantize_rows(
        x: &[bf16], global: GlobalScale, rounding: Rounding, position: u64, codes: &mut [u8], scales: &mut [u8],
    ) {
        let out = codes.chunks_exact_mut(BLOCK / 2).zip(scales);
        for (i, (x, (codes, scale))) in x.chunks_exact(BLOCK).zip(out).enumerate() {
            let random = match rounding {
                Rounding::Nearest => None,
                Rounding::Stochastic(stream) => Some(stream.block(position + i as u64)),
            };
            let (bytes, s) = tile::quantize_row(&tile::widen(x), global, random);
            codes.copy_from_slice(&bytes);
            *scale = s;
        }
    }
}

fn quantize_columnwise(
    isa: Isa,
    x: &[bf16],
    cols: usize,
    groups: &Groups,
    columnwise: ColumnwiseCast<'_, Host>,
) {
    let k = groups.padded_rows();
    if k == 0 {
        return;
    }
    let codes = columnwise.cast.codes.par_chunks_mut(COLS * (k / 2));
    let scales = columnwise.cast.scales.par_chunks_mut(COLS * (k / BLOCK));
    let (amax, rounding, rht) = (columnwise.cast.amax, columnwise.cast.rounding, columnwise.rht);
    codes.zip(scales).enumerate().for_each(|(chunk, (codes, scales))| {
        for (e, &amax) in amax.iter().enumerate() {
            let (rows, padded) = (groups.range(e), groups.padded_range(e));
            let global = GlobalScale::from_amax(amax);
            for block in 0..padded.len() / BLOCK {
                let first = rows.start + block * BLOCK;
                let band = &x[first * cols..rows.end.min(first + BLOCK) * cols];
                let transform = Columns { cols, first: chunk * COLS, rht, global, rounding, block };
                quantize_band(isa, band, transform, k, padded.start / BLOCK + block, codes, scales);
            }
        }
    });
}

/// What the columns of one band share.
#[derive(Clone, Copy)]
struct Columns {
    cols: usize,
    /// First column of the task.
    first: usize,
    rht: Option<crate::numerics::hadamard::SignMask>,
    global: GlobalScale,
    rounding: Rounding,
    /// Position of the band among the expert's bands of 16 tokens.
    block: usize,
}

multiversion! {
    /// One band of up to 16 tokens, for the columns of one task: block `slot` of each output row of length `k`.
    fn quantize_band(band: &[bf16], c: Columns, k: usize, slot: usize, codes: &mut [u8], scales: &mut [u8]) {
        for local in (0..scales.len() / (k / BLOCK)).step_by(BLOCK) {
            let col = c.first + local;
            let mut tile = tile::load(band, c.cols, col);
            if let Some(mask) = c.rht {
                tile::rht(&mut tile, mask);
            }
            let random = match c.rounding {
                Rounding::Nearest => None,
                Rounding::Stochastic(stream) => {
                    Some(tile::random_blocks(stream, columnwise_position(c.block, col, c.cols)))
                }
            };
            let q = tile::quantize_columns(&tile, c.global, random.as_ref());
            for lane in 0..BLOCK {
                let row = local + lane;
                let bytes: [u8; BLOCK / 2] = std::array::from_fn(|b| q.codes[b][lane]);
                codes[row * (k / 2) + slot * (BLOCK / 2)..][..BLOCK / 2].copy_from_slice(&bytes);
                scales[row * (k / BLOCK) + slot] = q.scales[lane];
            }
        }
    }
}

pub(super) fn quantize_weights(isa: Isa, pass: QuantizeWeights<'_, Host>) {
    let QuantizeWeights { w, shape: WeightShape { n, k }, codes, scales, amax } = pass;
    amax.par_iter_mut().zip(&w).for_each(|(amax, w)| {
        *amax =
            w.par_chunks(1 << 14).map(|chunk| super::amax::block_amax(isa, chunk)).reduce(|| 0.0, f32::max);
    });
    // One task is a band of 16 rows of one expert.
    let bands = w.len() * (n / BLOCK);
    let (codes, _) = carve(codes, std::iter::repeat_n(BLOCK * (k / 2), bands));
    let (scales, _) = carve(scales, std::iter::repeat_n(BLOCK * (k / BLOCK), bands));
    codes.into_par_iter().zip(scales).enumerate().for_each(|(i, (codes, scales))| {
        let (e, band) = (i / (n / BLOCK), i % (n / BLOCK));
        let rows = &w[e][band * BLOCK * k..(band + 1) * BLOCK * k];
        quantize_square_tiles(isa, rows, k, GlobalScale::from_amax(amax[e]), codes, scales);
    });
}

multiversion! {
    /// A band of 16 rows of a weight in 16 x 16 tiles.
    fn quantize_square_tiles(rows: &[bf16], k: usize, global: GlobalScale, codes: &mut [u8], scales: &mut [u8]) {
        for block in 0..k / BLOCK {
            let tile = tile::load(rows, k, block * BLOCK);
            let mut finite = true;
            for lanes in &tile {
                for v in lanes {
                    finite &= v.abs() < f32::INFINITY;
                }
            }
            let scale = if finite { global.block_scale(tile::horizontal_max(tile::column_amax(&tile))) } else { e4m3::NAN };
            let multiplier = global.multiplier(scale);
            for (row, lanes) in tile.iter().enumerate() {
                scales[row * (k / BLOCK) + block] = scale;
                let bytes = encode_row(lanes, multiplier, finite);
                codes[row * (k / 2) + block * (BLOCK / 2)..][..BLOCK / 2].copy_from_slice(&bytes);
            }
        }
    }
}

#[inline(always)]
fn encode_row(lanes: &Lanes, multiplier: f32, finite: bool) -> [u8; BLOCK / 2] {
    let mut codes = [0u8; BLOCK];
    for (code, v) in codes.iter_mut().zip(lanes) {
        *code = if finite { e2m1::encode(v * multiplier) } else { 0 };
    }
    std::array::from_fn(|b| e2m1::pack(codes[2 * b], codes[2 * b + 1]))
}
