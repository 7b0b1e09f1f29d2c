//! Causal multi-head self-attention that knows positions only as distances.
//!
//! Each head lowers its scores by `slope * distance` (ALiBi, Press et al. 2022, section 3). There is nothing to
//! learn about positions: bytes nearby matter from the first step on, which a short training cannot do without.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Device, Tensor, TensorData, activation::softmax};

use super::init::Initializer;

#[derive(Module, Debug)]
pub(crate) struct Attention {
    /// `[H, 3H]`: query, key and value side by side.
    qkv: Linear,
    output: Linear,
    heads: usize,
}

impl Attention {
    pub(super) fn new(init: &mut Initializer<'_>, hidden: usize, heads: usize, output_gain: f64) -> Self {
        Self {
            qkv: init.linear(hidden, 3 * hidden, 1.0),
            output: init.linear(hidden, hidden, output_gain),
            heads,
        }
    }

    /// `x [B, C, H]`; `bias` from [`distance_bias`].
    pub(super) fn forward(&self, x: Tensor<3>, bias: Tensor<4>) -> Tensor<3> {
        let [rows, context, hidden] = x.dims();
        let width = hidden / self.heads;
        let [query, key, value] = self
            .qkv
            .forward(x)
            .reshape([rows, context, 3 * self.heads, width])
            .swap_dims(1, 2)
            .split(self.heads, 1)
            .try_into()
            .expect("three times as many heads split into three");
        let scores = query.matmul(key.transpose()) / (width as f64).sqrt();
        let weights = softmax(scores + bias, 3);
        let mixed = weights.matmul(value).swap_dims(1, 2).reshape([rows, context, hidden]);
        self.output.forward(mixed)
    }
}

/// `[1, heads, C, C]`: what is added to the scores of (query, key); minus infinity where the key is in the future.
///
/// The slopes are the geometric sequence from `2^(-8/heads)` to `2^-8`.
pub(super) fn distance_bias(heads: usize, context: usize, device: &Device) -> Tensor<4> {
    let mut values = Vec::with_capacity(heads * context * context);
    for head in 1..=heads {
        let slope = (-8.0 * head as f32 / heads as f32).exp2();
        for query in 0..context {
            let bias =
                |key| if key > query { f32::NEG_INFINITY } else { slope * (key as f32 - query as f32) };
            values.extend((0..context).map(bias));
        }
    }
    Tensor::from_data(TensorData::new(values, [1, heads, context, context]), device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::values;

    #[test]
    fn the_bias_falls_with_distance_and_hides_the_future() {
        let bias = values(distance_bias(2, 3, &Device::flex()));
        let future = f32::NEG_INFINITY;
        let (steep, flat) = (0.0625, 0.00390625);
        let head = |slope: f32| [0.0, future, future, -slope, 0.0, future, -2.0 * slope, -slope, 0.0];
        assert_eq!(bias, [head(steep), head(flat)].concat());
    }
}
