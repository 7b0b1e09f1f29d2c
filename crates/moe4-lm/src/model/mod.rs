//! A byte-level transformer whose feed-forward layers are mixtures of experts.
//!
//! ```text
//! h = embedding[byte]
//! for each block: h += attention(norm(h)); h += experts(norm(h))
//! logits = norm(h) . head
//! ```
//!
//! Everything but the experts computes in FP32, in every precision.

mod attention;
mod init;
mod moe;

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::{Linear, RmsNorm};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};

use self::attention::{Attention, distance_bias};
use self::init::Initializer;
use self::moe::MixtureOfExperts;
use crate::Error;
use crate::config::{ModelConfig, VOCABULARY};
use crate::data::Batch;
use crate::operator::{Operator, Weights};
use crate::ops::Failure;

/// Standard deviation of the embeddings and of the output projection.
///
/// burn's default embedding, N(0, 1), drowns the blocks' contributions and stalls at 2.1 nats a byte. A small output
/// projection starts at ln 256, knowing nothing.
const EMBEDDING_STD: f64 = 0.02;

#[derive(Module, Debug)]
struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    experts_norm: RmsNorm,
    experts: MixtureOfExperts,
}

/// The model's parameters.
#[derive(Module, Debug)]
pub(crate) struct Transformer {
    embedding: Param<Tensor<2>>,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
    heads: usize,
}

/// What all layers of one forward pass share.
pub(crate) struct Pass<'a> {
    pub(crate) operator: &'a Arc<Operator>,
    /// One for each block.
    pub(crate) weights: &'a [Arc<Weights>],
    pub(crate) seed: u64,
    pub(crate) step: u64,
    /// Weight of each block's load-balance loss.
    pub(crate) balance: f32,
    pub(crate) failure: Failure,
}

/// The two losses of a batch.
pub(crate) struct Losses {
    /// Mean nats a byte, `[1]`; its backward pass includes the load-balance loss.
    pub(crate) cross_entropy: Tensor<1>,
    /// Mean load-balance loss of the blocks.
    pub(crate) balance: f32,
}

impl Transformer {
    pub(crate) fn new(config: &ModelConfig, operator: &Operator, seed: u64, device: &Device) -> Self {
        let ModelConfig { layers, hidden, heads, .. } = *config;
        let init = &mut Initializer::new(device, seed);
        // Each block adds two terms to the residual stream; scaled so, their sum keeps unit variance.
        let output_gain = 1.0 / (2.0 * layers as f64).sqrt();
        Self {
            embedding: init.normal([VOCABULARY, hidden], EMBEDDING_STD),
            blocks: (0..layers)
                .map(|_| Block {
                    attention_norm: init.norm(hidden),
                    attention: Attention::new(init, hidden, heads, output_gain),
                    experts_norm: init.norm(hidden),
                    experts: MixtureOfExperts::new(init, config, operator.fc1_rows(), output_gain),
                })
                .collect(),
            norm: init.norm(hidden),
            head: init.projection(hidden, VOCABULARY, EMBEDDING_STD),
            heads,
        }
    }

    /// The experts' weights in the operator's format: once an optimizer step, for all passes until the next one.
    pub(crate) fn prepare(&self, operator: &Operator) -> Result<Vec<Arc<Weights>>, Error> {
        self.blocks.iter().map(|block| block.experts.prepare(operator).map(Arc::new)).collect()
    }

    /// `bytes [rows * context]` to logits `[rows, context, 256]` and the mean load-balance loss.
    pub(crate) fn forward(
        &self,
        bytes: &[u8],
        rows: usize,
        pass: &Pass<'_>,
    ) -> Result<(Tensor<3>, f32), Error> {
        let context = bytes.len() / rows;
        let hidden = self.embedding.dims()[1];
        let device = self.embedding.device();
        let bias = distance_bias(self.heads, context, &device);

        let tokens = self.embedding.val().select(0, indices(bytes, &device));
        let mut h = tokens.reshape([rows, context, hidden]);
        let mut balance = 0.0;
        for (layer, block) in self.blocks.iter().enumerate() {
            let attended = block.attention.forward(block.attention_norm.forward(h.clone()), bias.clone());
            h = h + attended;
            let x = block.experts_norm.forward(h.clone()).reshape([rows * context, hidden]);
            let (y, layer_balance) = block.experts.forward(x, pass, layer)?;
            h = h + y.reshape([rows, context, hidden]);
            balance += layer_balance;
        }
        let logits = self.head.forward(self.norm.forward(h));
        Ok((logits, balance / self.blocks.len() as f32))
    }

    pub(crate) fn losses(&self, batch: &Batch, pass: &Pass<'_>) -> Result<Losses, Error> {
        let (logits, balance) = self.forward(&batch.inputs, batch.rows, pass)?;
        let tokens = batch.rows * batch.context;
        let device = logits.device();
        let log_probabilities = log_softmax(logits.reshape([tokens, VOCABULARY]), 1);
        let targets = indices(&batch.targets, &device).reshape([tokens, 1]);
        Ok(Losses { cross_entropy: log_probabilities.gather(1, targets).mean().neg(), balance })
    }
}

fn indices(bytes: &[u8], device: &Device) -> Tensor<1, Int> {
    let values: Vec<i64> = bytes.iter().map(|&byte| i64::from(byte)).collect();
    Tensor::from_data(TensorData::new(values, [bytes.len()]), device)
}

/// A tensor's values in row-major order.
pub(crate) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().expect("model tensors are FP32 and on the CPU")
}
