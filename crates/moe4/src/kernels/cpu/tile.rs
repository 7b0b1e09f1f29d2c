//! A tile of 16 rows by 16 columns as `[[f32; 16]; 16]`: one vector a row, columns in the lanes.
//!
//! The same tile serves both directions. Columnwise blocks run down the rows, so a butterfly is additions of whole
//! vectors and sixteen blocks are handled at once; rowwise blocks are single vectors. All functions are inlined
//! into functions compiled for an instruction set.
#![forbid(unsafe_code)]

use crate::numerics::hadamard::SignMask;
use crate::numerics::rounding::RandomStream;
use crate::numerics::scale::GlobalScale;
use crate::numerics::{BLOCK, bf16 as bf, e2m1, e4m3};
use half::bf16;

/// One vector: sixteen lanes.
pub(super) type Lanes = [f32; BLOCK];
/// Sixteen vectors.
pub(super) type Tile = [Lanes; BLOCK];

/// Up to 16 x 16 elements of a `[·, cols]` matrix from `rows`, column `col` on; zeros elsewhere.
#[inline(always)]
pub(super) fn load(rows: &[bf16], cols: usize, col: usize) -> Tile {
    let mut tile = [[0.0; BLOCK]; BLOCK];
    let width = BLOCK.min(cols - col);
    for (lanes, row) in tile.iter_mut().zip(rows.chunks_exact(cols)) {
        if width == BLOCK {
            *lanes = widen(&row[col..col + BLOCK]);
        } else {
            for (lane, &v) in lanes.iter_mut().zip(&row[col..]) {
                *lane = bf::to_f32(v);
            }
        }
    }
    tile
}

/// Sixteen values as one vector.
#[inline(always)]
pub(super) fn widen(values: &[bf16]) -> Lanes {
    let mut lanes = [0.0; BLOCK];
    for (lane, &v) in lanes.iter_mut().zip(&values[..BLOCK]) {
        *lane = bf::to_f32(v);
    }
    lanes
}

/// The RHT of every column, in the order of [`crate::numerics::hadamard`], rounded to BF16.
#[inline(always)]
pub(super) fn rht(tile: &mut Tile, mask: SignMask) {
    for (lanes, sign) in tile.iter_mut().zip(mask.sign_bits()) {
        for v in lanes.iter_mut() {
            *v = f32::from_bits(v.to_bits() ^ sign);
        }
    }
    butterfly::<1>(tile);
    butterfly::<2>(tile);
    butterfly::<4>(tile);
    butterfly::<8>(tile);
    for lanes in tile.iter_mut() {
        for v in lanes.iter_mut() {
            *v = bf::round(*v * 0.25);
        }
    }
}

#[inline(always)]
fn butterfly<const STRIDE: usize>(tile: &mut Tile) {
    for pair in 0..BLOCK / 2 {
        let i = pair / STRIDE * 2 * STRIDE + pair % STRIDE;
        let (low, high) = tile.split_at_mut(i + STRIDE);
        for (a, b) in low[i].iter_mut().zip(&mut high[0]) {
            (*a, *b) = (*a + *b, *a - *b);
        }
    }
}

/// The larger of `m` and `|v|`, unless `v` is infinite or NaN.
#[inline(always)]
pub(super) fn max_finite(m: f32, v: f32) -> f32 {
    let a = v.abs();
    // One comparison drops smaller values and NaN, the other infinities.
    if a > m && a < f32::INFINITY { a } else { m }
}

/// The largest finite magnitude of each column.
#[inline(always)]
pub(super) fn column_amax(tile: &Tile) -> Lanes {
    let mut amax = [0.0; BLOCK];
    for lanes in tile {
        for (m, &v) in amax.iter_mut().zip(lanes) {
            *m = max_finite(*m, v);
        }
    }
    amax
}

/// The largest of all lanes.
#[inline(always)]
pub(super) fn horizontal_max(lanes: Lanes) -> f32 {
    let mut m = lanes;
    let mut width = BLOCK / 2;
    while width > 0 {
        for i in 0..width {
            m[i] = if m[i + width] > m[i] { m[i + width] } else { m[i] };
        }
        width /= 2;
    }
    m[0]
}

/// One columnwise block in each lane: eight code bytes and a scale.
pub(super) struct ColumnBlocks {
    /// `codes[b][lane]` holds rows `2b` and `2b + 1`.
    pub(super) codes: [[u8; BLOCK]; BLOCK / 2],
    pub(super) scales: [u8; BLOCK],
}

/// Quantizes every column of a tile as one block. `random[lane]` are the bytes of that lane's block, if rounding is
/// stochastic.
#[inline(always)]
pub(super) fn quantize_columns(
    tile: &Tile,
    global: GlobalScale,
    random: Option<&[[u8; BLOCK]; BLOCK]>,
) -> ColumnBlocks {
    let amax = column_amax(tile);
    let mut finite = [true; BLOCK];
    for lanes in tile {
        for (ok, v) in finite.iter_mut().zip(lanes) {
            *ok &= v.abs() < f32::INFINITY;
        }
    }
    let mut scales = [0u8; BLOCK];
    let mut multiplier = [0f32; BLOCK];
    for lane in 0..BLOCK {
        let scale = global.block_scale(amax[lane]);
        multiplier[lane] = global.multiplier(scale);
        scales[lane] = if finite[lane] { scale } else { e4m3::NAN };
    }
    let code = |row: usize, lane: usize| {
        let v = tile[row][lane] * multiplier[lane];
        let code = match random {
            None => e2m1::encode(v),
            Some(random) => e2m1::encode_stochastic(v, random[lane][row]),
        };
        if finite[lane] { code } else { 0 }
    };
    let mut codes = [[0u8; BLOCK]; BLOCK / 2];
    for (b, out) in codes.iter_mut().enumerate() {
        for (lane, out) in out.iter_mut().enumerate() {
            *out = e2m1::pack(code(2 * b, lane), code(2 * b + 1, lane));
        }
    }
    ColumnBlocks { codes, scales }
}

/// Quantizes one vector as a rowwise block.
#[inline(always)]
pub(super) fn quantize_row(
    v: &Lanes,
    global: GlobalScale,
    random: Option<[u8; BLOCK]>,
) -> ([u8; BLOCK / 2], u8) {
    let mut lanes = [0.0; BLOCK];
    let mut finite = true;
    for (m, v) in lanes.iter_mut().zip(v) {
        *m = max_finite(0.0, *v);
        finite &= v.abs() < f32::INFINITY;
    }
    if !finite {
        return ([0; BLOCK / 2], e4m3::NAN);
    }
    let scale = global.block_scale(horizontal_max(lanes));
    let multiplier = global.multiplier(scale);
    let mut codes = [0u8; BLOCK];
    match random {
        None => {
            for (code, v) in codes.iter_mut().zip(v) {
                *code = e2m1::encode(v * multiplier);
            }
        }
        Some(random) => {
            for ((code, v), r) in codes.iter_mut().zip(v).zip(random) {
                *code = e2m1::encode_stochastic(v * multiplier, r);
            }
        }
    }
    (std::array::from_fn(|b| e2m1::pack(codes[2 * b], codes[2 * b + 1])), scale)
}

/// The random bytes of sixteen neighbouring blocks, the first at `position`.
#[inline(always)]
pub(super) fn random_blocks(stream: RandomStream, position: u64) -> [[u8; BLOCK]; BLOCK] {
    std::array::from_fn(|lane| stream.block(position + lane as u64))
}
