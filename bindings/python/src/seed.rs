//! Where the random numbers of stochastic rounding come from: an int64 tensor that torch drew.
//!
//! On the CPU its value is the seed. On a GPU it is never read here: kernels add it to the streams of one fixed seed, so
//! that nothing waits, and a graph, which draws the tensor anew, rounds otherwise in each replay.

use moe4::mlp::RandomSeed;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::tensor::{Device, Tensor, wrong_dtype};
use crate::torch::Dtype;

/// The seed of one backward.
pub(crate) enum Seed {
    Host(RandomSeed),
    /// `[1]` int64 on the GPU.
    Gpu(Tensor),
}

impl Seed {
    /// From `[1]`, or an empty tensor where nothing is random.
    pub(crate) fn new(seed: &Bound<'_, PyAny>) -> PyResult<Self> {
        let seed = Tensor::new("seed", seed)?;
        let none = RandomSeed::default();
        match (seed.len(), seed.dtype(), seed.device()) {
            (0, ..) => Ok(Self::Host(none)),
            (1, Dtype::I64, Device::Cpu) => {
                Ok(Self::Host(RandomSeed { seed: seed.host_i64()[0] as u64, ..none }))
            }
            (1, Dtype::I64, Device::Cuda(_)) => Ok(Self::Gpu(seed)),
            (1, dtype, _) => Err(wrong_dtype("seed", &[Dtype::I64], dtype.name())),
            (elements, ..) => {
                Err(PyValueError::new_err(format!("seed: expected one element or none, got {elements}")))
            }
        }
    }

    /// The tensor, if it is on a GPU and must be on that of the others.
    pub(crate) fn tensor(&self) -> Option<&Tensor> {
        match self {
            Self::Host(_) => None,
            Self::Gpu(tensor) => Some(tensor),
        }
    }
}
