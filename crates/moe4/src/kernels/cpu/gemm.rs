//! Grouped products over blocks of rows, with an epilogue on each block's accumulators while they are warm.
#![forbid(unsafe_code)]

use super::isa::Isa;
use super::matrix::{Matrix, pack};
use super::micro::{Geometry, Panels, accumulate};
use rayon::prelude::*;
use std::cell::Cell;
use std::ops::Range;

/// Contraction indices of A packed at a time: a block of it (112 x 2048 x 4 bytes) stays in L2.
const PACKED_K: usize = 2048;

/// Elements of packed B kept at a time (32 MiB): several small experts are packed together, a large one alone.
const PACKED: usize = 8 << 20;

/// One expert's product `A [m, k] · B [n, k]ᵀ`.
pub(super) struct Problem<'a> {
    pub(super) a: Matrix<'a>,
    pub(super) b: Matrix<'a>,
    pub(super) n: usize,
    pub(super) k: usize,
}

/// A block of at most [`BLOCK_ROWS`](super::micro::BLOCK_ROWS) rows of one problem, with whatever its epilogue
/// writes to.
pub(super) struct Task<O> {
    pub(super) problem: usize,
    pub(super) rows: Range<usize>,
    pub(super) out: O,
}

/// Accumulators of one block: `rows` rows of `n`, `ld` apart.
pub(super) struct Block<'a> {
    pub(super) acc: &'a [f32],
    pub(super) ld: usize,
}

impl Block<'_> {
    /// Row `i`, columns past the last included.
    #[inline(always)]
    pub(super) fn row(&self, i: usize) -> &[f32] {
        &self.acc[i * self.ld..(i + 1) * self.ld]
    }
}

thread_local! {
    /// Packed operands and accumulators, kept between calls: fresh pages cost more than the packing.
    static SCRATCH: [Cell<Vec<f32>>; 3] = const { [const { Cell::new(Vec::new()) }; 3] };
}

/// Elements of a cache line.
const LINE: usize = 16;

/// Runs `f` with `len` elements of unspecified contents, from the start of a cache line. The buffer leaves its cell,
/// so nested use is sound.
fn with_scratch<R>(slot: usize, len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut buffer = SCRATCH.with(|s| s[slot].take());
    if buffer.len() < len + LINE {
        buffer.resize(len + LINE, 0.0);
    }
    let start = buffer.as_ptr().align_offset(size_of::<f32>() * LINE);
    let result = f(&mut buffer[start..start + len]);
    SCRATCH.with(|s| s[slot].set(buffer));
    result
}

/// All tasks, which come in the order of their problems; results in the same order.
pub(super) fn run<O: Send, R: Send>(
    isa: Isa,
    problems: &[Problem<'_>],
    tasks: Vec<Task<O>>,
    epilogue: impl Fn(&Task<()>, Block<'_>, O) -> R + Sync,
) -> Vec<R> {
    let geometry = Geometry::of(isa);
    let packed_len = |p: &Problem<'_>| p.n.next_multiple_of(geometry.nr) * p.k;
    let mut results = Vec::with_capacity(tasks.len());
    let mut tasks = tasks.into_iter().peekable();
    while let Some(first) = tasks.peek() {
        let start = first.problem;
        let (mut batch, mut offsets, mut total) = (vec![], vec![], 0);
        while let Some(task) = tasks.next_if(|t| {
            let missing: usize = problems[start + offsets.len()..=t.problem].iter().map(packed_len).sum();
            offsets.is_empty() || total + missing <= PACKED
        }) {
            while start + offsets.len() <= task.problem {
                offsets.push(total);
                total += packed_len(&problems[start + offsets.len() - 1]);
            }
            batch.push(task);
        }
        with_scratch(0, total, |packed| {
            pack_b(isa, geometry, &problems[start..start + offsets.len()], packed);
            let packed = &*packed;
            let done = batch.into_par_iter().with_max_len(1).map(|Task { problem, rows, out }| {
                let p = &problems[problem];
                let b = &packed[offsets[problem - start]..][..packed_len(p)];
                let task = Task { problem, rows, out: () };
                // One line more: rows of a tile then lie in different sets of the caches.
                let ld = p.n.next_multiple_of(geometry.nr) + LINE;
                with_scratch(1, task.rows.len().next_multiple_of(geometry.mr) * ld, |acc| {
                    block_product(isa, geometry, p, task.rows.clone(), b, acc, ld);
                    epilogue(&task, Block { acc, ld }, out)
                })
            });
            results.par_extend(done);
        });
    }
    results
}

fn pack_b(isa: Isa, Geometry { nr, .. }: Geometry, problems: &[Problem<'_>], packed: &mut [f32]) {
    let mut panels = vec![];
    let mut rest = packed;
    for p in problems {
        for first in (0..p.n).step_by(nr) {
            let (panel, tail) = rest.split_at_mut(p.k * nr);
            panels.push((p, first, panel));
            rest = tail;
        }
    }
    panels.into_par_iter().for_each(|(p, first, panel)| {
        pack(isa, p.b, first..p.n.min(first + nr), nr, 0..p.k, panel);
    });
}

fn block_product(
    isa: Isa,
    Geometry { mr, .. }: Geometry,
    p: &Problem<'_>,
    rows: Range<usize>,
    b: &[f32],
    acc: &mut [f32],
    ld: usize,
) {
    if p.k == 0 {
        acc.fill(0.0);
    }
    let panels = rows.len().div_ceil(mr);
    with_scratch(2, panels * mr * PACKED_K.min(p.k), |a| {
        for k0 in (0..p.k).step_by(PACKED_K) {
            let kc = PACKED_K.min(p.k - k0);
            let a = &mut a[..panels * mr * kc];
            for (panel, first) in a.chunks_exact_mut(mr * kc).zip(rows.clone().step_by(mr)) {
                pack(isa, p.a, first..rows.end.min(first + mr), mr, k0..k0 + kc, panel);
            }
            accumulate(isa, Panels { a, b, k: p.k, k0, kc }, acc, ld);
        }
    });
}
