//! A training step of the operator: quantization of the weights, forward and backward, with all gradients. Or a forward
//! alone, with weights that were prepared before, and nothing kept for a backward.
//!
//! Weight gradients are BF16 and overwritten, as PyTorch's are that the peers measure.

use std::sync::Arc;

use anyhow::Result;
use half::bf16;
use moe4::kernels::{Backend, Buffer, Memory};
use moe4::mlp::{
    BackwardArgs, Forward, ForwardArgs, GradMode, Gradients, GroupedMlp, GroupedMlpConfig, Needs, Phase,
    Precision, PreparedWeights, RandomSeed, WeightGrad, WeightGrads, WeightSource,
};

use super::inputs;
use super::sequence::Part;
use super::shapes::Shape;
use super::tensors::{Output, download, poisoned};

/// How much of the operator runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    Forward,
    Training,
}

/// Inputs and results of a step in a backend's memory.
pub(super) struct Step<M: Memory> {
    extent: Extent,
    mlp: GroupedMlp,
    groups: M::Groups,
    weights: [Buffer<M, bf16>; 2],
    /// Unless a step pays for it: a forward does not, and in BF16 there is nothing to be made of the weights.
    prepared: Option<Arc<PreparedWeights<M>>>,
    x: Buffer<M, bf16>,
    dy: Buffer<M, bf16>,
    prob: Buffer<M, f32>,
    dw: [Buffer<M, bf16>; 2],
    results: Option<Results<M>>,
}

struct Results<M: Memory> {
    y: Buffer<M, bf16>,
    gradients: Option<Gradients<M>>,
}

impl<M: Memory> Step<M> {
    pub(super) fn new<B: Backend<Memory = M>>(
        backend: &B,
        extent: Extent,
        precision: Precision,
        shape: &Shape,
    ) -> Result<Self> {
        let mlp = GroupedMlp::new(GroupedMlpConfig { precision, ..shape.config() })?;
        let [n1, n2] = mlp.weight_shapes().map(|s| shape.experts * s.n * s.k);
        let rows = shape.rows * shape.hidden;
        let deviation = |inputs: usize| (1.0 / inputs as f32).sqrt();
        let training = extent == Extent::Training;
        let [dy, dw1, dw2] = [rows, n1, n2].map(|len| if training { len } else { 0 });
        let mut step = Self {
            extent,
            groups: backend.groups(&shape.groups()?)?,
            weights: [
                backend.upload(&inputs::normal(11, n1, deviation(shape.hidden)))?,
                backend.upload(&inputs::normal(12, n2, deviation(shape.ffn)))?,
            ],
            prepared: None,
            x: backend.upload(&inputs::normal(13, rows, 1.0))?,
            dy: backend.upload(&inputs::normal(14, dy, 1.0))?,
            prob: backend.upload(&inputs::probabilities(15, shape.rows))?,
            dw: [poisoned(backend, dw1, 0)?, poisoned(backend, dw2, 0)?],
            results: None,
            mlp,
        };
        if precision == Precision::Bf16 || !training {
            step.prepared = Some(step.prepare(backend)?);
            // What is prepared is a copy.
            step.weights = [poisoned(backend, 0, 0)?, poisoned(backend, 0, 0)?];
        }
        Ok(step)
    }

    /// Fills the weights' gradients with `byte`; the other results are new buffers of every step.
    pub(super) fn poison<B: Backend<Memory = M>>(&mut self, backend: &B, byte: u8) -> Result<()> {
        for dw in &mut self.dw {
            let len = M::len(&M::view(dw));
            *dw = poisoned(backend, 0, byte)?;
            *dw = poisoned(backend, len, byte)?;
        }
        Ok(())
    }

    fn prepare<B: Backend<Memory = M>>(&self, backend: &B) -> Result<Arc<PreparedWeights<M>>> {
        let [w1, w2] = self.weights.each_ref().map(|w| WeightSource::Packed(M::view(w)));
        Ok(Arc::new(self.mlp.prepare_weights(backend, w1, w2, None)?))
    }

    fn needs(&self) -> Needs {
        match self.extent {
            Extent::Forward => Needs::NONE,
            Extent::Training => Needs::ALL,
        }
    }

    /// The passes of a run.
    pub(super) fn parts(&self) -> Vec<Part> {
        let weights: &[&str] = if self.prepared.is_some() { &[] } else { &["w1", "w2"] };
        let plan = self.mlp.plan(self.needs());
        let weights = weights.iter().map(|tensor| Part::weights(tensor));
        let forward = Part::of(Phase::Forward, &plan.forward);
        weights.chain(forward).chain(Part::of(Phase::Backward, &plan.backward)).collect()
    }

    pub(super) fn run<B: Backend<Memory = M>>(&mut self, backend: &B) -> Result<()> {
        // Before the step, so that memory holds one step's tensors only.
        self.results = None;
        let weights = match &self.prepared {
            Some(prepared) => Arc::clone(prepared),
            None => self.prepare(backend)?,
        };
        let args = ForwardArgs {
            x: M::view(&self.x),
            prob: M::view(&self.prob),
            groups: &self.groups,
            weights: &weights,
            needs: self.needs(),
            trace: None,
        };
        let Forward { y, saved } = self.mlp.forward(backend, args)?;
        if self.extent == Extent::Forward {
            self.results = Some(Results { y, gradients: None });
            return Ok(());
        }
        let experts = self.mlp.config().experts;
        let [dw1, dw2] = &mut self.dw;
        let dw = WeightGrads {
            dw1: WeightGrad::packed_bf16(M::view_mut(dw1), experts, GradMode::Overwrite),
            dw2: WeightGrad::packed_bf16(M::view_mut(dw2), experts, GradMode::Overwrite),
        };
        let random = RandomSeed { seed: 1, call: 0 };
        let args = BackwardArgs { dy: M::view(&self.dy), random, dw: Some(dw), trace: None };
        let gradients = self.mlp.backward(backend, &saved, args)?;
        self.results = Some(Results { y, gradients: Some(gradients) });
        Ok(())
    }

    /// Gives the results of the last step to `each`, tensor by tensor.
    pub(super) fn outputs<B: Backend<Memory = M>>(
        &self,
        backend: &B,
        each: &mut dyn FnMut(Output) -> Result<()>,
    ) -> Result<()> {
        let Some(Results { y, gradients }) = &self.results else { return Ok(()) };
        each(download::<_, bf16>(backend, "y", y)?)?;
        let Some(gradients) = gradients else { return Ok(()) };
        if let Some(dx) = &gradients.dx {
            each(download::<_, bf16>(backend, "dx", dx)?)?;
        }
        each(download::<_, f32>(backend, "dprob", &gradients.dprob)?)?;
        for (name, dw) in ["dw1", "dw2"].into_iter().zip(&self.dw) {
            each(download::<_, bf16>(backend, name, dw)?)?;
        }
        Ok(())
    }
}
