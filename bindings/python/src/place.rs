//! A kind of device: where tensors are, and the backend that works on them there.
//!
//! The functions of this module are written for any place; which one a call is for, its tensors say
//! ([`common_device`](crate::tensor::common_device)), and [`dispatch`] goes there.

use moe4::kernels::{Backend, Buffer, Error, Memory};
use moe4::mlp::RandomSeed;
use pyo3::prelude::*;

use crate::error::raise;
use crate::exchange::Exchange;
use crate::seed::Seed;
use crate::splits::Splits;
use crate::torch::Handed;

/// Where a call runs.
pub(crate) trait Place {
    type Memory: Exchange;
    type Backend<'b>: Backend<Memory = Self::Memory>;

    /// Runs `work` without the interpreter's lock.
    fn run<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Self::Backend<'_>) -> Result<R, Failure> + Send,
    ) -> PyResult<R>;

    /// Groups with the token positions that the splits need, as far as the host knows those; else as
    /// [`Place::groups_for_any`].
    fn groups(
        backend: &Self::Backend<'_>,
        splits: &Splits,
    ) -> Result<<Self::Memory as Memory>::Groups, Failure>;

    /// Groups for tensors that are handed over with room for any splits. A device that learns splits late has the room
    /// from the beginning; the host [makes](Exchange::resize) it.
    fn groups_for_any(
        backend: &Self::Backend<'_>,
        splits: &Splits,
    ) -> Result<<Self::Memory as Memory>::Groups, Failure>;

    /// Runs `work` with the random numbers of a seed that is here or on the host.
    fn seeded<R>(
        backend: &Self::Backend<'_>,
        seed: &Seed,
        work: impl FnOnce(RandomSeed) -> Result<R, Failure>,
    ) -> Result<R, Failure>;

    /// A torch tensor that owns the buffer from now on.
    ///
    /// # Panics
    /// If `shape` has not as many elements as the buffer.
    fn hand_over<'py, T: Handed>(
        &self,
        py: Python<'py>,
        buffer: Buffer<Self::Memory, T>,
        shape: &[usize],
    ) -> PyResult<Bound<'py, PyAny>>;
}

/// Evaluates `$body` with `$place` for the device: `dispatch!(py, device, place => f(place))`.
macro_rules! dispatch {
    ($py:expr, $device:expr, $place:ident => $body:expr) => {
        match $device {
            $crate::tensor::Device::Cpu => {
                let $place = $crate::cpu::OnCpu;
                $body
            }
            $crate::tensor::Device::Cuda(ordinal) => {
                let $place = $crate::cuda::OnCuda::current($py, ordinal)?;
                $body
            }
        }
    };
}
pub(crate) use dispatch;

/// What can go wrong in work: in the library, or in a check of a tensor.
pub(crate) enum Failure {
    Library(Error),
    Python(PyErr),
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure::Library(error.into())
    }
}

impl Failure {
    pub(crate) fn raise(self) -> PyErr {
        match self {
            Failure::Library(error) => raise(error),
            Failure::Python(error) => error,
        }
    }
}

/// Lets a check of a tensor fail within work.
pub(crate) trait Checked<T> {
    fn checked(self) -> Result<T, Failure>;
}

impl<T> Checked<T> for PyResult<T> {
    fn checked(self) -> Result<T, Failure> {
        self.map_err(Failure::Python)
    }
}
