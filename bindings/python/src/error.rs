//! Errors of the library as exceptions.
//!
//! | error | exception |
//! |---|---|
//! | arguments that do not fit together | `ValueError` |
//! | something that a backend cannot do | `NotImplementedError` |
//! | a device or its driver failed | `RuntimeError` |

use moe4::kernels::Error;
use moe4::tensor::GroupsError;
use pyo3::PyErr;
use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyValueError};

pub(crate) fn raise(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Misuse(_) => PyValueError::new_err(message),
        Error::Unsupported(_) => PyNotImplementedError::new_err(message),
        Error::Device(_) => PyRuntimeError::new_err(message),
    }
}

pub(crate) fn bad_splits(error: GroupsError) -> PyErr {
    raise(error.into())
}
