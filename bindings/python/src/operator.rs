//! The grouped MLP, forward and backward, over tensors that torch keeps.
//!
//! What the backward needs travels as torch tensors, so that autograd, checkpointing and memory accounting see it. The
//! forward returns `y` and those of `c, h, x_codes, x_scales, x_amax, h_codes, h_scales, h_amax` that the plan saves, in
//! this order; [`SavedList`] finds them again. Columnwise codes and scales are flat and long enough
//! for any splits, `[H · Tb/2]` and `[H · Tb/16]` with `Tb` = [`Groups::most_padded_rows`], since their true length depends on the
//! values of the splits, which a compiler that traces shapes does not know.

use std::slice;

use half::bf16;
use moe4::kernels::{Buffer, Extent};
use moe4::mlp::{
    BackwardArgs, Biases, ForwardTensors, ForwardViewArgs, GradBuffers, GradMode, Gradients, GroupedMlp,
    Needs, Nvfp4Weights, Packed, Plan, Precision, SavedAs, SavedParts, SavedTensor, SavedTensorView,
    WeightGrad, WeightGrads, WeightShape, WeightSource, WeightsView,
};
use moe4::tensor::{Groups, Nvfp4, OperandShape};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::error::raise;
use crate::exchange::Exchange;
use crate::options::{needs, parse};
use crate::place::{Checked, Place, dispatch};
use crate::seed::Seed;
use crate::splits::Splits;
use crate::tensor::{Tensor, common_device, expect_disjoint};
use crate::torch::Dtype;

type Object<'py> = Bound<'py, PyAny>;

/// Raises if the options are not valid.
#[pyfunction]
pub(crate) fn check_options(options: &str) -> PyResult<()> {
    parse(options).map(drop)
}

/// What a forward and backward will do, as text.
#[pyfunction]
pub(crate) fn plan(options: &str, input: bool, weights: bool) -> PyResult<String> {
    Ok(parse(options)?.plan(needs(input, weights)).to_string())
}

/// `(c, x, h)`: whether `c` is saved, and as what `x` and `h` are: `nothing`, `columnwise`, `amax` or `bf16`.
#[pyfunction]
pub(crate) fn saved_forms(
    options: &str,
    input: bool,
    weights: bool,
) -> PyResult<(bool, &'static str, &'static str)> {
    let plan = parse(options)?.plan(needs(input, weights));
    let form = |saved| match saved {
        SavedAs::Nothing => "nothing",
        SavedAs::Columnwise => "columnwise",
        SavedAs::Amax => "amax",
        SavedAs::Bf16 => "bf16",
    };
    Ok((plan.saved_c, form(plan.saved_x), form(plan.saved_h)))
}

/// Weights as they come: quantized `[codes, scales, amax, values]` of both projections, `values` empty where there are
/// none, or BF16 tensors, packed or one an expert.
struct Weights {
    w1: Vec<Tensor>,
    w2: Vec<Tensor>,
    biases: Option<(Tensor, Tensor)>,
}

impl Weights {
    fn new(
        w1: &[Object<'_>],
        w2: &[Object<'_>],
        b1: Option<&Object<'_>>,
        b2: Option<&Object<'_>>,
    ) -> PyResult<Self> {
        let biases = match (b1, b2) {
            (Some(b1), Some(b2)) => Some((Tensor::new("b1", b1)?, Tensor::new("b2", b2)?)),
            (None, None) => None,
            _ => return Err(PyValueError::new_err("biases: expected both b1 and b2 or neither, got one")),
        };
        Ok(Self { w1: Tensor::list("w1", w1)?, w2: Tensor::list("w2", w2)?, biases })
    }

    fn view<M: Exchange>(&self, mlp: &GroupedMlp) -> PyResult<WeightsView<'_, M>> {
        let config = mlp.config();
        let biases = match &self.biases {
            Some((b1, b2)) => {
                b1.expect(&[config.experts, config.fc1_rows()])?;
                b2.expect(&[config.experts, config.hidden])?;
                Some(Biases { b1: b1.view::<M, f32>()?, b2: b2.view::<M, f32>()? })
            }
            None => None,
        };
        let view = match config.precision {
            Precision::Nvfp4 => {
                mlp.weights_nvfp4(quantized::<M>(&self.w1)?, quantized::<M>(&self.w2)?, biases)
            }
            Precision::Bf16 => {
                let [s1, s2] = mlp.weight_shapes();
                let experts = config.experts;
                mlp.weights_bf16(plain(&self.w1, experts, s1)?, plain(&self.w2, experts, s2)?, biases)
            }
        };
        view.map_err(|e| raise(e.into()))
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.w1.iter().chain(&self.w2).chain(self.biases.iter().flat_map(|(b1, b2)| [b1, b2]))
    }
}

fn quantized<M: Exchange>(tensors: &[Tensor]) -> PyResult<Nvfp4Weights<'_, M>> {
    let [codes, scales, amax, values] = tensors else {
        let message =
            format!("weights: expected codes, scales, amax and values, got {} tensors", tensors.len());
        return Err(PyValueError::new_err(message));
    };
    let (codes, scales) = (codes.view::<M, u8>()?, scales.view::<M, u8>()?);
    let unpacked = if values.len() > 0 { Some(values.view::<M, bf16>()?) } else { None };
    Ok(Nvfp4Weights { packed: Nvfp4 { codes, scales, amax: amax.view::<M, f32>()? }, unpacked })
}

/// BF16 weights; one tensor stays one, whose experts lie at equal distances.
fn plain<M: Exchange>(
    weights: &[Tensor],
    experts: usize,
    shape: WeightShape,
) -> PyResult<WeightSource<'_, M>> {
    expect_weights(weights, experts, shape)?;
    match weights {
        [one] if one.shape().len() == 3 => Ok(WeightSource::Packed(one.view::<M, bf16>()?)),
        each => {
            Ok(WeightSource::PerExpert(each.iter().map(Tensor::view::<M, bf16>).collect::<PyResult<_>>()?))
        }
    }
}

/// One tensor of all experts, or one for each, of the shape of a weight.
pub(crate) fn expect_weights(
    tensors: &[Tensor],
    experts: usize,
    WeightShape { n, k }: WeightShape,
) -> PyResult<()> {
    match tensors {
        [one] if one.shape().len() == 3 => one.expect(&[experts, n, k]),
        each if each.len() == experts => each.iter().try_for_each(|tensor| tensor.expect(&[n, k])),
        each => Err(PyValueError::new_err(format!(
            "weights: expected one tensor for each of {experts} experts, got {}",
            each.len()
        ))),
    }
}

/// `y [T, H]` and what the backward needs, see the top of this file.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "one custom operator")]
pub(crate) fn forward<'py>(
    py: Python<'py>,
    options: &str,
    x: &Object<'py>,
    prob: &Object<'py>,
    splits: &Object<'py>,
    w1: Vec<Object<'py>>,
    w2: Vec<Object<'py>>,
    b1: Option<&Object<'py>>,
    b2: Option<&Object<'py>>,
    input: bool,
    weights: bool,
) -> PyResult<Vec<Object<'py>>> {
    let mlp = parse(options)?;
    let (tokens, params) =
        ([Tensor::new("x", x)?, Tensor::new("prob", prob)?], Weights::new(&w1, &w2, b1, b2)?);
    let device = common_device(tokens.iter().chain(params.tensors()))?;
    dispatch!(py, device, place => {
        forward_at(py, &place, &mlp, &tokens, splits, &params, needs(input, weights))
    })
}

fn forward_at<'py, P: Place>(
    py: Python<'py>,
    place: &P,
    mlp: &GroupedMlp,
    [x, prob]: &[Tensor; 2],
    splits: &Object<'py>,
    params: &Weights,
    needs: Needs,
) -> PyResult<Vec<Object<'py>>> {
    let config = mlp.config();
    let [t, hidden] = x.dims()?;
    x.expect(&[t, config.hidden])?;
    prob.expect(&[t])?;
    let splits = Splits::new(Some(splits), t, x.device())?;
    let out = place.run(py, |backend| {
        let view = params.view::<P::Memory>(mlp).checked()?;
        let args = ForwardViewArgs {
            x: x.view::<P::Memory, bf16>().checked()?,
            prob: prob.view::<P::Memory, f32>().checked()?,
            groups: &P::groups_for_any(backend, &splits)?,
            weights: &view,
            needs,
            trace: None,
        };
        Ok(mlp.forward_view(backend, args)?)
    })?;
    let ForwardTensors { y, c, x, h } = out;
    let mut outputs = vec![place.hand_over(py, y, &[t, hidden])?];
    if let Some(c) = c {
        outputs.push(place.hand_over(py, c, &[t, config.fc1_rows()])?);
    }
    let h = match h {
        SavedTensor::Bf16(h) => {
            outputs.push(place.hand_over(py, h, &[t, config.ffn])?);
            SavedTensor::Nothing
        }
        other => other,
    };
    for (saved, cols) in [(x, hidden), (h, config.ffn)] {
        give_saved(py, place, saved, cols, t, config.experts, &mut outputs)?;
    }
    Ok(outputs)
}

/// Codes, scales and amax, as far as they were saved.
fn give_saved<'py, P: Place>(
    py: Python<'py>,
    place: &P,
    saved: SavedTensor<P::Memory>,
    cols: usize,
    rows: usize,
    experts: usize,
    outputs: &mut Vec<Object<'py>>,
) -> PyResult<()> {
    match saved {
        SavedTensor::Columnwise(Packed(Nvfp4 { codes, scales, amax })) => {
            let shape = OperandShape { rows: cols, k: Groups::most_padded_rows(experts, rows) };
            for (mut flat, len) in [(codes, shape.code_bytes()), (scales, shape.scale_bytes())] {
                P::Memory::resize(&mut flat, len);
                outputs.push(place.hand_over(py, flat, &[len])?);
            }
            outputs.push(place.hand_over(py, amax, &[experts])?);
        }
        SavedTensor::Amax(amax) => outputs.push(place.hand_over(py, amax, &[experts])?),
        SavedTensor::Nothing | SavedTensor::Bf16(_) => {}
    }
    Ok(())
}

/// The tensors that a forward left, by what they are.
pub(crate) struct SavedList {
    c: Tensor,
    /// Its parts; `x` in BF16 is an argument.
    pub(crate) x: Vec<Tensor>,
    pub(crate) h: Vec<Tensor>,
}

impl SavedList {
    /// From the tensors behind `y`, in the order of a forward.
    fn new(saved: &[Object<'_>], plan: &Plan) -> PyResult<Self> {
        let parts = |form| match form {
            SavedAs::Nothing => 0,
            SavedAs::Columnwise => 3,
            SavedAs::Amax | SavedAs::Bf16 => 1,
        };
        let of_x = if plan.saved_x == SavedAs::Bf16 { 0 } else { parts(plan.saved_x) };
        let expected = 1 + of_x + parts(plan.saved_h);
        let mut tensors = Tensor::list("saved", saved)?.into_iter();
        if tensors.len() != expected {
            let got = tensors.len();
            let message = format!("saved: expected the {expected} tensors that a forward saves, got {got}");
            return Err(PyValueError::new_err(message));
        }
        let c = tensors.next().expect("is one of them");
        // A plain `h` comes before the parts of `x`; where it is saved, `x` has none.
        Ok(Self { c, x: tensors.by_ref().take(of_x).collect(), h: tensors.collect() })
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.c].into_iter().chain(&self.x).chain(&self.h)
    }
}

/// A saved tensor from its parts.
pub(crate) fn rebuild<'a, M: Exchange>(
    form: SavedAs,
    parts: &'a [Tensor],
    groups: &M::Groups,
    cols: usize,
) -> PyResult<SavedTensorView<'a, M>> {
    match (form, parts) {
        (SavedAs::Nothing, _) => Ok(SavedTensorView::Nothing),
        (SavedAs::Amax, [amax]) => Ok(SavedTensorView::Amax(amax.view::<M, f32>()?)),
        (SavedAs::Bf16, [plain]) => Ok(SavedTensorView::Bf16(plain.view::<M, bf16>()?)),
        (SavedAs::Columnwise, [codes, scales, amax]) => {
            let most = Groups::most_padded_rows(groups.experts(), groups.rows());
            let bounded = OperandShape { rows: cols, k: most };
            codes.expect(&[bounded.code_bytes()])?;
            scales.expect(&[bounded.scale_bytes()])?;
            let exact = OperandShape { rows: cols, k: groups.padded_rows() };
            Ok(SavedTensorView::Columnwise(Nvfp4 {
                codes: codes.prefix::<M, u8>(exact.code_bytes())?,
                scales: scales.prefix::<M, u8>(exact.scale_bytes())?,
                amax: amax.view::<M, f32>()?,
            }))
        }
        (form, parts) => unreachable!("{} parts of {form:?}: counted when they came", parts.len()),
    }
}

/// `[dx, dprob, db1, db2]`, `None` for what was not asked for. Gradients of the weights go to `dw1` and `dw2`, one
/// tensor `[E, n, k]` or one `[n, k]` an expert, float32 or bfloat16; they are replaced, or added to.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "one custom operator")]
pub(crate) fn backward<'py>(
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
    dw1: Vec<Object<'py>>,
    dw2: Vec<Object<'py>>,
    accumulate: bool,
    input: bool,
    weights: bool,
) -> PyResult<Vec<Option<Object<'py>>>> {
    let mlp = parse(options)?;
    let plan = mlp.plan(needs(input, weights));
    let call = Backward::new(plan, [dy, x, prob, seed], [&w1, &w2], [b1, b2], &saved)?;
    let dw = [Tensor::list("dw1", &dw1)?, Tensor::list("dw2", &dw2)?];
    let device = common_device(call.tensors().chain(dw.iter().flatten()))?;
    dispatch!(py, device, place => backward_at(py, &place, &mlp, splits, &call, dw, accumulate))
}

/// What a backward reads.
pub(crate) struct Backward {
    pub(crate) plan: Plan,
    pub(crate) dy: Tensor,
    pub(crate) x: Tensor,
    prob: Tensor,
    params: Weights,
    pub(crate) saved: SavedList,
    pub(crate) seed: Seed,
}

impl Backward {
    pub(crate) fn new(
        plan: Plan,
        [dy, x, prob, seed]: [&Object<'_>; 4],
        [w1, w2]: [&[Object<'_>]; 2],
        [b1, b2]: [Option<&Object<'_>>; 2],
        saved: &[Object<'_>],
    ) -> PyResult<Self> {
        Ok(Self {
            dy: Tensor::new("dy", dy)?,
            x: Tensor::new("x", x)?,
            prob: Tensor::new("prob", prob)?,
            params: Weights::new(w1, w2, b1, b2)?,
            saved: SavedList::new(saved, &plan)?,
            seed: Seed::new(seed)?,
            plan,
        })
    }

    /// All that is read.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let (saved, params) = (self.saved.tensors(), self.params.tensors());
        [&self.dy, &self.prob, &self.x].into_iter().chain(self.seed.tensor()).chain(saved).chain(params)
    }

    /// `T`.
    pub(crate) fn rows(&self, mlp: &GroupedMlp) -> PyResult<usize> {
        let [rows, _] = self.dy.dims()?;
        self.dy.expect(&[rows, mlp.config().hidden])?;
        Ok(rows)
    }

    /// What the forward left.
    pub(crate) fn parts<'a, M: Exchange>(
        &'a self,
        mlp: &GroupedMlp,
        groups: &'a M::Groups,
    ) -> PyResult<SavedParts<'a, M>> {
        let (config, plan, saved) = (mlp.config(), &self.plan, &self.saved);
        Ok(SavedParts {
            groups,
            weights: self.params.view::<M>(mlp)?,
            c: saved.c.view::<M, bf16>()?,
            prob: self.prob.view::<M, f32>()?,
            x: rebuild::<M>(plan.saved_x, x_parts(plan, &self.x, &saved.x), groups, config.hidden)?,
            h: rebuild::<M>(plan.saved_h, &saved.h, groups, config.ffn)?,
        })
    }
}

/// What was saved of `x`: in BF16 itself, else parts.
fn x_parts<'a>(plan: &Plan, x: &'a Tensor, parts: &'a [Tensor]) -> &'a [Tensor] {
    if plan.saved_x == SavedAs::Bf16 { slice::from_ref(x) } else { parts }
}

fn backward_at<'py, P: Place>(
    py: Python<'py>,
    place: &P,
    mlp: &GroupedMlp,
    splits: &Object<'py>,
    call: &Backward,
    mut dw: [Vec<Tensor>; 2],
    accumulate: bool,
) -> PyResult<Vec<Option<Object<'py>>>> {
    let needs = call.plan.needs;
    let rows = call.rows(mlp)?;
    let splits = Splits::new(Some(splits), rows, call.dy.device())?;
    let written: Vec<&Tensor> = dw.iter().flatten().collect();
    expect_disjoint(&written, call.tensors())?;

    let gradients = place.run(py, |backend| {
        let groups = P::groups_for_any(backend, &splits)?;
        let parts = call.parts::<P::Memory>(mlp, &groups).checked()?;
        let saved = mlp.saved_view::<P::Memory>(needs, parts)?;
        let dw = match needs.weights {
            true => Some(weight_grads::<P::Memory>(&mut dw, mlp.config().experts, accumulate).checked()?),
            false => None,
        };
        let dy = call.dy.view::<P::Memory, bf16>().checked()?;
        P::seeded(backend, &call.seed, |random| {
            Ok(mlp.backward_view(backend, &saved, BackwardArgs { dy, random, dw, trace: None })?)
        })
    })?;
    give(py, place, mlp, rows, gradients)
}

/// `[dx, dprob, db1, db2]` as torch tensors.
pub(crate) fn give<'py, P: Place>(
    py: Python<'py>,
    place: &P,
    mlp: &GroupedMlp,
    rows: usize,
    Gradients { dx, dprob, db1, db2 }: Gradients<P::Memory>,
) -> PyResult<Vec<Option<Object<'py>>>> {
    let config = mlp.config();
    let give = |buffer: Option<Buffer<P::Memory, f32>>, shape: [usize; 2]| {
        buffer.map(|b| place.hand_over(py, b, &shape)).transpose()
    };
    Ok(vec![
        dx.map(|dx| place.hand_over(py, dx, &[rows, config.hidden])).transpose()?,
        Some(place.hand_over(py, dprob, &[rows])?),
        give(db1, [config.experts, config.fc1_rows()])?,
        give(db2, [config.experts, config.hidden])?,
    ])
}

/// Where the gradients of both weights go.
pub(crate) fn weight_grads<M: Exchange>(
    [dw1, dw2]: &mut [Vec<Tensor>; 2],
    experts: usize,
    accumulate: bool,
) -> PyResult<WeightGrads<'_, M>> {
    let mode = if accumulate { GradMode::Accumulate } else { GradMode::Overwrite };
    Ok(WeightGrads { dw1: weight_grad(dw1, experts, mode)?, dw2: weight_grad(dw2, experts, mode)? })
}

fn weight_grad<M: Exchange>(
    tensors: &mut [Tensor],
    experts: usize,
    mode: GradMode,
) -> PyResult<WeightGrad<'_, M>> {
    let Some(dtype) = tensors.first().map(Tensor::dtype) else {
        return Err(PyValueError::new_err("dw: expected buffers for the weights' gradients, got none"));
    };
    let packed = tensors.len() == 1 && tensors[0].shape().len() == 3;
    let buffers = match dtype {
        Dtype::F32 if packed => GradBuffers::F32(M::split_mut(tensors[0].view_mut::<M, f32>()?, experts)),
        Dtype::Bf16 if packed => GradBuffers::Bf16(M::split_mut(tensors[0].view_mut::<M, bf16>()?, experts)),
        Dtype::F32 => {
            GradBuffers::F32(tensors.iter_mut().map(Tensor::view_mut::<M, f32>).collect::<PyResult<_>>()?)
        }
        Dtype::Bf16 => {
            GradBuffers::Bf16(tensors.iter_mut().map(Tensor::view_mut::<M, bf16>).collect::<PyResult<_>>()?)
        }
        other => {
            return Err(PyTypeError::new_err(format!(
                "dw: expected torch.float32 or torch.bfloat16, got {}",
                other.name()
            )));
        }
    };
    Ok(WeightGrad { buffers, mode })
}
