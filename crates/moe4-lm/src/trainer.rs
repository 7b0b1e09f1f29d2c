//! One model in one precision: steps, validation, sampling, and its checkpoint.

use std::path::Path;
use std::sync::Arc;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use rand::Rng;

use crate::config::{Precision, RunConfig};
use crate::data::Corpus;
use crate::experts::Failure;
use crate::model::{Pass, Transformer, values};
use crate::operator::{Operator, Weights};
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
        let operator = Arc::new(Operator::new(&config.model, precision, config.training.recompute)?);
        let model = Transformer::new(&config.model, &operator, config.training.seed, &device);
        let optimizer =
            AdamWConfig::new().with_beta_2(0.99).with_epsilon(1e-8).with_weight_decay(0.01).init();
        Ok(Self { config, corpus, precision, operator, model, optimizer, step: 0 })
    }

    /// Steps done.
    pub fn step_count(&self) -> usize {
        self.step
    }

    /// Number of trained values.
    pub fn parameter_count(&self) -> usize {
        self.model.num_params()
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
        let losses = self.model.losses(&batch, &pass);
        let total = losses.cross_entropy.clone() + losses.balance.clone() * training.balance;
        let gradients = total.backward();
        pass.failure.check()?;
        let losses =
            StepLosses { cross_entropy: scalar(losses.cross_entropy), balance: scalar(losses.balance) };
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
            sum += f64::from(scalar(model.losses(batch, &pass).cross_entropy)) * batch.rows as f64;
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
            let (logits, _) = model.forward(window, 1, &pass);
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
        checkpoint::save(path, &self.header()?, &self.model, &self.optimizer)
    }

    /// Goes on from a file of [`Self::save`] of the same configuration.
    ///
    /// # Errors
    /// The file cannot be read or belongs to something else.
    pub fn load(&mut self, path: &Path) -> Result<(), Error> {
        let header = self.header()?;
        let (step, model, optimizer) =
            checkpoint::load(path, &header, self.model.clone(), self.optimizer.clone())?;
        if step > self.config.training.steps {
            return Err(Error::foreign(path, format!("it is at step {step}, past the run's last")));
        }
        (self.step, self.model, self.optimizer) = (step, model, optimizer);
        Ok(())
    }

    fn header(&self) -> Result<checkpoint::Header, Error> {
        let config = self.config.to_toml()?;
        Ok(checkpoint::Header { precision: self.precision, step: self.step, config })
    }

    fn pass<'b>(&'b self, weights: &'b [Arc<Weights>]) -> Pass<'b> {
        Pass {
            operator: &self.operator,
            weights,
            seed: self.config.training.seed,
            step: self.step as u64,
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
