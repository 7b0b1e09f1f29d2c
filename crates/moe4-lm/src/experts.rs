//! The expert layer as a differentiable operation of burn, with four parents: x, W1, W2 and the gates.
//!
//! The weights' values are read from [`Weights`], prepared once an optimizer step; the tensors `w1` and `w2`
//! enter the graph only to receive their gradients.

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::{Shape, Tensor, TensorData};
use moe4::mlp::{Needs, RandomSeed};

use crate::Error;
use crate::operator::{Operator, Saved, Weights};
use crate::routing::Routing;

/// The first error of a forward or backward pass.
///
/// burn's operations return tensors, not results: the operation hands on zeros, and the error waits here.
#[derive(Debug, Clone, Default)]
pub(crate) struct Failure(Arc<Mutex<Option<Error>>>);

impl Failure {
    fn record<T>(&self, result: Result<T, Error>) -> Option<T> {
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

/// What one call of the operation needs besides its differentiable inputs.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) operator: Arc<Operator>,
    pub(crate) weights: Arc<Weights>,
    pub(crate) routing: Arc<Routing>,
    /// Key of the stochastic rounding, distinct for each layer and step.
    pub(crate) random: RandomSeed,
    pub(crate) failure: Failure,
}

/// `x [T, H]`, `w1 [E, N1, H]`, `w2 [E, H, F]`, `gates [T * top_k]` to `y [T, H]`, all FP32.
pub(crate) fn experts(x: Tensor<2>, w1: Tensor<3>, w2: Tensor<3>, gates: Tensor<1>, call: Call) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::grouped_experts(
        x.into_dispatch(),
        w1.into_dispatch(),
        w2.into_dispatch(),
        gates.into_dispatch(),
        call,
    ))
}

#[backend_extension(Autodiff, Flex)]
trait GroupedExperts: Backend {
    fn grouped_experts(
        x: FloatTensor<Self>,
        w1: FloatTensor<Self>,
        w2: FloatTensor<Self>,
        gates: FloatTensor<Self>,
        call: Call,
    ) -> FloatTensor<Self>;
}

impl GroupedExperts for Flex {
    fn grouped_experts(
        x: FloatTensor<Self>,
        _w1: FloatTensor<Self>,
        _w2: FloatTensor<Self>,
        gates: FloatTensor<Self>,
        call: Call,
    ) -> FloatTensor<Self> {
        forward(&x, &gates, &call, Needs::NONE).0
    }
}

impl<C: CheckpointStrategy> GroupedExperts for Autodiff<Flex, C> {
    fn grouped_experts(
        x: FloatTensor<Self>,
        w1: FloatTensor<Self>,
        w2: FloatTensor<Self>,
        gates: FloatTensor<Self>,
        call: Call,
    ) -> FloatTensor<Self> {
        let shapes = [&x, &w1, &w2, &gates].map(|tensor| tensor.primitive().shape());
        let nodes = [x.node(), w1.node(), w2.node(), gates.node()];
        match GroupedExpertsBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (y, saved) = forward(x.primitive(), gates.primitive(), &call, Needs::ALL);
                prep.finish(State { shapes, saved, call }, y)
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(forward(x.primitive(), gates.primitive(), &call, Needs::NONE).0)
            }
        }
    }
}

#[derive(Debug)]
struct GroupedExpertsBackward;

#[derive(Debug, Clone)]
struct State {
    /// Of x, w1, w2 and gates.
    shapes: [Shape; 4],
    /// None after a failed forward pass.
    saved: Option<Arc<Saved>>,
    call: Call,
}

impl Backward<Flex, 4> for GroupedExpertsBackward {
    type State = State;

    fn backward(self, ops: Ops<State, 4>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let State { shapes, saved, call } = ops.state;
        let dy = grads.consume::<Flex>(&ops.node);
        let result = saved.and_then(|saved| {
            let dy = dy.to_contiguous();
            let dy = dy.as_slice::<f32>().unwrap_or_default();
            call.failure.record(call.operator.backward(&saved, dy, &call.routing, call.random))
        });
        let gradients = match result {
            Some(gradients) => [gradients.x, gradients.w1, gradients.w2, gradients.gates],
            None => shapes.each_ref().map(|shape| vec![0.0; shape.num_elements()]),
        };
        for ((parent, shape), gradient) in ops.parents.into_iter().zip(shapes).zip(gradients) {
            if let Some(parent) = parent {
                grads.register::<Flex>(parent.id, tensor(gradient, shape));
            }
        }
    }
}

fn forward(
    x: &FloatTensor<Flex>,
    gates: &FloatTensor<Flex>,
    call: &Call,
    needs: Needs,
) -> (FloatTensor<Flex>, Option<Arc<Saved>>) {
    let (x, gates) = (x.to_contiguous(), gates.to_contiguous());
    let shape = x.shape();
    let values = x.as_slice::<f32>().unwrap_or_default();
    let gates = gates.as_slice::<f32>().unwrap_or_default();
    let result = call.operator.forward(&call.weights, values, gates, &call.routing, needs);
    match call.failure.record(result) {
        Some((y, saved)) => (tensor(y, shape), Some(Arc::new(saved))),
        None => (tensor(vec![0.0; shape.num_elements()], shape), None),
    }
}

fn tensor(values: Vec<f32>, shape: Shape) -> FloatTensor<Flex> {
    FloatTensor::<Flex>::from_data(TensorData::new(values, shape))
}
