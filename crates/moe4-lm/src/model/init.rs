//! Parameters with fixed identities and values that follow from the seed.
//!
//! burn draws both from process-wide generators; here they must be the same in every run, so that a checkpoint's
//! optimizer state finds its parameters again.

use burn::module::{Param, ParamId};
use burn::nn::{Linear, RmsNorm};
use burn::tensor::{Device, Tensor, TensorData};
use rand::Rng;

use crate::rng::{Stream, rng};

/// Makes parameters one after another; the n-th has identity n.
pub(super) struct Initializer<'a> {
    device: &'a Device,
    seed: u64,
    made: u64,
}

impl<'a> Initializer<'a> {
    pub(super) fn new(device: &'a Device, seed: u64) -> Self {
        Self { device, seed, made: 0 }
    }

    /// Normal with mean 0 and the given standard deviation.
    pub(super) fn normal<const D: usize>(&mut self, shape: [usize; D], std: f64) -> Param<Tensor<D>> {
        let mut rng = rng(self.seed, Stream::Parameters, self.made);
        let values: Vec<f32> = (0..shape.iter().product::<usize>())
            .map(|_| {
                // Box-Muller; 1 - u keeps the logarithm finite.
                let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
                let angle = std::f64::consts::TAU * rng.random::<f64>();
                (std * radius * angle.cos()) as f32
            })
            .collect();
        self.parameter(values, shape)
    }

    /// `[input, output]`, without bias, keeping the variance of a unit-variance input times `gain` squared.
    pub(super) fn linear(&mut self, input: usize, output: usize, gain: f64) -> Linear {
        self.projection(input, output, gain / (input as f64).sqrt())
    }

    /// `[input, output]`, without bias, with the given standard deviation.
    pub(super) fn projection(&mut self, input: usize, output: usize, std: f64) -> Linear {
        Linear { weight: self.normal([input, output], std), bias: None }
    }

    /// Scale one.
    pub(super) fn norm(&mut self, width: usize) -> RmsNorm {
        RmsNorm { gamma: self.parameter(vec![1.0; width], [width]), epsilon: 1e-5 }
    }

    fn parameter<const D: usize>(&mut self, values: Vec<f32>, shape: [usize; D]) -> Param<Tensor<D>> {
        let value = Tensor::from_data(TensorData::new(values, shape), self.device).require_grad();
        self.made += 1;
        Param::initialized(ParamId::from(self.made), value)
    }
}
