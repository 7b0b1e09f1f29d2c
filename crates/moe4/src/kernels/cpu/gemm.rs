//! Grouped products, with an epilogue on accumulators while they are warm.
//!
//! ```text
//! for each task, a run of rows of one expert:         tasks spread over threads
//!   pack A, all of the contraction                    stays in L2
//!   for each stripe, up to 128 columns:
//!     for each stretch of the contraction:
//!       pack the stripe of B                          stays in L1 and L2, never in memory
//!       accumulators += A · B                         panel by panel, in registers or tiles
//!     epilogue                                        scaling, bias, activation, rounding, amaxes
//! ```
//!
//! B is packed by each task that needs it: that takes less time than to write it once for all and to read it again
//! from another core's cache.
#![forbid(unsafe_code)]

use super::engine::Engine;
use super::isa::Isa;
use super::matrix::Matrix;
use rayon::prelude::*;
use std::cell::Cell;
use std::ops::Range;

/// Columns of accumulators that an epilogue sees at a time.
const STRIPE: usize = 128;

/// Columns come in panels of this many, the last one of a piece filled up.
pub(super) const PANEL: usize = 32;

/// One expert's product `A [m, k] · B [n, k]ᵀ`.
pub(super) struct Problem<'a> {
    pub(super) a: Matrix<'a>,
    pub(super) b: Matrix<'a>,
    pub(super) n: usize,
    pub(super) k: usize,
}

/// A run of rows of one problem, with whatever its epilogue writes to.
pub(super) struct Task<O> {
    pub(super) problem: usize,
    pub(super) rows: Range<usize>,
    pub(super) out: O,
}

/// How the columns of a product are cut into stripes.
#[derive(Clone, Copy)]
pub(super) enum Cut {
    /// From first to last.
    Straight,
    /// A piece of the first half of the columns beside the same piece of the second: a feature's gate and up.
    Halves,
}

/// Neighbouring columns, and where they lie among the accumulators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) cols: Range<usize>,
    pub(super) at: usize,
}

/// The columns of one stripe: two pieces of the same length if cut in halves.
pub(super) struct Stripe {
    pub(super) first: Piece,
    pub(super) second: Option<Piece>,
}

impl Stripe {
    pub(super) fn pieces(&self) -> impl Iterator<Item = &Piece> {
        std::iter::once(&self.first).chain(&self.second)
    }

    /// Columns of accumulators, filled up to whole panels.
    fn width(&self) -> usize {
        self.pieces().map(|p| p.cols.len().next_multiple_of(PANEL)).sum()
    }
}

fn stripes(n: usize, cut: Cut) -> impl Iterator<Item = Stripe> {
    let (len, width) = match cut {
        Cut::Straight => (n, STRIPE),
        Cut::Halves => (n / 2, STRIPE / 2),
    };
    (0..len).step_by(width).map(move |start| {
        let cols = start..len.min(start + width);
        let at = cols.len().next_multiple_of(PANEL);
        let second = match cut {
            Cut::Straight => None,
            Cut::Halves => Some(Piece { cols: len + cols.start..len + cols.end, at }),
        };
        Stripe { first: Piece { cols, at: 0 }, second }
    })
}

/// Accumulators of one stripe: its rows, `ld` apart.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    pub(super) acc: &'a [f32],
    pub(super) ld: usize,
}

impl<'a> Block<'a> {
    /// Row `i`, from column `at` of the accumulators on.
    #[inline(always)]
    pub(super) fn row(&self, i: usize, at: usize) -> &'a [f32] {
        &self.acc[i * self.ld + at..(i + 1) * self.ld]
    }
}

thread_local! {
    /// A, B and accumulators, kept between calls: fresh pages cost more than the packing.
    static SCRATCH: [Cell<Vec<f32>>; 3] = const { [const { Cell::new(Vec::new()) }; 3] };
}

/// Elements of a cache line.
const LINE: usize = 16;

/// Runs `f` with `len` elements of unspecified contents, from the start of a cache line. The buffer leaves its cell,
/// so nested use is sound.
fn with_scratch<R>(slot: usize, len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut buffer = SCRATCH.with(|s| s[slot].take());
    if buffer.len() < len + LINE {
        // Not by `resize`: that copies, and keeps up to twice the length.
        drop(std::mem::take(&mut buffer));
        buffer = vec![0.0; len + LINE];
    }
    let start = buffer.as_ptr().align_offset(size_of::<f32>() * LINE);
    let result = f(&mut buffer[start..start + len]);
    SCRATCH.with(|s| s[slot].set(buffer));
    result
}

/// All tasks, stripe by stripe; what they wrote to, in the same order.
pub(super) fn run<O: Send>(
    isa: Isa,
    problems: &[Problem<'_>],
    tasks: Vec<Task<O>>,
    cut: Cut,
    epilogue: impl Fn(&Task<()>, &Stripe, Block<'_>, &mut O) + Sync,
) -> Vec<O> {
    let each = |Task { problem, rows, mut out }: Task<O>| {
        let task = Task { problem, rows, out: () };
        product(isa, &problems[problem], task.rows.clone(), cut, |stripe, block| {
            epilogue(&task, stripe, block, &mut out);
        });
        out
    };
    tasks.into_par_iter().with_max_len(1).map(each).collect()
}

fn product(
    isa: Isa,
    p: &Problem<'_>,
    rows: Range<usize>,
    cut: Cut,
    mut each: impl FnMut(&Stripe, Block<'_>),
) {
    let engine = Engine::new(isa);
    // One line more: rows of a tile then lie in different sets of the caches.
    let ld = STRIPE + LINE;
    let b_len = engine.b_len(STRIPE, p.k.min(engine.stretch()));
    with_scratch(0, engine.a_len(rows.len(), p.k), |a| {
        engine.pack_a(p.a, rows.clone(), p.k, a);
        with_scratch(1, b_len, |b| {
            with_scratch(2, engine.rows(rows.len()) * ld, |acc| {
                for stripe in stripes(p.n, cut) {
                    if p.k == 0 {
                        acc.fill(0.0);
                    }
                    for start in (0..p.k).step_by(engine.stretch()) {
                        let k = start..p.k.min(start + engine.stretch());
                        let b = &mut b[..engine.b_len(stripe.width(), k.len())];
                        let mut rest = &mut b[..];
                        for piece in stripe.pieces() {
                            let len = engine.b_len(piece.cols.len().next_multiple_of(PANEL), k.len());
                            let (panels, tail) = rest.split_at_mut(len);
                            engine.pack_b(p.b, piece.cols.clone(), k.clone(), panels);
                            rest = tail;
                        }
                        engine.accumulate(a, b, p.k, k, acc, ld);
                    }
                    each(&stripe, Block { acc, ld });
                }
            });
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_cover_every_column_once() {
        for (n, cut) in
            [16, 48, 128, 160, 272].into_iter().flat_map(|n| [(n, Cut::Straight), (2 * n, Cut::Halves)])
        {
            let mut seen = vec![0; n];
            for stripe in stripes(n, cut) {
                assert!(stripe.width() <= STRIPE, "{n}");
                for Piece { cols, .. } in stripe.pieces() {
                    cols.clone().for_each(|c| seen[c] += 1);
                }
                if let Some(second) = &stripe.second {
                    assert_eq!(second.cols.start - stripe.first.cols.start, n / 2);
                    assert!(second.at >= stripe.first.cols.len() && second.at.is_multiple_of(PANEL));
                }
            }
            assert!(seen.iter().all(|&n| n == 1), "{n}");
        }
    }
}
