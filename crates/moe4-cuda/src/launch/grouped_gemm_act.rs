//! Launches `kernels/grouped_gemm_act.cu`.

use super::THREADS;
use super::products::*;
use super::{aligned, hopper};
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::memory::DeviceMemory;
use crate::variant::Variant;
use bytemuck::{Pod, Zeroable};
use moe4::kernels::Error;
use moe4::kernels::activation::GluLayout;
use moe4::kernels::contract::{GroupedGemmAct, Side, WeightShape};

pub(crate) fn variant(choice: EpilogueChoice, hopper: bool) -> Variant {
    let kernel = if hopper { "hopper_gemm_act" } else { "grouped_gemm_act" };
    Variant { kernel, defines: choice.defines() }
}

/// `ActOut` of `kernels/epilogue_act.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ActArgument {
    b1: u64,
    prob: u64,
    c: u64,
    h: u64,
    ffn: u32,
    activation: ActivationArgument,
    h_amax: AmaxArgument,
}

pub(crate) fn grouped_gemm_act(cuda: &Cuda, pass: GroupedGemmAct<'_, DeviceMemory>) -> Result<(), Error> {
    pass.check()?;
    let GroupedGemmAct { x, w1, b1, hidden, ffn, activation, layout, prob, groups, c, h, h_amax } = pass;
    let name = "grouped_gemm_act";
    let shape = WeightShape { n: activation.fc1_rows(ffn), k: hidden };
    let (hidden, ffn) = (dimension("hidden", hidden)?, dimension("ffn", ffn)?);
    let (b1, prob) =
        (optional(name, "b1", b1.map(|b1| b1.address()), 8)?, aligned(name, "prob", prob.address(), 4)?);
    let (c, h) = (aligned(name, "c", c.address(), 16)?, aligned(name, "h", h.address(), 16)?);
    let x = Bf16Operand::new(cuda, name, "x", x)?;
    let w1 = Bf16Weights::new(cuda, name, "w1", w1, shape.n * shape.k)?;
    let (scales, groups_argument) = (ScalesArgument::of_weights(name, &x, &w1)?, groups.argument());
    let (h_amax, amax) = AmaxArgument::new(cuda, name, &h_amax)?;
    let choice = EpilogueChoice::new(&activation, layout, amax);
    let out = ActArgument { b1, prob, c, h, ffn, activation: ActivationArgument::new(&activation), h_amax };
    let gates = if activation.is_gated() { 2 } else { 1 };
    let product = hopper::RowProduct {
        a: x.address,
        w: w1.argument,
        shape,
        side: Side::Fprop,
        columns: (ffn as usize).div_ceil(hopper::TILE_N / gates),
        ups: (gates == 2 && layout == GluLayout::Halves).then_some(ffn as usize),
        scales,
        groups,
    };
    if cuda.multiplies_by_wgmma() && product.fits() {
        // SAFETY: `check` compared lengths with shapes; operands live until the product is enqueued and are freed behind it.
        return unsafe { product.launch(cuda, &variant(choice, true), &out) };
    }
    let kernel = cuda.kernel(&variant(choice, false))?;
    let arguments = Arguments::of("[T, F, E]", shape_of(groups, ffn))
        .with(&x.address)
        .with(&w1.argument)
        .with(&hidden)
        .with(&scales)
        .with(&groups_argument)
        .with(&out);
    let grid = Grid::new(groups.grid((ffn as usize).div_ceil(TILE_COLS / gates) as u32), THREADS);
    // SAFETY: `check` compared lengths with shapes; operands live until the product is enqueued and are freed behind it.
    cuda.on(unsafe { kernel.launch(cuda.stream(), grid, arguments) })
}
