//! All settings of a run: what `config.toml` holds.

use std::fmt;
use std::str::FromStr;

use moe4::kernels::activation::Activation;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::data::Corpus;

/// Tokens are bytes.
pub const VOCABULARY: usize = 256;

/// The most bytes in one optimizer step.
///
/// Also a promise: burn sums longer tensors in parallel, in an order that depends on the threads.
const MAX_BYTES_A_STEP: usize = 1 << 20;

/// The most parameters: with gradients and AdamW's state, 16 GB.
const MAX_PARAMETERS: usize = 1 << 30;

/// The most activation values of a step: at 8 bytes with their gradients, 16 GB.
const MAX_ACTIVATIONS: u128 = 1 << 31;

/// The longest text to sample.
const MAX_SAMPLE_BYTES: usize = 1 << 20;

/// The number format of the expert layers' matrix products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// BF16 operands, FP32 accumulation: the baseline.
    Bf16,
    /// NVFP4 operands: 4-bit codes with E4M3 block scales.
    Nvfp4,
}

impl Precision {
    /// The name in files and flags: `bf16` or `nvfp4`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Nvfp4 => "nvfp4",
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Bf16 => "BF16",
            Self::Nvfp4 => "NVFP4",
        })
    }
}

impl FromStr for Precision {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        [Self::Bf16, Self::Nvfp4]
            .into_iter()
            .find(|precision| precision.name() == name)
            .ok_or_else(|| Error::setting("precision", name, "bf16 or nvfp4"))
    }
}

/// Where the experts' saved tensors wait for the backward pass. The losses are the same bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stash {
    /// Where the forward pass made them.
    #[default]
    InPlace,
    /// In pages of a pool that is allocated once.
    Paged,
}

/// The model's shape.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Attention heads; divides `hidden`.
    pub heads: usize,
    /// Bytes that the model sees at once.
    pub context: usize,
    /// Experts in each block.
    pub experts: usize,
    /// Experts that a token is sent to.
    pub top_k: usize,
    /// Width of an expert.
    pub ffn: usize,
    /// The experts' activation, written as `tanh_srelu:s=16`.
    #[serde(with = "activation_text")]
    pub activation: Activation,
}

impl Default for ModelConfig {
    /// About 3.5 million parameters.
    fn default() -> Self {
        Self {
            layers: 4,
            hidden: 128,
            heads: 4,
            context: 128,
            experts: 8,
            top_k: 2,
            ffn: 256,
            activation: Activation::SWIGLU,
        }
    }
}

/// How the model is trained.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingConfig {
    /// The runs to compare, in the order in which they are trained.
    pub precisions: Vec<Precision>,
    /// Optimizer steps.
    pub steps: usize,
    /// Windows of `context` bytes in a step.
    pub batch: usize,
    /// Peak learning rate of AdamW.
    pub learning_rate: f64,
    /// Steps over which the learning rate rises from zero to its peak.
    pub warmup: usize,
    /// Weight of the load-balance loss.
    pub balance: f64,
    /// Rebuild the experts' inner activations in the backward pass instead of keeping them.
    pub recompute: bool,
    /// Where the experts' saved tensors wait for the backward pass.
    #[serde(default)]
    pub stash: Stash,
    /// Parameters, batches, stochastic rounding and sampled text follow from it.
    pub seed: u64,
    /// Steps between validations.
    pub validate_every: usize,
    /// Validation windows of such an intermediate validation; the last one takes the whole validation part.
    pub validation_windows: usize,
    /// Steps between checkpoints.
    pub checkpoint_every: usize,
    /// Length of the sampled text in bytes.
    pub sample_bytes: usize,
}

impl Default for TrainingConfig {
    fn default() -> Self {
        Self {
            precisions: vec![Precision::Bf16, Precision::Nvfp4],
            steps: 200,
            batch: 8,
            learning_rate: 2e-3,
            warmup: 50,
            balance: 0.01,
            recompute: false,
            stash: Stash::InPlace,
            seed: 1,
            validate_every: 50,
            validation_windows: 64,
            checkpoint_every: 100,
            sample_bytes: 400,
        }
    }
}

/// The text that a run was started with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// The path of the text, or the name of the shipped one.
    pub text: String,
    /// FNV-1a over its bytes, in hexadecimal.
    pub fingerprint: String,
}

/// Everything a run follows from, as in its `config.toml`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// The model's shape.
    pub model: ModelConfig,
    /// How it is trained.
    pub training: TrainingConfig,
    /// On which text.
    pub data: DataConfig,
}

impl RunConfig {
    /// Checks every setting, and that the text is long enough.
    ///
    /// # Errors
    /// Names the first setting that is out of range.
    pub fn check(&self, corpus: &Corpus) -> Result<(), Error> {
        self.model.check()?;
        self.training.check()?;
        let context = self.model.context;
        if self.training.batch.checked_mul(context).is_none_or(|bytes| bytes > MAX_BYTES_A_STEP) {
            let expected = format!("at most {} with a context of {context}", MAX_BYTES_A_STEP / context);
            return Err(Error::setting("batch", self.training.batch, expected));
        }
        let rows = self.training.batch as u128 * context as u128;
        let model = &self.model;
        let attention = model.heads as u128 * context as u128;
        let experts = model.top_k as u128 * (4 * model.hidden as u128 + 3 * model.ffn as u128);
        let routing = model.experts as u128;
        if rows * (attention + experts + routing) * model.layers as u128 > MAX_ACTIVATIONS {
            let got = format!("{context} with a batch of {}", self.training.batch);
            return Err(Error::setting(
                "context",
                got,
                "smaller: the activations of a step would not fit in 16 GB",
            ));
        }
        corpus.check(self.model.context)
    }

    /// The text of `config.toml`.
    ///
    /// # Errors
    /// A setting has no TOML form, which [`Self::check`] excludes.
    pub fn to_toml(&self) -> Result<String, Error> {
        toml::to_string(self).map_err(|error| Error::setting("config.toml", error, "valid TOML"))
    }
}

impl ModelConfig {
    /// Checks every setting that the operator does not check itself.
    ///
    /// # Errors
    /// Names the first setting that is out of range.
    pub fn check(&self) -> Result<(), Error> {
        at_least_one("layers", self.layers)?;
        at_least_one("hidden", self.hidden)?;
        at_least_one("heads", self.heads)?;
        at_least_one("context", self.context)?;
        at_least_one("experts", self.experts)?;
        at_least_one("ffn", self.ffn)?;
        if !self.hidden.is_multiple_of(self.heads) {
            return Err(Error::setting(
                "heads",
                self.heads,
                format!("a divisor of hidden ({})", self.hidden),
            ));
        }
        if !(1..=self.experts).contains(&self.top_k) {
            let expected = format!("from 1 to the number of experts ({})", self.experts);
            return Err(Error::setting("top_k", self.top_k, expected));
        }
        match self.parameters() {
            Some(parameters) if parameters <= MAX_PARAMETERS => Ok(()),
            got => Err(Error::TooManyParameters { got, most: MAX_PARAMETERS }),
        }
    }

    /// Number of trained values; None if it overflows.
    pub fn parameters(&self) -> Option<usize> {
        let product = |factors: &[usize]| factors.iter().try_fold(1_usize, |p, &f| p.checked_mul(f));
        let fc1_rows = if self.activation.is_gated() { self.ffn.checked_mul(2)? } else { self.ffn };
        let experts = product(&[self.experts, self.ffn.checked_add(fc1_rows)?, self.hidden])?;
        let attention = product(&[4, self.hidden, self.hidden])?;
        let router_and_norms = self.experts.checked_add(2)?.checked_mul(self.hidden)?;
        let block = experts.checked_add(attention)?.checked_add(router_and_norms)?;
        let ends = product(&[2 * VOCABULARY + 1, self.hidden])?;
        block.checked_mul(self.layers)?.checked_add(ends)
    }
}

impl TrainingConfig {
    /// Checks every setting.
    ///
    /// # Errors
    /// Names the first setting that is out of range.
    pub fn check(&self) -> Result<(), Error> {
        at_least_one("steps", self.steps)?;
        at_least_one("batch", self.batch)?;
        at_least_one("validate_every", self.validate_every)?;
        at_least_one("validation_windows", self.validation_windows)?;
        at_least_one("checkpoint_every", self.checkpoint_every)?;
        if !(self.learning_rate.is_finite() && self.learning_rate > 0.0) {
            return Err(Error::setting("learning_rate", self.learning_rate, "finite and positive"));
        }
        if !(self.balance.is_finite() && self.balance >= 0.0) {
            return Err(Error::setting("balance", self.balance, "finite and not negative"));
        }
        if self.sample_bytes > MAX_SAMPLE_BYTES {
            return Err(Error::setting(
                "sample_bytes",
                self.sample_bytes,
                format!("at most {MAX_SAMPLE_BYTES}"),
            ));
        }
        if i64::try_from(self.seed).is_err() {
            return Err(Error::setting("seed", self.seed, format!("at most {}", i64::MAX)));
        }
        let distinct = self.precisions.len() < 2 || self.precisions[0] != self.precisions[1];
        if self.precisions.is_empty() || self.precisions.len() > 2 || !distinct {
            let got = format!("{:?}", self.precisions);
            return Err(Error::setting("precisions", got, "bf16, nvfp4, or each of them once"));
        }
        Ok(())
    }

    /// The learning rate of a step counted from 0: linear warm-up, then a cosine down to a tenth of the peak.
    pub fn learning_rate_at(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.learning_rate * (step + 1) as f64 / self.warmup as f64;
        }
        let progress = (step - self.warmup) as f64 / (self.steps.saturating_sub(self.warmup)).max(1) as f64;
        let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress.min(1.0)).cos());
        self.learning_rate * (0.1 + 0.9 * cosine)
    }
}

/// An activation as the text that its `Display` and `FromStr` agree on.
mod activation_text {
    use moe4::kernels::activation::Activation;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(activation: &Activation, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(activation)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Activation, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

fn at_least_one(setting: &'static str, value: usize) -> Result<(), Error> {
    if value == 0 { Err(Error::setting(setting, value, "at least 1")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_learning_rate_rises_then_falls_to_a_tenth() {
        let config = TrainingConfig { steps: 100, warmup: 10, learning_rate: 1.0, ..Default::default() };
        assert!((config.learning_rate_at(0) - 0.1).abs() < 1e-12);
        assert!((config.learning_rate_at(9) - 1.0).abs() < 1e-12);
        assert!((config.learning_rate_at(10) - 1.0).abs() < 1e-12);
        assert!(config.learning_rate_at(55) < 0.6);
        assert!(config.learning_rate_at(99) < 0.11);
    }

    #[test]
    fn defaults_pass_and_each_bad_setting_is_named() {
        ModelConfig::default().check().expect("default model");
        TrainingConfig::default().check().expect("default training");
        let top_k = ModelConfig { top_k: 9, ..Default::default() }.check();
        assert_eq!(
            top_k.expect_err("too many").to_string(),
            "top_k is 9, but must be from 1 to the number of experts (8)"
        );
        assert!(ModelConfig { hidden: usize::MAX / 2, heads: 1, ..Default::default() }.check().is_err());
        assert!(ModelConfig { heads: 3, ..Default::default() }.check().is_err());
        assert!(TrainingConfig { learning_rate: f64::NAN, ..Default::default() }.check().is_err());
        assert!(TrainingConfig { steps: 0, ..Default::default() }.check().is_err());
    }

    #[test]
    fn the_configuration_survives_toml() {
        let config = RunConfig {
            model: ModelConfig::default(),
            training: TrainingConfig::default(),
            data: DataConfig { text: "t".into(), fingerprint: "0".into() },
        };
        let text = config.to_toml().expect("to TOML");
        assert_eq!(toml::from_str::<RunConfig>(&text).expect("from TOML"), config);
    }
}
