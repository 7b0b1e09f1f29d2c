//! Amax and quantization, block by block.

use crate::kernels::contract::{
    Cast, Dequantize, Direction, GroupQuantize, PackedOut, QuantizeWeights, WeightShape,
};
use crate::kernels::memory::Host;
use crate::numerics::hadamard::{SignMask, rht};
use crate::numerics::rounding::{Rounding, columnwise_position, rowwise_position};
use crate::numerics::scale::{self, GlobalScale, unpacked};
use crate::numerics::{BLOCK, bf16 as bf, e2m1, e4m3};
use crate::tensor::{Groups, ScaleLayout};
use half::bf16;

/// The largest finite magnitude; infinities and NaN are passed over.
pub(super) fn finite_amax(values: impl IntoIterator<Item = f32>) -> f32 {
    values.into_iter().map(f32::abs).filter(|a| a.is_finite()).fold(0.0, f32::max)
}

/// `x: [T, cols]` bf16 -> `amax: [E]` f32.
pub(super) fn group_amax(x: &[bf16], cols: usize, groups: &Groups, amax: &mut [f32]) {
    for (e, amax) in amax.iter_mut().enumerate() {
        let rows = groups.range(e);
        *amax = finite_amax(x[rows.start * cols..rows.end * cols].iter().map(|&v| bf::to_f32(v)));
    }
}

/// `x: [T, cols]` bf16 -> `amax: [E]` f32 of the transformed, bf16-rounded values.
pub(super) fn group_amax_rht(x: &[bf16], cols: usize, groups: &Groups, mask: SignMask, amax: &mut [f32]) {
    for (e, amax) in amax.iter_mut().enumerate() {
        let blocks = groups.range(e).len().div_ceil(BLOCK);
        let all = (0..blocks).flat_map(|block| (0..cols).map(move |col| (block, col)));
        *amax =
            finite_amax(all.flat_map(|(block, col)| rht(token_block(x, cols, groups, e, block, col), mask)));
    }
}

/// Sixteen consecutive tokens of one column of an expert, zeros past its last token.
fn token_block(x: &[bf16], cols: usize, groups: &Groups, e: usize, block: usize, col: usize) -> [f32; BLOCK] {
    let rows = groups.range(e);
    std::array::from_fn(|i| {
        let row = rows.start + block * BLOCK + i;
        if row < rows.end { bf::to_f32(x[row * cols + col]) } else { 0.0 }
    })
}

/// Codes and scale of one block. `position` is where its random bytes are found.
fn quantize_block(
    v: [f32; BLOCK],
    global: GlobalScale,
    rounding: Rounding,
    position: u64,
) -> ([u8; BLOCK], u8) {
    // A NaN or an infinity marks the whole block, so that the damage shows in the output.
    if !v.iter().all(|v| v.is_finite()) {
        return ([0; BLOCK], e4m3::NAN);
    }
    let scale = global.block_scale(finite_amax(v));
    let e = global.multiplier(scale);
    let codes = match rounding {
        // f32 product, then RNE to E2M1; the encoder saturates at 6
        Rounding::Nearest => v.map(|v| e2m1::encode(v * e)),
        Rounding::Stochastic(stream) => {
            let random = stream.block(position);
            std::array::from_fn(|i| e2m1::encode_stochastic(v[i] * e, random[i]))
        }
    };
    (codes, scale)
}

/// A copy `[rows, k]` under construction.
struct Copy<'a> {
    k: usize,
    packed: Option<PackedOut<'a, Host>>,
    unpacked: Option<&'a mut [bf16]>,
}

impl Copy<'_> {
    /// Zero everywhere, padding of scales included.
    fn clear(&mut self) {
        if let Some(PackedOut { codes, scales, .. }) = &mut self.packed {
            codes.fill(0);
            scales.fill(0);
        }
        if let Some(values) = &mut self.unpacked {
            values.fill(bf16::ZERO);
        }
    }

    /// Writes block `block` of a row of `k/16` blocks.
    fn store(&mut self, row: usize, block: usize, (q, s): ([u8; BLOCK], u8)) {
        let k = self.k;
        if let Some(PackedOut { codes, scales, layout }) = &mut self.packed {
            scales[layout.offset(row, block, k / BLOCK)] = s;
            for i in 0..BLOCK / 2 {
                codes[row * (k / 2) + block * (BLOCK / 2) + i] = e2m1::pack(q[2 * i], q[2 * i + 1]);
            }
        }
        if let Some(values) = &mut self.unpacked {
            for i in 0..BLOCK {
                values[row * k + block * BLOCK + i] = unpacked(q[i], s);
            }
        }
    }
}

pub(super) fn group_quantize(pass: GroupQuantize<'_, Host>) {
    let GroupQuantize { x, cols, groups, rowwise, columnwise } = pass;
    if let Some(Cast { amax, rounding, packed, unpacked }) = rowwise {
        let mut out = Copy { k: cols, packed, unpacked };
        out.clear();
        let blocks = cols / BLOCK;
        for (e, &amax) in amax.iter().enumerate() {
            let global = GlobalScale::from_amax(amax);
            for (token, row) in groups.range(e).enumerate() {
                for block in 0..blocks {
                    let v = std::array::from_fn(|i| bf::to_f32(x[row * cols + block * BLOCK + i]));
                    let q = quantize_block(v, global, rounding, rowwise_position(token, block, blocks));
                    out.store(row, block, q);
                }
            }
        }
    }
    if let Some(columnwise) = columnwise {
        let Cast { amax, rounding, packed, unpacked } = columnwise.cast;
        let mut out = Copy { k: groups.padded_rows(), packed, unpacked };
        out.clear();
        for (e, &amax) in amax.iter().enumerate() {
            let global = GlobalScale::from_amax(amax);
            let padded = groups.padded_range(e);
            for block in 0..padded.len() / BLOCK {
                for col in 0..cols {
                    let v = token_block(x, cols, groups, e, block, col);
                    let v = columnwise.rht.map_or(v, |mask| rht(v, mask));
                    let q = quantize_block(v, global, rounding, columnwise_position(block, col, cols));
                    out.store(col, padded.start / BLOCK + block, q);
                }
            }
        }
    }
}

pub(super) fn quantize_weights(pass: QuantizeWeights<'_, Host>) {
    let QuantizeWeights { w, shape: WeightShape { n, k }, codes, scales, unpacked, amax } = pass;
    let packed = Some(PackedOut { codes, scales, layout: ScaleLayout::Plain });
    let mut out = Copy { k, packed, unpacked };
    for (e, w) in w.into_iter().enumerate() {
        amax[e] = finite_amax(w.iter().map(|&v| bf::to_f32(v)));
        let global = GlobalScale::from_amax(amax[e]);
        for tile_row in 0..n / BLOCK {
            for block in 0..k / BLOCK {
                let row_of_tile = |i: usize| -> [f32; BLOCK] {
                    let start = (tile_row * BLOCK + i) * k + block * BLOCK;
                    std::array::from_fn(|j| bf::to_f32(w[start + j]))
                };
                let tile = (0..BLOCK).flat_map(row_of_tile);
                let finite = tile.clone().all(f32::is_finite);
                let scale = if finite { global.block_scale(finite_amax(tile)) } else { e4m3::NAN };
                let multiplier = global.multiplier(scale);
                for i in 0..BLOCK {
                    let q = row_of_tile(i).map(|v| if finite { e2m1::encode(v * multiplier) } else { 0 });
                    out.store(e * n + tile_row * BLOCK + i, block, (q, scale));
                }
            }
        }
    }
}

pub(super) fn dequantize(pass: Dequantize<'_, Host>) {
    let Dequantize { codes, scales, amax, cols, groups, direction, layout, out } = pass;
    let [rows, k] = direction.shape(groups, cols);
    out.fill(0.0);
    for (e, &amax) in amax.iter().enumerate() {
        let (owned_rows, owned_k) = match direction {
            Direction::Rowwise => (groups.range(e), 0..k),
            Direction::Columnwise => (0..rows, groups.padded_range(e)),
        };
        for row in owned_rows {
            for i in owned_k.clone() {
                let (even, odd) = e2m1::unpack(codes[row * (k / 2) + i / 2]);
                let code = if i % 2 == 0 { even } else { odd };
                let block_scale = scales[layout.offset(row, i / BLOCK, k / BLOCK)];
                out[row * k + i] = scale::dequantize(code, block_scale, amax);
            }
        }
    }
}
