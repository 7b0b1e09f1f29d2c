//! The forward: FC1, activation, FC2.

use super::config::Needs;
use super::plan::{Phase, SavedAs};
use super::quantize::{Amaxes, Copies, Grouped, quantize};
use super::saved::{OwnedOperand, Saved, SavedTensor};
use super::trace::Trace;
use super::weights::{PreparedWeights, WeightsView};
use super::{GroupedMlp, Precision};
use crate::kernels::contract::{Bias, GroupedGemm, GroupedGemmAct, Operand, Side, WeightOperand};
use crate::kernels::error::{expect_len, require};
use crate::kernels::{Backend, Buffer, Error, Extent, Memory, Misuse, View};
use crate::numerics::BLOCK;
use crate::numerics::rounding::Rounding;
use half::bf16;
use std::sync::Arc;

/// Inputs of a forward.
pub struct ForwardArgs<'a, M: Memory> {
    /// `[T, H]`, rows sorted by expert.
    pub x: View<'a, M, bf16>,
    /// `[T]`, the routing probability of each row.
    pub prob: View<'a, M, f32>,
    /// Rows of each expert.
    pub groups: &'a M::Groups,
    /// From [`GroupedMlp::prepare_weights`].
    pub weights: &'a Arc<PreparedWeights<M>>,
    /// Which gradients will be wanted.
    pub needs: Needs,
    /// Copies of intermediate tensors, if wanted.
    pub trace: Option<&'a mut Trace>,
}

/// What a forward returns.
#[derive(Debug)]
pub struct Forward<M: Memory> {
    /// `[T, H]`.
    pub y: Buffer<M, bf16>,
    /// For the backward; drop it if there is none.
    pub saved: Saved<M>,
}

/// Inputs of a forward over weights that the caller owns.
pub struct ForwardViewArgs<'a, 'w, M: Memory> {
    /// `[T, H]`, rows sorted by expert.
    pub x: View<'a, M, bf16>,
    /// `[T]`, the routing probability of each row.
    pub prob: View<'a, M, f32>,
    /// Rows of each expert.
    pub groups: &'a M::Groups,
    /// From [`PreparedWeights::view`], [`GroupedMlp::weights_nvfp4`] or [`GroupedMlp::weights_bf16`].
    pub weights: &'a WeightsView<'w, M>,
    /// Which gradients will be wanted.
    pub needs: Needs,
    /// Copies of intermediate tensors, if wanted.
    pub trace: Option<&'a mut Trace>,
}

/// What [`GroupedMlp::forward_view`] returns: new tensors only, for a caller that keeps its inputs itself.
#[derive(Debug)]
pub struct ForwardTensors<M: Memory> {
    /// `[T, H]`.
    pub y: Buffer<M, bf16>,
    /// `[T, N1]`, if there will be a backward.
    pub c: Option<Buffer<M, bf16>>,
    /// The columnwise copy of `x`, if the backward needs one. (In BF16 it needs `x` itself.)
    pub x: SavedTensor<M>,
    /// `h`, as [`Plan::saved_h`](super::Plan) says.
    pub h: SavedTensor<M>,
}

const NEAREST: [Rounding; 2] = [Rounding::Nearest; 2];

impl GroupedMlp {
    /// `y [T, H]` and what the backward needs. Rows past `sum(splits)` are never read; `y` is zero there.
    pub fn forward<B: Backend>(
        &self,
        backend: &B,
        args: ForwardArgs<'_, B::Memory>,
    ) -> Result<Forward<B::Memory>, Error> {
        let ForwardArgs { x, prob, groups, weights, needs, trace } = args;
        let view = weights.view();
        let args = ForwardViewArgs {
            x: B::Memory::shorten(x),
            prob: B::Memory::shorten(prob),
            groups,
            weights: &view,
            needs,
            trace,
        };
        let ForwardTensors { y, c, x: saved_x, h } = self.forward_view(backend, args)?;
        let plan = self.plan(needs);
        let saved_x = match plan.saved_x {
            SavedAs::Bf16 => SavedTensor::Bf16(backend.duplicate(x)?),
            _ => saved_x,
        };
        let c = match c {
            Some(c) => Some((c, backend.duplicate(prob)?)),
            None => None,
        };
        let saved = Saved {
            plan,
            groups: groups.clone(),
            weights: Arc::clone(weights),
            x: Arc::new(saved_x),
            h: Arc::new(h),
            c,
        };
        Ok(Forward { y, saved })
    }

    /// [`GroupedMlp::forward`] for a caller that keeps inputs, weights and saved tensors itself, such as a framework
    /// with an autograd of its own. [`GroupedMlp::saved_view`] puts the tensors together again for the backward.
    pub fn forward_view<B: Backend>(
        &self,
        backend: &B,
        args: ForwardViewArgs<'_, '_, B::Memory>,
    ) -> Result<ForwardTensors<B::Memory>, Error> {
        let ForwardViewArgs { x, prob, groups, weights, needs, mut trace } = args;
        let config = &self.config;
        let (t, experts) = (groups.rows(), config.experts);
        let (hidden, ffn, n1) = (config.hidden, config.ffn, config.fc1_rows());
        require(&backend.capabilities(), config.precision == Precision::Nvfp4, false)?;
        if groups.experts() != experts {
            return Err(Error::Misuse(Misuse::Conflict {
                what: "splits",
                conflict: format!("expected {experts} experts, got {}", groups.experts()),
                fix: "give one split for each expert of the configuration",
            }));
        }
        expect_len("forward", "x", &[t, hidden], B::Memory::len(&x))?;
        expect_len("forward", "prob", &[t], B::Memory::len(&prob))?;
        weights.check(self)?;
        let plan = self.plan(needs);

        let grouped_x = Grouped { name: "x", data: x, cols: hidden, groups };
        let x_copies = match plan.x.needs_pass() {
            true => {
                let amaxes = Amaxes::by_pass(backend, &plan.x, &grouped_x)?;
                quantize(backend, &plan.x, Phase::Forward, &grouped_x, amaxes, NEAREST, &mut trace)?
            }
            false => Copies::none(),
        };
        if let Some(trace) = &mut trace {
            trace_weights(backend, trace, weights, self)?;
        }
        let mut c = backend.empty::<bf16>(t * n1)?;
        let mut h = backend.empty::<bf16>(t * ffn)?;
        let mut h_amaxes = match plan.h.needs_epilogue() {
            true => Some(Amaxes::empty(backend, &plan.h, experts)?),
            false => None,
        };
        backend.grouped_gemm_act(GroupedGemmAct {
            x: match &x_copies.rowwise {
                Some(q) => q.view(),
                None => Operand::Bf16(B::Memory::shorten(x)),
            },
            w1: weights.w1.operand(),
            b1: weights.w1.bias(),
            hidden,
            ffn,
            activation: config.activation,
            layout: config.glu_layout,
            prob: B::Memory::shorten(prob),
            groups,
            c: B::Memory::view_mut(&mut c),
            h: B::Memory::view_mut(&mut h),
            h_amax: h_amaxes.as_mut().map(|a| a.epilogue(&plan.h)),
        })?;
        // What no later pass reads makes room for what they write.
        drop(x_copies.rowwise);
        if let Some(trace) = &mut trace {
            trace.add(backend, "c", &[t, n1], B::Memory::view(&c))?;
            trace.add(backend, "h", &[t, ffn], B::Memory::view(&h))?;
        }

        let h_copies = match h_amaxes {
            Some(amaxes) => {
                let grouped = Grouped { name: "h", data: B::Memory::view(&h), cols: ffn, groups };
                quantize(backend, &plan.h, Phase::Forward, &grouped, amaxes, NEAREST, &mut trace)?
            }
            None => Copies::none(),
        };
        let c = plan.saved_c.then_some(c);
        // BF16 `h` is gone if there is a copy.
        let fc2_input = h_copies.rowwise.unwrap_or(OwnedOperand::Bf16(h));
        let mut y = backend.empty::<bf16>(t * hidden)?;
        backend.grouped_gemm(GroupedGemm {
            a: fc2_input.view(),
            w: weights.w2.operand(),
            shape: self.weight_shapes()[1],
            side: Side::Fprop,
            groups,
            bias: weights.w2.bias().map(|bias| Bias { bias, prob: Some(B::Memory::shorten(prob)) }),
            out: B::Memory::view_mut(&mut y),
        })?;
        if let Some(trace) = &mut trace {
            trace.add(backend, "y", &[t, hidden], B::Memory::view(&y))?;
        }

        let saved_x = match (plan.saved_x, x_copies.columnwise) {
            (SavedAs::Columnwise, Some(OwnedOperand::Nvfp4(q))) => SavedTensor::Columnwise(q),
            _ => SavedTensor::Nothing,
        };
        let saved_h = match (plan.saved_h, h_copies.columnwise, h_copies.columnwise_amax, fc2_input) {
            (SavedAs::Columnwise, Some(OwnedOperand::Nvfp4(q)), ..) => SavedTensor::Columnwise(q),
            (SavedAs::Amax, _, Some(amax), _) => SavedTensor::Amax(amax),
            (SavedAs::Bf16, .., OwnedOperand::Bf16(h)) => SavedTensor::Bf16(h),
            _ => SavedTensor::Nothing,
        };
        Ok(ForwardTensors { y, c, x: saved_x, h: saved_h })
    }
}

fn trace_weights<B: Backend>(
    backend: &B,
    trace: &mut Trace,
    weights: &WeightsView<'_, B::Memory>,
    mlp: &GroupedMlp,
) -> Result<(), Error> {
    let experts = mlp.config.experts;
    let operands = [weights.w1.operand(), weights.w2.operand()];
    for ((name, operand), shape) in ["w1", "w2"].into_iter().zip(operands).zip(mlp.weight_shapes()) {
        let WeightOperand::Nvfp4 { packed: q, .. } = operand else { continue };
        trace.add(backend, format!("{name}_fp4"), &[experts, shape.n, shape.k / 2], q.codes)?;
        trace.add(backend, format!("{name}_scale"), &[experts, shape.n, shape.k / BLOCK], q.scales)?;
        trace.add(backend, format!("{name}_amax"), &[experts], q.amax)?;
    }
    Ok(())
}
