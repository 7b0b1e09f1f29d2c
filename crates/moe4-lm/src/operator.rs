//! The expert layer on plain FP32 slices: moe4's grouped MLP between the permutation to expert order and back.
//!
//! ```text
//! xs[r] = bf16(x[token(r)])      ps[r] = gates[assignment(r)]
//! ys    = grouped_mlp(xs, W1, W2, ps)            the gate scales the activation inside
//! y[t]  = sum over choices j of ys[row(t, j)], in FP32, j ascending, rounded to BF16 once
//! ```
//!
//! Backward, `dy` and `dxs` take the same two paths the other way. Weights are FP32 outside (AdamW's master copy)
//! and BF16 inside, before any quantization.

use std::sync::Arc;

use half::bf16;
use half::slice::HalfFloatSliceExt;
use moe4::kernels::cpu::Cpu;
use moe4::kernels::work::Rows;
use moe4::kernels::{self, Host, Memory};
use moe4::mlp::{
    self, BackwardArgs, ForwardArgs, GradBuffers, GradMode, GroupedMlp, GroupedMlpConfig, Needs, PagedSaved,
    PagedStash, PagedStashStats, PreparedWeights, RandomSeed, Stash as _, WeightGrad, WeightGrads,
    WeightSource,
};
use moe4::routing::Permutation;
use moe4::tensor::Groups;

use crate::Error;
use crate::config::{ModelConfig, Precision, Stash};

/// The grouped MLP of one configuration on the CPU.
#[derive(Debug)]
pub(crate) struct Operator {
    mlp: GroupedMlp,
    backend: Cpu,
    stash: Option<PagedStash>,
}

/// One layer's weights, quantized or rounded to BF16.
pub(crate) type Weights = PreparedWeights<Host>;

/// What the backward pass of one call needs.
#[derive(Debug)]
pub(crate) enum Saved {
    InPlace(mlp::Saved<Host>),
    Paged(PagedSaved),
}

/// Bytes of a page: small beside a layer's tensors, large beside the cost of a copy.
const PAGE_BYTES: usize = 64 << 10;

/// Gradients of the four inputs, each of its input's shape.
pub(crate) struct Gradients {
    pub(crate) x: Vec<f32>,
    pub(crate) w1: Vec<f32>,
    pub(crate) w2: Vec<f32>,
    pub(crate) gates: Vec<f32>,
}

impl Operator {
    /// `tokens` are those of a batch: with a paged stash, the pool holds what all layers save for them.
    pub(crate) fn new(
        model: &ModelConfig,
        precision: Precision,
        recompute: bool,
        stash: Stash,
        tokens: usize,
    ) -> Result<Self, Error> {
        let mlp = GroupedMlp::new(GroupedMlpConfig {
            activation: model.activation,
            precision: match precision {
                Precision::Bf16 => mlp::Precision::Bf16,
                Precision::Nvfp4 => mlp::Precision::Nvfp4,
            },
            recompute_activation: recompute,
            ..GroupedMlpConfig::new(model.experts, model.hidden, model.ffn)
        })?;
        let stash = match stash {
            Stash::InPlace => None,
            Stash::Paged => Some(pool(&mlp, model, tokens)?),
        };
        Ok(Self { mlp, backend: Cpu::new(), stash })
    }

    /// How full the pool was at most, if there is one.
    pub(crate) fn stash_stats(&self) -> Option<PagedStashStats> {
        self.stash.as_ref().map(PagedStash::stats)
    }

    /// `N1`, the rows of each expert's W1.
    pub(crate) fn fc1_rows(&self) -> usize {
        self.mlp.config().fc1_rows()
    }

    /// `w1 [E, N1, H]`, `w2 [E, H, F]`.
    pub(crate) fn prepare(&self, w1: &[f32], w2: &[f32]) -> Result<Weights, Error> {
        let (w1, w2) = (to_bf16(w1), to_bf16(w2));
        let (w1, w2) = (WeightSource::Packed(w1.as_slice()), WeightSource::Packed(w2.as_slice()));
        Ok(self.mlp.prepare_weights(&self.backend, w1, w2, None)?)
    }

    /// `x [T, H]` and `gates [T * top_k]` to `y [T, H]` and what the backward pass needs.
    pub(crate) fn forward(
        &self,
        weights: &Arc<Weights>,
        x: &[f32],
        gates: &[f32],
        permutation: &Permutation,
        needs: Needs,
    ) -> Result<(Vec<f32>, Saved), Error> {
        let prob = permutation.permute_choices(gates).map_err(kernels::Error::from)?;
        let x = self.to_expert_order(x, permutation)?;
        let groups = Groups::new(&permutation.splits, prob.len()).map_err(kernels::Error::from)?;
        let args = ForwardArgs {
            x: x.as_slice(),
            prob: prob.as_slice(),
            groups: &groups,
            weights,
            needs,
            trace: None,
        };
        let forward = self.mlp.forward(&self.backend, args)?;
        let saved = match &self.stash {
            Some(stash) if needs.backward() => match stash.store(forward.saved) {
                Ok(stored) => Saved::Paged(stored),
                // The pool is sized for a batch; whatever else asks for room goes on in place.
                Err(refused) => Saved::InPlace(refused.saved),
            },
            _ => Saved::InPlace(forward.saved),
        };
        Ok((self.to_tokens(&forward.y, permutation)?, saved))
    }

    /// `dy [T, H]` to the gradients; `random` keys the stochastic rounding.
    pub(crate) fn backward(
        &self,
        saved: Saved,
        dy: &[f32],
        permutation: &Permutation,
        random: RandomSeed,
    ) -> Result<Gradients, Error> {
        let saved = match saved {
            Saved::InPlace(saved) => saved,
            Saved::Paged(stored) => stored.restore()?,
        };
        let experts = self.mlp.config().experts;
        let [mut w1, mut w2] = self.mlp.weight_shapes().map(|shape| vec![0.0; experts * shape.n * shape.k]);
        let dy = self.to_expert_order(dy, permutation)?;
        let gradient = |buffer| WeightGrad {
            buffers: GradBuffers::F32(Host::split_mut(buffer, experts)),
            mode: GradMode::Overwrite,
        };
        let dw = Some(WeightGrads { dw1: gradient(&mut w1), dw2: gradient(&mut w2) });
        let gradients = self.mlp.backward(
            &self.backend,
            &saved,
            BackwardArgs { dy: dy.as_slice(), random, dw, trace: None },
        )?;

        let x = match gradients.dx {
            Some(dx) => self.to_tokens(&dx, permutation)?,
            None => Vec::new(),
        };
        let gates = permutation.unpermute_choices(&gradients.dprob).map_err(kernels::Error::from)?;
        Ok(Gradients { x, w1, w2, gates })
    }

    /// `[T, H]` to BF16 `[T * top_k, H]`.
    fn to_expert_order(&self, x: &[f32], permutation: &Permutation) -> Result<Vec<bf16>, Error> {
        Ok(permutation.permute(&self.backend, to_bf16(x).as_slice(), self.mlp.config().hidden)?)
    }

    /// `[T * top_k, H]` to the sums `[T, H]`.
    fn to_tokens(&self, y: &[bf16], permutation: &Permutation) -> Result<Vec<f32>, Error> {
        let sums = permutation.unpermute(&self.backend, y, self.mlp.config().hidden)?;
        let mut values = vec![0.0; sums.len()];
        sums.convert_to_f32_slice(&mut values);
        Ok(values)
    }
}

/// Pages for every layer's saved tensors of one batch, each expert's tokens rounded up to 16.
fn pool(mlp: &GroupedMlp, model: &ModelConfig, tokens: usize) -> Result<PagedStash, Error> {
    let rows = tokens * model.top_k;
    let rows = Rows { rows, padded: rows + 15 * model.experts, experts: model.experts };
    let layer: usize = mlp.plan(Needs::ALL).saved_bytes(rows).iter().map(|tensor| tensor.bytes).sum();
    let pages = model.layers * layer.div_ceil(PAGE_BYTES);
    let pages = u32::try_from(pages).map_err(|_| Error::setting("stash", pages, "fewer than 2^32 pages"))?;
    Ok(PagedStash::new(PAGE_BYTES, pages)?)
}

fn to_bf16(values: &[f32]) -> Vec<bf16> {
    let mut rounded = vec![bf16::ZERO; values.len()];
    rounded.convert_from_f32_slice(values);
    rounded
}
