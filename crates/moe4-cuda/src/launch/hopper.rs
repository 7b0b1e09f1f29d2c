//! Launches the products' kernels for Hopper: `kernels/hopper_gemm.cu`, `hopper_gemm_act.cu`, `hopper_gemm_dact.cu` and
//! `hopper_wgrad.cu`. They read what the portable kernels read, by copies of boxes that need operands in one piece.

use super::products::{Bf16Weights, ScalesArgument, TensorsArgument, shape_of};
use super::row_product::RowProduct;
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid, TensorMap};
use crate::groups::DeviceGroups;
use crate::variant::Variant;
use bytemuck::{NoUninit, Pod, Zeroable};
use moe4::kernels::Error;
use moe4::kernels::contract::{GradMode, Side, WeightShape};

/// `TILE_M`, `TILE_N`, `TILE_K`, `STAGES` and `THREADS` of `kernels/hopper_pipeline.cuh`.
const TILE_M: usize = 128;
const TILE_N: usize = 256;
const TILE_K: usize = 64;
const STAGES: usize = 4;
const THREADS: u32 = 384;
/// `SLABS_BYTES` of `kernels/fragment.cuh`, for eight warps.
const SLABS: usize = 8 * 4096;
/// Stages of both operands in BF16, and slabs behind them.
const SHARED: u32 = (STAGES * (TILE_M + TILE_N) * TILE_K * 2 + SLABS) as u32;

/// Compile-time choices of `hopper_wgrad`.
pub(crate) fn wgrad_variant(bf16_gradient: bool, mode: GradMode) -> Variant {
    let accumulate = mode == GradMode::Accumulate;
    let defines = vec![("BF16_GRADIENT", u32::from(bf16_gradient)), ("ACCUMULATE", u32::from(accumulate))];
    Variant { kernel: "hopper_wgrad", defines }
}

/// `RowProduct` of `kernels/hopper_rows.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RowProductArgument {
    n: u32,
    k: u32,
    width: u32,
    columns: u32,
    ups: u32,
}

/// Whether a copy of a box can name the operands: rows exist, and weights lie at equal distances.
pub(super) fn fits(w: &Bf16Weights<'_>, groups: &DeviceGroups) -> bool {
    groups.extent().rows > 0 && w.argument.table == 0 && w.argument.stride.is_multiple_of(8)
}

/// Enqueues `variant` with the epilogue's argument.
///
/// # Safety
/// As for [`RowProduct::launch`].
pub(super) unsafe fn launch(
    cuda: &Cuda,
    variant: &Variant,
    product: &RowProduct<'_>,
    w: &Bf16Weights<'_>,
    out: &impl NoUninit,
) -> Result<(), Error> {
    let RowProduct { shape, side, ups, groups, .. } = *product;
    let (n, k) = side.dims(shape);
    let (extent, columns) = (groups.extent(), product.columns(TILE_N));
    let box_rows = match side {
        Side::Fprop => TILE_N / 2,
        Side::Dgrad => TILE_K,
    };
    let a = cuda.on(TensorMap::matrix(product.a, [extent.rows, k], TILE_M as u32))?;
    let stored = [extent.experts, shape.n, shape.k];
    let w = cuda.on(TensorMap::of_experts(w.argument.base, stored, w.argument.stride, box_rows as u32))?;
    let argument = RowProductArgument {
        n: n as u32,
        k: k as u32,
        width: (if ups.is_some() { TILE_N / 2 } else { TILE_N }) as u32,
        columns: columns as u32,
        ups: ups.unwrap_or(0) as u32,
    };
    let groups_argument = groups.argument();
    let kernel = cuda.kernel(variant)?;
    let arguments = Arguments::of("[T, columns, E]", shape_of(groups, n as u32))
        .with(&a)
        .with(&w)
        .with(&groups_argument)
        .with(&argument)
        .with(&product.scales)
        .with(out);
    let tiles = extent.most_tiles() * columns;
    // SAFETY: as required; copies outside of a tensor give zeros.
    cuda.on(unsafe { kernel.launch(cuda.stream(), grid(cuda, tiles), arguments) })
}

/// `WgradShape` of `kernels/hopper_wgrad.cu`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct WgradArgument {
    n: u32,
    k: u32,
    rows: u32,
    columns: u32,
    stride: u64,
}

/// Weight gradients from columnwise operands.
pub(super) struct Wgrad<'a> {
    /// `[n, Tp]` and `[k, Tp]`, BF16.
    pub(super) a: u64,
    pub(super) b: u64,
    pub(super) shape: WeightShape,
    pub(super) dw: TensorsArgument,
    pub(super) scales: ScalesArgument,
    pub(super) groups: &'a DeviceGroups,
}

impl Wgrad<'_> {
    /// As [`fits`].
    pub(super) fn fits(&self) -> bool {
        self.groups.extent().padded_rows > 0 && self.dw.table == 0
    }

    /// Enqueues `variant`.
    ///
    /// # Safety
    /// As for [`RowProduct::launch`].
    pub(super) unsafe fn launch(&self, cuda: &Cuda, variant: &Variant) -> Result<(), Error> {
        let WeightShape { n, k } = self.shape;
        let extent = self.groups.extent();
        let positions = extent.padded_rows;
        let a = cuda.on(TensorMap::matrix(self.a, [n, positions], TILE_M as u32))?;
        let b = cuda.on(TensorMap::matrix(self.b, [k, positions], TILE_N as u32 / 2))?;
        let (rows, columns) = (n.div_ceil(TILE_M), k.div_ceil(TILE_N));
        let shape = WgradArgument {
            n: n as u32,
            k: k as u32,
            rows: rows as u32,
            columns: columns as u32,
            stride: self.dw.stride,
        };
        let groups = self.groups.argument();
        let kernel = cuda.kernel(variant)?;
        let arguments = Arguments::of("[n, k, E]", [n, k, extent.experts])
            .with(&a)
            .with(&b)
            .with(&groups)
            .with(&shape)
            .with(&self.scales)
            .with(&self.dw.base);
        let tiles = rows * columns * extent.experts;
        // SAFETY: as required; copies outside of a tensor give zeros.
        cuda.on(unsafe { kernel.launch(cuda.stream(), grid(cuda, tiles), arguments) })
    }
}

/// One thread block a multiprocessor: they take tiles in turn.
fn grid(cuda: &Cuda, tiles: usize) -> Grid {
    let blocks = (cuda.device().facts().multiprocessors as usize).min(tiles) as u32;
    Grid::new([blocks, 1, 1], THREADS).with_shared(SHARED)
}
