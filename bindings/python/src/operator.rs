//! The grouped MLP, forward and backward, over tensors that torch keeps.
//!
//! What the backward needs travels as torch tensors, so that autograd, checkpointing and memory accounting see it. The
//! forward returns `y` and eight more, `c, h, x_codes, x_scales, x_amax, h_codes, h_scales, h_amax`; one that the plan
//! does not save is `None` here and an empty tensor in Python. Columnwise codes and scales are flat and long enough
//! for any splits, `[H · Tb/2]` and `[H · Tb/16]` with `Tb` = [`bound`], since their true length depends on the
//! values of the splits, which a compiler that traces shapes does not know.

use half::bf16;
use moe4::kernels::{Backend, Buffer};
use moe4::mlp::{
    BackwardArgs, Biases, ForwardTensors, ForwardViewArgs, GradBuffers, GradMode, Gradients, GroupedMlp,
    Needs, Packed, PackedView, Precision, RandomSeed, SavedAs, SavedParts, SavedTensor, SavedTensorView,
    WeightGrad, WeightGrads, WeightSource, WeightsView,
};
use moe4::numerics::BLOCK;
use moe4::tensor::{Groups, Nvfp4, OperandShape};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::error::raise;
use crate::exchange::Exchange;
use crate::options::{needs, parse};
use crate::quantizers::weight_views;
use crate::run::{Checked, OnCpu, Place};
use crate::tensor::{Tensor, expect_disjoint, groups};
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

/// Token positions that hold any splits of `rows` over `experts`: each expert wastes at most 15.
fn bound(rows: usize, experts: usize) -> usize {
    (rows + (BLOCK - 1) * experts) / BLOCK * BLOCK
}

/// Weights as they come: quantized `[codes, scales, amax]` of both projections, or BF16 tensors, packed or one an
/// expert.
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
            Precision::Nvfp4 => mlp.weights_nvfp4(packed::<M>(&self.w1)?, packed::<M>(&self.w2)?, biases),
            Precision::Bf16 => {
                for (weights, shape) in [&self.w1, &self.w2].into_iter().zip(mlp.weight_shapes()) {
                    match &weights[..] {
                        [one] if one.shape().len() == 3 => one.expect(&[config.experts, shape.n, shape.k])?,
                        each => each.iter().try_for_each(|w| w.expect(&[shape.n, shape.k]))?,
                    }
                }
                let [w1, w2] = [&self.w1, &self.w2].map(|w| weight_views::<M>(w, config.experts));
                mlp.weights_bf16(WeightSource::PerExpert(w1?), WeightSource::PerExpert(w2?), biases)
            }
        };
        view.map_err(|e| raise(e.into()))
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.w1.iter().chain(&self.w2).chain(self.biases.iter().flat_map(|(b1, b2)| [b1, b2]))
    }
}

fn packed<M: Exchange>(tensors: &[Tensor]) -> PyResult<PackedView<'_, M>> {
    let [codes, scales, amax] = tensors else {
        let message = format!("weights: expected codes, scales and amax, got {} tensors", tensors.len());
        return Err(PyValueError::new_err(message));
    };
    Ok(Nvfp4 { codes: codes.view::<M, u8>()?, scales: scales.view::<M, u8>()?, amax: amax.view::<M, f32>()? })
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
) -> PyResult<Vec<Option<Object<'py>>>> {
    let mlp = parse(options)?;
    let params = Weights::new(&w1, &w2, b1, b2)?;
    forward_at::<OnCpu>(py, &mlp, [x, prob, splits], &params, needs(input, weights))
}

fn forward_at<'py, P: Place>(
    py: Python<'py>,
    mlp: &GroupedMlp,
    [x, prob, splits]: [&Object<'py>; 3],
    params: &Weights,
    needs: Needs,
) -> PyResult<Vec<Option<Object<'py>>>> {
    let (x, prob) = (Tensor::new("x", x)?, Tensor::new("prob", prob)?);
    let config = mlp.config();
    let [t, hidden] = x.dims()?;
    x.expect(&[t, config.hidden])?;
    prob.expect(&[t])?;
    let groups = groups(Some(splits), t)?;
    let out = P::run(py, |backend| {
        let view = params.view::<P::Memory>(mlp).checked()?;
        let args = ForwardViewArgs {
            x: x.view::<P::Memory, bf16>().checked()?,
            prob: prob.view::<P::Memory, f32>().checked()?,
            groups: &backend.groups(&groups)?,
            weights: &view,
            needs,
            trace: None,
        };
        Ok(mlp.forward_view(backend, args)?)
    })?;
    let ForwardTensors { y, c, x, h } = out;
    let experts = config.experts;
    let [xc, xs, xa] = parts::<P::Memory>(py, x, hidden, t, experts)?;
    let (h_plain, h) = match h {
        SavedTensor::Bf16(h) => (Some(P::Memory::hand_over(py, h, &[t, config.ffn])?), SavedTensor::Nothing),
        other => (None, other),
    };
    let [hc, hs, ha] = parts::<P::Memory>(py, h, config.ffn, t, experts)?;
    let c = c.map(|c| P::Memory::hand_over(py, c, &[t, config.fc1_rows()])).transpose()?;
    Ok(vec![Some(P::Memory::hand_over(py, y, &[t, hidden])?), c, h_plain, xc, xs, xa, hc, hs, ha])
}

/// Codes, scales and amax, as far as they were saved.
fn parts<'py, M: Exchange>(
    py: Python<'py>,
    saved: SavedTensor<M>,
    cols: usize,
    rows: usize,
    experts: usize,
) -> PyResult<[Option<Object<'py>>; 3]> {
    let flat = |mut buffer: Buffer<M, u8>, len: usize| {
        M::resize(&mut buffer, len);
        M::hand_over(py, buffer, &[len])
    };
    match saved {
        SavedTensor::Columnwise(Packed(Nvfp4 { codes, scales, amax })) => {
            let shape = OperandShape { rows: cols, k: bound(rows, experts) };
            Ok([
                Some(flat(codes, shape.code_bytes())?),
                Some(flat(scales, shape.scale_bytes())?),
                Some(M::hand_over(py, amax, &[experts])?),
            ])
        }
        SavedTensor::Amax(amax) => Ok([None, None, Some(M::hand_over(py, amax, &[experts])?)]),
        SavedTensor::Nothing | SavedTensor::Bf16(_) => Ok([None, None, None]),
    }
}

/// A saved tensor from its parts `[plain, codes, scales, amax]`.
fn rebuild<'a, M: Exchange>(
    form: SavedAs,
    [plain, codes, scales, amax]: [&'a Tensor; 4],
    groups: &Groups,
    cols: usize,
) -> PyResult<SavedTensorView<'a, M>> {
    match form {
        SavedAs::Nothing => Ok(SavedTensorView::Nothing),
        SavedAs::Amax => Ok(SavedTensorView::Amax(amax.view::<M, f32>()?)),
        SavedAs::Bf16 => Ok(SavedTensorView::Bf16(plain.view::<M, bf16>()?)),
        SavedAs::Columnwise => {
            let bounded = OperandShape { rows: cols, k: bound(groups.rows(), groups.experts()) };
            codes.expect(&[bounded.code_bytes()])?;
            scales.expect(&[bounded.scale_bytes()])?;
            let exact = OperandShape::columnwise(groups, cols);
            Ok(SavedTensorView::Columnwise(Nvfp4 {
                codes: codes.prefix::<M, u8>(exact.code_bytes())?,
                scales: scales.prefix::<M, u8>(exact.scale_bytes())?,
                amax: amax.view::<M, f32>()?,
            }))
        }
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
    let call = Backward {
        dy: Tensor::new("dy", dy)?,
        x: Tensor::new("x", x)?,
        prob: Tensor::new("prob", prob)?,
        params: Weights::new(&w1, &w2, b1, b2)?,
        saved: Tensor::list("saved", &saved)?,
        seed: read_seed(seed)?,
        mode: if accumulate { GradMode::Accumulate } else { GradMode::Overwrite },
        needs: needs(input, weights),
    };
    let dw = [Tensor::list("dw1", &dw1)?, Tensor::list("dw2", &dw2)?];
    backward_at::<OnCpu>(py, &mlp, splits, &call, dw)
}

/// What a backward reads.
struct Backward {
    dy: Tensor,
    x: Tensor,
    prob: Tensor,
    params: Weights,
    saved: Vec<Tensor>,
    seed: RandomSeed,
    mode: GradMode,
    needs: Needs,
}

fn backward_at<'py, P: Place>(
    py: Python<'py>,
    mlp: &GroupedMlp,
    splits: &Object<'py>,
    call: &Backward,
    mut dw: [Vec<Tensor>; 2],
) -> PyResult<Vec<Option<Object<'py>>>> {
    let (config, plan) = (mlp.config(), mlp.plan(call.needs));
    let (experts, n1) = (config.experts, config.fc1_rows());
    let [t, hidden] = call.dy.dims()?;
    call.dy.expect(&[t, config.hidden])?;
    let groups = groups(Some(splits), t)?;
    let Ok([c, h, xc, xs, xa, hc, hs, ha]) = <&[Tensor; 8]>::try_from(&call.saved[..]) else {
        let message = format!("saved: expected the 8 tensors of a forward, got {}", call.saved.len());
        return Err(PyValueError::new_err(message));
    };
    let written: Vec<&Tensor> = dw.iter().flatten().collect();
    let read = [&call.dy, &call.prob, &call.x].into_iter().chain(&call.saved).chain(call.params.tensors());
    expect_disjoint(&written, read)?;

    let Gradients { dx, dprob, db1, db2 } = P::run(py, |backend| {
        let on_device = backend.groups(&groups)?;
        let parts = SavedParts {
            groups: &on_device,
            weights: call.params.view::<P::Memory>(mlp).checked()?,
            c: c.view::<P::Memory, bf16>().checked()?,
            prob: call.prob.view::<P::Memory, f32>().checked()?,
            x: rebuild::<P::Memory>(plan.saved_x, [&call.x, xc, xs, xa], &groups, hidden).checked()?,
            h: rebuild::<P::Memory>(plan.saved_h, [h, hc, hs, ha], &groups, config.ffn).checked()?,
        };
        let saved = mlp.saved_view::<P::Memory>(call.needs, parts)?;
        let [dw1, dw2] = &mut dw;
        let dw = match call.needs.weights {
            true => Some(WeightGrads {
                dw1: weight_grad::<P::Memory>(dw1, experts, call.mode).checked()?,
                dw2: weight_grad::<P::Memory>(dw2, experts, call.mode).checked()?,
            }),
            false => None,
        };
        let dy = call.dy.view::<P::Memory, bf16>().checked()?;
        Ok(mlp.backward_view(backend, &saved, BackwardArgs { dy, random: call.seed, dw, trace: None })?)
    })?;
    let give = |buffer: Option<Buffer<P::Memory, f32>>, shape: [usize; 2]| {
        buffer.map(|b| P::Memory::hand_over(py, b, &shape)).transpose()
    };
    Ok(vec![
        dx.map(|dx| P::Memory::hand_over(py, dx, &[t, hidden])).transpose()?,
        Some(P::Memory::hand_over(py, dprob, &[t])?),
        give(db1, [experts, n1])?,
        give(db2, [experts, hidden])?,
    ])
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

/// A seed of 64 bits from an int64 tensor `[1]`, or 0 from an empty one.
fn read_seed(seed: &Object<'_>) -> PyResult<RandomSeed> {
    let seed: Vec<i64> = seed.call_method0("tolist")?.extract()?;
    Ok(RandomSeed { seed: seed.first().map_or(0, |&s| s as u64), call: 0 })
}
