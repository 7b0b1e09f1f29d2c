//! Rows of each expert: an int64 tensor `[E]`, on the host or where the other tensors are.
//!
//! Splits on a GPU are never read here: kernels compute the groups from them, and nothing waits. What does not fit is
//! then found by the kernels, and raised by `synchronize` or a later call.

use moe4::tensor::Groups;
use pyo3::prelude::*;

use crate::error::bad_splits;
use crate::place::{Checked, Failure};
use crate::tensor::{Device, Tensor, misplaced, wrong_dtype};
use crate::torch::Dtype;

/// The rows of each expert of a tensor of `rows`.
pub(crate) enum Splits {
    Host(Groups),
    /// `[E]` int64 on the GPU, and `rows`.
    Gpu(Tensor, usize),
}

impl Splits {
    /// Those of a tensor of `rows` on `device`; without splits, one group of all.
    pub(crate) fn new(splits: Option<&Bound<'_, PyAny>>, rows: usize, device: Device) -> PyResult<Self> {
        let Some(splits) = splits else { return Ok(Self::Host(Groups::single(rows))) };
        let splits = Tensor::new("splits", splits)?;
        let [experts] = splits.dims()?;
        if splits.dtype() != Dtype::I64 {
            return Err(wrong_dtype("splits", &[Dtype::I64], splits.dtype().name()));
        }
        match splits.device() {
            Device::Cpu => Ok(Self::Host(Groups::from_i64(&splits.host_i64(), rows).map_err(bad_splits)?)),
            other if other != device => Err(misplaced("splits", other, device)),
            Device::Cuda(_) => {
                // The rules for splits are those of the host's groups.
                Groups::new(&vec![0; experts], rows).map_err(bad_splits)?;
                Ok(Self::Gpu(splits, rows))
            }
        }
    }

    /// `E`.
    pub(crate) fn experts(&self) -> usize {
        match self {
            Self::Host(groups) => groups.experts(),
            Self::Gpu(splits, _) => splits.len(),
        }
    }

    /// Groups that the host knows.
    pub(crate) fn on_host(&self) -> Result<&Groups, Failure> {
        match self {
            Self::Host(groups) => Ok(groups),
            Self::Gpu(splits, _) => Err(misplaced("splits", splits.device(), Device::Cpu)).checked(),
        }
    }
}
