//! Launches `kernels/unpack.cu`.

use super::{THREADS, aligned, blocks, plain};
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::memory::{DeviceBuffer, DeviceView};
use half::bf16;
use moe4::kernels::{Backend, Error};
use moe4::numerics::BLOCK;

/// The values of an operand of `kernel`, in memory of their own. Scales are in the plain layout.
pub(super) fn unpack(
    cuda: &Cuda,
    kernel: &'static str,
    name: &'static str,
    codes: DeviceView<'_, u8>,
    scales: DeviceView<'_, u8>,
) -> Result<DeviceBuffer<bf16>, Error> {
    let codes_address = aligned(kernel, name, codes.address(), 8)?;
    let mut values = cuda.empty::<bf16>(2 * codes.len())?;
    let (scales_address, count) = (scales.address(), scales.len() as u64);
    let out = values.view_mut().address();
    let of_kernel = cuda.kernel(&plain("unpack"))?;
    let arguments = Arguments::of("[blocks, codes, 1]", [scales.len(), codes.len(), 1])
        .with(&codes_address)
        .with(&scales_address)
        .with(&count)
        .with(&out);
    debug_assert_eq!(codes.len(), scales.len() * BLOCK / 2, "the pass compared lengths with shapes");
    let grid = Grid::new([blocks(scales.len(), THREADS as usize, 1 << 30), 1, 1], THREADS);
    // SAFETY: there are 8 bytes of codes and 16 values for each scale.
    cuda.on(unsafe { of_kernel.launch(cuda.stream(), grid, arguments) })?;
    Ok(values)
}
