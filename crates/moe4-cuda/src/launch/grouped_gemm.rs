//! Launches `kernels/grouped_gemm.cu`.

use super::aligned;
use super::products::*;
use super::row_product::{RowProduct, Weights};
use crate::backend::Cuda;
use crate::memory::DeviceMemory;
use crate::variant::Variant;
use bytemuck::{Pod, Zeroable};
use moe4::kernels::Error;
use moe4::kernels::contract::{Bias, GroupedGemm, Side};

pub(crate) fn variant(side: Side, main_loop: MainLoop) -> Variant {
    let defines = vec![("DGRAD", u32::from(side == Side::Dgrad))];
    main_loop.variant(["grouped_gemm", "hopper_gemm", "packed_gemm"], defines)
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
    dimension("contraction of a product", contraction)?;
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
    let w = Weights::new(cuda, name, "w", w, shape, groups)?;
    let product = RowProduct {
        a: a.address,
        shape,
        side,
        outputs: cols as usize,
        gates: 1,
        ups: None,
        scales: ScalesArgument::of_weights(name, &a, w.amax())?,
        groups,
    };
    // SAFETY: `check` compared lengths with shapes; operands live until the product is enqueued and are freed behind it.
    unsafe { product.launch(cuda, &w, |main_loop| variant(side, main_loop), &out) }
}
