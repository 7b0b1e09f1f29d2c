//! A backward that leaves the weights' gradients for later.
//!
//! [`DelayedWeightGrads`] keeps what the two products read and nothing else: the copies that the backward made, and of
//! torch's tensors the saved `x` and `h`, in BF16 precision `dy` as well. `c` and the weights can go.

use half::bf16;
use moe4::kernels::{Backend, Host};
use moe4::mlp::{BackwardArgs, BackwardTensors, GroupedMlp, Plan, SavedAs, WgradParts, WgradTensors};
use moe4::tensor::Groups;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::exchange::Exchange;
use crate::operator::{Backward, give, rebuild, weight_grads};
use crate::options::parse;
use crate::run::{Checked, OnCpu, Place};
use crate::tensor::{Tensor, expect_disjoint, groups};

type Object<'py> = Bound<'py, PyAny>;
/// `[dx, dprob, db1, db2]`.
type Given<'py> = Vec<Option<Object<'py>>>;

/// The weights' gradients of one backward, computed by `run`, once.
#[pyclass(module = "moe4._moe4")]
pub(crate) struct DelayedWeightGrads {
    kept: Option<Kept<Host>>,
}

struct Kept<M: Exchange> {
    tensors: WgradTensors<M>,
    plan: Plan,
    groups: Groups,
    /// In BF16 precision.
    dy: Option<Tensor>,
    x: [Tensor; 4],
    h: [Tensor; 4],
}

/// `([dx, dprob, db1, db2], handle)`; arguments are those of `backward`.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "those of `backward`")]
pub(crate) fn backward_delayed<'py>(
    py: Python<'py>,
    options: &str,
    dy: &Object<'py>,
    x: &Object<'py>,
    prob: &Object<'py>,
    splits: &Object<'py>,
    w1: Vec<Object<'py>>,
    w2: Vec<Object<'py>>,
    b1: Option<&Object<'py>>,
    b2: Option<&Object<'py>>,
    saved: Vec<Object<'py>>,
    seed: &Object<'py>,
    input: bool,
) -> PyResult<(Given<'py>, DelayedWeightGrads)> {
    let mlp = parse(options)?;
    let call = Backward::new([dy, x, prob, seed], [&w1, &w2], [b1, b2], &saved, [input, true])?;
    let (gradients, kept) = at::<OnCpu>(py, &mlp, splits, call)?;
    Ok((gradients, DelayedWeightGrads { kept: Some(kept) }))
}

fn at<'py, P: Place>(
    py: Python<'py>,
    mlp: &GroupedMlp,
    splits: &Object<'py>,
    call: Backward,
) -> PyResult<(Given<'py>, Kept<P::Memory>)> {
    let plan = mlp.plan(call.needs);
    let rows = call.rows(mlp)?;
    let groups = groups(Some(splits), rows)?;
    let BackwardTensors { gradients, weights: tensors } = P::run(py, |backend| {
        let on_device = backend.groups(&groups)?;
        let parts = call.parts::<P::Memory>(mlp, &plan, &groups, &on_device).checked()?;
        let saved = mlp.saved_view::<P::Memory>(call.needs, parts)?;
        let dy = call.dy.view::<P::Memory, bf16>().checked()?;
        let args = BackwardArgs { dy, random: call.seed, dw: None, trace: None };
        Ok(mlp.backward_delayed_view(backend, &saved, args)?)
    })?;
    let gradients = give::<P::Memory>(py, mlp, rows, gradients)?;
    let Backward { dy, x, saved: [_, h, xc, xs, xa, hc, hs, ha], .. } = call;
    let dy = (plan.saved_x == SavedAs::Bf16).then_some(dy);
    let kept = Kept { tensors, plan, groups, dy, x: [x, xc, xs, xa], h: [h, hc, hs, ha] };
    Ok((gradients, kept))
}

#[pymethods]
impl DelayedWeightGrads {
    /// Gradients of the weights go to `dw1` and `dw2`, see `backward`.
    fn run(
        &mut self,
        py: Python<'_>,
        dw1: Vec<Object<'_>>,
        dw2: Vec<Object<'_>>,
        accumulate: bool,
    ) -> PyResult<()> {
        let dw = [Tensor::list("dw1", &dw1)?, Tensor::list("dw2", &dw2)?];
        let kept = self.kept.take().ok_or_else(|| {
            PyRuntimeError::new_err("delayed weight gradients: expected one run, got another")
        })?;
        run_at::<OnCpu>(py, kept, dw, accumulate)
    }
}

fn run_at<P: Place>(
    py: Python<'_>,
    Kept { tensors, plan, groups, dy, x, h }: Kept<P::Memory>,
    mut dw: [Vec<Tensor>; 2],
    accumulate: bool,
) -> PyResult<()> {
    let written: Vec<&Tensor> = dw.iter().flatten().collect();
    expect_disjoint(&written, dy.iter().chain(&x).chain(&h))?;
    let config = &plan.config;
    P::run(py, |backend| {
        let parts = WgradParts {
            dy: dy.as_ref().map(Tensor::view::<P::Memory, bf16>).transpose().checked()?,
            x: rebuild::<P::Memory>(plan.saved_x, x.each_ref(), &groups, config.hidden).checked()?,
            h: rebuild::<P::Memory>(plan.saved_h, h.each_ref(), &groups, config.ffn).checked()?,
        };
        let dw = weight_grads::<P::Memory>(&mut dw, config.experts, accumulate).checked()?;
        Ok(tensors.run(backend, parts, dw)?)
    })
}
