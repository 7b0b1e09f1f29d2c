//! The backward: from `dy` to `dx`, the weights' and the probabilities' gradients.

use super::config::{GradientRounding, Precision};
use super::delayed::{BackwardTensors, DelayedWeightGrads, WgradOperands, WgradTensors, products, rebuilt_h};
use super::plan::{OperandPlan, Phase, Plan};
use super::quantize::{Amaxes, Copies, Grouped, quantize};
use super::saved::{OwnedOperand, Saved, SavedView};
use super::trace::Trace;
use super::{GroupedMlp, WeightGrad};
use crate::kernels::contract::{GroupedBiasGrad, GroupedGemm, GroupedGemmDact, Operand, Side};
use crate::kernels::error::{expect_len, require};
use crate::kernels::{Backend, Buffer, Error, Extent, Memory, Misuse, View};
use crate::numerics::rounding::{RandomStream, Rounding};
use half::bf16;
use std::sync::Arc;

/// Inputs of a backward.
pub struct BackwardArgs<'a, M: Memory> {
    /// `[T, H]`.
    pub dy: View<'a, M, bf16>,
    /// Where stochastic rounding takes its random bits from.
    pub random: RandomSeed,
    /// Where `dW1` and `dW2` go; present exactly if the forward's needs asked for weight gradients and they are not
    /// [delayed](GroupedMlp::backward_delayed).
    pub dw: Option<WeightGrads<'a, M>>,
    /// Copies of intermediate tensors, if wanted.
    pub trace: Option<&'a mut Trace>,
}

/// Buffers of the weights' gradients.
pub struct WeightGrads<'a, M: Memory> {
    /// `[N1, H]` an expert.
    pub dw1: WeightGrad<'a, M>,
    /// `[H, F]` an expert.
    pub dw2: WeightGrad<'a, M>,
}

impl<M: Memory> WeightGrads<'_, M> {
    /// Lengths against the operator's shapes.
    pub(super) fn check(&self, mlp: &GroupedMlp) -> Result<(), Misuse> {
        let ([s1, s2], experts) = (mlp.weight_shapes(), mlp.config.experts);
        self.dw1.check("backward", "dw1", s1, experts)?;
        self.dw2.check("backward", "dw2", s2, experts)
    }
}

/// The seed of a run and the number of this backward within it.
///
/// Two backwards under one seed that must not share random bits need different calls: count layers and steps, for
/// example `step · layers + layer`. Within a call the copies of `dy` and `dc` use streams of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RandomSeed {
    /// The seed of the run.
    pub seed: u64,
    /// The number of this call.
    pub call: u64,
}

impl RandomSeed {
    /// Rounding of the rowwise and the columnwise copy of tensor `index`.
    fn rounding(self, mode: GradientRounding, index: u64) -> [Rounding; 2] {
        [0, 1].map(|direction| match mode {
            GradientRounding::Nearest => Rounding::Nearest,
            GradientRounding::Stochastic => Rounding::Stochastic(RandomStream {
                seed: self.seed,
                stream: self.call.wrapping_mul(4).wrapping_add(2 * index + direction),
            }),
        })
    }
}

/// What a backward returns; weight gradients are in the caller's buffers.
#[derive(Debug)]
pub struct Gradients<M: Memory> {
    /// `[T, H]`, if asked for.
    pub dx: Option<Buffer<M, bf16>>,
    /// `[T]`.
    pub dprob: Buffer<M, f32>,
    /// `[E, N1]`, if there is a bias and weight gradients were asked for.
    pub db1: Option<Buffer<M, f32>>,
    /// `[E, H]`, likewise.
    pub db2: Option<Buffer<M, f32>>,
}

/// What a backward returns that leaves the weights' gradients for later.
#[derive(Debug)]
pub struct DelayedBackward<M: Memory> {
    /// Everything else.
    pub gradients: Gradients<M>,
    /// Computes them.
    pub weights: DelayedWeightGrads<M>,
}

/// A backward up to the weights' gradients and `dx`.
struct Started<M: Memory> {
    gradients: Gradients<M>,
    /// `[T, N1]`, where it has no copies: in BF16.
    dc: Option<Buffer<M, bf16>>,
    dc_copies: Copies<M>,
    /// The columnwise copy of `dy`; none in BF16.
    dy: Option<OwnedOperand<M>>,
    /// `h` made again for the weights' gradients; none if it was saved or they are not wanted.
    h: Option<OwnedOperand<M>>,
}

impl<M: Memory> Started<M> {
    /// `dc` as a product reads it: this copy of it, or the tensor itself.
    fn dc_or<'a>(&'a self, copy: &'a Option<OwnedOperand<M>>) -> Result<Operand<'a, M>, Error> {
        match (copy, &self.dc) {
            (Some(copy), _) => Ok(copy.view()),
            (None, Some(dc)) => Ok(Operand::Bf16(M::view(dc))),
            (None, None) => Err(misuse("dc", "no copy of it was made for this product", INCONSISTENT)),
        }
    }
}

impl GroupedMlp {
    /// Gradients of one forward. `saved` stays usable, so that a graph can be run backward again.
    pub fn backward<B: Backend>(
        &self,
        backend: &B,
        saved: &Saved<B::Memory>,
        args: BackwardArgs<'_, B::Memory>,
    ) -> Result<Gradients<B::Memory>, Error> {
        self.backward_view(backend, &saved.view(), args)
    }

    /// [`GroupedMlp::backward`] over saved tensors that the caller owns.
    pub fn backward_view<B: Backend>(
        &self,
        backend: &B,
        saved: &SavedView<'_, B::Memory>,
        mut args: BackwardArgs<'_, B::Memory>,
    ) -> Result<Gradients<B::Memory>, Error> {
        self.check_backward(backend, saved, &args.dy)?;
        let dw = args.dw.take();
        match (&dw, saved.plan.needs.weights) {
            (Some(dw), true) => dw.check(self)?,
            (None, false) => {}
            (None, true) => {
                let fix = "pass dw, or call backward_delayed";
                let conflict = "the forward was told that weights need gradients, got no buffers";
                return Err(misuse("dw", conflict, fix));
            }
            (Some(_), false) => {
                let fix = "pass Needs with weights to forward, or no buffers";
                let conflict = "the forward was told that weights need no gradients, got buffers";
                return Err(misuse("dw", conflict, fix));
            }
        }
        let dy = args.dy;
        let mut started = self.start(backend, saved, args)?;
        // Taken, so that they are gone before `dx` is there.
        let (dy_copy, h_copy) = (started.dy.take(), started.h.take());
        if let Some(dw) = dw {
            let h = match &h_copy {
                Some(h) => h.view(),
                None => saved.h.operand().ok_or_else(|| not_saved("h"))?,
            };
            let operands = WgradOperands {
                dy: operand_or(&dy_copy, B::Memory::shorten(dy)),
                dc: started.dc_or(&started.dc_copies.columnwise)?,
                x: saved.x.operand().ok_or_else(|| not_saved("x"))?,
                h,
            };
            products(self, backend, saved.groups, operands, dw)?;
        }
        drop((dy_copy, h_copy));
        started.gradients.dx = self.input_gradient(backend, saved, &started)?;
        Ok(started.gradients)
    }

    /// Gradients of one forward without those of the weights, which are left for later: to fill a bubble of a
    /// pipeline, or to run while `dx` is on its way to another device. `args.dw` is `None`.
    ///
    /// Every random bit is drawn and every copy made here; [`DelayedWeightGrads::run`] has the two products left to do,
    /// and writes the same bytes as [`GroupedMlp::backward`]. The biases' gradients are part of what is returned at once.
    /// `saved` may be dropped: the handle keeps what it needs of it, `x` and `h`.
    ///
    /// Errors: those of [`GroupedMlp::backward`]; buffers in `args.dw`; a forward that was told that weights need no
    /// gradients.
    pub fn backward_delayed<B: Backend>(
        &self,
        backend: &B,
        saved: &Saved<B::Memory>,
        args: BackwardArgs<'_, B::Memory>,
    ) -> Result<DelayedBackward<B::Memory>, Error> {
        let dy = args.dy;
        let BackwardTensors { gradients, weights: tensors } =
            self.backward_delayed_view(backend, &saved.view(), args)?;
        let dy = match &tensors.dy {
            Some(_) => None,
            None => Some(backend.duplicate(dy)?),
        };
        let (x, h) = (Arc::clone(&saved.x), Arc::clone(&saved.h));
        Ok(DelayedBackward { gradients, weights: DelayedWeightGrads { tensors, dy, x, h } })
    }

    /// [`GroupedMlp::backward_delayed`] over saved tensors that the caller owns. It keeps `x` and `h`, in BF16 precision
    /// `dy` as well, for [`WgradTensors::run`]; `c` and the weights are not needed any more.
    pub fn backward_delayed_view<B: Backend>(
        &self,
        backend: &B,
        saved: &SavedView<'_, B::Memory>,
        args: BackwardArgs<'_, B::Memory>,
    ) -> Result<BackwardTensors<B::Memory>, Error> {
        self.check_backward(backend, saved, &args.dy)?;
        if args.dw.is_some() {
            let conflict = "expected no buffers for gradients that are computed later";
            return Err(misuse("dw", conflict, "pass them to DelayedWeightGrads::run, or call backward"));
        }
        if !saved.plan.needs.weights {
            let conflict =
                "the forward was told that weights need no gradients, so none can be computed later";
            return Err(misuse("saved", conflict, "pass Needs with weights to forward, or call backward"));
        }
        let mut started = self.start(backend, saved, args)?;
        started.gradients.dx = self.input_gradient(backend, saved, &started)?;
        let Started { gradients, dc, dc_copies, dy, h } = started;
        let weights = WgradTensors {
            plan: Plan::clone(&saved.plan),
            groups: saved.groups.clone(),
            dy,
            dc: match dc_copies.columnwise.or(dc.map(OwnedOperand::Bf16)) {
                Some(dc) => dc,
                None => return Err(misuse("dc", "no copy of it was made for its weights", INCONSISTENT)),
            },
            h,
        };
        Ok(BackwardTensors { gradients, weights })
    }

    /// Everything but the last products, for arguments that were checked.
    fn start<B: Backend>(
        &self,
        backend: &B,
        saved: &SavedView<'_, B::Memory>,
        args: BackwardArgs<'_, B::Memory>,
    ) -> Result<Started<B::Memory>, Error> {
        let BackwardArgs { dy, random, mut trace, dw: _ } = args;
        let dy = B::Memory::shorten(dy);
        let (config, plan, groups) = (&self.config, &*saved.plan, saved.groups);
        let (t, experts) = (groups.rows(), config.experts);
        let (hidden, ffn, n1) = (config.hidden, config.ffn, config.fc1_rows());
        let Some((c, prob)) = &saved.c else {
            return Err(misuse(
                "saved",
                "expected a forward with gradients, got Needs::NONE",
                "pass other needs to forward",
            ));
        };
        let (c, prob) = (B::Memory::shorten(*c), B::Memory::shorten(*prob));
        let grouped_dy = Grouped { name: "dy", data: dy, cols: hidden, groups };
        let dy_rounding = random.rounding(config.gradient_rounding, 0);
        let Copies { rowwise: dy_rowwise, columnwise: dy_columnwise, .. } =
            quantize_gradient(backend, &plan.dy, &grouped_dy, None, dy_rounding, &mut trace)?;

        let mut dc = backend.empty::<bf16>(t * n1)?;
        let mut dprob = backend.empty::<f32>(t)?;
        let mut db1 =
            (config.bias && plan.needs.weights).then(|| backend.empty::<f32>(experts * n1)).transpose()?;
        let mut h = plan.rebuilds_h.then(|| backend.empty::<bf16>(t * ffn)).transpose()?;
        let mut dh = trace.is_some().then(|| backend.empty::<f32>(t * ffn)).transpose()?;
        let mut dc_amaxes = match plan.dc.needs_epilogue() {
            true => Some(Amaxes::empty(backend, &plan.dc, experts)?),
            false => None,
        };
        backend.grouped_gemm_dact(GroupedGemmDact {
            dy: operand_or(&dy_rowwise, B::Memory::shorten(dy)),
            w2: saved.weights.w2.operand(),
            hidden,
            ffn,
            activation: config.activation,
            layout: config.glu_layout,
            c: B::Memory::shorten(c),
            prob: B::Memory::shorten(prob),
            groups,
            dc: B::Memory::view_mut(&mut dc),
            dprob: B::Memory::view_mut(&mut dprob),
            db1: db1.as_mut().map(B::Memory::view_mut),
            dc_amax: dc_amaxes.as_mut().map(|a| a.epilogue(&plan.dc)),
            h: h.as_mut().map(B::Memory::view_mut),
            dh: dh.as_mut().map(B::Memory::view_mut),
        })?;
        if let (Some(trace), Some(dh)) = (&mut trace, &dh) {
            trace.add(backend, "dh", &[t, ffn], B::Memory::view(dh))?;
            trace.add(backend, "dc", &[t, n1], B::Memory::view(&dc))?;
        }
        // What no later pass reads makes room for what they write.
        drop((dh, dy_rowwise));

        let mut db2 = None;
        if let Some(b2) = saved.weights.w2.bias() {
            db2 = plan.needs.weights.then(|| backend.empty::<f32>(experts * hidden)).transpose()?;
            backend.grouped_bias_grad(GroupedBiasGrad {
                dy: B::Memory::shorten(dy),
                hidden,
                b2,
                prob: B::Memory::shorten(prob),
                groups,
                dprob: B::Memory::view_mut(&mut dprob),
                db2: db2.as_mut().map(B::Memory::view_mut),
            })?;
        }

        let h = rebuilt_h(backend, saved, h, &mut trace)?;
        let grouped_dc = Grouped { name: "dc", data: B::Memory::view(&dc), cols: n1, groups };
        let dc_rounding = random.rounding(config.gradient_rounding, 1);
        let dc_copies =
            quantize_gradient(backend, &plan.dc, &grouped_dc, dc_amaxes, dc_rounding, &mut trace)?;

        let dc = (config.precision == Precision::Bf16).then_some(dc);

        let gradients = Gradients { dx: None, dprob, db1, db2 };
        Ok(Started { gradients, dc, dc_copies, dy: dy_columnwise, h })
    }

    /// `dx = dc · W1`, if asked for.
    fn input_gradient<B: Backend>(
        &self,
        backend: &B,
        saved: &SavedView<'_, B::Memory>,
        started: &Started<B::Memory>,
    ) -> Result<Option<Buffer<B::Memory, bf16>>, Error> {
        if !saved.plan.needs.input {
            return Ok(None);
        }
        let mut dx = backend.empty::<bf16>(saved.groups.rows() * self.config.hidden)?;
        backend.grouped_gemm(GroupedGemm {
            a: started.dc_or(&started.dc_copies.rowwise)?,
            w: saved.weights.w1.operand(),
            shape: self.weight_shapes()[0],
            side: Side::Dgrad,
            groups: saved.groups,
            bias: None,
            out: B::Memory::view_mut(&mut dx),
        })?;
        Ok(Some(dx))
    }

    fn check_backward<B: Backend>(
        &self,
        backend: &B,
        saved: &SavedView<'_, B::Memory>,
        dy: &View<'_, B::Memory, bf16>,
    ) -> Result<(), Error> {
        let config = &self.config;
        if saved.plan.config != *config {
            let fix = "run the backward with the operator that ran the forward";
            return Err(misuse("saved", "it comes from an operator of another configuration", fix));
        }
        let stochastic = config.gradient_rounding == GradientRounding::Stochastic;
        require(&backend.capabilities(), config.precision == Precision::Nvfp4, stochastic)?;
        expect_len("backward", "dy", &[saved.groups.rows(), config.hidden], B::Memory::len(dy))?;
        Ok(())
    }
}

pub(super) fn misuse(what: &'static str, conflict: &str, fix: &'static str) -> Error {
    Error::Misuse(Misuse::Conflict { what, conflict: conflict.into(), fix })
}

pub(super) fn not_saved(tensor: &'static str) -> Error {
    misuse(tensor, "the forward saved it in no form that the backward can use", INCONSISTENT)
}

const INCONSISTENT: &str = "report this: the plan is inconsistent";

/// Copies of a gradient, its amaxes from the epilogue that wrote it or from a pass; none in BF16.
fn quantize_gradient<B: Backend>(
    backend: &B,
    plan: &OperandPlan,
    x: &Grouped<'_, B::Memory>,
    epilogue: Option<Amaxes<B::Memory>>,
    rounding: [Rounding; 2],
    trace: &mut Option<&mut Trace>,
) -> Result<Copies<B::Memory>, Error> {
    let amaxes = match epilogue {
        Some(amaxes) => amaxes,
        None if plan.needs_pass() => Amaxes::by_pass(backend, plan, x)?,
        None => return Ok(Copies::none()),
    };
    quantize(backend, plan, Phase::Backward, x, amaxes, rounding, trace)
}

fn operand_or<'a, M: Memory>(copy: &'a Option<OwnedOperand<M>>, plain: View<'a, M, bf16>) -> Operand<'a, M> {
    copy.as_ref().map_or(Operand::Bf16(plain), OwnedOperand::view)
}
