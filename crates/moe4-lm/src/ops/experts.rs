//! The expert layer as a differentiable operation of burn, with four parents: x, W1, W2 and the gates.
//!
//! The weights' values are read from [`Weights`], prepared once an optimizer step; the tensors `w1` and `w2`
//! enter the graph only to receive their gradients.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::{Shape, Tensor};
use moe4::mlp::{Needs, RandomSeed};
use moe4::routing::Permutation;

use super::{Failure, tensor, values};
use crate::Error;
use crate::operator::{Operator, Saved, Weights};

/// What one call of the operation needs besides its differentiable inputs.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) operator: Arc<Operator>,
    pub(crate) weights: Arc<Weights>,
    pub(crate) permutation: Arc<Permutation>,
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
            let result = Arc::into_inner(saved)
                .ok_or(Error::Reused)
                .and_then(|saved| call.operator.backward(saved, values(&dy), &call.permutation, call.random));
            call.failure.record(result)
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
    let result = call.operator.forward(&call.weights, values(&x), values(&gates), &call.permutation, needs);
    match call.failure.record(result) {
        Some((y, saved)) => (tensor(y, shape), Some(Arc::new(saved))),
        None => (tensor(vec![0.0; shape.num_elements()], shape), None),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData, activation::silu};
    use half::bf16;
    use rand::Rng;

    use super::*;
    use crate::config::{ModelConfig, Precision, Stash};
    use crate::model::values;
    use crate::rng::{Stream, rng};

    const TOKENS: usize = 24;
    const EXPERTS: usize = 4;
    const HIDDEN: usize = 32;
    const FFN: usize = 48;

    /// Random values that BF16 holds exactly, uniform with the given bound, on an autodiff device.
    fn random<const D: usize>(stream: u64, shape: [usize; D], bound: f32) -> Tensor<D> {
        let mut rng = rng(0, Stream::Parameters, stream);
        let values: Vec<f32> = (0..shape.iter().product())
            .map(|_| bf16::from_f32(rng.random_range(-bound..bound)).to_f32())
            .collect();
        Tensor::from_data(TensorData::new(values, shape), &Device::flex().autodiff()).require_grad()
    }

    /// The same layer in FP32, every expert on every token, the unused results weighted with zero.
    fn dense(x: &Tensor<2>, w1: &Tensor<3>, w2: &Tensor<3>, gates: &Tensor<1>, chosen: &[u32]) -> Tensor<2> {
        let choices: Vec<Tensor<2>> = (0..EXPERTS)
            .map(|expert| {
                let chosen = chosen.iter().map(|&choice| f32::from(choice as usize == expert)).collect();
                let chosen =
                    Tensor::<1>::from_data(TensorData::new::<f32, _>(chosen, [TOKENS * 2]), &x.device());
                let weight = (gates.clone() * chosen).reshape([TOKENS, 2]).sum_dim(1);
                let w1 = w1.clone().narrow(0, expert, 1).squeeze_dim::<2>(0);
                let w2 = w2.clone().narrow(0, expert, 1).squeeze_dim::<2>(0);
                let c = x.clone().matmul(w1.transpose());
                let h = silu(c.clone().narrow(1, 0, FFN)) * c.narrow(1, FFN, FFN);
                (h * weight).matmul(w2.transpose())
            })
            .collect();
        choices.into_iter().reduce(|sum, y| sum + y).expect("at least one expert")
    }

    #[test]
    fn output_and_all_four_gradients_agree_with_a_dense_computation() {
        let config = ModelConfig { experts: EXPERTS, hidden: HIDDEN, ffn: FFN, ..ModelConfig::default() };
        let operator = Arc::new(
            Operator::new(&config, Precision::Bf16, false, Stash::Paged, TOKENS).expect("valid shape"),
        );
        let x = random(0, [TOKENS, HIDDEN], 1.0);
        let w1 = random(1, [EXPERTS, 2 * FFN, HIDDEN], 0.3);
        let w2 = random(2, [EXPERTS, HIDDEN, FFN], 0.3);
        let gates = random(3, [TOKENS * 2], 1.0);
        let dy = random(4, [TOKENS, HIDDEN], 1.0).detach();
        // Two choices a token; expert 3 gets no token.
        let chosen: Vec<u32> =
            (0..TOKENS as u32).flat_map(|token| [token % 3, (token + 1 + token / 12) % 3]).collect();
        let permutation = Arc::new(Permutation::new(&chosen, EXPERTS, 2).expect("valid choices"));
        assert_eq!(permutation.splits[3], 0);

        let call = Call {
            weights: Arc::new(operator.prepare(&values(w1.clone()), &values(w2.clone())).expect("weights")),
            operator,
            permutation,
            random: RandomSeed::default(),
            failure: Failure::default(),
        };
        let y = experts(x.clone(), w1.clone(), w2.clone(), gates.clone(), call.clone());
        let expected = dense(&x, &w1, &w2, &gates, &chosen);
        let got_gradients = (y.clone() * dy.clone()).sum().backward();
        let expected_gradients = (expected.clone() * dy).sum().backward();
        call.failure.check().expect("no failure");

        close("y", &values(y), &values(expected));
        macro_rules! gradient {
            ($($tensor:ident)*) => {$(
                let [got, expected] = [&got_gradients, &expected_gradients]
                    .map(|gradients| values($tensor.grad(gradients).expect("a gradient")));
                close(stringify!($tensor), &got, &expected);
            )*};
        }
        gradient!(x w1 w2 gates);
    }

    /// Equal up to BF16: c, h, dc and the result are each rounded once or twice, with a relative error of at most
    /// 2^-9, so that the norm of the difference stays below 8 of these roundings.
    fn close(name: &str, got: &[f32], expected: &[f32]) {
        let norm =
            |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        let difference = norm(&mut got.iter().zip(expected).map(|(a, b)| a - b));
        let size = norm(&mut expected.iter().copied());
        assert_eq!(got.len(), expected.len(), "{name}");
        assert!(difference < 8.0 / 512.0 * size, "{name}: {difference} of {size}");
    }
}
