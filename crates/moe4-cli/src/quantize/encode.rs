//! Codes and scales of a matrix whose blocks lie along its rows, and back.

use moe4::numerics::rounding::{RandomStream, columnwise_position, rowwise_position};
use moe4::numerics::scale::{self, GlobalScale};
use moe4::numerics::{BLOCK, e2m1};
use moe4::tensor::Tile;
use rayon::prelude::*;

use super::operand::Operand;
use super::{Axis, Settings};

/// A quantized matrix.
pub(super) struct Encoded {
    /// `[rows, cols/2]`.
    pub(super) codes: Vec<u8>,
    /// `[rows, cols/16]`.
    pub(super) scales: Vec<u8>,
    pub(super) amax: f32,
}

/// Quantizes `operand`; stochastically if there is a `stream`, else to nearest.
pub(super) fn encode(operand: &Operand, settings: &Settings, stream: Option<RandomStream>) -> Encoded {
    let Operand { rows, cols, ref values } = *operand;
    let blocks = cols / BLOCK;
    let amax = values.par_iter().map(|value| value.abs()).reduce(|| 0.0, f32::max);
    let global = GlobalScale::from_amax(amax);
    let mut encoded = Encoded { codes: vec![0; rows * cols / 2], scales: vec![0; rows * blocks], amax };
    if blocks == 0 {
        return encoded;
    }

    // Rows that share their block scales.
    let band = if settings.tile == Tile::Square16 { BLOCK } else { 1 };
    let work = (
        values.par_chunks(band * cols),
        encoded.codes.par_chunks_mut(band * cols / 2),
        encoded.scales.par_chunks_mut(band * blocks),
    );
    work.into_par_iter().enumerate().for_each(|(index, (values, codes, scales))| {
        let mut amaxes = vec![0.0_f32; blocks];
        for (at, block) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
            let amax = &mut amaxes[at % blocks];
            *amax = block.iter().fold(*amax, |amax, value| amax.max(value.abs()));
        }
        for (at, block) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
            let (row, column) = (index * band + at / blocks, at % blocks);
            scales[at] = global.block_scale(amaxes[column]);
            let random = stream.map(|stream| {
                stream.block(match settings.axis {
                    Axis::Rowwise => rowwise_position(row, column, blocks),
                    Axis::Columnwise => columnwise_position(column, row, rows),
                })
            });
            let multiplier = global.multiplier(scales[at]);
            encode_block(block, multiplier, random, &mut codes[at * BLOCK / 2..(at + 1) * BLOCK / 2]);
        }
    });
    encoded
}

fn encode_block(block: &[f32; BLOCK], multiplier: f32, random: Option<[u8; BLOCK]>, codes: &mut [u8]) {
    let code = |at: usize| match random {
        Some(bytes) => e2m1::encode_stochastic(block[at] * multiplier, bytes[at]),
        None => e2m1::encode(block[at] * multiplier),
    };
    for (pair, byte) in codes.iter_mut().enumerate() {
        *byte = e2m1::pack(code(2 * pair), code(2 * pair + 1));
    }
}

impl Encoded {
    /// The values that the codes stand for, `[rows, cols]`.
    pub(super) fn dequantize(&self, cols: usize) -> Vec<f32> {
        let mut values = vec![0.0; self.codes.len() * 2];
        if cols > 0 {
            values.par_chunks_mut(BLOCK).enumerate().for_each(|(block, values)| {
                self.dequantize_block(block, values);
            });
        }
        values
    }

    /// Norm of the error over the norm of the values; 0 if the values are all zero.
    pub(super) fn relative_error(&self, operand: &Operand) -> f64 {
        // Sums of one row each, added in order: the same result whatever the threads do.
        let row_sums = |row: usize| {
            let mut restored = [0.0; BLOCK];
            let (mut error, mut norm) = (0.0_f64, 0.0_f64);
            let values = &operand.values[row * operand.cols..(row + 1) * operand.cols];
            for (column, block) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
                self.dequantize_block(row * operand.cols / BLOCK + column, &mut restored);
                for (value, restored) in block.iter().zip(restored) {
                    error += (f64::from(restored) - f64::from(*value)).powi(2);
                    norm += f64::from(*value).powi(2);
                }
            }
            (error, norm)
        };
        let sums: Vec<(f64, f64)> = (0..operand.rows).into_par_iter().map(row_sums).collect();
        let (error, norm) = sums.iter().fold((0.0, 0.0), |sum, row| (sum.0 + row.0, sum.1 + row.1));
        if norm == 0.0 { 0.0 } else { (error / norm).sqrt() }
    }

    fn dequantize_block(&self, block: usize, values: &mut [f32]) {
        for (pair, values) in values.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let (even, odd) = e2m1::unpack(self.codes[block * BLOCK / 2 + pair]);
            *values = [even, odd].map(|code| scale::dequantize(code, self.scales[block], self.amax));
        }
    }
}
