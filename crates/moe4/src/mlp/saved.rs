//! What the backward needs, and nothing else.

use super::GroupedMlp;
use super::config::Needs;
use super::plan::{Plan, SavedAs};
use super::weights::{PackedView, PreparedWeights, WeightsView};
use crate::kernels::error::expect_len;
use crate::kernels::{Buffer, Element, Extent, Memory, Misuse, View};
use crate::tensor::{Nvfp4, OperandShape};
use half::bf16;
use std::borrow::Cow;
use std::sync::Arc;

/// A packed operand, owned.
#[derive(Debug)]
pub struct Packed<M: Memory>(pub Nvfp4<Buffer<M, u8>, Buffer<M, f32>>);

impl<M: Memory> Packed<M> {
    /// The same operand, borrowed.
    pub fn view(&self) -> PackedView<'_, M> {
        Nvfp4 { codes: M::view(&self.0.codes), scales: M::view(&self.0.scales), amax: M::view(&self.0.amax) }
    }

    fn bytes(&self) -> usize {
        bytes::<M, _>(&self.0.codes) + bytes::<M, _>(&self.0.scales) + bytes::<M, _>(&self.0.amax)
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

/// One tensor in the form that the plan chose; see [`SavedAs`].
#[derive(Debug)]
pub enum SavedTensor<M: Memory> {
    /// Not needed.
    Nothing,
    /// Codes `[cols, Tp/2]`, scales `[cols, Tp/16]`, amax `[E]`.
    Columnwise(Packed<M>),
    /// `[E]`.
    Amax(Buffer<M, f32>),
    /// `[T, cols]`.
    Bf16(Buffer<M, bf16>),
}

/// [`SavedTensor`], borrowed.
pub enum SavedTensorView<'a, M: Memory> {
    /// Not needed.
    Nothing,
    /// Codes `[cols, Tp/2]`, scales `[cols, Tp/16]`, amax `[E]`.
    Columnwise(PackedView<'a, M>),
    /// `[E]`.
    Amax(View<'a, M, f32>),
    /// `[T, cols]`.
    Bf16(View<'a, M, bf16>),
}

/// What a backward reads, as tensors that the caller owns: parts for [`GroupedMlp::saved_view`].
pub struct SavedParts<'a, M: Memory> {
    /// Rows of each expert, those of the forward.
    pub groups: &'a M::Groups,
    /// Those of the forward.
    pub weights: WeightsView<'a, M>,
    /// `c [T, N1]`.
    pub c: View<'a, M, bf16>,
    /// `[T]`.
    pub prob: View<'a, M, f32>,
    /// `x [T, H]`, as [`Plan::saved_x`] says.
    pub x: SavedTensorView<'a, M>,
    /// `h [T, F]`, as [`Plan::saved_h`] says.
    pub h: SavedTensorView<'a, M>,
}

/// [`Saved`], borrowed: what a backward reads.
pub struct SavedView<'a, M: Memory> {
    pub(super) plan: Cow<'a, Plan>,
    pub(super) groups: &'a M::Groups,
    pub(super) weights: WeightsView<'a, M>,
    pub(super) x: SavedTensorView<'a, M>,
    pub(super) h: SavedTensorView<'a, M>,
    pub(super) c: Option<(View<'a, M, bf16>, View<'a, M, f32>)>,
}

impl<M: Memory> SavedView<'_, M> {
    /// The plan that the backward will follow.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}

impl GroupedMlp {
    /// What a forward with these needs left, put together from tensors that the caller kept.
    ///
    /// Errors name a tensor that the plan wants in another form or whose length does not fit.
    pub fn saved_view<'a, M: Memory>(
        &self,
        needs: Needs,
        parts: SavedParts<'a, M>,
    ) -> Result<SavedView<'a, M>, Misuse> {
        let SavedParts { groups, weights, c, prob, x, h } = parts;
        let (kernel, config, plan) = ("saved_view", &self.config, self.plan(needs));
        if !plan.saved_c {
            return Err(Misuse::Conflict {
                what: "needs",
                conflict: "expected a forward with gradients, got Needs::NONE".into(),
                fix: "pass the needs of the forward",
            });
        }
        if groups.experts() != config.experts {
            return Err(Misuse::Conflict {
                what: "splits",
                conflict: format!("expected {} experts, got {}", config.experts, groups.experts()),
                fix: "give one split for each expert of the configuration",
            });
        }
        weights.check(self)?;
        expect_len(kernel, "c", &[groups.rows(), config.fc1_rows()], M::len(&c))?;
        expect_len(kernel, "prob", &[groups.rows()], M::len(&prob))?;
        x.check("x", plan.saved_x, groups, config.hidden)?;
        h.check("h", plan.saved_h, groups, config.ffn)?;
        Ok(SavedView { plan: Cow::Owned(plan), groups, weights, x, h, c: Some((c, prob)) })
    }
}

impl<M: Memory> SavedTensorView<'_, M> {
    fn form(&self) -> SavedAs {
        match self {
            SavedTensorView::Nothing => SavedAs::Nothing,
            SavedTensorView::Columnwise(_) => SavedAs::Columnwise,
            SavedTensorView::Amax(_) => SavedAs::Amax,
            SavedTensorView::Bf16(_) => SavedAs::Bf16,
        }
    }

    fn check(
        &self,
        name: &'static str,
        planned: SavedAs,
        groups: &M::Groups,
        cols: usize,
    ) -> Result<(), Misuse> {
        let kernel = "saved_view";
        if self.form() != planned {
            return Err(Misuse::Conflict {
                what: name,
                conflict: format!("expected it saved as {planned:?}, got {:?}", self.form()),
                fix: "pass the tensors, the needs and the options of one forward",
            });
        }
        match self {
            SavedTensorView::Nothing => Ok(()),
            SavedTensorView::Amax(amax) => expect_len(kernel, name, &[groups.experts()], M::len(amax)),
            SavedTensorView::Bf16(x) => expect_len(kernel, name, &[groups.rows(), cols], M::len(x)),
            SavedTensorView::Columnwise(q) => {
                let shape = OperandShape { rows: cols, k: groups.padded_rows() };
                expect_len(kernel, name, &[shape.code_bytes()], M::len(&q.codes))?;
                expect_len(kernel, name, &[shape.scale_bytes()], M::len(&q.scales))?;
                expect_len(kernel, name, &[groups.experts()], M::len(&q.amax))
            }
        }
    }
}

impl<M: Memory> Saved<M> {
    /// The same tensors, borrowed.
    pub fn view(&self) -> SavedView<'_, M> {
        SavedView {
            plan: Cow::Borrowed(&self.plan),
            groups: &self.groups,
            weights: self.weights.view(),
            x: self.x.view(),
            h: self.h.view(),
            c: self.c.as_ref().map(|(c, prob)| (M::view(c), M::view(prob))),
        }
    }

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
    /// The same tensor, borrowed.
    pub fn view(&self) -> SavedTensorView<'_, M> {
        match self {
            SavedTensor::Nothing => SavedTensorView::Nothing,
            SavedTensor::Columnwise(q) => SavedTensorView::Columnwise(q.view()),
            SavedTensor::Amax(amax) => SavedTensorView::Amax(M::view(amax)),
            SavedTensor::Bf16(x) => SavedTensorView::Bf16(M::view(x)),
        }
    }

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
