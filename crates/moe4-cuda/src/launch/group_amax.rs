//! Launches `kernels/group_amax.cu`.

use super::{THREADS, aligned, blocks, plain};
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::groups::TILE_ROWS;
use crate::memory::DeviceMemory;
use moe4::kernels::Error;
use moe4::kernels::contract::GroupAmax;

/// BF16 elements that a thread block takes at a time; `CHUNK` of the kernel.
const CHUNK: usize = 8 * 8 * THREADS as usize;

pub(crate) fn group_amax(cuda: &Cuda, pass: GroupAmax<'_, DeviceMemory>) -> Result<(), Error> {
    pass.check()?;
    let GroupAmax { x, cols, groups, amax } = pass;
    let name = "group_amax";
    let x = aligned(name, "x", x.address(), 2)?;
    let amax_address = aligned(name, "amax", amax.address(), 4)?;
    cuda.clear(&amax)?;
    let kernel = cuda.kernel(&plain(name))?;
    let (cols, groups_argument) = (cols as u64, groups.argument());
    let arguments =
        Arguments::of("[T, cols, E]", [groups.extent().rows, cols as usize, groups.extent().experts])
            .with(&x)
            .with(&cols)
            .with(&groups_argument)
            .with(&amax_address);
    let grid = Grid::new(groups.grid(blocks(TILE_ROWS * cols as usize, CHUNK, 65535)), THREADS);
    // SAFETY: `check` compared lengths with shapes; the kernel reads rows of experts only.
    cuda.on(unsafe { kernel.launch(cuda.stream(), grid, arguments) })
}
