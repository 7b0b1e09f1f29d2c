//! Launches `kernels/unpermute.cu`.

use super::permute::vector;
use super::{THREADS, aligned, blocks, indexed_rows, narrow};
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::memory::DeviceMemory;
use crate::variant::Variant;
use moe4::kernels::Error;
use moe4::kernels::contract::Unpermute;

pub(crate) fn variant(vector: usize) -> Variant {
    Variant { kernel: "unpermute", defines: vec![("VECTOR", vector as u32)] }
}

pub(crate) fn unpermute(cuda: &Cuda, pass: Unpermute<'_, DeviceMemory>) -> Result<(), Error> {
    pass.check()?;
    let Unpermute { y, cols, slot, top_k, weights, out } = pass;
    let kernel = cuda.kernel(&variant(vector(cols, [y.address(), out.address()])))?;
    let (rows, tokens) = (indexed_rows("unpermute: rows of y", y.len() / cols)?, (out.len() / cols) as u64);
    let name = "unpermute";
    let y = aligned(name, "y", y.address(), 2)?;
    let out = aligned(name, "out", out.address(), 2)?;
    let slot = aligned(name, "slot", slot.address(), 4)?;
    // An address of 0 stands for weights of 1.
    let weights = aligned(name, "weights", weights.map_or(0, |w| w.address()), 4)?;
    let (cols, top_k, faults) = (cols as u64, narrow("top_k", top_k)?, cuda.faults_address());
    let arguments = Arguments::of("[rows, cols, tokens]", [rows as usize, cols as usize, tokens as usize])
        .with(&y)
        .with(&rows)
        .with(&cols)
        .with(&slot)
        .with(&top_k)
        .with(&weights)
        .with(&tokens)
        .with(&out)
        .with(&faults);
    let grid = Grid::new([blocks(tokens as usize, THREADS as usize / 32, 1 << 30), 1, 1], THREADS);
    // SAFETY: `check` compared lengths with shapes; the kernel compares indices with the number of rows.
    cuda.on(unsafe { kernel.launch(cuda.stream(), grid, arguments) })
}
