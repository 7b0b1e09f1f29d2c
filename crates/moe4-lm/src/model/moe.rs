//! The mixture-of-experts layer: a softmax router in FP32 and moe4's grouped MLP.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{Int, Tensor, TensorData, activation::softmax};

use moe4::mlp::RandomSeed;

use super::init::Initializer;
use super::{Pass, values};
use crate::Error;
use crate::config::ModelConfig;
use crate::experts::{Call, experts};
use crate::operator::{Operator, Weights};
use crate::rng::{Stream, derive};
use crate::routing::Routing;

#[derive(Module, Debug)]
pub(crate) struct MixtureOfExperts {
    router: Linear,
    /// `[E, N1, H]`.
    w1: Param<Tensor<3>>,
    /// `[E, H, F]`.
    w2: Param<Tensor<3>>,
    top_k: usize,
}

impl MixtureOfExperts {
    pub(super) fn new(
        init: &mut Initializer<'_>,
        config: &ModelConfig,
        fc1_rows: usize,
        output_gain: f64,
    ) -> Self {
        let ModelConfig { experts, hidden, ffn, top_k, .. } = *config;
        Self {
            router: init.linear(hidden, experts, 1.0),
            w1: init.normal([experts, fc1_rows, hidden], 1.0 / (hidden as f64).sqrt()),
            w2: init.normal([experts, hidden, ffn], output_gain / (ffn as f64).sqrt()),
            top_k,
        }
    }

    /// The weights in the operator's own format.
    pub(super) fn prepare(&self, operator: &Operator) -> Result<Weights, Error> {
        operator.prepare(&values(self.w1.val()), &values(self.w2.val()))
    }

    /// `x [T, H]` to the experts' output `[T, H]` and the load-balance loss `[1]`, which is 1 when perfectly even.
    ///
    /// The chosen probabilities are normalized to sum 1. The loss is that of the Switch Transformer
    /// (Fedus et al. 2021, equation 4): `E * sum_e f_e * P_e`, with `f_e` the share of assignments and `P_e` the
    /// mean probability of expert e.
    pub(super) fn forward(&self, x: Tensor<2>, pass: &Pass<'_>, layer: usize) -> (Tensor<2>, Tensor<1>) {
        let probabilities = softmax(self.router.forward(x.clone()), 1);
        let [tokens, count] = probabilities.dims();
        let routing = Routing::top_k(&values(probabilities.clone()), count, self.top_k);

        let device = x.device();
        let chosen: Vec<i64> = routing.experts.iter().map(|&expert| expert as i64).collect();
        let chosen = Tensor::<2, Int>::from_data(TensorData::new(chosen, [tokens, self.top_k]), &device);
        let gates = probabilities.clone().gather(1, chosen);
        let gates = gates.clone() / gates.sum_dim(1);

        let scale = count as f32 / routing.slot.len() as f32;
        let share: Vec<f32> = routing.splits.iter().map(|&rows| rows as f32 * scale).collect();
        let share = Tensor::<1>::from_data(TensorData::new(share, [count]), &device);
        let balance = (probabilities.mean_dim(0).reshape([count]) * share).sum();

        let call = Call {
            operator: Arc::clone(pass.operator),
            weights: Arc::clone(&pass.weights[layer]),
            routing: Arc::new(routing),
            random: RandomSeed { seed: derive(pass.seed, Stream::Rounding, layer as u64), call: pass.step },
            failure: pass.failure.clone(),
        };
        let y = experts(x, self.w1.val(), self.w2.val(), gates.reshape([tokens * self.top_k]), call);
        (y, balance)
    }
}
