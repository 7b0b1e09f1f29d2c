//! The backward: from `dy` to `dx`, the weights' and the probabilities' gradients.

use super::config::{GradientRounding, Precision};
use super::plan::{OperandPlan, Phase};
use super::quantize::{Amaxes, Copies, Grouped, quantize};
use super::saved::{Saved, SavedTensorView, SavedView};
use super::trace::Trace;
use super::{GroupedMlp, WeightGrad};
use crate::kernels::contract::{GroupedBiasGrad, GroupedGemm, GroupedGemmDact, GroupedWgrad, Operand, Side};
use crate::kernels::error::{expect_len, require};
use crate::kernels::{Backend, Buffer, Error, Extent, Memory, Misuse, View};
use crate::numerics::rounding::{RandomStream, Rounding};
use half::bf16;

/// Inputs of a backward.
pub struct BackwardArgs<'a, M: Memory> {
    /// `[T, H]`.
    pub dy: View<'a, M, bf16>,
    /// Where stochastic rounding takes its random bits from.
    pub random: RandomSeed,
    /// Where `dW1` and `dW2` go; present exactly if the forward's needs asked for weight gradients.
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
        args: BackwardArgs<'_, B::Memory>,
    ) -> Result<Gradients<B::Memory>, Error> {
        let BackwardArgs { dy, random, dw, mut trace } = args;
        let dy = B::Memory::shorten(dy);
        let (config, plan, groups) = (&self.config, &*saved.plan, saved.groups);
        let (t, experts) = (groups.rows(), config.experts);
        let (hidden, ffn, n1) = (config.hidden, config.ffn, config.fc1_rows());
        self.check_backward(backend, saved, &dy, &dw)?;
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
        let dy_copies = quantize_gradient(backend, &plan.dy, &grouped_dy, None, dy_rounding, &mut trace)?;

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
            dy: rowwise_or(&dy_copies, B::Memory::shorten(dy)),
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
        drop(dh);

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

        let grouped_dc = Grouped { name: "dc", data: B::Memory::view(&dc), cols: n1, groups };
        let dc_rounding = random.rounding(config.gradient_rounding, 1);
        let dc_copies =
            quantize_gradient(backend, &plan.dc, &grouped_dc, dc_amaxes, dc_rounding, &mut trace)?;

        if let Some(dw) = dw {
            let operands = GradientOperands {
                dy: columnwise_or(&dy_copies, B::Memory::shorten(dy)),
                dc: columnwise_or(&dc_copies, B::Memory::view(&dc)),
            };
            self.weight_gradients(backend, saved, operands, h, dw, trace)?;
        }

        let mut dx = None;
        if plan.needs.input {
            let mut out = backend.empty::<bf16>(t * hidden)?;
            backend.grouped_gemm(GroupedGemm {
                a: rowwise_or(&dc_copies, B::Memory::view(&dc)),
                w: saved.weights.w1.operand(),
                shape: self.weight_shapes()[0],
                side: Side::Dgrad,
                groups,
                bias: None,
                out: B::Memory::view_mut(&mut out),
            })?;
            dx = Some(out);
        }
        Ok(Gradients { dx, dprob, db1, db2 })
    }

    /// `dW2 = dyᵀ·h` and `dW1 = dcᵀ·x`; `rebuilt_h` is `h` as the `dact` kernel wrote it again.
    fn weight_gradients<B: Backend>(
        &self,
        backend: &B,
        saved: &SavedView<'_, B::Memory>,
        operands: GradientOperands<'_, B::Memory>,
        rebuilt_h: Option<Buffer<B::Memory, bf16>>,
        mut dw: WeightGrads<'_, B::Memory>,
        mut trace: Option<&mut Trace>,
    ) -> Result<(), Error> {
        let groups = saved.groups;
        let [w1_shape, w2_shape] = self.weight_shapes();
        let packed_h = match (&saved.h, &rebuilt_h) {
            (SavedTensorView::Amax(amax), Some(h)) => {
                let h = Grouped { name: "h", data: B::Memory::view(h), cols: self.config.ffn, groups };
                let amaxes = Amaxes { rowwise: backend.duplicate(B::Memory::shorten(*amax))?, rht: None };
                let nearest = [Rounding::Nearest; 2];
                quantize(backend, &saved.plan.h, Phase::Backward, &h, &amaxes, nearest, &mut trace)?
                    .columnwise
            }
            _ => None,
        };
        let h = match (&saved.h, &packed_h, &rebuilt_h) {
            (SavedTensorView::Columnwise(q), ..) => Operand::<B::Memory>::Nvfp4(*q).shorten(),
            (_, Some(q), _) => Operand::Nvfp4(q.view()),
            (SavedTensorView::Bf16(h), ..) => Operand::Bf16(B::Memory::shorten(*h)),
            (_, _, Some(h)) => Operand::Bf16(B::Memory::view(h)),
            _ => return Err(not_saved("h")),
        };
        let x = match &saved.x {
            SavedTensorView::Columnwise(q) => Operand::<B::Memory>::Nvfp4(*q).shorten(),
            SavedTensorView::Bf16(x) => Operand::Bf16(B::Memory::shorten(*x)),
            _ => return Err(not_saved("x")),
        };
        let GradientOperands { dy, dc } = operands;
        let dw2 = dw.dw2.reborrow();
        backend.grouped_wgrad(GroupedWgrad { a: dy.shorten(), b: h, shape: w2_shape, groups, dw: dw2 })?;
        let dw1 = dw.dw1.reborrow();
        backend.grouped_wgrad(GroupedWgrad { a: dc.shorten(), b: x, shape: w1_shape, groups, dw: dw1 })
    }

    fn check_backward<B: Backend>(
        &self,
        backend: &B,
        saved: &SavedView<'_, B::Memory>,
        dy: &View<'_, B::Memory, bf16>,
        dw: &Option<WeightGrads<'_, B::Memory>>,
    ) -> Result<(), Error> {
        let config = &self.config;
        if saved.plan.config != *config {
            let fix = "run the backward with the operator that ran the forward";
            return Err(misuse("saved", "it comes from an operator of another configuration", fix));
        }
        let stochastic = config.gradient_rounding == GradientRounding::Stochastic;
        require(&backend.capabilities(), config.precision == Precision::Nvfp4, stochastic)?;
        expect_len("backward", "dy", &[saved.groups.rows(), config.hidden], B::Memory::len(dy))?;
        match (dw, saved.plan.needs.weights) {
            (Some(dw), true) => {
                let [s1, s2] = self.weight_shapes();
                dw.dw1.check("backward", "dw1", s1, config.experts)?;
                Ok(dw.dw2.check("backward", "dw2", s2, config.experts)?)
            }
            (None, false) => Ok(()),
            (None, true) => Err(misuse(
                "dw",
                "the forward was told that weights need gradients, got no buffers",
                "pass dw",
            )),
            (Some(_), false) => {
                let fix = "pass Needs with weights to forward, or no buffers";
                Err(misuse("dw", "the forward was told that weights need no gradients, got buffers", fix))
            }
        }
    }
}

/// The columnwise copies of both gradients, or the gradients themselves in BF16.
struct GradientOperands<'a, M: Memory> {
    dy: Operand<'a, M>,
    dc: Operand<'a, M>,
}

fn misuse(what: &'static str, conflict: &str, fix: &'static str) -> Error {
    Error::Misuse(Misuse::Conflict { what, conflict: conflict.into(), fix })
}

fn not_saved(tensor: &'static str) -> Error {
    misuse(
        tensor,
        "the forward saved it in no form that the backward can use",
        "report this: the plan is inconsistent",
    )
}

/// Copies of a gradient, its amaxes from the epilogue that wrote it or from a pass; none in BF16.
fn quantize_gradient<B: Backend>(
    backend: &B,
    plan: &OperandPlan,
    x: &Grouped<'_, B::Memory>,
    epilogue: Option<Amaxes<B::Memory>>,
    rounding: [Rounding; 2],
    trace: &mut Option<&mut Trace>,
) -> Result<Option<Copies<B::Memory>>, Error> {
    let amaxes = match epilogue {
        Some(amaxes) => amaxes,
        None if plan.needs_pass() => Amaxes::by_pass(backend, plan, x)?,
        None => return Ok(None),
    };
    quantize(backend, plan, Phase::Backward, x, &amaxes, rounding, trace).map(Some)
}

fn rowwise_or<'a, M: Memory>(copies: &'a Option<Copies<M>>, plain: View<'a, M, bf16>) -> Operand<'a, M> {
    copies
        .as_ref()
        .and_then(|c| c.rowwise.as_ref())
        .map_or(Operand::Bf16(plain), |q| Operand::Nvfp4(q.view()))
}

fn columnwise_or<'a, M: Memory>(copies: &'a Option<Copies<M>>, plain: View<'a, M, bf16>) -> Operand<'a, M> {
    copies
        .as_ref()
        .and_then(|c| c.columnwise.as_ref())
        .map_or(Operand::Bf16(plain), |q| Operand::Nvfp4(q.view()))
}
