//! Launches `kernels/grouped_gemm_dact.cu`, and `kernels/sum_slices.cu` for dprob.

use super::column_sums::ColumnSums;
use super::products::*;
use super::row_product::{RowProduct, Weights};
use super::{THREADS, aligned, blocks, plain};
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::memory::DeviceMemory;
use crate::variant::Variant;
use bytemuck::{Pod, Zeroable};
use moe4::kernels::contract::{GroupedGemmDact, Side, WeightShape};
use moe4::kernels::{Backend, Error};

/// `h_again`: whether it writes `h`.
pub(crate) fn variant(choice: EpilogueChoice, h_again: bool, main_loop: MainLoop) -> Variant {
    let again = [("H_AGAIN", u32::from(h_again))];
    let defines = choice.defines().into_iter().chain(again).collect();
    main_loop.variant(["grouped_gemm_dact", "hopper_gemm_dact", "packed_gemm_dact"], defines)
}

/// `DactOut` of `kernels/epilogue_dact.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct DactArgument {
    c: u64,
    prob: u64,
    dc: u64,
    dprob: u64,
    h: u64,
    dh: u64,
    rows: u64,
    ffn: u32,
    activation: ActivationArgument,
    dc_amax: AmaxArgument,
}

pub(crate) fn grouped_gemm_dact(cuda: &Cuda, pass: GroupedGemmDact<'_, DeviceMemory>) -> Result<(), Error> {
    pass.check()?;
    let GroupedGemmDact {
        dy,
        w2,
        hidden,
        ffn,
        activation,
        layout,
        c,
        prob,
        groups,
        dc,
        dprob,
        db1,
        dc_amax,
        h,
        dh,
    } = pass;
    let name = "grouped_gemm_dact";
    let (shape, rows) = (WeightShape { n: hidden, k: ffn }, groups.extent().rows);
    dimension("hidden", hidden)?;
    let ffn = dimension("ffn", ffn)?;
    let slices = (ffn as usize).div_ceil(SLICE_FEATURES);
    let (c, prob) = (aligned(name, "c", c.address(), 16)?, aligned(name, "prob", prob.address(), 4)?);
    let (dc, dprob) = (aligned(name, "dc", dc.address(), 16)?, aligned(name, "dprob", dprob.address(), 4)?);
    let h = optional(name, "h", h.map(|h| h.address()), 16)?;
    let dh = optional(name, "dh", dh.map(|dh| dh.address()), 16)?;
    let db1 = db1.map(|db1| ColumnSums::new(name, groups, &db1)).transpose()?;
    let dy = Bf16Operand::new(cuda, name, "dy", dy)?;
    let w2 = Weights::new(cuda, name, "w2", w2, shape, groups)?;
    let scales = ScalesArgument::of_weights(name, &dy, w2.amax())?;
    let (dc_amax, amax) = AmaxArgument::new(cuda, name, &dc_amax)?;
    let choice = EpilogueChoice::new(&activation, layout, amax);
    let sum = cuda.kernel(&plain("sum_slices"))?;
    let partial = cuda.empty::<f32>(slices * rows)?;
    let partial = partial.view();
    let out = DactArgument {
        c,
        prob,
        dc,
        dprob: partial.address(),
        h,
        dh,
        rows: rows as u64,
        ffn,
        activation: ActivationArgument::new(&activation),
        dc_amax,
    };
    let product = RowProduct {
        a: dy.address,
        shape,
        side: Side::Dgrad,
        outputs: ffn as usize,
        gates: 1,
        ups: None,
        scales,
        groups,
    };
    let again = h != 0;
    // SAFETY: `check` compared lengths with shapes; operands and partial sums live until all is enqueued and are freed
    // behind it.
    unsafe { product.launch(cuda, &w2, |main_loop| variant(choice, again, main_loop), &out) }?;

    let (slices, rows_argument, groups_argument) = (slices as u32, rows as u64, groups.argument());
    let arguments = Arguments::of("[T, slices, E]", shape_of(groups, slices))
        .with(&out.dprob)
        .with(&slices)
        .with(&rows_argument)
        .with(&groups_argument)
        .with(&dprob);
    let grid = Grid::new([blocks(rows, THREADS as usize, 1 << 30), 1, 1], THREADS);
    // SAFETY: the product has written the partial sums of all rows of experts, the only ones that are read.
    cuda.on(unsafe { sum.launch(cuda.stream(), grid, arguments) })?;
    match db1 {
        Some(db1) => db1.launch(cuda, dc, activation.fc1_rows(ffn as usize) as u32, None),
        None => Ok(()),
    }
}
