//! What the backward needs, and nothing else.

use super::GroupedMlp;
use super::config::Needs;
use super::plan::{Plan, SavedAs};
use super::weights::{PackedView, PreparedWeights, WeightsView};
use crate::kernels::contract::{Operand, Unpacked};
use crate::kernels::error::expect_len;
use crate::kernels::pages::{AnyBuffer, Live, Part};
use crate::kernels::{Buffer, Element, Error, Extent, Memory, Misuse, View};
use crate::numerics::BLOCK;
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

/// An operand of a product, owned.
#[derive(Debug)]
pub(super) enum OwnedOperand<M: Memory> {
    Bf16(Buffer<M, bf16>),
    Nvfp4(Packed<M>),
    Unpacked { values: Buffer<M, bf16>, amax: Buffer<M, f32> },
}

impl<M: Memory> OwnedOperand<M> {
    pub(super) fn view(&self) -> Operand<'_, M> {
        match self {
            OwnedOperand::Bf16(x) => Operand::Bf16(M::view(x)),
            OwnedOperand::Nvfp4(q) => Operand::Nvfp4(q.view()),
            OwnedOperand::Unpacked { values, amax } => {
                Operand::Unpacked(Unpacked { values: M::view(values), amax: M::view(amax) })
            }
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            OwnedOperand::Bf16(x) => bytes::<M, _>(x),
            OwnedOperand::Nvfp4(q) => q.bytes(),
            OwnedOperand::Unpacked { values, amax } => bytes::<M, _>(values) + bytes::<M, _>(amax),
        }
    }
}

/// The tensors of one forward that its backward reads. Rowwise copies are gone by now.
#[derive(Debug)]
pub struct Saved<M: Memory> {
    pub(super) plan: Plan,
    pub(super) groups: M::Groups,
    pub(super) weights: Arc<PreparedWeights<M>>,
    /// Shared with the [delayed weight gradients](super::DelayedWeightGrads) of a backward, like `h`.
    pub(super) x: Arc<SavedTensor<M>>,
    pub(super) h: Arc<SavedTensor<M>>,
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
        x.check([kernel, "x"], plan.saved_x, groups, config.hidden)?;
        h.check([kernel, "h"], plan.saved_h, groups, config.ffn)?;
        Ok(SavedView { plan: Cow::Owned(plan), groups, weights, x, h, c: Some((c, prob)) })
    }
}

impl<M: Memory> SavedTensorView<'_, M> {
    /// The operand of a weight gradient that was saved as such.
    pub(super) fn operand(&self) -> Option<Operand<'_, M>> {
        match self {
            SavedTensorView::Columnwise(q) => Some(Operand::<M>::Nvfp4(*q).shorten()),
            SavedTensorView::Bf16(x) => Some(Operand::Bf16(M::shorten(*x))),
            SavedTensorView::Nothing | SavedTensorView::Amax(_) => None,
        }
    }

    fn form(&self) -> SavedAs {
        match self {
            SavedTensorView::Nothing => SavedAs::Nothing,
            SavedTensorView::Columnwise(_) => SavedAs::Columnwise,
            SavedTensorView::Amax(_) => SavedAs::Amax,
            SavedTensorView::Bf16(_) => SavedAs::Bf16,
        }
    }

    /// Form and lengths against the plan; `kernel` and `name` are for messages.
    pub(super) fn check(
        &self,
        [kernel, name]: [&'static str; 2],
        planned: SavedAs,
        groups: &M::Groups,
        cols: usize,
    ) -> Result<(), Misuse> {
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

/// [`Saved`] without its tensors.
#[derive(Debug)]
pub(super) struct SavedShell<M: Memory> {
    plan: Plan,
    pub(super) groups: M::Groups,
    weights: Arc<PreparedWeights<M>>,
}

/// [`Saved`] taken apart; or as it was, and why.
type Dismantled<M> = Result<(SavedShell<M>, Vec<Part<M>>), Box<(Saved<M>, Error)>>;

impl<M: Memory> Saved<M> {
    /// The tensors, in a fixed order, and the rest; an error if delayed gradients share a tensor.
    pub(super) fn dismantle(self) -> Dismantled<M> {
        let Saved { plan, groups, weights, x, h, c } = self;
        let (x, h) = match (Arc::try_unwrap(x), Arc::try_unwrap(h)) {
            (Ok(x), Ok(h)) => (x, h),
            (x, h) => {
                let (x, h) = (x.map_or_else(|x| x, Arc::new), h.map_or_else(|h| h, Arc::new));
                let conflict = "its tensors are shared with weight gradients that are delayed".into();
                let fix = "run those or drop them first";
                let error = Error::Misuse(Misuse::Conflict { what: "saved", conflict, fix });
                return Err(Box::new((Saved { plan, groups, weights, x, h, c }, error)));
            }
        };
        let config = &plan.config;
        let mut parts = vec![];
        if let Some((c, prob)) = c {
            parts.push(Part { buffer: AnyBuffer::Bf16(c), live: Live::Rows { cols: config.fc1_rows() } });
            parts.push(Part { buffer: AnyBuffer::F32(prob), live: Live::Rows { cols: 1 } });
        }
        for (tensor, cols) in [(x, config.hidden), (h, config.ffn)] {
            match tensor {
                SavedTensor::Nothing => {}
                SavedTensor::Columnwise(Packed(Nvfp4 { codes, scales, amax })) => parts.extend([
                    Part { buffer: AnyBuffer::U8(codes), live: Live::Positions { per: 2 } },
                    Part { buffer: AnyBuffer::U8(scales), live: Live::Positions { per: BLOCK } },
                    Part { buffer: AnyBuffer::F32(amax), live: Live::All },
                ]),
                SavedTensor::Amax(amax) => parts.push(Part { buffer: AnyBuffer::F32(amax), live: Live::All }),
                SavedTensor::Bf16(x) => {
                    parts.push(Part { buffer: AnyBuffer::Bf16(x), live: Live::Rows { cols } })
                }
            }
        }
        Ok((SavedShell { plan, groups, weights }, parts))
    }
}

impl<M: Memory> SavedShell<M> {
    /// With the tensors that [`Saved::dismantle`] took out, in the same order.
    pub(super) fn fill(self, parts: Vec<Part<M>>) -> Saved<M> {
        let SavedShell { plan, groups, weights } = self;
        let mut parts = parts.into_iter().map(|part| part.buffer);
        let c = plan.saved_c.then(|| (bf16s(&mut parts), f32s(&mut parts)));
        let mut tensor = |form| match form {
            SavedAs::Nothing => SavedTensor::Nothing,
            SavedAs::Columnwise => {
                let (codes, scales) = (u8s(&mut parts), u8s(&mut parts));
                SavedTensor::Columnwise(Packed(Nvfp4 { codes, scales, amax: f32s(&mut parts) }))
            }
            SavedAs::Amax => SavedTensor::Amax(f32s(&mut parts)),
            SavedAs::Bf16 => SavedTensor::Bf16(bf16s(&mut parts)),
        };
        let (x, h) = (Arc::new(tensor(plan.saved_x)), Arc::new(tensor(plan.saved_h)));
        Saved { plan, groups, weights, x, h, c }
    }
}

const IN_ORDER: &str = "a pool gives tensors back in their order";

fn u8s<M: Memory>(parts: &mut impl Iterator<Item = AnyBuffer<M>>) -> Buffer<M, u8> {
    let Some(AnyBuffer::U8(buffer)) = parts.next() else { panic!("{IN_ORDER}") };
    buffer
}

fn f32s<M: Memory>(parts: &mut impl Iterator<Item = AnyBuffer<M>>) -> Buffer<M, f32> {
    let Some(AnyBuffer::F32(buffer)) = parts.next() else { panic!("{IN_ORDER}") };
    buffer
}

fn bf16s<M: Memory>(parts: &mut impl Iterator<Item = AnyBuffer<M>>) -> Buffer<M, bf16> {
    let Some(AnyBuffer::Bf16(buffer)) = parts.next() else { panic!("{IN_ORDER}") };
    buffer
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

    pub(super) fn bytes(&self) -> usize {
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
