//! Launches `kernels/grouped_gemm.cu`.

use super::THREADS;
use super::products::*;
use super::{aligned, hopper};
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::memory::DeviceMemory;
use crate::variant::Variant;
use bytemuck::{Pod, Zeroable};
use moe4::kernels::Error;
use moe4::kernels::contract::{Bias, GroupedGemm, Side};

pub(crate) fn variant(side: Side) -> Variant {
    Variant { kernel: "grouped_gemm", defines: vec![("DGRAD", u32::from(side == Side::Dgrad))] }
}

/// `PlainOut` of `kernels/epilogue.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PlainArgument {
    bias: u64,
    prob: u64,
    out: u64,
    cols: u32,
    padding: u32,
}

pub(crate) fn grouped_gemm(cuda: &Cuda, pass: GroupedGemm<'_, DeviceMemory>) -> Result<(), Error> {
    pass.check()?;
    let GroupedGemm { a, w, shape, side, groups, bias, out } = pass;
    let name = "grouped_gemm";
    let (cols, contraction) = side.dims(shape);
    let cols = dimension("output columns of a product", cols)?;
    let contraction = dimension("contraction of a product", contraction)?;
    let (bias, prob) = match bias {
        Some(Bias { bias, prob }) => (Some(bias.address()), prob.map(|prob| prob.address())),
        None => (None, None),
    };
    let out = PlainArgument {
        bias: optional(name, "bias", bias, 8)?,
        prob: optional(name, "prob", prob, 4)?,
        out: aligned(name, "out", out.address(), 16)?,
        cols,
        padding: 0,
    };
    let a = Bf16Operand::new(cuda, name, "a", a)?;
    let w = Bf16Weights::new(cuda, name, "w", w, shape.n * shape.k)?;
    let (scales, groups_argument) = (ScalesArgument::of_weights(name, &a, &w)?, groups.argument());
    let columns = (cols as usize).div_ceil(hopper::TILE_N);
    let product =
        hopper::RowProduct { a: a.address, w: w.argument, shape, side, columns, ups: None, scales, groups };
    if cuda.multiplies_by_wgmma() && product.fits() {
        // SAFETY: `check` compared lengths with shapes; operands live until the product is enqueued and are freed behind it.
        return unsafe { product.launch(cuda, &hopper::gemm_variant(side), &out) };
    }
    let kernel = cuda.kernel(&variant(side))?;
    let arguments = Arguments::of("[T, cols, E]", shape_of(groups, cols))
        .with(&a.address)
        .with(&w.argument)
        .with(&contraction)
        .with(&scales)
        .with(&groups_argument)
        .with(&out);
    let grid = Grid::new(groups.grid((cols as usize).div_ceil(TILE_COLS) as u32), THREADS);
    // SAFETY: `check` compared lengths with shapes; operands live until the product is enqueued and are freed behind it.
    cuda.on(unsafe { kernel.launch(cuda.stream(), grid, arguments) })
}
