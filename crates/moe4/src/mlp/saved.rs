//! What the backward needs, and nothing else.

use super::plan::Plan;
use super::weights::PreparedWeights;
use crate::kernels::contract::{Operand, Unpacked};
use crate::kernels::{Buffer, Element, Memory, View};
use crate::tensor::Nvfp4;
use half::bf16;
use std::sync::Arc;

/// A packed operand, owned.
#[derive(Debug)]
pub(super) struct Packed<M: Memory>(pub(super) Nvfp4<Buffer<M, u8>, Buffer<M, f32>>);

impl<M: Memory> Packed<M> {
    pub(super) fn view(&self) -> Nvfp4<View<'_, M, u8>, View<'_, M, f32>> {
        Nvfp4 { codes: M::view(&self.0.codes), scales: M::view(&self.0.scales), amax: M::view(&self.0.amax) }
    }

    fn bytes(&self) -> usize {
        bytes::<M, _>(&self.0.codes) + bytes::<M, _>(&self.0.scales) + bytes::<M, _>(&self.0.amax)
    }
}

/// A quantized operand of a product, owned.
#[derive(Debug)]
pub(super) enum OwnedOperand<M: Memory> {
    Nvfp4(Packed<M>),
    Unpacked { values: Buffer<M, bf16>, amax: Buffer<M, f32> },
}

impl<M: Memory> OwnedOperand<M> {
    pub(super) fn view(&self) -> Operand<'_, M> {
        match self {
            OwnedOperand::Nvfp4(q) => Operand::Nvfp4(q.view()),
            OwnedOperand::Unpacked { values, amax } => {
                Operand::Unpacked(Unpacked { values: M::view(values), amax: M::view(amax) })
            }
        }
    }
}

/// The tensors of one forward that its backward reads. Rowwise copies are gone by now.
#[derive(Debug)]
pub struct Saved<M: Memory> {
    pub(super) plan: Plan,
    pub(super) groups: M::Groups,
    pub(super) weights: Arc<PreparedWeights<M>>,
    pub(super) x: SavedTensor<M>,
    pub(super) h: SavedTensor<M>,
    /// `c [T, N1]` and `prob [T]`.
    pub(super) c: Option<(Buffer<M, bf16>, Buffer<M, f32>)>,
}

/// One tensor in the form that the plan chose.
#[derive(Debug)]
pub(super) enum SavedTensor<M: Memory> {
    Nothing,
    Columnwise(Packed<M>),
    Amax(Buffer<M, f32>),
    Bf16(Buffer<M, bf16>),
}

impl<M: Memory> Saved<M> {
    /// The plan that the forward followed and the backward will follow.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Bytes owned for the backward, weights and splits not counted (they are shared by reference).
    pub fn bytes(&self) -> usize {
        let c = self.c.as_ref().map_or(0, |(c, prob)| bytes::<M, _>(c) + bytes::<M, _>(prob));
        c + self.x.bytes() + self.h.bytes()
    }
}

impl<M: Memory> SavedTensor<M> {
    fn bytes(&self) -> usize {
        match self {
            SavedTensor::Nothing => 0,
            SavedTensor::Columnwise(q) => q.bytes(),
            SavedTensor::Amax(amax) => bytes::<M, _>(amax),
            SavedTensor::Bf16(x) => bytes::<M, _>(x),
        }
    }
}

fn bytes<M: Memory, T: Element>(buffer: &Buffer<M, T>) -> usize {
    M::len(&M::view(buffer)) * size_of::<T>()
}
