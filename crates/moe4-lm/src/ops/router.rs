//! The gates: each token's probabilities of its chosen experts, as a function of the router's logits.
//!
//! The choice itself has no gradient. The gradient of the load-balance loss is added on the way back, so that the
//! loss needs no node of its own in the graph.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::{Shape, Tensor};
use moe4::routing::Routing;

use super::{Failure, tensor, values};

/// `logits [T, E]`, the ones that `routing` was made from, to the gates `[T * top_k]`.
///
/// Backward adds `balance` times the gradient of [`Routing::load_balance_loss`].
pub(crate) fn gates(logits: Tensor<2>, routing: Arc<Routing>, balance: f32, failure: Failure) -> Tensor<1> {
    let call = Call { routing, balance, failure };
    Tensor::from_dispatch(Dispatch::router_gates(logits.into_dispatch(), call))
}

#[derive(Debug, Clone)]
struct Call {
    routing: Arc<Routing>,
    balance: f32,
    failure: Failure,
}

#[backend_extension(Autodiff, Flex)]
trait RouterGates: Backend {
    fn router_gates(logits: FloatTensor<Self>, call: Call) -> FloatTensor<Self>;
}

impl RouterGates for Flex {
    fn router_gates(_logits: FloatTensor<Self>, call: Call) -> FloatTensor<Self> {
        forward(&call)
    }
}

impl<C: CheckpointStrategy> RouterGates for Autodiff<Flex, C> {
    fn router_gates(logits: FloatTensor<Self>, call: Call) -> FloatTensor<Self> {
        let shape = logits.primitive().shape();
        let y = forward(&call);
        match RouterGatesBackward.prepare::<C>([logits.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((shape, call), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

#[derive(Debug)]
struct RouterGatesBackward;

impl Backward<Flex, 1> for RouterGatesBackward {
    /// The logits' shape and the call.
    type State = (Shape, Call);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let (shape, call) = ops.state;
        let dgates = grads.consume::<Flex>(&ops.node).to_contiguous();
        let [Some(parent)] = ops.parents else { return };
        let result = call.routing.backward(values(&dgates), call.balance);
        let dlogits = call.failure.record(result.map_err(|error| moe4::kernels::Error::from(error).into()));
        let dlogits = dlogits.unwrap_or_else(|| vec![0.0; shape.num_elements()]);
        grads.register::<Flex>(parent.id, tensor(dlogits, shape));
    }
}

fn forward(call: &Call) -> FloatTensor<Flex> {
    let gates = call.routing.prob.clone();
    let shape = Shape::from([gates.len()]);
    tensor(gates, shape)
}

#[cfg(test)]
mod tests {
    use burn::tensor::activation::softmax;
    use burn::tensor::{Device, Int, TensorData};
    use moe4::routing::RouterConfig;

    use super::*;
    use crate::model::values;

    #[test]
    fn gates_and_gradient_agree_with_burns_own_operations() {
        const TOKENS: usize = 6;
        const EXPERTS: usize = 4;
        let device = Device::flex().autodiff();
        let numbers: Vec<f32> = (0..TOKENS * EXPERTS).map(|i| ((i * 37 % 23) as f32 - 11.0) / 7.0).collect();
        let logits = Tensor::<2>::from_data(TensorData::new(numbers.clone(), [TOKENS, EXPERTS]), &device);
        let logits = logits.require_grad();
        let weight: Vec<f32> = (0..TOKENS * 2).map(|i| (i as f32).sin()).collect();
        let weight = Tensor::<1>::from_data(TensorData::new(weight, [TOKENS * 2]), &device);
        let config = RouterConfig { experts: EXPERTS, top_k: 2, normalize: true };
        let routing = Arc::new(Routing::new(&numbers, config).expect("finite logits"));

        let failure = Failure::default();
        let got = gates(logits.clone(), Arc::clone(&routing), 0.3, failure.clone());
        let got_gradient = logits.grad(&(got.clone() * weight.clone()).sum().backward()).expect("a gradient");
        failure.check().expect("no failure");

        let probabilities = softmax(logits.clone(), 1);
        let chosen: Vec<i64> = routing.experts.iter().map(|&expert| i64::from(expert)).collect();
        let mut share = [0.0; EXPERTS];
        chosen.iter().for_each(|&expert| share[expert as usize] += EXPERTS as f32 / chosen.len() as f32);
        let chosen = Tensor::<2, Int>::from_data(TensorData::new(chosen, [TOKENS, 2]), &device);
        let picked = probabilities.clone().gather(1, chosen);
        let expected = (picked.clone() / picked.sum_dim(1)).reshape([TOKENS * 2]);
        let balance =
            (probabilities.mean_dim(0).reshape([EXPERTS]) * Tensor::from_floats(share, &device)).sum();
        assert!((values(balance.clone())[0] - routing.load_balance_loss()).abs() < 1e-5);
        let loss = (expected.clone() * weight).sum() + balance * 0.3;
        let expected_gradient = logits.grad(&loss.backward()).expect("a gradient");

        for (got, expected) in
            [(values(got), values(expected)), (values(got_gradient), values(expected_gradient))]
        {
            // A dozen FP32 roundings of numbers of at most 1.
            assert!(got.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6), "{got:?} {expected:?}");
        }
    }
}
