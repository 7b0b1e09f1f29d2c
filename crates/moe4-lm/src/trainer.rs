//! One model in one precision: steps, validation, sampling, and its checkpoint.

use std::path::Path;
use std::sync::Arc;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use moe4::mlp::PagedStashStats;
use rand::Rng;

use crate::checkpoint::Header;
use crate::config::{Precision, RunConfig, TrainingConfig};
use crate::data::Corpus;
use crate::model::{Pass, Transformer, values};
use crate::operator::{Operator, Weights};
use crate::ops::Failure;
use crate::rng::{Stream, rng};
use crate::{Error, checkpoint};

/// Sharpens the distribution that sampled text is drawn from.
const TEMPERATURE: f32 = 0.7;

/// The losses of one optimizer step, from before its update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepLosses {
    /// Mean nats a byte.
    pub cross_entropy: f32,
    /// Load-balance loss, 1 when every expert gets the same share.
    pub balance: f32,
}

/// A model in training.
///
/// The same configuration and text give the same losses, bit for bit, for any number of threads.
pub struct Trainer<'a> {
    config: &'a RunConfig,
    corpus: &'a Corpus,
    precision: Precision,
    operator: Arc<Operator>,
    model: Transformer,
    optimizer: ModuleOptimizer,
    step: usize,
}

impl<'a> Trainer<'a> {
    /// A model at step 0.
    ///
    /// # Errors
    /// A setting is out of range, or the text is too short.
    pub fn new(config: &'a RunConfig, corpus: &'a Corpus, precision: Precision) -> Result<Self, Error> {
        config.check(corpus)?;
        let device = Device::flex().autodiff();
        let TrainingConfig { recompute, stash, batch, .. } = config.training;
        let tokens = batch * config.model.context;
        let operator = Arc::new(Operator::new(&config.model, precision, recompute, stash, tokens)?);
        let model = Transformer::new(&config.model, &operator, config.training.seed, &device);
        let optimizer =
            AdamWConfig::new().with_beta_2(0.99).with_epsilon(1e-8).with_weight_decay(0.01).init();
        Ok(Self { config, corpus, precision, operator, model, optimizer, step: 0 })
    }

    /// How full the paged stash was at most, if there is one.
    pub fn stash_stats(&self) -> Option<PagedStashStats> {
        self.operator.stash_stats()
    }

    /// Steps done.
    pub fn step_count(&self) -> usize {
        self.step
    }

    /// One optimizer step.
    ///
    /// # Errors
    /// The loss is not finite, or the operator refuses its inputs.
    pub fn step(&mut self) -> Result<StepLosses, Error> {
        let training = &self.config.training;
        let batch = self.corpus.training_batch(
            training.seed,
            self.step as u64,
            training.batch,
            self.config.model.context,
        );
        let weights = self.model.prepare(&self.operator)?;
        let pass = self.pass(&weights);
        let losses = self.model.losses(&batch, &pass)?;
        let gradients = losses.cross_entropy.backward();
        pass.failure.check()?;
        let losses = StepLosses { cross_entropy: scalar(losses.cross_entropy), balance: losses.balance };
        if !losses.cross_entropy.is_finite() {
            return Err(Error::Diverged { step: self.step + 1, loss: losses.cross_entropy });
        }
        let gradients = GradientsParams::from_grads(gradients, &self.model);
        let rate = training.learning_rate_at(self.step);
        // The optimizer takes the model by value; a clone shares its tensors.
        self.model = self.optimizer.step(rate, self.model.clone(), gradients);
        self.step += 1;
        Ok(losses)
    }

    /// Mean nats a byte over the validation part, or over `limit` windows spread over it.
    ///
    /// # Errors
    /// The operator refuses its inputs.
    pub fn validate(&self, limit: Option<usize>) -> Result<f64, Error> {
        let batches =
            self.corpus.validation_batches(limit, self.config.training.batch, self.config.model.context);
        let weights = self.model.prepare(&self.operator)?;
        let pass = self.pass(&weights);
        let model = self.model.valid();
        let (mut sum, mut rows) = (0.0, 0);
        for batch in &batches {
            sum += f64::from(scalar(model.losses(batch, &pass)?.cross_entropy)) * batch.rows as f64;
            rows += batch.rows;
        }
        pass.failure.check()?;
        Ok(sum / rows as f64)
    }

    /// `bytes` bytes that the model writes after `prompt`, drawn from the run's seed.
    ///
    /// # Errors
    /// The operator refuses its inputs.
    pub fn sample(&self, prompt: &[u8], bytes: usize) -> Result<Vec<u8>, Error> {
        let weights = self.model.prepare(&self.operator)?;
        let pass = self.pass(&weights);
        let model = self.model.valid();
        let mut rng = rng(self.config.training.seed, Stream::Sample, 0);
        let mut text = prompt.to_vec();
        for _ in 0..bytes {
            let window = &text[text.len().saturating_sub(self.config.model.context)..];
            let (logits, _) = model.forward(window, 1, &pass)?;
            let last = logits.narrow(1, window.len() - 1, 1);
            text.push(draw(&values(last), rng.random()));
        }
        pass.failure.check()?;
        Ok(text.split_off(prompt.len()))
    }

    /// Writes the model, the optimizer's state and the step.
    ///
    /// # Errors
    /// The file cannot be written; a previous one is then still whole.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        checkpoint::save(path, &self.header(), &self.model, &self.optimizer)
    }

    /// Goes on from a file of [`Self::save`] of the same configuration.
    ///
    /// # Errors
    /// The file cannot be read or belongs to something else.
    pub fn load(&mut self, path: &Path) -> Result<(), Error> {
        let header = self.header();
        let (step, model, optimizer) =
            checkpoint::load(path, &header, self.model.clone(), self.optimizer.clone())?;
        (self.step, self.model, self.optimizer) = (step, model, optimizer);
        Ok(())
    }

    fn header(&self) -> Header {
        Header::new(self.precision, self.step, self.config)
    }

    fn pass<'b>(&'b self, weights: &'b [Arc<Weights>]) -> Pass<'b> {
        Pass {
            operator: &self.operator,
            weights,
            seed: self.config.training.seed,
            step: self.step as u64,
            balance: (self.config.training.balance / self.config.model.layers as f64) as f32,
            failure: Failure::default(),
        }
    }
}

fn scalar(tensor: Tensor<1>) -> f32 {
    values(tensor)[0]
}

/// The byte at quantile `u` of the softmax of `logits / TEMPERATURE`.
fn draw(logits: &[f32], u: f32) -> u8 {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = logits.iter().map(|logit| ((logit - highest) / TEMPERATURE).exp()).collect();
    let mut left = u * weights.iter().sum::<f32>();
    for (byte, weight) in (0..=u8::MAX).zip(&weights) {
        left -= weight;
        if left < 0.0 {
            return byte;
        }
    }
    u8::MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{DataConfig, ModelConfig, TrainingConfig};

    #[test]
    fn the_model_has_as_many_parameters_as_its_configuration_says() {
        let corpus = Corpus::shipped();
        let model = ModelConfig::default();
        let config = RunConfig { model, training: TrainingConfig::default(), data: DataConfig::of(&corpus) };
        let trainer = Trainer::new(&config, &corpus, Precision::Bf16).expect("valid configuration");
        assert_eq!(Some(trainer.model.num_params()), config.model.parameters());
        assert_eq!(config.model.parameters(), Some(3_478_656));
    }

    #[test]
    fn a_byte_is_drawn_in_proportion_to_its_sharpened_probability() {
        let mut logits = [f32::NEG_INFINITY; 256];
        logits[7] = 0.0;
        logits[9] = TEMPERATURE * 3.0_f32.ln();
        assert_eq!([0.0, 0.24, 0.26, 0.99].map(|u| draw(&logits, u)), [7, 7, 9, 9]);
    }
}
