//! Differentiable operations of burn that moe4 computes: the router's choice and the expert layer.

mod experts;
mod router;

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::Flex;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Shape, TensorData};

pub(crate) use self::experts::{Call, experts};
pub(crate) use self::router::gates;
use crate::Error;

/// The first error of a forward or backward pass.
///
/// burn's operations return tensors, not results: the operation hands on zeros, and the error waits here.
#[derive(Debug, Clone, Default)]
pub(crate) struct Failure(Arc<Mutex<Option<Error>>>);

impl Failure {
    pub(crate) fn record<T>(&self, result: Result<T, Error>) -> Option<T> {
        result
            .map_err(|error| {
                // A later error follows from the zeros of the first one and says nothing new.
                self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            })
            .ok()
    }

    /// The error, if there was one.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
    }
}

fn tensor(values: Vec<f32>, shape: Shape) -> FloatTensor<Flex> {
    FloatTensor::<Flex>::from_data(TensorData::new(values, shape))
}

/// The elements of a contiguous FP32 tensor.
fn values(tensor: &FloatTensor<Flex>) -> &[f32] {
    tensor.as_slice().expect("made contiguous by the caller")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_kept_and_told_once() {
        let failure = Failure::default();
        let error = || Err::<(), _>(Error::setting("first", 1, "2"));
        assert!(failure.record(error()).is_none());
        assert!(failure.clone().check().is_err());
        assert!(failure.check().is_ok());
    }
}
