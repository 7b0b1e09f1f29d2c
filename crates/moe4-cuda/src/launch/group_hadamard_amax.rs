//! Launches `kernels/group_hadamard_amax.cu`.

use super::{THREADS, aligned, blocks, mask_choice, narrow};
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::groups::TILE_ROWS;
use crate::memory::DeviceMemory;
use crate::variant::Variant;
use moe4::kernels::Error;
use moe4::kernels::contract::GroupHadamardAmax;
use moe4::numerics::BLOCK;
use moe4::numerics::hadamard::SignMask;

/// Column vectors of 16 tokens that a thread block takes; `THREADS * UNITS` of the kernel.
const VECTORS: usize = 2 * THREADS as usize;

pub(crate) fn variant(mask: SignMask, vector: usize) -> Variant {
    let defines = vec![("SIGN_MASK", mask_choice(mask)), ("VECTOR", vector as u32)];
    Variant { kernel: "group_hadamard_amax", defines }
}

pub(crate) fn group_hadamard_amax(
    cuda: &Cuda,
    pass: GroupHadamardAmax<'_, DeviceMemory>,
) -> Result<(), Error> {
    pass.check()?;
    let GroupHadamardAmax { x, cols, groups, sign_mask, amax, amax_rht } = pass;
    let name = "group_hadamard_amax";
    let [before, after] =
        [aligned(name, "amax", amax.address(), 4)?, aligned(name, "amax after RHT", amax_rht.address(), 4)?];
    let x_address = aligned(name, "x", x.address(), 2)?;
    cuda.clear(&amax)?;
    cuda.clear(&amax_rht)?;
    let vector = if cols.is_multiple_of(4) && x.address().is_multiple_of(8) { 4 } else { 1 };
    let kernel = cuda.kernel(&variant(sign_mask, vector))?;
    narrow("columns", cols)?;
    let vectors = TILE_ROWS / BLOCK * (cols / vector);
    let (cols, groups_argument) = (cols as u64, groups.argument());
    let mask = u32::from(sign_mask.0);
    let arguments =
        Arguments::of("[T, cols, E]", [groups.extent().rows, cols as usize, groups.extent().experts])
            .with(&x_address)
            .with(&cols)
            .with(&groups_argument)
            .with(&mask)
            .with(&before)
            .with(&after);
    let grid = Grid::new(groups.grid(blocks(vectors, VECTORS, u32::MAX)), THREADS);
    // SAFETY: `check` compared lengths with shapes; the kernel reads rows of experts only.
    cuda.on(unsafe { kernel.launch(cuda.stream(), grid, arguments) })
}
