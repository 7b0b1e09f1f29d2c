//! Quantization with given amaxes, in both directions, and of weights.

use super::isa::{Isa, multiversion};
use super::parallel::{carve, carve_rows};
use super::tile::{self, Lanes};
use crate::kernels::contract::{
    Cast, ColumnwiseCast, Dequantize, Direction, GroupQuantize, QuantizeWeights, WeightShape,
};
use crate::kernels::memory::Host;
use crate::numerics::hadamard::SignMask;
use crate::numerics::rounding::{Rounding, columnwise_position, rowwise_position};
use crate::numerics::scale::{self, GlobalScale};
use crate::numerics::{BLOCK, e2m1, e4m3};
use crate::tensor::{Groups, ScaleLayout, scale_layout};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// Rows of one rowwise task.
const ROWS: usize = 2 * BLOCK;
/// Columns of one columnwise task: one cache line of BF16.
const COLS: usize = 2 * BLOCK;

pub(super) fn group_quantize(isa: Isa, pass: GroupQuantize<'_, Host>) {
    let GroupQuantize { x, cols, groups, rowwise, columnwise } = pass;
    if let Some(Cast { amax, rounding, layout, codes, scales, unpacked }) = rowwise {
        in_layout(layout, groups.rows(), cols / BLOCK, scales, |scales| {
            quantize_rowwise(isa, x, cols, groups, PlainCast { amax, rounding, codes, scales });
            unpack(cols, codes, scales, unpacked);
        });
    }
    if let Some(ColumnwiseCast { rht, cast }) = columnwise {
        let Cast { amax, rounding, layout, codes, scales, unpacked } = cast;
        let k = groups.padded_rows();
        in_layout(layout, cols, k / BLOCK, scales, |scales| {
            quantize_columnwise(isa, x, cols, groups, rht, PlainCast { amax, rounding, codes, scales });
            unpack(k, codes, scales, unpacked);
        });
    }
}

/// A copy with scales row by row, which every loop here writes.
struct PlainCast<'a> {
    amax: &'a [f32],
    rounding: Rounding,
    codes: &'a mut [u8],
    scales: &'a mut [u8],
}

/// Lets `make` write plain `[rows, cols]` scales and moves them to their places. Nothing on a CPU reads the swizzled
/// form, so it takes a second buffer rather than a place in the loops.
fn in_layout(layout: ScaleLayout, rows: usize, cols: usize, scales: &mut [u8], make: impl FnOnce(&mut [u8])) {
    match layout {
        ScaleLayout::Plain => make(scales),
        ScaleLayout::Swizzled128x4 => {
            let mut plain = vec![0; rows * cols];
            make(&mut plain);
            scale_layout::swizzle(&plain, rows, cols, scales);
        }
    }
}

/// `[rows, k]` BF16 values of plain codes and scales: a function of these alone, also where they are zero.
fn unpack(k: usize, codes: &[u8], scales: &[u8], out: Option<&mut [bf16]>) {
    let Some(out) = out.filter(|out| !out.is_empty()) else { return };
    let rows = codes.par_chunks(k / 2).zip(scales.par_chunks(k / BLOCK));
    out.par_chunks_mut(k).zip(rows).for_each(|(out, (codes, scales))| {
        let blocks = codes.chunks_exact(BLOCK / 2).zip(scales);
        for (out, (codes, &scale)) in out.chunks_exact_mut(BLOCK).zip(blocks) {
            for (pair, &byte) in out.chunks_exact_mut(2).zip(codes) {
                let (even, odd) = e2m1::unpack(byte);
                pair.copy_from_slice(&[even, odd].map(|code| scale::unpacked(code, scale)));
            }
        }
    });
}

fn quantize_rowwise(isa: Isa, x: &[bf16], cols: usize, groups: &Groups, cast: PlainCast<'_>) {
    let PlainCast { amax, rounding, codes, scales } = cast;
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
    rht: Option<SignMask>,
    cast: PlainCast<'_>,
) {
    let k = groups.padded_rows();
    if k == 0 {
        return;
    }
    let PlainCast { amax, rounding, codes, scales } = cast;
    let codes = codes.par_chunks_mut(COLS * (k / 2));
    let scales = scales.par_chunks_mut(COLS * (k / BLOCK));
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
    rht: Option<SignMask>,
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
    let QuantizeWeights { w, shape: WeightShape { n, k }, codes, scales, unpacked, amax } = pass;
    amax.par_iter_mut().zip(&w).for_each(|(amax, w)| {
        *amax =
            w.par_chunks(1 << 14).map(|chunk| super::amax::block_amax(isa, chunk)).reduce(|| 0.0, f32::max);
    });
    // One task is a band of 16 rows of one expert.
    let bands = w.len() * (n / BLOCK);
    let (code_bands, _) = carve(&mut *codes, std::iter::repeat_n(BLOCK * (k / 2), bands));
    let (scale_bands, _) = carve(&mut *scales, std::iter::repeat_n(BLOCK * (k / BLOCK), bands));
    code_bands.into_par_iter().zip(scale_bands).enumerate().for_each(|(i, (codes, scales))| {
        let (e, band) = (i / (n / BLOCK), i % (n / BLOCK));
        let rows = &w[e][band * BLOCK * k..(band + 1) * BLOCK * k];
        quantize_square_tiles(isa, rows, k, GlobalScale::from_amax(amax[e]), codes, scales);
    });
    unpack(k, codes, scales, unpacked);
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

pub(super) fn dequantize(pass: Dequantize<'_, Host>) {
    let Dequantize { codes, scales, amax, cols, groups, direction, layout, out } = pass;
    let [_, k] = direction.shape(groups, cols);
    if out.is_empty() {
        return;
    }
    // Elements `range` of row `row`, which start and end with a block.
    let run = |row: usize, range: Range<usize>, amax: f32, out: &mut [f32]| {
        let codes = &codes[(row * k + range.start) / 2..(row * k + range.end) / 2];
        for (i, (out, codes)) in out.chunks_exact_mut(BLOCK).zip(codes.chunks_exact(BLOCK / 2)).enumerate() {
            let block_scale = scales[layout.offset(row, range.start / BLOCK + i, k / BLOCK)];
            for (pair, &byte) in out.chunks_exact_mut(2).zip(codes) {
                let (even, odd) = e2m1::unpack(byte);
                pair.copy_from_slice(&[even, odd].map(|code| scale::dequantize(code, block_scale, amax)));
            }
        }
    };
    match direction {
        Direction::Rowwise => {
            let blocks = groups.row_blocks(ROWS);
            let pieces = carve_rows(out, k, &blocks);
            blocks.par_iter().zip(pieces).for_each(|(block, out)| {
                for (row, out) in block.rows.clone().zip(out.chunks_exact_mut(k)) {
                    run(row, 0..k, amax[block.expert], out);
                }
            });
        }
        Direction::Columnwise => out.par_chunks_mut(k).enumerate().for_each(|(row, out)| {
            for (e, &amax) in amax.iter().enumerate() {
                let range = groups.padded_range(e);
                run(row, range.clone(), amax, &mut out[range]);
            }
        }),
    }
}
