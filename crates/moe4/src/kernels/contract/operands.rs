//! What products read and write: operands, weights, amaxes that an epilogue leaves, buffers of weight gradients.

use super::{Checked, multiple_of_block};
use crate::kernels::error::expect_len;
use crate::kernels::memory::{Memory, View, ViewMut};
use crate::numerics::BLOCK;
use crate::numerics::hadamard::SignMask;
use crate::tensor::Nvfp4;
use half::bf16;

/// The stored shape of one expert's weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightShape {
    /// Rows: the outputs of the forward product.
    pub n: usize,
    /// Columns: the inputs of the forward product.
    pub k: usize,
}

/// Which dimension of a stored weight `[n, k]` a product contracts over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// `out[T, n] = a[T, k] · Wᵀ`.
    Fprop,
    /// `out[T, k] = a[T, n] · W`: the transpose of the same codes and tile scales.
    Dgrad,
}

impl Side {
    /// `(output columns, contraction length)` for a weight.
    pub fn dims(self, w: WeightShape) -> (usize, usize) {
        match self {
            Side::Fprop => (w.n, w.k),
            Side::Dgrad => (w.k, w.n),
        }
    }
}

/// The activation or gradient side of a product.
pub enum Operand<'a, M: Memory> {
    /// Unquantized `[T, cols]`; a wgrad contracts it along `T`.
    Bf16(View<'a, M, bf16>),
    /// Rowwise for fprop and dgrad, columnwise for wgrad.
    Nvfp4(Nvfp4<View<'a, M, u8>, View<'a, M, f32>>),
    /// The same operand with its BF16 values already in memory, in the logical shape of the packed form. A product
    /// gives the same bytes for either.
    Unpacked(Unpacked<'a, M>),
}

impl<M: Memory> Clone for Operand<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<M: Memory> Copy for Operand<'_, M> {}

/// A quantized operand as a BF16 matrix unit takes it: [`Cast::unpacked`](super::Cast) and the amaxes that its copy was
/// made with.
pub struct Unpacked<'a, M: Memory> {
    /// `[T, k]` rowwise, `[n, Tp]` columnwise: `code · f32(block scale)`, without the global scale.
    pub values: View<'a, M, bf16>,
    /// `[E]`: gives the global scale, as for a packed operand.
    pub amax: View<'a, M, f32>,
}

impl<M: Memory> Clone for Unpacked<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<M: Memory> Copy for Unpacked<'_, M> {}

/// The weight side of a product.
pub enum WeightOperand<'a, M: Memory> {
    /// One unquantized `[n, k]` view an expert.
    Bf16(Vec<View<'a, M, bf16>>),
    /// As written by [`QuantizeWeights`](super::QuantizeWeights). Both forms hold the same values: a backend reads either.
    Nvfp4 {
        /// Codes `[E, n, k/2]`, scales `[E, n, k/16]`, amaxes `[E]`.
        packed: Nvfp4<View<'a, M, u8>, View<'a, M, f32>>,
        /// `[E, n, k]`: `code · f32(block scale)`.
        unpacked: Option<View<'a, M, bf16>>,
    },
}

/// Where an epilogue leaves the amaxes of what it wrote.
pub struct AmaxOut<'a, M: Memory> {
    /// Out, `[E]`: of the BF16 tensor.
    pub amax: ViewMut<'a, M, f32>,
    /// Out, `[E]`: after the RHT along tokens.
    pub rht: Option<(RhtAmax, ViewMut<'a, M, f32>)>,
}

/// How an epilogue finds the amax after the RHT.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RhtAmax {
    /// By the transform.
    Exact(SignMask),
    /// As 4 times the amax before: sums of 16 values over 4 are never larger. See [`rht_amax_bound`].
    Bound,
}

/// The bound of [`RhtAmax::Bound`], capped at the largest finite number. Exact: 4 times a BF16 value.
pub fn rht_amax_bound(amax: f32) -> f32 {
    (4.0 * amax).min(f32::MAX)
}

/// Weight-gradient buffers, one view an expert.
pub struct WeightGrad<'a, M: Memory> {
    /// The buffers.
    pub buffers: GradBuffers<'a, M>,
    /// Overwrite or add.
    pub mode: GradMode,
}

/// The type of weight-gradient buffers.
pub enum GradBuffers<'a, M: Memory> {
    /// FP32.
    F32(Vec<ViewMut<'a, M, f32>>),
    /// BF16; accumulation rounds once an update.
    Bf16(Vec<ViewMut<'a, M, bf16>>),
}

/// What happens to the buffer's former contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GradMode {
    /// They are replaced; an empty expert gets zeros.
    #[default]
    Overwrite,
    /// They are added to; an empty expert's buffer is unchanged.
    Accumulate,
}

pub(super) fn check_amax_out<M: Memory>(
    kernel: &'static str,
    out: &Option<AmaxOut<'_, M>>,
    experts: usize,
) -> Checked {
    let Some(out) = out else { return Ok(()) };
    expect_len(kernel, "amax", &[experts], M::len_mut(&out.amax))?;
    match &out.rht {
        Some((_, amax)) => expect_len(kernel, "amax after RHT", &[experts], M::len_mut(amax)),
        None => Ok(()),
    }
}

impl<'a, M: Memory> Operand<'a, M> {
    /// The same operand under a shorter borrow.
    pub fn shorten<'short>(self) -> Operand<'short, M>
    where
        'a: 'short,
    {
        match self {
            Operand::Bf16(x) => Operand::Bf16(M::shorten(x)),
            Operand::Nvfp4(Nvfp4 { codes, scales, amax }) => Operand::Nvfp4(Nvfp4 {
                codes: M::shorten(codes),
                scales: M::shorten(scales),
                amax: M::shorten(amax),
            }),
            Operand::Unpacked(Unpacked { values, amax }) => {
                Operand::Unpacked(Unpacked { values: M::shorten(values), amax: M::shorten(amax) })
            }
        }
    }

    /// The amaxes of a quantized operand.
    pub fn amax(&self) -> Option<View<'a, M, f32>> {
        match self {
            Operand::Bf16(_) => None,
            Operand::Nvfp4(q) => Some(q.amax),
            Operand::Unpacked(u) => Some(u.amax),
        }
    }

    pub(super) fn check(
        &self,
        kernel: &'static str,
        name: &'static str,
        bf16: [usize; 2],
        nvfp4: [usize; 2],
        experts: usize,
    ) -> Checked {
        match self {
            Operand::Bf16(x) => expect_len(kernel, name, &bf16, M::len(x)),
            Operand::Nvfp4(q) => {
                let [rows, k] = nvfp4;
                expect_len(kernel, name, &[rows, k / 2], M::len(&q.codes))?;
                expect_len(kernel, name, &[rows, k / BLOCK], M::len(&q.scales))?;
                expect_len(kernel, name, &[experts], M::len(&q.amax))
            }
            Operand::Unpacked(u) => {
                expect_len(kernel, name, &nvfp4, M::len(&u.values))?;
                expect_len(kernel, name, &[experts], M::len(&u.amax))
            }
        }
    }
}

impl<M: Memory> WeightOperand<'_, M> {
    pub(super) fn check(
        &self,
        kernel: &'static str,
        name: &'static str,
        WeightShape { n, k }: WeightShape,
        experts: usize,
    ) -> Checked {
        match self {
            WeightOperand::Bf16(w) => check_experts::<M>(kernel, name, w, n, k, experts),
            WeightOperand::Nvfp4 { packed, unpacked } => {
                multiple_of_block("rows of a quantized weight", n)?;
                multiple_of_block("columns of a quantized weight", k)?;
                expect_len(kernel, name, &[experts, n, k / 2], M::len(&packed.codes))?;
                expect_len(kernel, name, &[experts, n, k / BLOCK], M::len(&packed.scales))?;
                if let Some(values) = unpacked {
                    expect_len(kernel, name, &[experts, n, k], M::len(values))?;
                }
                expect_len(kernel, name, &[experts], M::len(&packed.amax))
            }
        }
    }
}

pub(super) fn check_experts<M: Memory>(
    kernel: &'static str,
    name: &'static str,
    w: &[View<'_, M, bf16>],
    n: usize,
    k: usize,
    experts: usize,
) -> Checked {
    expect_len(kernel, "list of experts' weights", &[experts], w.len())?;
    w.iter().try_for_each(|w| expect_len(kernel, name, &[n, k], M::len(w)))
}

impl<'a, M: Memory> WeightGrad<'a, M> {
    /// One FP32 tensor `[E, n, k]` for all experts.
    pub fn packed_f32(dw: ViewMut<'a, M, f32>, experts: usize, mode: GradMode) -> Self {
        Self { buffers: GradBuffers::F32(M::split_mut(dw, experts)), mode }
    }

    /// The same buffers under a shorter borrow.
    pub fn reborrow(&mut self) -> WeightGrad<'_, M> {
        let buffers = match &mut self.buffers {
            GradBuffers::F32(v) => GradBuffers::F32(v.iter_mut().map(M::reborrow).collect()),
            GradBuffers::Bf16(v) => GradBuffers::Bf16(v.iter_mut().map(M::reborrow).collect()),
        };
        WeightGrad { buffers, mode: self.mode }
    }

    /// One BF16 tensor `[E, n, k]` for all experts.
    pub fn packed_bf16(dw: ViewMut<'a, M, bf16>, experts: usize, mode: GradMode) -> Self {
        Self { buffers: GradBuffers::Bf16(M::split_mut(dw, experts)), mode }
    }
}

impl<M: Memory> WeightGrad<'_, M> {
    pub(crate) fn check(
        &self,
        kernel: &'static str,
        name: &'static str,
        WeightShape { n, k }: WeightShape,
        experts: usize,
    ) -> Checked {
        let lengths: Vec<usize> = match &self.buffers {
            GradBuffers::F32(v) => v.iter().map(M::len_mut).collect(),
            GradBuffers::Bf16(v) => v.iter().map(M::len_mut).collect(),
        };
        expect_len(kernel, "list of experts' weight gradients", &[experts], lengths.len())?;
        lengths.into_iter().try_for_each(|len| expect_len(kernel, name, &[n, k], len))
    }
}
