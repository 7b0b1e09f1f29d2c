//! Launches `kernels/column_sums.cu` and `kernels/sum_tiles.cu`.

use super::products::{grid_dimension, shape_of};
use super::{THREADS, aligned, plain};
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::groups::DeviceGroups;
use crate::memory::DeviceViewMut;
use crate::variant::Variant;
use moe4::kernels::{Backend, Error, Misuse};

/// Columns of a thread block in both kernels.
const COLS: u32 = 256;

pub(crate) fn variant(weighted: bool) -> Variant {
    Variant { kernel: "column_sums", defines: vec![("WEIGHTED", u32::from(weighted))] }
}

/// Sums over the rows of each expert, to be launched behind a pass that it belongs to.
pub(super) struct ColumnSums<'a> {
    groups: &'a DeviceGroups,
    experts: u32,
    out: u64,
}

impl<'a> ColumnSums<'a> {
    /// To `out [E, cols]`. Refuses what does not fit, before anything is launched.
    pub(super) fn new(
        name: &'static str,
        groups: &'a DeviceGroups,
        out: &DeviceViewMut<'a, f32>,
    ) -> Result<Self, Misuse> {
        let out = aligned(name, "gradient of a bias", out.address(), 4)?;
        let experts = grid_dimension("experts", groups.extent().experts)?;
        Ok(Self { groups, experts, out })
    }

    /// `out[e] = Σ (weight ·) x`. `x [T, cols]` in BF16, its address a multiple of 16; `cols` a multiple of 16;
    /// `weight [T]`.
    pub(super) fn launch(self, cuda: &Cuda, x: u64, cols: u32, weight: Option<u64>) -> Result<(), Error> {
        let Self { groups, experts, out } = self;
        let of_tiles = cuda.kernel(&variant(weight.is_some()))?;
        let of_experts = cuda.kernel(&plain("sum_tiles"))?;
        let partial = cuda.empty::<f32>(groups.extent().most_tiles() * cols as usize)?;
        let (partial, weight, groups_argument) = (partial.view(), weight.unwrap_or(0), groups.argument());
        let (partial, shares) = (partial.address(), cols.div_ceil(COLS));
        let arguments = Arguments::of("[T, cols, E]", shape_of(groups, cols))
            .with(&x)
            .with(&cols)
            .with(&weight)
            .with(&groups_argument)
            .with(&partial);
        let grid = Grid::new(groups.grid(shares), THREADS);
        // SAFETY: the pass compared lengths with shapes; there is a row of partial sums for each tile.
        cuda.on(unsafe { of_tiles.launch(cuda.stream(), grid, arguments) })?;
        let arguments = Arguments::of("[T, cols, E]", shape_of(groups, cols))
            .with(&partial)
            .with(&cols)
            .with(&groups_argument)
            .with(&out);
        let grid = Grid::new([shares, experts, 1], THREADS);
        // SAFETY: as above; the sums of every expert's tiles are there.
        cuda.on(unsafe { of_experts.launch(cuda.stream(), grid, arguments) })
    }
}
