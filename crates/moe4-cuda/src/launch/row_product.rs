//! Products of each expert's rows with its weight: which main loop runs, and its launch.

use super::packed::PackedWeights;
use super::products::{Bf16Weights, MainLoop, ScalesArgument, TILE_COLS, shape_of};
use super::{THREADS, hopper, narrow};
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::groups::DeviceGroups;
use crate::memory::{DeviceMemory, DeviceView};
use crate::variant::Variant;
use bytemuck::NoUninit;
use moe4::kernels::Error;
use moe4::kernels::contract::{Side, WeightOperand, WeightShape};

/// The weights of all experts in the form that a product reads.
pub(super) enum Weights<'a> {
    Packed(PackedWeights<'a>),
    Bf16(Bf16Weights<'a>),
}

impl<'a> Weights<'a> {
    pub(super) fn new(
        cuda: &Cuda,
        kernel: &'static str,
        name: &'static str,
        w: WeightOperand<'a, DeviceMemory>,
        shape: WeightShape,
        groups: &DeviceGroups,
    ) -> Result<Self, Error> {
        match PackedWeights::choose(cuda, &w, shape, groups) {
            Some(packed) => Ok(Self::Packed(packed)),
            None => Bf16Weights::new(cuda, kernel, name, w, shape.n * shape.k).map(Self::Bf16),
        }
    }

    /// What they were quantized with.
    pub(super) fn amax(&self) -> Option<DeviceView<'a, f32>> {
        match self {
            Self::Packed(packed) => Some(packed.amax),
            Self::Bf16(values) => values.amax,
        }
    }
}

/// A product, but for its weights.
pub(super) struct RowProduct<'a> {
    /// `[T, contraction]`, BF16.
    pub(super) a: u64,
    /// Of a weight as it is stored.
    pub(super) shape: WeightShape,
    pub(super) side: Side,
    /// Columns of the output, or features.
    pub(super) outputs: usize,
    /// Columns of the product that an output takes: gate and up, or one.
    pub(super) gates: usize,
    /// Where ups begin among the rows of W1, if a tile is to hold gates and the ups of the same features from there.
    pub(super) ups: Option<usize>,
    pub(super) scales: ScalesArgument,
    pub(super) groups: &'a DeviceGroups,
}

impl RowProduct<'_> {
    /// Enqueues the variant of the main loop that fits, with the epilogue's argument.
    ///
    /// # Safety
    /// Operands are as large as their shapes say, outputs as `out` says, and all live until the product has run.
    pub(super) unsafe fn launch(
        &self,
        cuda: &Cuda,
        w: &Weights<'_>,
        variant: impl Fn(MainLoop) -> Variant,
        out: &impl NoUninit,
    ) -> Result<(), Error> {
        // SAFETY: as required.
        unsafe {
            match w {
                Weights::Packed(w) => w.launch(cuda, &variant(w.main_loop()), self, out),
                Weights::Bf16(w) if cuda.multiplies_by_wgmma() && hopper::fits(w, self.groups) => {
                    hopper::launch(cuda, &variant(MainLoop::Hopper), self, w, out)
                }
                Weights::Bf16(w) => self.launch_portable(cuda, &variant(MainLoop::Portable), w, out),
            }
        }
    }

    /// Tiles side by side.
    pub(super) fn columns(&self, tile: usize) -> usize {
        self.outputs.div_ceil(tile / self.gates)
    }

    /// # Safety
    /// As for [`RowProduct::launch`].
    unsafe fn launch_portable(
        &self,
        cuda: &Cuda,
        variant: &Variant,
        w: &Bf16Weights<'_>,
        out: &impl NoUninit,
    ) -> Result<(), Error> {
        let kernel = cuda.kernel(variant)?;
        let (_, contraction) = self.side.dims(self.shape);
        let contraction = narrow("contraction of a product", contraction)?;
        let groups = self.groups.argument();
        let arguments = Arguments::of("[T, outputs, E]", shape_of(self.groups, self.outputs as u32))
            .with(&self.a)
            .with(&w.argument)
            .with(&contraction)
            .with(&self.scales)
            .with(&groups)
            .with(out);
        let grid = Grid::new(self.groups.grid(self.columns(TILE_COLS) as u32), THREADS);
        // SAFETY: as required; what is outside of a tensor is not read.
        cuda.on(unsafe { kernel.launch(cuda.stream(), grid, arguments) })
    }
}
