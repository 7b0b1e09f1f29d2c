//! Launches `kernels/grouped_gemm_act.cu`.

use super::aligned;
use super::products::*;
use super::row_product::{RowProduct, Weights};
use crate::backend::Cuda;
use crate::memory::DeviceMemory;
use crate::variant::Variant;
use bytemuck::{Pod, Zeroable};
use moe4::kernels::Error;
use moe4::kernels::activation::GluLayout;
use moe4::kernels::contract::{GroupedGemmAct, Side, WeightShape};

pub(crate) fn variant(choice: EpilogueChoice, main_loop: MainLoop) -> Variant {
    main_loop.variant(["grouped_gemm_act", "hopper_gemm_act", "packed_gemm_act"], choice.defines())
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
    dimension("hidden", hidden)?;
    let ffn = dimension("ffn", ffn)?;
    let (b1, prob) =
        (optional(name, "b1", b1.map(|b1| b1.address()), 8)?, aligned(name, "prob", prob.address(), 4)?);
    let (c, h) = (aligned(name, "c", c.address(), 16)?, aligned(name, "h", h.address(), 16)?);
    let x = Bf16Operand::new(cuda, name, "x", x)?;
    let w1 = Weights::new(cuda, name, "w1", w1, shape, groups)?;
    let scales = ScalesArgument::of_weights(name, &x, w1.amax())?;
    let (h_amax, amax) = AmaxArgument::new(cuda, name, &h_amax)?;
    let choice = EpilogueChoice::new(&activation, layout, amax);
    let out = ActArgument { b1, prob, c, h, ffn, activation: ActivationArgument::new(&activation), h_amax };
    let gated = activation.is_gated();
    let product = RowProduct {
        a: x.address,
        shape,
        side: Side::Fprop,
        outputs: ffn as usize,
        gates: if gated { 2 } else { 1 },
        ups: (gated && layout == GluLayout::Halves).then_some(ffn as usize),
        scales,
        groups,
    };
    // SAFETY: `check` compared lengths with shapes; operands live until the product is enqueued and are freed behind it.
    unsafe { product.launch(cuda, &w1, |main_loop| variant(choice, main_loop), &out) }
}
