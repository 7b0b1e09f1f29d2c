//! Causal multi-head self-attention.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Bool, Tensor, activation::softmax};

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

    /// `x [B, C, H]`; `future [C, C]` is true where a position may not look.
    pub(super) fn forward(&self, x: Tensor<3>, future: Tensor<2, Bool>) -> Tensor<3> {
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
        let weights = softmax(scores.mask_fill(future.unsqueeze(), f32::NEG_INFINITY), 3);
        let mixed = weights.matmul(value).swap_dims(1, 2).reshape([rows, context, hidden]);
        self.output.forward(mixed)
    }
}
