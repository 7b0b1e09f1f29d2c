//! Amaxes, quantization and back. Each function is a check of its tensors, a pass written against the contract, and
//! handing over the results.

use half::bf16;
use moe4::kernels::contract::{
    Cast, ColumnwiseCast, Dequantize, Direction, GroupAmax, GroupHadamardAmax, GroupQuantize, PackedOut,
    QuantizeWeights, WeightShape,
};
use moe4::kernels::{Backend, Buffer, Error, Extent, Memory, View};
use moe4::numerics::BLOCK;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::{RandomStream, Rounding};
use moe4::tensor::{Nvfp4, ScaleLayout};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::exchange::Exchange;
use crate::place::{Place, dispatch};
use crate::splits::Splits;
use crate::tensor::{Tensor, common_device};

type Packed<M> = Nvfp4<Buffer<M, u8>, Buffer<M, f32>>;
type Object<'py> = Bound<'py, PyAny>;
/// Codes, block scales, amax.
type Copy3<'py> = (Object<'py>, Object<'py>, Object<'py>);

/// `(amax, amax_rht)`, float32 `[E]` each, of `x [T, cols]` bfloat16.
#[pyfunction]
pub(crate) fn hadamard_amax<'py>(
    py: Python<'py>,
    x: &Object<'py>,
    splits: Option<&Object<'py>>,
    sign_mask: u16,
) -> PyResult<(Object<'py>, Object<'py>)> {
    let x = Tensor::new("x", x)?;
    dispatch!(py, x.device(), place => hadamard_amax_at(py, &place, &x, splits, SignMask(sign_mask)))
}

fn hadamard_amax_at<'py, P: Place>(
    py: Python<'py>,
    place: &P,
    x: &Tensor,
    splits: Option<&Object<'py>>,
    sign_mask: SignMask,
) -> PyResult<(Object<'py>, Object<'py>)> {
    let [rows, cols] = x.dims()?;
    let splits = Splits::new(splits, rows, x.device())?;
    let view = x.view::<P::Memory, bf16>()?;
    let (amax, rht) = place
        .run(py, |backend| Ok(amaxes(backend, view, cols, &P::groups(backend, &splits)?, sign_mask)?))?;
    let shape = [splits.experts()];
    Ok((place.hand_over(py, amax, &shape)?, place.hand_over(py, rht, &shape)?))
}

type Amaxes<M> = (Buffer<M, f32>, Buffer<M, f32>);

fn amaxes<B: Backend>(
    backend: &B,
    x: View<'_, B::Memory, bf16>,
    cols: usize,
    groups: &<B::Memory as Memory>::Groups,
    sign_mask: SignMask,
) -> Result<Amaxes<B::Memory>, Error> {
    let (mut amax, mut rht) = (backend.empty(groups.experts())?, backend.empty(groups.experts())?);
    backend.group_hadamard_amax(GroupHadamardAmax {
        x: B::Memory::shorten(x),
        cols,
        groups,
        sign_mask,
        amax: B::Memory::view_mut(&mut amax),
        amax_rht: B::Memory::view_mut(&mut rht),
    })?;
    Ok((amax, rht))
}

/// What a quantization makes.
#[derive(Clone, Copy)]
struct Wanted {
    rowwise: bool,
    columnwise: bool,
    rht: Option<SignMask>,
    rounding: [Rounding; 2],
    layout: ScaleLayout,
}

/// `(rowwise, columnwise)` copies of `x [T, cols]` bfloat16, each `(codes, scales, amax)` or `None`.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "keyword arguments of one Python function")]
#[pyo3(signature = (x, splits, *, rowwise, columnwise, rht, seed, stream, swizzled, amax, amax_rht))]
pub(crate) fn group_quantize<'py>(
    py: Python<'py>,
    x: &Object<'py>,
    splits: Option<&Object<'py>>,
    rowwise: bool,
    columnwise: bool,
    rht: Option<u16>,
    seed: Option<u64>,
    stream: u64,
    swizzled: bool,
    amax: Option<&Object<'py>>,
    amax_rht: Option<&Object<'py>>,
) -> PyResult<Pair<'py>> {
    if !rowwise && !columnwise {
        return Err(PyValueError::new_err("expected rowwise, columnwise or both, got neither"));
    }
    let rounding = [0, 1].map(|direction| match seed {
        None => Rounding::Nearest,
        Some(seed) => {
            let stream = stream.wrapping_mul(2).wrapping_add(direction);
            Rounding::Stochastic(RandomStream { seed, stream })
        }
    });
    let layout = layout(swizzled);
    let wanted = Wanted { rowwise, columnwise, rht: rht.map(SignMask), rounding, layout };
    let x = Tensor::new("x", x)?;
    let given =
        |name, object: Option<&Object<'py>>| object.map(|object| Tensor::new(name, object)).transpose();
    let amaxes = [given("amax", amax)?, given("amax_rht", amax_rht)?];
    let device = common_device([&x].into_iter().chain(amaxes.iter().flatten()))?;
    dispatch!(py, device, place => group_quantize_at(py, &place, &x, splits, wanted, &amaxes))
}

type Pair<'py> = (Option<Copy3<'py>>, Option<Copy3<'py>>);

fn group_quantize_at<'py, P: Place>(
    py: Python<'py>,
    place: &P,
    x: &Tensor,
    splits: Option<&Object<'py>>,
    wanted: Wanted,
    known: &[Option<Tensor>; 2],
) -> PyResult<Pair<'py>> {
    let [rows, cols] = x.dims()?;
    let splits = Splits::new(splits, rows, x.device())?;
    known.iter().flatten().try_for_each(|t| t.expect(&[splits.experts()]))?;
    let [amax, amax_rht] = known;
    let view = x.view::<P::Memory, bf16>()?;
    let known = [
        amax.as_ref().map(Tensor::view::<P::Memory, f32>).transpose()?,
        amax_rht.as_ref().map(Tensor::view::<P::Memory, f32>).transpose()?,
    ];
    let ([row, column], groups) = place.run(py, |backend| {
        let groups = P::groups(backend, &splits)?;
        Ok((copies(backend, view, cols, &groups, known, wanted)?, groups))
    })?;
    let give = |copy: Option<Packed<P::Memory>>, direction: Direction| {
        copy.map(|copy| hand_over(py, place, copy, direction.shape(&groups, cols), wanted.layout)).transpose()
    };
    Ok((give(row, Direction::Rowwise)?, give(column, Direction::Columnwise)?))
}

fn copies<B: Backend>(
    backend: &B,
    x: View<'_, B::Memory, bf16>,
    cols: usize,
    groups: &<B::Memory as Memory>::Groups,
    known: [Option<View<'_, B::Memory, f32>>; 2],
    wanted: Wanted,
) -> Result<[Option<Packed<B::Memory>>; 2], Error> {
    let [known, known_rht] = known;
    let transformed = wanted.rht.filter(|_| wanted.columnwise);
    let plain_needed = wanted.rowwise || transformed.is_none();
    // What is not given is measured, in one pass.
    let mut amax = known.map(|a| backend.duplicate(B::Memory::shorten(a))).transpose()?;
    let mut rht = known_rht.map(|a| backend.duplicate(B::Memory::shorten(a))).transpose()?;
    match transformed {
        Some(mask) if rht.is_none() => {
            let (plain, measured) = amaxes(backend, x, cols, groups, mask)?;
            rht = Some(measured);
            amax.get_or_insert(plain);
        }
        _ if amax.is_none() && plain_needed => {
            let mut plain = backend.empty(groups.experts())?;
            let out = B::Memory::view_mut(&mut plain);
            backend.group_amax(GroupAmax { x: B::Memory::shorten(x), cols, groups, amax: out })?;
            amax = Some(plain);
        }
        _ => {}
    }
    let allocate = |wanted_here: bool, direction: Direction, amax: &Option<Buffer<B::Memory, f32>>| {
        let (true, Some(amax)) = (wanted_here, amax) else { return Ok(None) };
        let [rows, k] = direction.shape(groups, cols);
        Ok::<_, Error>(Some(Nvfp4 {
            codes: backend.empty(rows * (k / 2))?,
            scales: backend.empty(wanted.layout.bytes(rows, k / BLOCK))?,
            amax: backend.duplicate(B::Memory::view(amax))?,
        }))
    };
    let mut row = allocate(wanted.rowwise, Direction::Rowwise, &amax)?;
    let column_amax = if transformed.is_some() { &rht } else { &amax };
    let mut column = allocate(wanted.columnwise, Direction::Columnwise, column_amax)?;
    let [row_rounding, column_rounding] = wanted.rounding;
    backend.group_quantize(GroupQuantize {
        x: B::Memory::shorten(x),
        cols,
        groups,
        rowwise: row.as_mut().map(|q| cast::<B::Memory>(q, row_rounding, wanted.layout)),
        columnwise: column.as_mut().map(|q| ColumnwiseCast {
            rht: transformed,
            cast: cast::<B::Memory>(q, column_rounding, wanted.layout),
        }),
    })?;
    Ok([row, column])
}

fn cast<M: Memory>(q: &mut Packed<M>, rounding: Rounding, layout: ScaleLayout) -> Cast<'_, M> {
    let Nvfp4 { codes, scales, amax } = q;
    Cast {
        amax: M::view(amax),
        rounding,
        packed: Some(PackedOut { codes: M::view_mut(codes), scales: M::view_mut(scales), layout }),
        unpacked: None,
    }
}

/// Codes, block scales, amax, and the values where the backend multiplies those.
type Tiles<'py> = (Object<'py>, Object<'py>, Object<'py>, Option<Object<'py>>);

/// `(codes [E, n, k/2], scales [E, n, k/16], amax [E], values)` of weights in 16x16 tiles. `weights` is one bfloat16
/// tensor `[E, n, k]`, or one `[n, k]` for each expert. `values`, bfloat16 `[E, n, k]`, are what the codes stand for,
/// without the global scale: for a backend whose products read them, if `with_values`.
#[pyfunction]
pub(crate) fn quantize_weights<'py>(
    py: Python<'py>,
    weights: Vec<Object<'py>>,
    with_values: bool,
) -> PyResult<Tiles<'py>> {
    let weights = Tensor::list("weights", &weights)?;
    let device = common_device(&weights)?;
    dispatch!(py, device, place => quantize_weights_at(py, &place, &weights, with_values))
}

fn quantize_weights_at<'py, P: Place>(
    py: Python<'py>,
    place: &P,
    weights: &[Tensor],
    with_values: bool,
) -> PyResult<Tiles<'py>> {
    let (experts, shape) = weight_shape(weights)?;
    let views = weight_views::<P::Memory>(weights, experts)?;
    let (packed, values) = place.run(py, |backend| Ok(tiles(backend, views, shape, with_values)?))?;
    let WeightShape { n, k } = shape;
    Ok((
        place.hand_over(py, packed.codes, &[experts, n, k / 2])?,
        place.hand_over(py, packed.scales, &[experts, n, k / BLOCK])?,
        place.hand_over(py, packed.amax, &[experts])?,
        values.map(|values| place.hand_over(py, values, &[experts, n, k])).transpose()?,
    ))
}

/// The number of experts and the shape that all have.
fn weight_shape(weights: &[Tensor]) -> PyResult<(usize, WeightShape)> {
    match weights {
        [packed] if packed.shape().len() == 3 => {
            let [experts, n, k] = packed.dims()?;
            Ok((experts, WeightShape { n, k }))
        }
        [first, others @ ..] => {
            let [n, k] = first.dims()?;
            others.iter().try_for_each(|w| w.expect(&[n, k]))?;
            Ok((weights.len(), WeightShape { n, k }))
        }
        [] => Err(PyValueError::new_err("weights: expected one tensor for each expert, got none")),
    }
}

/// One view an expert.
fn weight_views<M: Exchange>(weights: &[Tensor], experts: usize) -> PyResult<Vec<View<'_, M, bf16>>> {
    match weights {
        [packed] if packed.shape().len() == 3 && experts > 0 => {
            Ok(M::split(packed.view::<M, bf16>()?, experts))
        }
        each => each.iter().map(Tensor::view::<M, bf16>).collect(),
    }
}

type TilesOf<M> = (Packed<M>, Option<Buffer<M, bf16>>);

fn tiles<B: Backend>(
    backend: &B,
    w: Vec<View<'_, B::Memory, bf16>>,
    shape: WeightShape,
    with_values: bool,
) -> Result<TilesOf<B::Memory>, Error> {
    let (experts, WeightShape { n, k }) = (w.len(), shape);
    let mut q = Nvfp4 {
        codes: backend.empty(experts * n * (k / 2))?,
        scales: backend.empty(experts * n * (k / BLOCK))?,
        amax: backend.empty(experts)?,
    };
    let with_values = with_values && backend.capabilities().unpacked_operands;
    let mut values = with_values.then(|| backend.empty(experts * n * k)).transpose()?;
    backend.quantize_weights(QuantizeWeights {
        w: w.into_iter().map(B::Memory::shorten).collect(),
        shape,
        codes: B::Memory::view_mut(&mut q.codes),
        scales: B::Memory::view_mut(&mut q.scales),
        unpacked: values.as_mut().map(B::Memory::view_mut),
        amax: B::Memory::view_mut(&mut q.amax),
    })?;
    Ok((q, values))
}

/// The values of a copy of a tensor `[rows, cols]`, float32: `[rows, cols]` or, columnwise, `[cols, Tp]`.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "keyword arguments of one Python function")]
#[pyo3(signature = (codes, scales, amax, splits, *, rows, cols, columnwise, swizzled))]
pub(crate) fn dequantize<'py>(
    py: Python<'py>,
    codes: &Object<'py>,
    scales: &Object<'py>,
    amax: &Object<'py>,
    splits: Option<&Object<'py>>,
    rows: usize,
    cols: usize,
    columnwise: bool,
    swizzled: bool,
) -> PyResult<Object<'py>> {
    let direction = if columnwise { Direction::Columnwise } else { Direction::Rowwise };
    let codes = Tensor::new("codes", codes)?;
    let parts = [codes, Tensor::new("scales", scales)?, Tensor::new("amax", amax)?];
    let device = common_device(&parts)?;
    dispatch!(py, device, place => {
        dequantize_at(py, &place, &parts, splits, [rows, cols], direction, layout(swizzled))
    })
}

fn dequantize_at<'py, P: Place>(
    py: Python<'py>,
    place: &P,
    [codes, scales, amax]: &[Tensor; 3],
    splits: Option<&Object<'py>>,
    [rows, cols]: [usize; 2],
    direction: Direction,
    layout: ScaleLayout,
) -> PyResult<Object<'py>> {
    let splits = Splits::new(splits, rows, codes.device())?;
    let views = Nvfp4 {
        codes: codes.view::<P::Memory, u8>()?,
        scales: scales.view::<P::Memory, u8>()?,
        amax: amax.view::<P::Memory, f32>()?,
    };
    let (out, shape) = place.run(py, |backend| {
        let groups = P::groups(backend, &splits)?;
        let shape = direction.shape(&groups, cols);
        Ok((values(backend, views, cols, &groups, direction, layout)?, shape))
    })?;
    place.hand_over(py, out, &shape)
}

fn values<B: Backend>(
    backend: &B,
    q: Nvfp4<View<'_, B::Memory, u8>, View<'_, B::Memory, f32>>,
    cols: usize,
    groups: &<B::Memory as Memory>::Groups,
    direction: Direction,
    layout: ScaleLayout,
) -> Result<Buffer<B::Memory, f32>, Error> {
    // By the codes, two in a byte: the shape, which the pass compares them with, may be of any size.
    let mut out = backend.empty(2 * B::Memory::len(&q.codes))?;
    backend.dequantize(Dequantize {
        codes: B::Memory::shorten(q.codes),
        scales: B::Memory::shorten(q.scales),
        amax: B::Memory::shorten(q.amax),
        cols,
        groups,
        direction,
        layout,
        out: B::Memory::view_mut(&mut out),
    })?;
    Ok(out)
}

fn layout(swizzled: bool) -> ScaleLayout {
    if swizzled { ScaleLayout::Swizzled128x4 } else { ScaleLayout::Plain }
}

fn hand_over<'py, P: Place>(
    py: Python<'py>,
    place: &P,
    copy: Packed<P::Memory>,
    [rows, k]: [usize; 2],
    layout: ScaleLayout,
) -> PyResult<Copy3<'py>> {
    let experts = P::Memory::len(&P::Memory::view(&copy.amax));
    Ok((
        place.hand_over(py, copy.codes, &[rows, k / 2])?,
        place.hand_over(py, copy.scales, &layout.padded_shape(rows, k / BLOCK))?,
        place.hand_over(py, copy.amax, &[experts])?,
    ))
}
