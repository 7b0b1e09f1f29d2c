//! Launches `kernels/grouped_bias_grad.cu`, and the sums of columns for db2.

use super::column_sums::ColumnSums;
use super::products::{dimension, shape_of};
use super::{THREADS, aligned, plain};
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::memory::DeviceMemory;
use moe4::kernels::Error;
use moe4::kernels::contract::GroupedBiasGrad;

/// Thread blocks that share a tile's 128 rows.
const SHARES: u32 = 4;

pub(crate) fn grouped_bias_grad(cuda: &Cuda, pass: GroupedBiasGrad<'_, DeviceMemory>) -> Result<(), Error> {
    pass.check()?;
    let GroupedBiasGrad { dy, hidden, b2, prob, groups, dprob, db2 } = pass;
    let name = "grouped_bias_grad";
    let cols = dimension("hidden", hidden)?;
    let (dy, b2) = (aligned(name, "dy", dy.address(), 16)?, aligned(name, "b2", b2.address(), 4)?);
    let (prob, dprob) =
        (aligned(name, "prob", prob.address(), 4)?, aligned(name, "dprob", dprob.address(), 4)?);
    let db2 = db2.map(|db2| ColumnSums::new(name, groups, &db2)).transpose()?;
    let kernel = cuda.kernel(&plain(name))?;
    let groups_argument = groups.argument();
    let arguments = Arguments::of("[T, H, E]", shape_of(groups, cols))
        .with(&dy)
        .with(&cols)
        .with(&b2)
        .with(&groups_argument)
        .with(&dprob);
    // SAFETY: `check` compared lengths with shapes; the kernel reads rows of experts only.
    cuda.on(unsafe { kernel.launch(cuda.stream(), Grid::new(groups.grid(SHARES), THREADS), arguments) })?;
    match db2 {
        Some(db2) => db2.launch(cuda, dy, cols, Some(prob)),
        None => Ok(()),
    }
}
