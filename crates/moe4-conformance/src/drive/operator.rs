//! The whole operator with host data in and host data out, on memory poisoned before use.

use super::host as download;
use crate::alter::{Altered, Poisoned};
use crate::report::Failure;
use half::bf16;
use moe4::kernels::{Backend, Buffer, Error, Memory};
use moe4::mlp::{
    BackwardArgs, Biases, DelayedBackward, Forward, ForwardArgs, GradBuffers, GradMode, GroupedMlp,
    GroupedMlpConfig, Needs, PreparedWeights, RandomSeed, Stash, Trace, WeightGrad, WeightGrads,
    WeightSource,
};
use moe4::tensor::Groups;
use std::sync::Arc;

/// One forward and its backward.
#[derive(Clone, Debug)]
pub struct Step<'a> {
    /// The operator's options.
    pub config: GroupedMlpConfig,
    /// Rows of each expert.
    pub groups: &'a Groups,
    /// `[T, H]`.
    pub x: &'a [bf16],
    /// `[E, N1, H]`.
    pub w1: &'a [bf16],
    /// `[E, H, F]`.
    pub w2: &'a [bf16],
    /// `[E, N1]` and `[E, H]`, where the configuration has biases.
    pub biases: Option<(&'a [f32], &'a [f32])>,
    /// `[T]`.
    pub prob: &'a [f32],
    /// `[T, H]`.
    pub dy: &'a [bf16],
    /// Which gradients are wanted.
    pub needs: Needs,
    /// Where random bits come from.
    pub random: RandomSeed,
    /// Weights given as one tensor an expert.
    pub weights_per_expert: bool,
    /// Value in every weight gradient's element before an accumulating backward; `None` overwrites poison.
    pub accumulate_onto: Option<f32>,
    /// Weight gradients left for later, when what the forward saved is gone.
    pub delayed: bool,
    /// Intermediate tensors kept, among them codes that no product reads.
    pub traced: bool,
}

/// Everything that comes out of a step.
#[derive(Clone, Debug)]
pub struct StepOut {
    /// `[T, H]`.
    pub y: Vec<bf16>,
    /// `[T, H]`, if asked for.
    pub dx: Option<Vec<bf16>>,
    /// `[T]`.
    pub dprob: Vec<f32>,
    /// `[E, N1, H]`, if asked for.
    pub dw1: Option<Vec<f32>>,
    /// `[E, H, F]`, if asked for.
    pub dw2: Option<Vec<f32>>,
    /// `[E, N1]`, if there is one.
    pub db1: Option<Vec<f32>>,
    /// `[E, H]`, if there is one.
    pub db2: Option<Vec<f32>>,
    /// Every intermediate tensor, if they were to be kept.
    pub trace: Trace,
}

fn source<M: Memory>(w: &Buffer<M, bf16>, experts: usize, apart: bool) -> WeightSource<'_, M> {
    match apart {
        true => WeightSource::PerExpert(M::split(M::view(w), experts)),
        false => WeightSource::Packed(M::view(w)),
    }
}

impl Step<'_> {
    /// Runs the step on poisoned memory.
    pub fn run<B: Backend>(&self, b: &B) -> Result<StepOut, Error> {
        let on_device = b.groups(self.groups)?;
        let b = &Altered { inner: b, alteration: Poisoned };
        let mlp = GroupedMlp::new(self.config.clone())?;
        let weights = self.prepare(b, &mlp)?;
        let mut trace = Trace::default();
        let (x, prob, dy) = (b.upload(self.x)?, b.upload(self.prob)?, b.upload(self.dy)?);
        let forward = mlp.forward(
            b,
            ForwardArgs {
                x: B::Memory::view(&x),
                prob: B::Memory::view(&prob),
                groups: &on_device,
                weights: &weights,
                needs: self.needs,
                trace: self.traced.then_some(&mut trace),
            },
        )?;
        let (experts, [s1, s2]) = (self.groups.experts(), mlp.weight_shapes());
        let mode = if self.accumulate_onto.is_some() { GradMode::Accumulate } else { GradMode::Overwrite };
        let before = self.accumulate_onto.unwrap_or(f32::NAN);
        let mut dw1 = b.upload(&vec![before; experts * s1.n * s1.k])?;
        let mut dw2 = b.upload(&vec![before; experts * s2.n * s2.k])?;
        let Forward { y, saved } = forward;
        let gradients = {
            let dw = self.needs.weights.then(|| WeightGrads {
                dw1: grads::<B::Memory>(&mut dw1, experts, mode),
                dw2: grads::<B::Memory>(&mut dw2, experts, mode),
            });
            let dy = B::Memory::view(&dy);
            let args =
                BackwardArgs { dy, random: self.random, dw: None, trace: self.traced.then_some(&mut trace) };
            match dw {
                Some(dw) if self.delayed => {
                    let DelayedBackward { gradients, weights } = mlp.backward_delayed(b, &saved, args)?;
                    drop(saved);
                    weights.run(b, dw)?;
                    gradients
                }
                dw => mlp.backward(b, &saved, BackwardArgs { dw, ..args })?,
            }
        };
        let optional = |x: &Option<Buffer<B::Memory, f32>>| x.as_ref().map(|x| download(b, x)).transpose();
        Ok(StepOut {
            y: download(b, &y)?,
            dx: gradients.dx.as_ref().map(|dx| download(b, dx)).transpose()?,
            dprob: download(b, &gradients.dprob)?,
            dw1: self.needs.weights.then(|| download(b, &dw1)).transpose()?,
            dw2: self.needs.weights.then(|| download(b, &dw2)).transpose()?,
            db1: optional(&gradients.db1)?,
            db2: optional(&gradients.db2)?,
            trace,
        })
    }

    /// dW1, dW2, dprob and dx after each other, `saved` having been in `stash` between forward and backward.
    pub fn run_stashed<B: Backend, S: Stash<B::Memory>>(
        &self,
        b: &B,
        stash: &S,
    ) -> Result<Vec<f32>, Failure> {
        let on_device = b.groups(self.groups)?;
        let mlp = GroupedMlp::new(self.config.clone())?;
        let weights = self.prepare(b, &mlp)?;
        let (x, prob, dy) = (b.upload(self.x)?, b.upload(self.prob)?, b.upload(self.dy)?);
        let args = ForwardArgs {
            x: B::Memory::view(&x),
            prob: B::Memory::view(&prob),
            groups: &on_device,
            weights: &weights,
            needs: Needs::ALL,
            trace: None,
        };
        let saved = mlp.forward(b, args)?.saved;
        let stored = stash.store(saved).map_err(|refused| Failure::new(refused.reason.to_string()))?;
        let saved = stash.restore(stored)?;
        let (experts, [s1, s2]) = (self.groups.experts(), mlp.weight_shapes());
        let mut dw1 = b.upload(&vec![f32::NAN; experts * s1.n * s1.k])?;
        let mut dw2 = b.upload(&vec![f32::NAN; experts * s2.n * s2.k])?;
        let dw = WeightGrads {
            dw1: grads::<B::Memory>(&mut dw1, experts, GradMode::Overwrite),
            dw2: grads::<B::Memory>(&mut dw2, experts, GradMode::Overwrite),
        };
        let args = BackwardArgs { dy: B::Memory::view(&dy), random: self.random, dw: Some(dw), trace: None };
        let gradients = mlp.backward(b, &saved, args)?;
        let mut all = download(b, &dw1)?;
        all.extend(download(b, &dw2)?);
        all.extend(download(b, &gradients.dprob)?);
        if let Some(dx) = &gradients.dx {
            all.extend(download(b, dx)?.iter().map(|v| v.to_f32()));
        }
        Ok(all)
    }

    fn prepare<B: Backend>(&self, b: &B, mlp: &GroupedMlp) -> Result<Arc<PreparedWeights<B::Memory>>, Error> {
        let experts = self.groups.experts();
        let (w1, w2) = (b.upload(self.w1)?, b.upload(self.w2)?);
        let biases =
            self.biases.map(|(b1, b2)| Ok::<_, Error>((b.upload(b1)?, b.upload(b2)?))).transpose()?;
        let weights = mlp.prepare_weights(
            b,
            source::<B::Memory>(&w1, experts, self.weights_per_expert),
            source::<B::Memory>(&w2, experts, self.weights_per_expert),
            biases.as_ref().map(|(b1, b2)| Biases { b1: B::Memory::view(b1), b2: B::Memory::view(b2) }),
        )?;
        Ok(Arc::new(weights))
    }
}

fn grads<M: Memory>(dw: &mut Buffer<M, f32>, experts: usize, mode: GradMode) -> WeightGrad<'_, M> {
    WeightGrad { buffers: GradBuffers::F32(M::split_mut(M::view_mut(dw), experts)), mode }
}
