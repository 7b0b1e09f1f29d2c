//! The weights' gradients of one backward: `dW2 = dyᵀ·h` and `dW1 = dcᵀ·x`, at once or later.
//!
//! [`products`] computes them from operands, whoever owns those. A backward makes up to three of the four: the columnwise
//! copies of `dy` and `dc`, and `h` where it was not saved. [`WgradTensors`] holds these until later; the rest is lent to
//! its run by a caller that keeps tensors itself, or shared with the forward's [`Saved`] in [`DelayedWeightGrads`].

use super::GroupedMlp;
use super::backward::{Gradients, WeightGrads, misuse, not_saved};
use super::plan::{Phase, Plan};
use super::quantize::{Amaxes, Grouped, quantize};
use super::saved::{OwnedOperand, SavedTensor, SavedTensorView, SavedView};
use super::trace::Trace;
use crate::kernels::contract::{GroupedWgrad, Operand};
use crate::kernels::error::expect_len;
use crate::kernels::{Backend, Buffer, Error, Extent, Memory, View};
use crate::numerics::rounding::Rounding;
use half::bf16;
use std::sync::Arc;

/// What both products read: columnwise copies, or BF16 tensors.
pub(super) struct WgradOperands<'a, M: Memory> {
    pub(super) dy: Operand<'a, M>,
    pub(super) dc: Operand<'a, M>,
    pub(super) x: Operand<'a, M>,
    pub(super) h: Operand<'a, M>,
}

/// `dW2 = dyᵀ·h` and `dW1 = dcᵀ·x`.
pub(super) fn products<B: Backend>(
    mlp: &GroupedMlp,
    backend: &B,
    groups: &<B::Memory as Memory>::Groups,
    WgradOperands { dy, dc, x, h }: WgradOperands<'_, B::Memory>,
    mut dw: WeightGrads<'_, B::Memory>,
) -> Result<(), Error> {
    let [w1, w2] = mlp.weight_shapes();
    let dw2 = dw.dw2.reborrow();
    backend.grouped_wgrad(GroupedWgrad { a: dy.shorten(), b: h.shorten(), shape: w2, groups, dw: dw2 })?;
    let dw1 = dw.dw1.reborrow();
    backend.grouped_wgrad(GroupedWgrad { a: dc.shorten(), b: x.shorten(), shape: w1, groups, dw: dw1 })
}

/// `h` as the `dact` kernel wrote it again, or its columnwise copy with the saved amax; `None` where `h` was saved.
pub(super) fn rebuilt_h<B: Backend>(
    backend: &B,
    saved: &SavedView<'_, B::Memory>,
    h: Option<Buffer<B::Memory, bf16>>,
    trace: &mut Option<&mut Trace>,
) -> Result<Option<OwnedOperand<B::Memory>>, Error> {
    let Some(h) = h else { return Ok(None) };
    let SavedTensorView::Amax(amax) = &saved.h else { return Ok(Some(OwnedOperand::Bf16(h))) };
    let (plan, groups) = (&*saved.plan, saved.groups);
    let h = Grouped { name: "h", data: B::Memory::view(&h), cols: plan.config.ffn, groups };
    let amaxes = Amaxes { rowwise: backend.duplicate(B::Memory::shorten(*amax))?, rht: None };
    let nearest = [Rounding::Nearest; 2];
    let copies = quantize(backend, &plan.h, Phase::Backward, &h, amaxes, nearest, trace)?;
    Ok(Some(copies.columnwise.ok_or_else(|| not_saved("h"))?))
}

/// What [`GroupedMlp::backward_delayed_view`] returns: new tensors only, for a caller that keeps the others itself.
#[derive(Debug)]
pub struct BackwardTensors<M: Memory> {
    /// Everything but the weights' gradients.
    pub gradients: Gradients<M>,
    /// What those will read of this backward.
    pub weights: WgradTensors<M>,
}

/// What the weights' gradients of one backward read that the backward made: the columnwise copies of `dy` and `dc` (in BF16
/// precision `dc` itself), and `h` where that was made again.
///
/// Dropped without a run, it gives no gradients.
#[derive(Debug)]
#[must_use = "weights get no gradients from this backward before `run`"]
pub struct WgradTensors<M: Memory> {
    pub(super) plan: Plan,
    pub(super) groups: M::Groups,
    /// None in BF16.
    pub(super) dy: Option<OwnedOperand<M>>,
    pub(super) dc: OwnedOperand<M>,
    /// None where `h` was saved.
    pub(super) h: Option<OwnedOperand<M>>,
}

/// What the weights' gradients read that the caller of [`GroupedMlp::backward_delayed_view`] kept.
pub struct WgradParts<'a, M: Memory> {
    /// `[T, H]`, that of the backward; read in BF16 precision only, where it must be there.
    pub dy: Option<View<'a, M, bf16>>,
    /// Those of [`SavedParts`](super::SavedParts). `h` is read if the forward saved it, not if it was made again.
    pub x: SavedTensorView<'a, M>,
    /// See `x`.
    pub h: SavedTensorView<'a, M>,
}

impl<M: Memory> WgradTensors<M> {
    /// `dW2 = dyᵀ·h` and `dW1 = dcᵀ·x`, overwritten or accumulated as `dw` says; bit by bit what the backward would have
    /// written at once.
    ///
    /// `backend` is the one of the backward, or another on the same memory. Errors name a tensor or a buffer that does not
    /// fit; nothing is written then. The tensors stay: the caller frees them, when work on another stream has read them.
    pub fn run<B: Backend<Memory = M>>(
        &self,
        backend: &B,
        parts: WgradParts<'_, M>,
        dw: WeightGrads<'_, M>,
    ) -> Result<(), Error> {
        let (kernel, config) = ("WgradTensors::run", &self.plan.config);
        let mlp = GroupedMlp { config: config.clone() };
        dw.check(&mlp)?;
        parts.x.check([kernel, "x"], self.plan.saved_x, &self.groups, config.hidden)?;
        parts.h.check([kernel, "h"], self.plan.saved_h, &self.groups, config.ffn)?;
        let dy = match (&self.dy, &parts.dy) {
            (Some(copy), _) => copy.view(),
            (None, Some(dy)) => {
                expect_len(kernel, "dy", &[self.groups.rows(), config.hidden], M::len(dy))?;
                Operand::Bf16(M::shorten(*dy))
            }
            (None, None) => {
                let conflict = "expected the gradient of a backward in BF16, got none";
                return Err(misuse("dy", conflict, "pass dy as the backward got it"));
            }
        };
        let h = match &self.h {
            Some(h) => h.view(),
            None => parts.h.operand().ok_or_else(|| not_saved("h"))?,
        };
        let x = parts.x.operand().ok_or_else(|| not_saved("x"))?;
        products(&mlp, backend, &self.groups, WgradOperands { dy, dc: self.dc.view(), x, h }, dw)
    }

    /// Bytes held until the run.
    pub fn bytes(&self) -> usize {
        let optional = |operand: &Option<OwnedOperand<M>>| operand.as_ref().map_or(0, OwnedOperand::bytes);
        optional(&self.dy) + self.dc.bytes() + optional(&self.h)
    }
}

/// The weights' gradients of one backward, not computed yet. From [`GroupedMlp::backward_delayed`].
///
/// It owns the columnwise copies of `dy` and `dc` (their BF16 tensors in BF16 precision) and `h`'s copy where that was
/// made again, and shares the saved `x` and `h` with the forward's [`Saved`](super::Saved), which may be gone. Dropped
/// without a run, it gives no gradients and frees all of that.
#[derive(Debug)]
#[must_use = "weights get no gradients from this backward before `run`"]
pub struct DelayedWeightGrads<M: Memory> {
    pub(super) tensors: WgradTensors<M>,
    /// In BF16, where [`WgradTensors`] has no copy.
    pub(super) dy: Option<Buffer<M, bf16>>,
    pub(super) x: Arc<SavedTensor<M>>,
    pub(super) h: Arc<SavedTensor<M>>,
}

impl<M: Memory> DelayedWeightGrads<M> {
    /// `dW2 = dyᵀ·h` and `dW1 = dcᵀ·x`, overwritten or accumulated as `dw` says; bit by bit what the backward would have
    /// written at once.
    ///
    /// `backend` is the one of the backward, or another on the same memory. Errors name a buffer that does not fit;
    /// nothing is written then.
    pub fn run<B: Backend<Memory = M>>(self, backend: &B, dw: WeightGrads<'_, M>) -> Result<(), Error> {
        let Self { tensors, dy, x, h } = self;
        let parts = WgradParts { dy: dy.as_ref().map(M::view), x: x.view(), h: h.view() };
        tensors.run(backend, parts, dw)
    }

    /// Bytes held until the run, those that a [`Saved`](super::Saved) may share included.
    pub fn bytes(&self) -> usize {
        let dy = self.dy.as_ref().map_or(0, |dy| M::len(&M::view(dy)) * size_of::<bf16>());
        let h = if self.tensors.h.is_some() { 0 } else { self.h.bytes() };
        self.tensors.bytes() + dy + self.x.bytes() + h
    }
}
