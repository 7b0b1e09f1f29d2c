//! Permutation and FC2's bias.

use super::{host, poisoned};
use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::contract::{GroupedBiasGrad, Permute, Unpermute};
use moe4::kernels::{Error, Memory};
use moe4::tensor::Groups;

/// `[slots, cols]` by `permute`.
pub fn permute<B: Backend>(b: &B, x: &[bf16], cols: usize, source: &[u32]) -> Result<Vec<bf16>, Error> {
    let (x, on_device) = (b.upload(x)?, b.upload(source)?);
    let mut out = poisoned::<B, bf16>(b, source.len() * cols)?;
    b.permute(Permute {
        x: B::Memory::view(&x),
        cols,
        source: B::Memory::view(&on_device),
        out: B::Memory::view_mut(&mut out),
    })?;
    host(b, &out)
}

/// `[tokens, cols]` by `unpermute`.
pub fn unpermute<B: Backend>(
    b: &B,
    y: &[bf16],
    cols: usize,
    (slot, top_k): (&[u32], usize),
    weights: Option<&[f32]>,
) -> Result<Vec<bf16>, Error> {
    let (y, on_device) = (b.upload(y)?, b.upload(slot)?);
    let weights = weights.map(|w| b.upload(w)).transpose()?;
    let mut out = poisoned::<B, bf16>(b, slot.len() / top_k * cols)?;
    b.unpermute(Unpermute {
        y: B::Memory::view(&y),
        cols,
        slot: B::Memory::view(&on_device),
        top_k,
        weights: weights.as_ref().map(B::Memory::view),
        out: B::Memory::view_mut(&mut out),
    })?;
    host(b, &out)
}

/// `grouped_bias_grad`.
#[derive(Clone, Debug)]
pub struct BiasGrad<'a> {
    /// `[T, H]`.
    pub dy: &'a [bf16],
    /// `H`.
    pub hidden: usize,
    /// `[E, H]`.
    pub b2: &'a [f32],
    /// `[T]`.
    pub prob: &'a [f32],
    /// Rows of each expert.
    pub groups: &'a Groups,
    /// `[T]`, what the pass adds to.
    pub dprob: &'a [f32],
}

impl BiasGrad<'_> {
    /// `(dprob, db2)`.
    pub fn run<B: Backend>(&self, b: &B) -> Result<(Vec<f32>, Vec<f32>), Error> {
        let (dy, b2, prob) = (b.upload(self.dy)?, b.upload(self.b2)?, b.upload(self.prob)?);
        let groups = b.groups(self.groups)?;
        let mut dprob = b.upload(self.dprob)?;
        let mut db2 = poisoned::<B, f32>(b, self.b2.len())?;
        b.grouped_bias_grad(GroupedBiasGrad {
            dy: B::Memory::view(&dy),
            hidden: self.hidden,
            b2: B::Memory::view(&b2),
            prob: B::Memory::view(&prob),
            groups: &groups,
            dprob: B::Memory::view_mut(&mut dprob),
            db2: Some(B::Memory::view_mut(&mut db2)),
        })?;
        Ok((host(b, &dprob)?, host(b, &db2)?))
    }
}
