//! Launches `kernels/dequantize.cu`.

use super::{THREADS, aligned, blocks, narrow};
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::groups::TILE_ROWS;
use crate::memory::DeviceMemory;
use crate::variant::Variant;
use moe4::kernels::Error;
use moe4::kernels::contract::{Dequantize, Direction};
use moe4::numerics::BLOCK;
use moe4::tensor::ScaleLayout;

pub(crate) fn variant(direction: Direction, layout: ScaleLayout) -> Variant {
    let columnwise = u32::from(direction == Direction::Columnwise);
    let swizzled = u32::from(layout == ScaleLayout::Swizzled128x4);
    Variant { kernel: "dequantize", defines: vec![("COLUMNWISE", columnwise), ("SWIZZLED", swizzled)] }
}

pub(crate) fn dequantize(cuda: &Cuda, pass: Dequantize<'_, DeviceMemory>) -> Result<(), Error> {
    pass.check()?;
    let Dequantize { codes, scales, amax, cols, groups, direction, layout, out } = pass;
    let kernel = cuda.kernel(&variant(direction, layout))?;
    let name = "dequantize";
    let codes = aligned(name, "codes", codes.address(), 8)?;
    let out = aligned(name, "out", out.address(), 16)?;
    let amax = aligned(name, "amax", amax.address(), 4)?;
    let shares = blocks(TILE_ROWS * cols / BLOCK, THREADS as usize, 65535);
    let (scales, k, groups_argument) =
        (scales.address(), groups.extent().padded_rows as u64, groups.argument());
    let cols = narrow("columns", cols)?;
    let arguments =
        Arguments::of("[T, cols, E]", [groups.extent().rows, cols as usize, groups.extent().experts])
            .with(&codes)
            .with(&scales)
            .with(&amax)
            .with(&cols)
            .with(&k)
            .with(&groups_argument)
            .with(&out);
    let grid = Grid::new(groups.grid(shares), THREADS);
    // SAFETY: `check` compared lengths with shapes.
    cuda.on(unsafe { kernel.launch(cuda.stream(), grid, arguments) })
}
