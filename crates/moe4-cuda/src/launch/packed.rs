//! Launches the products' kernels for few rows an expert: `kernels/packed_gemm.cu`, `packed_gemm_act.cu` and
//! `packed_gemm_dact.cu`. A product of few rows takes as long as its weights take to read, so that they read packed codes. They
//! give the bits that the portable kernels give.

use super::products::{MainLoop, shape_of};
use super::row_product::RowProduct;
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::groups::DeviceGroups;
use crate::memory::{DeviceMemory, DeviceView};
use crate::variant::Variant;
use bytemuck::{NoUninit, Pod, Zeroable};
use moe4::kernels::Error;
use moe4::kernels::contract::{WeightOperand, WeightShape};

/// `THREADS` and `TILE_COLS` of `kernels/packed_stage.cuh`.
const THREADS: u32 = 128;
const TILE_COLS: usize = 256;

/// Average rows of an expert up to which codes are read. Of the tensor, not of the splits, so that a graph that is recorded for
/// some splits has the kernels that have run with others.
///
/// Of an H200, in picoseconds an element of a weight: its 2 B in BF16 take 0.47 at 4.26 TB/s. As codes it has half a byte
/// (a scale is read once for 16 rows), 0.12, but here `mma.sync` multiplies: 128 elements by 16 rows in 6.4 cycles of
/// one of 528 schedulers (62 % of what the matrix unit can), 0.054. Measured forwards of qwen3-30b, by average rows: 16,
/// 0.22 ms instead of 0.32 in BF16; 64, 0.50 instead of 0.36. A straight line between them crosses at about 35.
const MOST_AVERAGE_ROWS: usize = 32;
/// Average rows of an expert, and `ROWS` up to there: a block takes twice as many at once as the average, so that few experts
/// need a second pass, but no more sums in registers than that.
const TILES: [(usize, usize); 3] = [(8, 16), (24, 32), (MOST_AVERAGE_ROWS, 64)];

/// Every `ROWS`.
pub(crate) fn every_rows() -> impl Iterator<Item = usize> {
    TILES.into_iter().map(|(_, at_once)| at_once)
}

/// `PackedWeights` of `kernels/packed_stage.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct WeightsArgument {
    codes: u64,
    scales: u64,
    n: u32,
    k: u32,
}

/// Weights that are read as codes, and how many rows at once.
pub(super) struct PackedWeights<'a> {
    argument: WeightsArgument,
    pub(super) amax: DeviceView<'a, f32>,
    /// `ROWS` of the kernels.
    rows: usize,
}

impl<'a> PackedWeights<'a> {
    /// Those of `w`, unless BF16 values are the better operand or the only one.
    pub(super) fn choose(
        cuda: &Cuda,
        w: &WeightOperand<'a, DeviceMemory>,
        shape: WeightShape,
        groups: &DeviceGroups,
    ) -> Option<Self> {
        let WeightOperand::Nvfp4 { packed, .. } = w else { return None };
        let extent = groups.extent();
        let rows = rows_at_once(extent.rows, extent.experts)?;
        let (codes, scales) = (packed.codes.address(), packed.scales.address());
        let whole_words = [codes, scales].iter().all(|place| place.is_multiple_of(16));
        (cuda.reads_packed_weights() && fits(shape) && whole_words).then_some(Self {
            argument: WeightsArgument { codes, scales, n: shape.n as u32, k: shape.k as u32 },
            amax: packed.amax,
            rows,
        })
    }

    pub(super) fn main_loop(&self) -> MainLoop {
        MainLoop::Packed { rows: self.rows }
    }

    /// Enqueues `variant` with the epilogue's argument.
    ///
    /// # Safety
    /// As for [`RowProduct::launch`].
    pub(super) unsafe fn launch(
        &self,
        cuda: &Cuda,
        variant: &Variant,
        product: &RowProduct<'_>,
        out: &impl NoUninit,
    ) -> Result<(), Error> {
        let kernel = cuda.kernel(variant)?;
        let groups = product.groups.argument();
        let arguments = Arguments::of("[T, outputs, E]", shape_of(product.groups, product.outputs as u32))
            .with(&product.a)
            .with(&self.argument)
            .with(&product.scales)
            .with(&groups)
            .with(out);
        let grid = Grid::new(product.groups.grid(product.columns(TILE_COLS) as u32), THREADS)
            .with_shared(shared(self.rows));
        // SAFETY: as required; what is outside of a tensor is not read.
        cuda.on(unsafe { kernel.launch(cuda.stream(), grid, arguments) })
    }
}

/// `ROWS` for so many rows of so many experts; none for many.
fn rows_at_once(rows: usize, experts: usize) -> Option<usize> {
    TILES.into_iter().find(|&(average, _)| rows <= average * experts).map(|(_, at_once)| at_once)
}

/// Rows of codes begin at 16 bytes, and an expert's bytes and 64 rows of either contraction have offsets of 32 bits.
fn fits(WeightShape { n, k }: WeightShape) -> bool {
    k.is_multiple_of(32) && n.saturating_mul(k / 2) <= u32::MAX as usize && n.max(k) <= 1 << 24
}

/// `STAGES` times `STAGE_BYTES`.
fn shared(rows: usize) -> u32 {
    const STAGES: usize = 3;
    const STEPS: usize = 128;
    (STAGES * (rows * STEPS * 2 + TILE_COLS * STEPS / 2 + STEPS * 2)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_at_once_follow_the_average() {
        let expected = [(0, Some(16)), (64, Some(16)), (65, Some(32)), (192, Some(32)), (193, Some(64))];
        for (rows, at_once) in expected.into_iter().chain([(256, Some(64)), (257, None)]) {
            assert_eq!(rows_at_once(rows, 8), at_once, "{rows} rows of 8 experts");
            assert!(at_once.is_none_or(|at_once| every_rows().any(|rows| rows == at_once)));
        }
    }

    #[test]
    fn what_offsets_reach() {
        let shape = |n, k| WeightShape { n, k };
        assert!(fits(shape(1536, 2048)) && fits(shape(2048, 768)) && fits(shape(16, 32)));
        for (n, k) in [(2048, 48), (1 << 17, 1 << 16), (16, 1 << 25)] {
            assert!(!fits(shape(n, k)), "[{n}, {k}]");
        }
    }
}
