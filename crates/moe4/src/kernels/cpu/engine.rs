//! What multiplies: tiles of registers by vector instructions, or the matrix tiles of AMX. Each has its own form of packed
//! operands, which lie in the same scratch memory.
//!
//! | | A | B |
//! |---|---|---|
//! | vectors | `[rows/mr][k][mr]` of `f32` | `[columns/nr][k][nr]` of `f32` |
//! | AMX | for each 32 rows `[k/32][2]` tiles of BF16 | for each 32 columns `[k/32][2]` tiles of BF16 |

#[cfg(target_arch = "x86_64")]
use super::amx::{Configured, DEPTH, LANES, Tile};
#[cfg(target_arch = "x86_64")]
use super::gemm::PANEL;
use super::isa::Isa;
use super::matrix::{Matrix, pack};
use super::micro::{self, Geometry, Panels};
#[cfg(target_arch = "x86_64")]
use super::tiles_avx512::{self, Form};
use std::ops::Range;

/// What multiplies on an instruction set.
pub(super) enum Engine {
    Vectors {
        isa: Isa,
        geometry: Geometry,
    },
    #[cfg(target_arch = "x86_64")]
    Amx(Configured),
}

/// Indices of the contraction that stay in L1: see `docs/attempts.md`.
const VECTOR_STRETCH: usize = micro::KC;
#[cfg(target_arch = "x86_64")]
const AMX_STRETCH: usize = 512;

/// Scratch memory as tiles.
#[cfg(target_arch = "x86_64")]
fn tiles(scratch: &[f32]) -> &[Tile] {
    // SAFETY: a tile is plain data with the size of its elements, any bits are valid, and the parts before and after
    // what is aligned are checked to be empty.
    let (before, tiles, after) = unsafe { scratch.align_to::<Tile>() };
    assert!(before.is_empty() && after.is_empty(), "scratch starts at a line and holds whole tiles");
    tiles
}

/// [`tiles`] to be written.
#[cfg(target_arch = "x86_64")]
fn tiles_mut(scratch: &mut [f32]) -> &mut [Tile] {
    // SAFETY: as for `tiles`.
    let (before, tiles, after) = unsafe { scratch.align_to_mut::<Tile>() };
    assert!(before.is_empty() && after.is_empty(), "scratch starts at a line and holds whole tiles");
    tiles
}

#[cfg(target_arch = "x86_64")]
const TILE_LEN: usize = size_of::<Tile>() / size_of::<f32>();

/// Panels of 32 rows, the last of 16 if that is enough: range of rows, tiles across.
#[cfg(target_arch = "x86_64")]
fn row_panels(rows: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
    (0..rows).step_by(2 * LANES).map(move |first| {
        let len = (rows - first).min(2 * LANES);
        (first..first + len, len.div_ceil(LANES))
    })
}

impl Engine {
    pub(super) fn new(isa: Isa) -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(configured) = Configured::new(isa) {
            return Engine::Amx(configured);
        }
        Engine::Vectors { isa, geometry: Geometry::of(isa) }
    }

    /// Indices of the contraction between two visits of the accumulators.
    pub(super) fn stretch(&self) -> usize {
        match self {
            Engine::Vectors { .. } => VECTOR_STRETCH,
            #[cfg(target_arch = "x86_64")]
            Engine::Amx(_) => AMX_STRETCH,
        }
    }

    /// `rows` filled up to whole panels.
    pub(super) fn rows(&self, rows: usize) -> usize {
        match self {
            Engine::Vectors { geometry, .. } => rows.next_multiple_of(geometry.mr),
            #[cfg(target_arch = "x86_64")]
            Engine::Amx(_) => rows.next_multiple_of(LANES),
        }
    }

    /// Elements of scratch memory that A takes.
    pub(super) fn a_len(&self, rows: usize, k: usize) -> usize {
        match self {
            Engine::Vectors { .. } => self.rows(rows) * k,
            #[cfg(target_arch = "x86_64")]
            Engine::Amx(_) => self.rows(rows) / LANES * k.div_ceil(DEPTH) * TILE_LEN,
        }
    }

    /// Elements of scratch memory that `columns` of B take, whole panels.
    pub(super) fn b_len(&self, columns: usize, k: usize) -> usize {
        match self {
            Engine::Vectors { .. } => columns * k,
            #[cfg(target_arch = "x86_64")]
            Engine::Amx(_) => columns / LANES * k.div_ceil(DEPTH) * TILE_LEN,
        }
    }

    pub(super) fn pack_a(&self, a: Matrix<'_>, rows: Range<usize>, k: usize, out: &mut [f32]) {
        if k == 0 {
            return;
        }
        match self {
            Engine::Vectors { isa, geometry: Geometry { mr, .. } } => {
                for (panel, first) in out.chunks_exact_mut(mr * k).zip(rows.clone().step_by(*mr)) {
                    pack(*isa, a, first..rows.end.min(first + mr), *mr, 0..k, panel);
                }
            }
            #[cfg(target_arch = "x86_64")]
            Engine::Amx(_) => {
                let mut rest = tiles_mut(out);
                for (panel, across) in row_panels(rows.len()) {
                    let (tiles, tail) = rest.split_at_mut(across * k.div_ceil(DEPTH));
                    let lanes = rows.start + panel.start..rows.start + panel.end;
                    // SAFETY: tiles are configured only where AVX-512 is available too.
                    unsafe { tiles_avx512::pack(a, Form::Lanes, lanes, across, 0..k, tiles) };
                    rest = tail;
                }
            }
        }
    }

    /// `columns` of B, the last panel filled up with zeros.
    pub(super) fn pack_b(&self, b: Matrix<'_>, columns: Range<usize>, k: Range<usize>, out: &mut [f32]) {
        match self {
            Engine::Vectors { isa, geometry: Geometry { nr, .. } } => {
                for (i, panel) in out.chunks_exact_mut(nr * k.len()).enumerate() {
                    let first = columns.end.min(columns.start + i * nr);
                    pack(*isa, b, first..columns.end.min(first + nr), *nr, k.clone(), panel);
                }
            }
            #[cfg(target_arch = "x86_64")]
            Engine::Amx(_) => {
                let steps = k.len().div_ceil(DEPTH);
                for (panel, first) in
                    tiles_mut(out).chunks_exact_mut(2 * steps).zip(columns.clone().step_by(PANEL))
                {
                    let lanes = first..columns.end.min(first + PANEL);
                    // SAFETY: tiles are configured only where AVX-512 is available too.
                    unsafe { tiles_avx512::pack(b, Form::Pairs, lanes, 2, k.clone(), panel) };
                }
            }
        }
    }

    /// `acc [rows, ld] (+)= A · B` for the indices `stretch` of `k`, of which B holds these only; `=` for the first.
    pub(super) fn accumulate(
        &self,
        a: &[f32],
        b: &[f32],
        k: usize,
        stretch: Range<usize>,
        acc: &mut [f32],
        ld: usize,
    ) {
        match self {
            Engine::Vectors { isa, .. } => micro::accumulate(*isa, Panels { a, b, k, stretch }, acc, ld),
            #[cfg(target_arch = "x86_64")]
            Engine::Amx(configured) => {
                let (a, b) = (tiles(a), tiles(b));
                let (all, steps) = (k.div_ceil(DEPTH), stretch.len().div_ceil(DEPTH));
                let start = stretch.start / DEPTH;
                let rows = a.len() / all * LANES;
                let mut rest = a;
                for (panel, across) in row_panels(rows) {
                    let (tiles, tail) = rest.split_at(across * all);
                    rest = tail;
                    let tiles = &tiles[across * start..across * (start + steps)];
                    for (j, b) in b.chunks_exact(2 * steps).enumerate() {
                        let acc = &mut acc[panel.start * ld + j * PANEL..];
                        configured.multiply(tiles, b, acc, ld, stretch.start == 0);
                    }
                }
            }
        }
    }
}
