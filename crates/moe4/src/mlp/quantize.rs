//! Amaxes and quantized copies of one tensor, as its [`OperandPlan`] says.

use super::plan::{AmaxSource, CopyPlan, OperandPlan, Phase};
use super::saved::{OwnedOperand, Packed};
use super::trace::Trace;
use crate::kernels::contract::{
    AmaxOut, Cast, ColumnwiseCast, GroupAmax, GroupHadamardAmax, GroupQuantize, PackedOut, RhtAmax,
};
use crate::kernels::{Backend, Buffer, Error, Extent, Memory, View};
use crate::numerics::BLOCK;
use crate::numerics::rounding::Rounding;
use crate::tensor::{Nvfp4, OperandShape, ScaleLayout};
use half::bf16;

/// A `[T, cols]` tensor, rows grouped by expert.
pub(super) struct Grouped<'a, M: Memory> {
    pub(super) name: &'static str,
    pub(super) data: View<'a, M, bf16>,
    pub(super) cols: usize,
    pub(super) groups: &'a M::Groups,
}

/// The amaxes of one tensor, `[E]` each.
pub(super) struct Amaxes<M: Memory> {
    pub(super) rowwise: Buffer<M, f32>,
    /// Of the transformed tensor; without a transform the rowwise one serves both.
    pub(super) rht: Option<Buffer<M, f32>>,
}

impl<M: Memory> Amaxes<M> {
    /// Buffers for what `plan` needs, to be filled by a pass or an epilogue.
    pub(super) fn empty<B: Backend<Memory = M>>(
        backend: &B,
        plan: &OperandPlan,
        experts: usize,
    ) -> Result<Self, Error> {
        let rht = plan.rht().map(|_| backend.empty(experts)).transpose()?;
        Ok(Self { rowwise: backend.empty(experts)?, rht })
    }

    /// By a pass over the tensor.
    pub(super) fn by_pass<B: Backend<Memory = M>>(
        backend: &B,
        plan: &OperandPlan,
        x: &Grouped<'_, M>,
    ) -> Result<Self, Error> {
        let mut amaxes = Self::empty(backend, plan, x.groups.experts())?;
        let (data, cols, groups) = (M::shorten(x.data), x.cols, x.groups);
        match (plan.rht(), &mut amaxes.rht) {
            (Some(sign_mask), Some(rht)) => backend.group_hadamard_amax(GroupHadamardAmax {
                x: data,
                cols,
                groups,
                sign_mask,
                amax: M::view_mut(&mut amaxes.rowwise),
                amax_rht: M::view_mut(rht),
            })?,
            _ => backend.group_amax(GroupAmax {
                x: data,
                cols,
                groups,
                amax: M::view_mut(&mut amaxes.rowwise),
            })?,
        }
        Ok(amaxes)
    }

    /// Where the epilogue that writes the tensor is to leave them.
    pub(super) fn epilogue(&mut self, plan: &OperandPlan) -> AmaxOut<'_, M> {
        let kind = |mask| match plan.columnwise.map(|c| c.amax) {
            Some(AmaxSource::Bound) => RhtAmax::Bound,
            _ => RhtAmax::Exact(mask),
        };
        let rht = plan.rht().map(kind).zip(self.rht.as_mut().map(M::view_mut));
        AmaxOut { amax: M::view_mut(&mut self.rowwise), rht }
    }

    /// Those of the rowwise and of the columnwise copy, as far as they are wanted.
    fn of_copies<B: Backend<Memory = M>>(
        self,
        backend: &B,
        wanted: [bool; 2],
    ) -> Result<[Option<Buffer<M, f32>>; 2], Error> {
        let Self { rowwise, rht } = self;
        Ok(match (rht, wanted) {
            (None, [true, true]) => [Some(backend.duplicate(M::view(&rowwise))?), Some(rowwise)],
            (None, [false, true]) => [None, Some(rowwise)],
            (rht, _) => [Some(rowwise), rht],
        })
    }
}

/// The copies made in one phase, each in the form in which a product reads it.
pub(super) struct Copies<M: Memory> {
    pub(super) rowwise: Option<OwnedOperand<M>>,
    pub(super) columnwise: Option<OwnedOperand<M>>,
    /// The amax of a columnwise copy that is made in the other phase.
    pub(super) columnwise_amax: Option<Buffer<M, f32>>,
}

impl<M: Memory> Copies<M> {
    /// Those of a tensor that is not quantized.
    pub(super) fn none() -> Self {
        Self { rowwise: None, columnwise: None, columnwise_amax: None }
    }
}

/// Quantizes `x` in the directions that `plan` makes in `phase`.
///
/// On a backend that asks for unpacked operands, a copy that a product of this phase reads is made as its BF16 values
/// alone, unless a trace wants its codes; a columnwise copy of the forward waits for the backward and is packed, so that
/// what is saved does not grow.
pub(super) fn quantize<B: Backend>(
    backend: &B,
    plan: &OperandPlan,
    phase: Phase,
    x: &Grouped<'_, B::Memory>,
    amaxes: Amaxes<B::Memory>,
    rounding: [Rounding; 2],
    trace: &mut Option<&mut Trace>,
) -> Result<Copies<B::Memory>, Error> {
    let made = |copy: Option<CopyPlan>| copy.filter(|c| c.made == phase);
    let (rowwise_plan, columnwise_plan) = (made(plan.rowwise), made(plan.columnwise));
    let rowwise_shape = OperandShape { rows: x.groups.rows(), k: x.cols };
    let columnwise_shape = OperandShape { rows: x.cols, k: x.groups.padded_rows() };
    let unpack = backend.capabilities().unpacked_operands;
    let traced = trace.is_some();
    let allocate = |shape: OperandShape, amax: Buffer<B::Memory, f32>, unpack: bool| -> Result<_, Error> {
        let pack =
            || Ok::<_, Error>([backend.empty(shape.code_bytes())?, backend.empty(shape.scale_bytes())?]);
        Ok(Written {
            amax,
            packed: (!unpack || traced).then(pack).transpose()?,
            unpacked: unpack.then(|| backend.empty::<bf16>(shape.rows * shape.k)).transpose()?,
        })
    };
    let [rowwise_amax, mut columnwise_amax] =
        amaxes.of_copies(backend, [rowwise_plan.is_some(), plan.columnwise.is_some()])?;
    let mut rowwise =
        rowwise_plan.and(rowwise_amax).map(|amax| allocate(rowwise_shape, amax, unpack)).transpose()?;
    let unpack = unpack && phase == Phase::Backward;
    let mut columnwise = columnwise_plan
        .and_then(|_| columnwise_amax.take())
        .map(|amax| allocate(columnwise_shape, amax, unpack))
        .transpose()?;
    let [row_rounding, col_rounding] = rounding;
    if rowwise.is_some() || columnwise.is_some() {
        backend.group_quantize(GroupQuantize {
            x: B::Memory::shorten(x.data),
            cols: x.cols,
            groups: x.groups,
            rowwise: rowwise.as_mut().map(|q| q.cast(row_rounding)),
            columnwise: columnwise
                .as_mut()
                .zip(columnwise_plan)
                .map(|(q, plan)| ColumnwiseCast { rht: plan.rht, cast: q.cast(col_rounding) }),
        })?;
    }
    if let Some(trace) = trace {
        trace_copy(backend, trace, x.name, "", rowwise_shape, &rowwise)?;
        trace_copy(backend, trace, x.name, "_col", columnwise_shape, &columnwise)?;
    }
    Ok(Copies {
        rowwise: rowwise.map(Written::into_operand),
        columnwise: columnwise.map(Written::into_operand),
        columnwise_amax,
    })
}

/// A copy as `group_quantize` writes it.
struct Written<M: Memory> {
    amax: Buffer<M, f32>,
    /// Codes and scales.
    packed: Option<[Buffer<M, u8>; 2]>,
    unpacked: Option<Buffer<M, bf16>>,
}

impl<M: Memory> Written<M> {
    fn cast(&mut self, rounding: Rounding) -> Cast<'_, M> {
        let packed = self.packed.as_mut().map(|[codes, scales]| PackedOut {
            codes: M::view_mut(codes),
            scales: M::view_mut(scales),
            layout: ScaleLayout::Plain,
        });
        let unpacked = self.unpacked.as_mut().map(M::view_mut);
        Cast { amax: M::view(&self.amax), rounding, packed, unpacked }
    }

    /// One form is enough: where there are values, they are what a product reads.
    fn into_operand(self) -> OwnedOperand<M> {
        let Written { amax, packed, unpacked } = self;
        match (unpacked, packed) {
            (Some(values), _) => OwnedOperand::Unpacked { values, amax },
            (None, Some([codes, scales])) => OwnedOperand::Nvfp4(Packed(Nvfp4 { codes, scales, amax })),
            (None, None) => unreachable!("a copy has a form"),
        }
    }
}

fn trace_copy<B: Backend>(
    backend: &B,
    trace: &mut Trace,
    name: &str,
    suffix: &str,
    OperandShape { rows, k }: OperandShape,
    copy: &Option<Written<B::Memory>>,
) -> Result<(), Error> {
    let Some(Written { amax, packed: Some([codes, scales]), .. }) = copy else { return Ok(()) };
    let amax = B::Memory::view(amax);
    let experts = B::Memory::len(&amax);
    trace.add(backend, format!("{name}_fp4{suffix}"), &[rows, k / 2], B::Memory::view(codes))?;
    trace.add(backend, format!("{name}_scale{suffix}"), &[rows, k / BLOCK], B::Memory::view(scales))?;
    trace.add(backend, format!("{name}_amax{suffix}"), &[experts], amax)
}
