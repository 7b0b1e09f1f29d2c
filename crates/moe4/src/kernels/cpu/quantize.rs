//! Quantization with given amaxes, in both directions, and of weights.

#[cfg(target_arch = "x86_64")]
use super::isa::Kind;
use super::isa::{Isa, multiversion};
use super::parallel::{carve, carve_optional, carve_rows};
#[cfg(target_arch = "x86_64")]
use super::quantize_avx512;
use super::tile::{self, Lanes};
use crate::kernels::contract::{
    Cast, Dequantize, Direction, GroupQuantize, PackedOut, QuantizeWeights, WeightShape,
};
use crate::kernels::memory::Host;
use crate::numerics::hadamard::SignMask;
use crate::numerics::rounding::{RandomStream, Rounding, columnwise_position, rowwise_position};
use crate::numerics::scale::{self, GlobalScale};
use crate::numerics::{BLOCK, e2m1, e4m3};
use crate::tensor::{Groups, ScaleLayout, scale_layout};
use half::bf16;
use rayon::prelude::*;
use std::marker::PhantomData;
use std::ops::Range;

/// Rows that one task quantizes. Of a columnwise copy it writes whole lines of a cache, if they start with one.
const ROWS: usize = 8 * BLOCK;

pub(super) fn group_quantize(isa: Isa, pass: GroupQuantize<'_, Host>) {
    let GroupQuantize { x, cols, groups, rowwise, columnwise } = pass;
    let k = groups.padded_rows();
    let (rht, columnwise) = columnwise.map_or((None, None), |c| (c.rht, Some(c.cast)));
    in_layout(rowwise, groups.rows(), cols, |rowwise| {
        in_layout(columnwise, cols, k, |columnwise| {
            quantize_runs(isa, x, cols, groups, rowwise, columnwise.map(|cast| (rht, cast)));
        });
    });
}

/// A copy with scales row by row, which every loop here writes.
struct PlainCast<'a> {
    amax: &'a [f32],
    rounding: Rounding,
    codes: &'a mut [u8],
    scales: &'a mut [u8],
}

/// Lets `make` write plain `[rows, k/16]` scales and moves them to their places. Nothing on a CPU reads the swizzled
/// form, so it takes a second buffer rather than a place in the loops; so do codes and scales of which only the values are
/// wanted, which come last.
fn in_layout(cast: Option<Cast<'_, Host>>, rows: usize, k: usize, make: impl FnOnce(Option<PlainCast<'_>>)) {
    let Some(Cast { amax, rounding, packed, unpacked }) = cast else { return make(None) };
    match packed {
        None => {
            let (mut codes, mut scales) = (vec![0; rows * (k / 2)], vec![0; rows * (k / BLOCK)]);
            make(Some(PlainCast { amax, rounding, codes: &mut codes, scales: &mut scales }));
            unpack(k, &codes, &scales, unpacked);
        }
        Some(PackedOut { codes, scales, layout: ScaleLayout::Plain }) => {
            make(Some(PlainCast { amax, rounding, codes, scales }));
            unpack(k, codes, scales, unpacked);
        }
        Some(PackedOut { codes, scales, layout: ScaleLayout::Swizzled128x4 }) => {
            let mut plain = vec![0; rows * (k / BLOCK)];
            make(Some(PlainCast { amax, rounding, codes, scales: &mut plain }));
            unpack(k, codes, &plain, unpacked);
            scale_layout::swizzle(&plain, rows, k / BLOCK, scales);
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

/// A columnwise copy `[cols, k]` that several threads write, each its own blocks of tokens.
struct Columns<'a> {
    codes: *mut u8,
    scales: *mut u8,
    /// Blocks of a row.
    blocks: usize,
    cols: usize,
    borrowed: PhantomData<&'a mut [u8]>,
}

// SAFETY: threads write through `put` only, whose caller promises that no two write the same block.
unsafe impl Sync for Columns<'_> {}

impl<'a> Columns<'a> {
    fn new(codes: &'a mut [u8], scales: &'a mut [u8], cols: usize, blocks: usize) -> Self {
        assert!(
            codes.len() == cols * blocks * (BLOCK / 2) && scales.len() == cols * blocks,
            "{cols} x {blocks}"
        );
        Self { codes: codes.as_mut_ptr(), scales: scales.as_mut_ptr(), blocks, cols, borrowed: PhantomData }
    }

    /// Block `block` of sixteen columns from `col` on.
    ///
    /// # Safety
    /// No other thread writes `block` of these columns.
    #[inline(always)]
    unsafe fn put(&self, col: usize, block: usize, (codes, scales): ([u64; BLOCK], [u8; BLOCK])) {
        assert!(col + BLOCK <= self.cols && block < self.blocks, "block {block} of columns from {col} on");
        for (lane, (codes, scale)) in codes.into_iter().zip(scales).enumerate() {
            let at = (col + lane) * self.blocks + block;
            // SAFETY: `at` is below `cols · blocks`, which `new` compared with both lengths; nobody else writes there.
            unsafe {
                self.codes.add(at * (BLOCK / 2)).cast::<[u8; BLOCK / 2]>().write(codes.to_le_bytes());
                self.scales.add(at).write(scale);
            }
        }
    }
}

/// Both copies in one read of `x`: a band of 16 rows is in the cache when it is read again.
fn quantize_runs(
    isa: Isa,
    x: &[bf16],
    cols: usize,
    groups: &Groups,
    rowwise: Option<PlainCast<'_>>,
    columnwise: Option<(Option<SignMask>, PlainCast<'_>)>,
) {
    let (runs, blocks) = (groups.row_blocks(ROWS), cols / BLOCK);
    let (codes, scales, row) = match rowwise {
        Some(PlainCast { amax, rounding, codes, scales }) => {
            (Some(codes), Some(scales), Some((amax, rounding)))
        }
        None => (None, None, None),
    };
    let (codes, scales) = (carve_optional(codes, cols / 2, &runs), carve_optional(scales, blocks, &runs));
    let column = columnwise.map(|(rht, PlainCast { amax, rounding, codes, scales })| {
        (rht, amax, rounding, Columns::new(codes, scales, cols, groups.padded_rows() / BLOCK))
    });
    runs.par_iter().zip(codes).zip(scales).with_max_len(1).for_each(|((run, mut codes), mut scales)| {
        let e = run.expert;
        for (i, x) in x[run.rows.start * cols..run.rows.end * cols].chunks(BLOCK * cols).enumerate() {
            let token = run.token + i * BLOCK;
            if let (Some((amax, rounding)), Some(codes), Some(scales)) = (row, &mut codes, &mut scales) {
                let first = i * BLOCK * blocks;
                let range = first..first + x.len() / BLOCK;
                let codes = &mut codes[range.start * (BLOCK / 2)..range.end * (BLOCK / 2)];
                let (global, position) =
                    (GlobalScale::from_amax(amax[e]), rowwise_position(token, 0, blocks));
                quantize_rows(isa, x, cols, global, rounding, position, codes, &mut scales[range]);
            }
            if let Some((rht, amax, rounding, out)) = &column {
                let global = GlobalScale::from_amax(amax[e]);
                let block = (groups.padded_range(e).start + token) / BLOCK;
                for col in (0..cols).step_by(BLOCK) {
                    let random = match rounding {
                        Rounding::Nearest => None,
                        Rounding::Stochastic(stream) => {
                            Some((*stream, columnwise_position(token / BLOCK, col, cols)))
                        }
                    };
                    let blocks = quantize_columns(isa, x, cols, col, *rht, global, random);
                    // SAFETY: runs share no block of tokens: each starts at a multiple of 16 rows within its expert.
                    unsafe { out.put(col, block, blocks) };
                }
            }
        }
    });
}

/// Rowwise blocks of up to 16 rows, the first at `position`.
#[allow(clippy::too_many_arguments, reason = "the arguments of one call, from one place")]
fn quantize_rows(
    isa: Isa,
    x: &[bf16],
    cols: usize,
    global: GlobalScale,
    rounding: Rounding,
    position: u64,
    codes: &mut [u8],
    scales: &mut [u8],
) {
    debug_assert!(x.len().is_multiple_of(cols) && x.len() <= BLOCK * cols);
    match isa.kind() {
        // SAFETY: this kind exists only where detection found AVX-512.
        #[cfg(target_arch = "x86_64")]
        Kind::Amx | Kind::Avx512 => unsafe {
            quantize_avx512::quantize_rows(x, cols, global, rounding, position, codes, scales)
        },
        _ => quantize_each_row(isa, x, global, rounding, position, codes, scales),
    }
}

multiversion! {
    /// Consecutive rowwise blocks, the first at `position`.
    fn quantize_each_row(
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

/// Sixteen columnwise blocks from column `col` on of a band of up to 16 rows. `random` names the first block's draw.
fn quantize_columns(
    isa: Isa,
    band: &[bf16],
    cols: usize,
    col: usize,
    rht: Option<SignMask>,
    global: GlobalScale,
    random: Option<(RandomStream, u64)>,
) -> ([u64; BLOCK], [u8; BLOCK]) {
    match isa.kind() {
        // SAFETY: this kind exists only where detection found AVX-512.
        #[cfg(target_arch = "x86_64")]
        Kind::Amx | Kind::Avx512 => unsafe {
            quantize_avx512::quantize_columns(band, cols, col, rht, global, random)
        },
        _ => quantize_tile(isa, band, cols, col, rht, global, random),
    }
}

multiversion! {
    /// The same by the functions of [`tile`].
    fn quantize_tile(
        band: &[bf16], cols: usize, col: usize, rht: Option<SignMask>, global: GlobalScale, random: Option<(RandomStream, u64)>,
    ) -> ([u64; BLOCK], [u8; BLOCK]) {
        let mut tile = tile::load(band, cols, col);
        if let Some(mask) = rht {
            tile::rht(&mut tile, mask);
        }
        let random = random.map(|(stream, position)| tile::random_blocks(stream, position));
        let q = tile::quantize_columns(&tile, global, random.as_ref());
        let codes = std::array::from_fn(|lane| u64::from_le_bytes(std::array::from_fn(|b| q.codes[b][lane])));
        (codes, q.scales)
    }
}

pub(super) fn quantize_weights(isa: Isa, pass: QuantizeWeights<'_, Host>) {
    let QuantizeWeights { w, shape: WeightShape { n, k }, codes, scales, unpacked, amax } = pass;
    let (bands, blocks) = (n / BLOCK, k / BLOCK);
    let (code_slabs, _) = carve(&mut *codes, std::iter::repeat_n(n * (k / 2), w.len()));
    let (scale_slabs, _) = carve(&mut *scales, std::iter::repeat_n(n * blocks, w.len()));
    // An expert at a time, so that its weight is still in a cache when it is read again.
    let slabs = code_slabs.into_par_iter().zip(scale_slabs).with_max_len(1);
    slabs.zip(amax).zip(w).for_each(|(((codes, scales), amax), w)| {
        *amax =
            w.par_chunks(1 << 16).map(|chunk| super::amax::block_amax(isa, chunk)).reduce(|| 0.0, f32::max);
        let global = GlobalScale::from_amax(*amax);
        let (codes, _) = carve(codes, std::iter::repeat_n(BLOCK * (k / 2), bands));
        let (scales, _) = carve(scales, std::iter::repeat_n(BLOCK * blocks, bands));
        w.par_chunks(BLOCK * k).zip(codes).zip(scales).with_min_len(4).for_each(|((rows, codes), scales)| {
            quantize_band(isa, rows, k, global, codes, scales);
        });
    });
    unpack(k, codes, scales, unpacked);
}

/// A band of 16 rows of a weight in 16 x 16 tiles.
fn quantize_band(
    isa: Isa,
    rows: &[bf16],
    k: usize,
    global: GlobalScale,
    codes: &mut [u8],
    scales: &mut [u8],
) {
    match isa.kind() {
        // SAFETY: this kind exists only where detection found AVX-512.
        #[cfg(target_arch = "x86_64")]
        Kind::Amx | Kind::Avx512 => unsafe {
            quantize_avx512::quantize_square_tiles(rows, k, global, codes, scales)
        },
        _ => quantize_square_tiles(isa, rows, k, global, codes, scales),
    }
}

multiversion! {
    /// [`quantize_band`] by the functions of [`tile`].
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Backend;
    use crate::kernels::contract::{ColumnwiseCast, GroupQuantize, QuantizeWeights};
    use crate::kernels::cpu::Cpu;
    use crate::kernels::reference::Reference;
    use crate::numerics::philox::philox4x32;

    /// Mostly ordinary values, with blocks of very small and of very large ones, and a few that are not finite.
    fn values(len: usize) -> Vec<bf16> {
        let value = |i: usize| {
            let [a, b, ..] = philox4x32(3, 0, i as u64);
            let v = (a as f32 / u32::MAX as f32 - 0.5) * [1.0, 1e-3, 40.0, 1e-38][i / 64 % 4];
            bf16::from_f32(if b % 5000 == 0 { f32::INFINITY } else { v })
        };
        (0..len).map(value).collect()
    }

    type Copies = Vec<(Vec<u8>, Vec<u8>)>;

    fn weights<B: Backend<Memory = Host>>(b: &B, w: &[bf16], shape: WeightShape) -> Copies {
        let experts = w.len() / (shape.n * shape.k);
        let (mut codes, mut scales) = (vec![9; w.len() / 2], vec![9; w.len() / BLOCK]);
        let mut amax = vec![9.0; experts];
        let w = w.chunks(shape.n * shape.k).collect();
        let (c, s) = (&mut codes[..], &mut scales[..]);
        let pass = QuantizeWeights { w, shape, codes: c, scales: s, unpacked: None, amax: &mut amax[..] };
        b.quantize_weights(pass).expect("weights");
        vec![(codes, scales), (amax.iter().flat_map(|a| a.to_le_bytes()).collect(), vec![])]
    }

    fn both<B: Backend<Memory = Host>>(
        b: &B,
        x: &[bf16],
        cols: usize,
        groups: &Groups,
        random: bool,
    ) -> Copies {
        let amax = vec![20.0; groups.experts()];
        let k = groups.padded_rows();
        let mut out: Copies =
            [groups.rows() * cols, cols * k].map(|len| (vec![9; len / 2], vec![9; len / BLOCK])).into();
        let rounding = |stream| match random {
            true => Rounding::Stochastic(RandomStream { seed: 5, stream }),
            false => Rounding::Nearest,
        };
        let mut casts =
            out.iter_mut().zip([rounding(1), rounding(2)]).map(|((codes, scales), rounding)| Cast {
                amax: &amax[..],
                rounding,
                packed: Some(PackedOut {
                    codes: &mut codes[..],
                    scales: &mut scales[..],
                    layout: ScaleLayout::Plain,
                }),
                unpacked: None,
            });
        let rowwise = casts.next();
        let columnwise = casts.next().map(|cast| ColumnwiseCast { rht: Some(SignMask::DEFAULT), cast });
        b.group_quantize(GroupQuantize { x, cols, groups, rowwise, columnwise }).expect("both copies");
        drop(casts);
        out
    }

    /// Wider than what a register tile or a table of random bytes holds.
    #[test]
    fn wide_tensors_are_the_reference_to_the_byte() {
        let shape = WeightShape { n: 32, k: 1072 };
        let (w, groups) =
            (values(3 * shape.n * shape.k), Groups::new(&[3, 150, 0, 17], 180).expect("splits"));
        for isa in Isa::available() {
            let cpu = Cpu::with_isa(isa);
            assert!(weights(&cpu, &w, shape) == weights(&Reference, &w, shape), "{isa}");
            for (cols, random) in [(544, false), (560, true), (16, true)] {
                let x = values(groups.rows() * cols);
                let expected = both(&Reference, &x, cols, &groups, random);
                assert!(both(&cpu, &x, cols, &groups, random) == expected, "{isa}, {cols} columns, {random}");
            }
        }
    }
}
