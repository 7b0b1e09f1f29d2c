//! Launches `kernels/permute.cu`.

use super::{THREADS, aligned, blocks, indexed_rows};
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::memory::DeviceMemory;
use crate::variant::Variant;
use moe4::kernels::Error;
use moe4::kernels::contract::Permute;

pub(crate) fn variant(vector: usize) -> Variant {
    Variant { kernel: "permute", defines: vec![("VECTOR", vector as u32)] }
}

/// Elements of one access: rows of whole 16-byte words are moved by them.
pub(super) fn vector(cols: usize, addresses: [u64; 2]) -> usize {
    let whole = cols.is_multiple_of(8) && addresses.iter().all(|a| a.is_multiple_of(16));
    if whole { 8 } else { 1 }
}

pub(crate) fn permute(cuda: &Cuda, pass: Permute<'_, DeviceMemory>) -> Result<(), Error> {
    pass.check()?;
    let Permute { x, cols, source, out } = pass;
    let vector = vector(cols, [x.address(), out.address()]);
    let kernel = cuda.kernel(&variant(vector))?;
    let (rows, slots) = (indexed_rows("permute: rows of x", x.len() / cols)?, source.len() as u64);
    let words = (cols / vector) as u64;
    let x = aligned("permute", "x", x.address(), 2)?;
    let out = aligned("permute", "out", out.address(), 2)?;
    let source = aligned("permute", "source", source.address(), 4)?;
    let faults = cuda.faults_address();
    let arguments = Arguments::of("[rows, cols, slots]", [rows as usize, cols, slots as usize])
        .with(&x)
        .with(&rows)
        .with(&words)
        .with(&source)
        .with(&slots)
        .with(&out)
        .with(&faults);
    let grid = Grid::new([blocks(slots as usize, THREADS as usize / 32, 1 << 30), 1, 1], THREADS);
    // SAFETY: `check` compared lengths with shapes; the kernel compares indices with the number of rows.
    cuda.on(unsafe { kernel.launch(cuda.stream(), grid, arguments) })
}
