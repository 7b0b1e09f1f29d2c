//! The weights' gradients of one backward: `dW2 = dyᵀ·h` and `dW1 = dcᵀ·x`, at once or later.
//!
//! [`WgradInputs`] is what they read beside `dy` and `dc`: the saved `x`, and `h` as it was saved or as the backward made
//! it again. [`GroupedMlp::backward`] lends it `dy` and `dc`; [`DelayedWeightGrads`] owns them.

use super::GroupedMlp;
use super::backward::{WeightGrads, not_saved};
use super::plan::Phase;
use super::quantize::{Amaxes, Grouped, quantize};
use super::saved::{OwnedOperand, Saved, SavedTensor};
use super::trace::Trace;
use crate::kernels::contract::{GroupedWgrad, Operand};
use crate::kernels::{Backend, Buffer, Error, Memory};
use crate::numerics::rounding::Rounding;
use half::bf16;
use std::sync::Arc;

/// The input sides of both products.
#[derive(Debug)]
pub(super) struct WgradInputs<M: Memory> {
    groups: M::Groups,
    x: Arc<SavedTensor<M>>,
    h: InputH<M>,
}

#[derive(Debug)]
enum InputH<M: Memory> {
    Saved(Arc<SavedTensor<M>>),
    Rebuilt(OwnedOperand<M>),
}

impl<M: Memory> WgradInputs<M> {
    /// `rebuilt_h` is `h` as the `dact` kernel wrote it again; its columnwise copy is made here, with the saved amax.
    pub(super) fn new<B: Backend<Memory = M>>(
        backend: &B,
        saved: &Saved<M>,
        rebuilt_h: Option<Buffer<M, bf16>>,
        trace: &mut Option<&mut Trace>,
    ) -> Result<Self, Error> {
        let (plan, groups) = (&saved.plan, &saved.groups);
        let h = match (&*saved.h, rebuilt_h) {
            (SavedTensor::Amax(amax), Some(h)) => {
                let h = Grouped { name: "h", data: M::view(&h), cols: plan.config.ffn, groups };
                let amaxes = Amaxes { rowwise: backend.duplicate(M::view(amax))?, rht: None };
                let nearest = [Rounding::Nearest; 2];
                let copies = quantize(backend, &plan.h, Phase::Backward, &h, &amaxes, nearest, trace)?;
                InputH::Rebuilt(copies.columnwise.ok_or_else(|| not_saved("h"))?)
            }
            (_, Some(h)) => InputH::Rebuilt(OwnedOperand::Bf16(h)),
            (_, None) => InputH::Saved(Arc::clone(&saved.h)),
        };
        Ok(Self { groups: groups.clone(), x: Arc::clone(&saved.x), h })
    }

    /// Both products; `dy` and `dc` come as columnwise copies, or in BF16.
    pub(super) fn products<B: Backend<Memory = M>>(
        &self,
        mlp: &GroupedMlp,
        backend: &B,
        [dy, dc]: [Operand<'_, M>; 2],
        mut dw: WeightGrads<'_, M>,
    ) -> Result<(), Error> {
        let ([w1, w2], groups) = (mlp.weight_shapes(), &self.groups);
        let h = match &self.h {
            InputH::Saved(h) => h.operand().ok_or_else(|| not_saved("h"))?,
            InputH::Rebuilt(h) => h.view(),
        };
        let x = self.x.operand().ok_or_else(|| not_saved("x"))?;
        let dw2 = dw.dw2.reborrow();
        backend.grouped_wgrad(GroupedWgrad { a: dy.shorten(), b: h, shape: w2, groups, dw: dw2 })?;
        let dw1 = dw.dw1.reborrow();
        backend.grouped_wgrad(GroupedWgrad { a: dc.shorten(), b: x, shape: w1, groups, dw: dw1 })
    }
}

/// The weights' gradients of one backward, not computed yet. From [`GroupedMlp::backward_delayed`].
///
/// It owns the columnwise copies of `dy` and `dc` (their BF16 tensors in BF16 precision) and `h`'s copy where that was
/// made again, and shares the saved `x` and `h` with the forward's [`Saved`], which may be gone. Dropped without a run,
/// it gives no gradients and frees all of that.
#[derive(Debug)]
#[must_use = "weights get no gradients from this backward before `run`"]
pub struct DelayedWeightGrads<M: Memory> {
    mlp: GroupedMlp,
    inputs: WgradInputs<M>,
    dy: OwnedOperand<M>,
    dc: OwnedOperand<M>,
}

impl<M: Memory> DelayedWeightGrads<M> {
    pub(super) fn new(
        mlp: GroupedMlp,
        inputs: WgradInputs<M>,
        dy: OwnedOperand<M>,
        dc: OwnedOperand<M>,
    ) -> Self {
        Self { mlp, inputs, dy, dc }
    }

    /// `dW2 = dyᵀ·h` and `dW1 = dcᵀ·x`, overwritten or accumulated as `dw` says; bit by bit what the backward would have
    /// written at once.
    ///
    /// `backend` is the one of the backward, or another on the same memory. Errors name a buffer that does not fit;
    /// nothing is written then.
    pub fn run<B: Backend<Memory = M>>(self, backend: &B, dw: WeightGrads<'_, M>) -> Result<(), Error> {
        dw.check(&self.mlp)?;
        self.inputs.products(&self.mlp, backend, [self.dy.view(), self.dc.view()], dw)
    }

    /// Bytes held until the run, those that a [`Saved`] may share included.
    pub fn bytes(&self) -> usize {
        let h = match &self.inputs.h {
            InputH::Saved(h) => h.bytes(),
            InputH::Rebuilt(h) => h.bytes(),
        };
        self.dy.bytes() + self.dc.bytes() + self.inputs.x.bytes() + h
    }
}
