//! Launches `kernels/grouped_wgrad.cu`.

use super::products::*;
use super::{THREADS, hopper, narrow};
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::groups::TILE_ROWS;
use crate::memory::{DeviceMemory, DeviceViewMut};
use crate::variant::Variant;
use half::bf16;
use moe4::kernels::Error;
use moe4::kernels::contract::{GradBuffers, GradMode, GroupedWgrad, Operand};

pub(crate) fn variant(quantized: bool, bf16_gradient: bool, mode: GradMode) -> Variant {
    let defines = [
        ("QUANTIZED", quantized),
        ("BF16_GRADIENT", bf16_gradient),
        ("ACCUMULATE", mode == GradMode::Accumulate),
    ];
    Variant { kernel: "grouped_wgrad", defines: defines.map(|(name, on)| (name, u32::from(on))).to_vec() }
}

fn places<T>(buffers: &[DeviceViewMut<'_, T>]) -> Vec<u64> {
    buffers.iter().map(DeviceViewMut::address).collect()
}

pub(crate) fn grouped_wgrad(cuda: &Cuda, pass: GroupedWgrad<'_, DeviceMemory>) -> Result<(), Error> {
    pass.check()?;
    let GroupedWgrad { a, b, shape, groups, dw } = pass;
    let name = "grouped_wgrad";
    let n = dimension("rows of a weight gradient", shape.n)?;
    let k = dimension("columns of a weight gradient", shape.k)?;
    narrow("token positions", groups.extent().padded_rows)?;
    let rows = grid_dimension("rows of a weight gradient, in tiles of 128", shape.n.div_ceil(TILE_ROWS))?;
    let experts = grid_dimension("experts", groups.extent().experts)?;
    let quantized = !matches!(a, Operand::Bf16(_));
    let (places, element, bf16_gradient) = match &dw.buffers {
        GradBuffers::F32(buffers) => (places(buffers), size_of::<f32>(), false),
        GradBuffers::Bf16(buffers) => (places(buffers), size_of::<bf16>(), true),
    };
    let (out, _table) = tensors(cuda, name, "dw", &places, element)?;
    let a = Bf16Operand::new(cuda, name, "a", a)?;
    let b = Bf16Operand::new(cuda, name, "b", b)?;
    let (scales, groups_argument) = (ScalesArgument::of_operands(name, &a, &b)?, groups.argument());
    let wgrad = hopper::Wgrad { a: a.address, b: b.address, shape, dw: out, scales, groups };
    if cuda.multiplies_by_wgmma() && quantized && wgrad.fits() {
        // SAFETY: `check` compared lengths with shapes; operands live until the product is enqueued and are freed behind it.
        return unsafe { wgrad.launch(cuda, &hopper::wgrad_variant(bf16_gradient, dw.mode)) };
    }
    let kernel = cuda.kernel(&variant(quantized, bf16_gradient, dw.mode))?;
    let positions = groups.extent().padded_rows as u64;
    let arguments = Arguments::of("[n, k, E]", [shape.n, shape.k, experts as usize])
        .with(&a.address)
        .with(&b.address)
        .with(&n)
        .with(&k)
        .with(&positions)
        .with(&scales)
        .with(&groups_argument)
        .with(&out);
    let grid = Grid::new([shape.k.div_ceil(TILE_COLS) as u32, rows, experts], THREADS);
    // SAFETY: `check` compared lengths with shapes; operands and the table live until the product is enqueued and are
    // freed behind it.
    cuda.on(unsafe { kernel.launch(cuda.stream(), grid, arguments) })
}
