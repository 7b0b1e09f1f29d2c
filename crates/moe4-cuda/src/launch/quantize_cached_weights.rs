//! Launches `kernels/quantize_cached_weights.cu`.

use super::THREADS;
use super::quantize_weights::Weights;
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::variant::Variant;
use half::bf16;
use moe4::kernels::{Backend, Error};
use moe4::numerics::BLOCK;

/// Of the L2 cache the part that an expert's weight may fill: 12.5 MiB of the 50 MiB of an H200. Between its two reads come
/// as many bytes as it has, and 16 KiB for each thread block, 8.3 MiB there; one half of that cache repeats much of the
/// other, and outputs pass through it. Chosen from these sizes. Measured: experts of 3 and 6 MB take 0.8 of the time of two
/// launches, those of 10 MB the same (docs/attempts.md). An expert that does not stay is read from memory twice, as elsewhere.
const SHARE_OF_CACHE: usize = 4;
/// Fewest experts. The first one's amax and the last one's codes overlap with nothing: two launches do as well.
const FEWEST_EXPERTS: usize = 4;
/// Thread blocks of a multiprocessor; `RESIDENT` of the kernel.
const RESIDENT: u32 = 4;
/// Tiles of a warp, side by side; `WARP_TILES` of the kernel.
const WARP_TILES: u32 = 4;
/// Strips of `WARP_TILES` that make a piece; `STRIPS` of the kernel.
const STRIPS: u32 = THREADS / 32;

pub(crate) fn variant(unpacked: bool) -> Variant {
    Variant { kernel: "quantize_cached_weights", defines: vec![("UNPACKED", u32::from(unpacked))] }
}

/// Whether an expert of so many elements stays in an L2 cache of so many bytes from one read to the next, and there are
/// enough of them.
pub(super) fn suits(experts: usize, elements: usize, l2_cache: usize) -> bool {
    experts >= FEWEST_EXPERTS && elements * size_of::<bf16>() <= l2_cache / SHARE_OF_CACHE
}

/// For weights that it suits.
pub(super) fn launch(cuda: &Cuda, weights: &Weights) -> Result<(), Error> {
    let kernel = cuda.kernel(&variant(weights.unpacked))?;
    let &Weights { experts, rows, cols, .. } = weights;
    let resident = cuda.device().facts().multiprocessors * RESIDENT;
    let Tickets { pieces, ahead } = Tickets::of(experts, [rows, cols], resident);
    // The next ticket, and what is found in each piece.
    let mut progress = cuda.empty::<u32>(1 + pieces as usize)?;
    cuda.clear(&progress.view_mut())?;
    let next = progress.view().address();
    let found = next + size_of::<u32>() as u64;
    let arguments = Arguments::of("[E, n, k]", weights.sizes())
        .with(&weights.base)
        .with(&weights.stride)
        .with(&rows)
        .with(&cols)
        .with(&experts)
        .with(&ahead)
        .with(&next)
        .with(&found)
        .with(&weights.amax)
        .with(&weights.out);
    let grid = Grid::new([resident.min(pieces + ahead), 1, 1], THREADS);
    // SAFETY: the pass compared lengths with shapes, and the run's weights lie `stride` elements apart; outputs begin at
    // the run's first expert; `ahead` is at least the pieces of an expert, so that no thread block waits for ever.
    cuda.on(unsafe { kernel.launch(cuda.stream(), grid, arguments) })
}

/// How thread blocks walk through the weights: one ticket for each of `pieces + ahead` steps.
#[derive(Debug, PartialEq, Eq)]
struct Tickets {
    /// Of all experts.
    pieces: u32,
    /// Tickets between the two reads of a piece: at least the pieces of an expert, at most all.
    ahead: u32,
}

impl Tickets {
    /// An expert, and as many pieces more as thread blocks may be at, so that hardly one waits for another. A piece
    /// has 4 KiB or more, whatever the shape, and a run less than 2^16 experts: for caches below 1 GiB 32 bits do.
    fn of(experts: u32, [rows, cols]: [u32; 2], resident: u32) -> Self {
        let block = BLOCK as u32;
        let of_expert = (rows / block * (cols / block).div_ceil(WARP_TILES)).div_ceil(STRIPS);
        let pieces = of_expert * experts;
        Self { pieces, ahead: (of_expert + resident).min(pieces) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_experts_are_read_once() {
        let of_h200 = |experts, elements| suits(experts, elements, 50 << 20);
        assert!(of_h200(128, 1536 * 2048) && of_h200(16, 1856 * 2688), "Qwen3-30B, Nemotron");
        assert!(!of_h200(8, 14336 * 4096) && !of_h200(3, 256), "Mixtral; few experts");
        assert!(!suits(128, 1536 * 2048, 6 << 20), "a small cache");
    }

    #[test]
    fn codes_are_an_expert_or_more_behind() {
        let of = |experts, shape, pieces, ahead| {
            assert_eq!(Tickets::of(experts, shape, 528), Tickets { pieces, ahead });
        };
        of(128, [1536, 2048], 128 * 384, 384 + 528);
        // No more than there is: all amaxes, then the codes. A piece that is not full; strips that are not.
        of(4, [16, 16], 4, 4);
        of(4, [48, 272], 8, 8);
        of(4, [0, 32], 0, 0);
        // Strips of one tile, of which eight have 4 KiB: the most pieces for their bytes.
        of(65535, [1 << 18, 16], 65535 * 2048, 2048 + 528);
    }
}
