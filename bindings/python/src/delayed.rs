//! A backward that leaves the weights' gradients for later.
//!
//! [`DelayedWeightGrads`] keeps what the two products read and nothing else: the copies that the backward made, and of
//! torch's tensors the saved `x` and `h`, in BF16 precision `dy` as well. `c` and the weights can go.

use half::bf16;
use moe4::kernels::Host;
use moe4::mlp::{
    BackwardArgs, BackwardTensors, GroupedMlp, Plan, SavedAs, WeightShape, WgradParts, WgradTensors,
};
use moe4_cuda::DeviceMemory;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::cpu::OnCpu;
use crate::cuda::OnCuda;
use crate::exchange::Exchange;
use crate::operator::{Backward, expect_weights, give, rebuild, weight_grads};
use crate::options::{needs, parse};
use crate::place::{Checked, Place};
use crate::splits::Splits;
use crate::tensor::{Device, Tensor, common_device, expect_disjoint, misplaced};

type Object<'py> = Bound<'py, PyAny>;
/// `[dx, dprob, db1, db2]`.
type Given<'py> = Vec<Option<Object<'py>>>;

/// The weights' gradients of one backward, computed by `run`, once.
#[pyclass(module = "moe4._moe4")]
pub(crate) struct DelayedWeightGrads {
    kept: Option<Anywhere>,
}

enum Anywhere {
    Cpu(Box<Kept<Host>>),
    /// With where it was made.
    Cuda(Box<Kept<DeviceMemory>>, OnCuda),
}

struct Kept<M: Exchange> {
    tensors: WgradTensors<M>,
    /// Of both weights.
    shapes: [WeightShape; 2],
    plan: Plan,
    groups: M::Groups,
    /// In BF16 precision.
    dy: Option<Tensor>,
    x: Vec<Tensor>,
    h: Vec<Tensor>,
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
    let plan = mlp.plan(needs(input, true));
    let call = Backward::new(plan, [dy, x, prob, seed], [&w1, &w2], [b1, b2], &saved)?;
    let (gradients, kept) = match common_device(call.tensors())? {
        Device::Cpu => {
            let (gradients, kept) = at(py, &OnCpu, &mlp, splits, call)?;
            (gradients, Anywhere::Cpu(kept.into()))
        }
        Device::Cuda(ordinal) => {
            let place = OnCuda::current(py, ordinal)?;
            let (gradients, kept) = at(py, &place, &mlp, splits, call)?;
            (gradients, Anywhere::Cuda(kept.into(), place))
        }
    };
    Ok((gradients, DelayedWeightGrads { kept: Some(kept) }))
}

fn at<'py, P: Place>(
    py: Python<'py>,
    place: &P,
    mlp: &GroupedMlp,
    splits: &Object<'py>,
    call: Backward,
) -> PyResult<(Given<'py>, Kept<P::Memory>)> {
    let needs = call.plan.needs;
    let rows = call.rows(mlp)?;
    let splits = Splits::new(Some(splits), rows, call.dy.device())?;
    let (BackwardTensors { gradients, weights: tensors }, groups) = place.run(py, |backend| {
        let groups = P::groups_for_any(backend, &splits)?;
        let parts = call.parts::<P::Memory>(mlp, &groups).checked()?;
        let saved = mlp.saved_view::<P::Memory>(needs, parts)?;
        let dy = call.dy.view::<P::Memory, bf16>().checked()?;
        let made = P::seeded(backend, &call.seed, |random| {
            let args = BackwardArgs { dy, random, dw: None, trace: None };
            Ok(mlp.backward_delayed_view(backend, &saved, args)?)
        })?;
        drop(saved);
        Ok((made, groups))
    })?;
    let gradients = give(py, place, mlp, rows, gradients)?;
    let Backward { plan, dy, x, saved, .. } = call;
    let (dy, x) = match plan.saved_x {
        SavedAs::Bf16 => (Some(dy), vec![x]),
        _ => (None, saved.x),
    };
    let kept = Kept { tensors, shapes: mlp.weight_shapes(), plan, groups, dy, x, h: saved.h };
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
        let kept = self.kept.as_ref().ok_or_else(|| {
            PyRuntimeError::new_err("delayed weight gradients: expected one run, got another")
        })?;
        let mut begun = false;
        let outcome = match (kept, common_device(dw.iter().flatten())?) {
            (Anywhere::Cpu(kept), Device::Cpu) => run_at(py, &OnCpu, kept, dw, accumulate, &mut begun),
            (Anywhere::Cuda(kept, made_at), Device::Cuda(ordinal)) if made_at.ordinal() == ordinal => {
                let place = OnCuda::current(py, ordinal)?;
                place.after(made_at, || run_at(py, &place, kept, dw, accumulate, &mut begun))
            }
            (kept, device) => {
                let made_at = match kept {
                    Anywhere::Cpu(_) => Device::Cpu,
                    Anywhere::Cuda(_, place) => Device::Cuda(place.ordinal()),
                };
                return Err(misplaced("dw1[0]", device, made_at));
            }
        };
        // Not before: on a GPU this frees memory, and only now the stream that it belongs to waits for its readers.
        if outcome.is_ok() || (begun && accumulate) {
            self.kept = None;
        }
        outcome
    }

    /// Whether there is nothing to run any more: it ran, or it failed in the midst of adding, which a second run would do
    /// twice.
    fn over(&self) -> bool {
        self.kept.is_none()
    }
}

/// `begun` tells whether something may have been written; before that everything is checked.
fn run_at<P: Place>(
    py: Python<'_>,
    place: &P,
    Kept { tensors, shapes, plan, groups, dy, x, h }: &Kept<P::Memory>,
    mut dw: [Vec<Tensor>; 2],
    accumulate: bool,
    begun: &mut bool,
) -> PyResult<()> {
    let config = &plan.config;
    dw.iter().zip(*shapes).try_for_each(|(dw, shape)| expect_weights(dw, config.experts, shape))?;
    let written: Vec<&Tensor> = dw.iter().flatten().collect();
    expect_disjoint(&written, dy.iter().chain(x).chain(h))?;
    let dw = weight_grads::<P::Memory>(&mut dw, config.experts, accumulate)?;
    place.run(py, |backend| {
        let parts = WgradParts {
            dy: dy.as_ref().map(Tensor::view::<P::Memory, bf16>).transpose().checked()?,
            x: rebuild::<P::Memory>(plan.saved_x, x, groups, config.hidden).checked()?,
            h: rebuild::<P::Memory>(plan.saved_h, h, groups, config.ffn).checked()?,
        };
        *begun = true;
        Ok(tensors.run(backend, parts, dw)?)
    })
}
