//! The passes of the operator as plain descriptors: what each reads, what it writes, and in which shape.
//!
//! Every output is written completely by its pass, whatever it held before: rows past `sum(splits)`, padding and
//! the amax of an empty expert become zero. Symbols: `T` rows, `E` experts, `H` hidden, `F` ffn, `N1` FC1 outputs,
//! `Tp` padded token positions.
#![forbid(unsafe_code)]

use super::activation::{Activation, GluLayout};
use super::error::{Misuse, expect_len};
use super::memory::{Extent, Memory, View, ViewMut};
use crate::numerics::BLOCK;
use crate::numerics::hadamard::SignMask;
use crate::numerics::rounding::Rounding;
use crate::tensor::{Nvfp4, ScaleLayout};
use half::bf16;

/// Largest finite magnitude of each expert's rows; 0 for an empty expert.
pub struct GroupAmax<'a, M: Memory> {
    /// `[T, cols]`.
    pub x: View<'a, M, bf16>,
    /// Columns of `x`.
    pub cols: usize,
    /// Rows of each expert.
    pub groups: &'a M::Groups,
    /// Out, `[E]`.
    pub amax: ViewMut<'a, M, f32>,
}

/// Each expert's amax before and after the RHT along tokens, in one read.
pub struct GroupHadamardAmax<'a, M: Memory> {
    /// `[T, cols]`.
    pub x: View<'a, M, bf16>,
    /// Columns of `x`.
    pub cols: usize,
    /// Rows of each expert.
    pub groups: &'a M::Groups,
    /// The transform.
    pub sign_mask: SignMask,
    /// Out, `[E]`: before the transform.
    pub amax: ViewMut<'a, M, f32>,
    /// Out, `[E]`: after the transform, of the BF16-rounded values.
    pub amax_rht: ViewMut<'a, M, f32>,
}

/// Quantization of `[T, cols]` with given amaxes: rowwise, columnwise, or both.
pub struct GroupQuantize<'a, M: Memory> {
    /// `[T, cols]`; `cols` a multiple of 16.
    pub x: View<'a, M, bf16>,
    /// Columns of `x`.
    pub cols: usize,
    /// Rows of each expert.
    pub groups: &'a M::Groups,
    /// Blocks of 16 along the row: codes `[T, cols/2]`, scales `[T, cols/16]`.
    pub rowwise: Option<Cast<'a, M>>,
    /// Blocks of 16 tokens: codes `[cols, Tp/2]`, scales `[cols, Tp/16]`.
    pub columnwise: Option<ColumnwiseCast<'a, M>>,
}

/// One quantized copy to be written, in one form or in both.
pub struct Cast<'a, M: Memory> {
    /// `[E]`, from a pass or an epilogue.
    pub amax: View<'a, M, f32>,
    /// Rounding of the elements.
    pub rounding: Rounding,
    /// Out: codes and scales.
    pub packed: Option<PackedOut<'a, M>>,
    /// Out, `[rows, k]`: `code · f32(block scale)`, see [`unpacked`](crate::numerics::scale::unpacked); the global
    /// scale is left out. Zero where no expert has a token.
    pub unpacked: Option<ViewMut<'a, M, bf16>>,
}

/// Where the packed form of a copy goes.
pub struct PackedOut<'a, M: Memory> {
    /// Out, `[rows, k/2]`: packed E2M1.
    pub codes: ViewMut<'a, M, u8>,
    /// Out: E4M3, `[rows, k/16]` in `layout`, padding zero.
    pub scales: ViewMut<'a, M, u8>,
    /// How `scales` lie in memory.
    pub layout: ScaleLayout,
}

/// A columnwise copy to be written.
pub struct ColumnwiseCast<'a, M: Memory> {
    /// The transform along tokens, if any. `cast.amax` must be of the same transform.
    pub rht: Option<SignMask>,
    /// The copy.
    pub cast: Cast<'a, M>,
}

/// Quantization of weights in 16x16 tiles, nearest, amax included.
pub struct QuantizeWeights<'a, M: Memory> {
    /// One `[n, k]` view an expert.
    pub w: Vec<View<'a, M, bf16>>,
    /// Rows and columns of a weight.
    pub shape: WeightShape,
    /// Out, `[E, n, k/2]`.
    pub codes: ViewMut<'a, M, u8>,
    /// Out, `[E, n, k/16]`: a tile's scale repeated over its 16 rows.
    pub scales: ViewMut<'a, M, u8>,
    /// Out, `[E, n, k]`: `code · f32(block scale)`, see [`unpacked`](crate::numerics::scale::unpacked).
    pub unpacked: Option<ViewMut<'a, M, bf16>>,
    /// Out, `[E]`.
    pub amax: ViewMut<'a, M, f32>,
}

/// The values of a quantized copy of `[T, cols]`: [`dequantize`](crate::numerics::scale::dequantize) of each element.
///
/// Weights `[E, n, k]` are a rowwise copy of `E · n` rows with splits of `n`.
pub struct Dequantize<'a, M: Memory> {
    /// Packed E2M1: `[T, cols/2]` rowwise, `[cols, Tp/2]` columnwise.
    pub codes: View<'a, M, u8>,
    /// E4M3: `[T, cols/16]` rowwise, `[cols, Tp/16]` columnwise, in `layout`.
    pub scales: View<'a, M, u8>,
    /// `[E]`: the amax that the copy was made with.
    pub amax: View<'a, M, f32>,
    /// Columns of the tensor; `cols` a multiple of 16.
    pub cols: usize,
    /// Rows of each expert.
    pub groups: &'a M::Groups,
    /// Which copy this is.
    pub direction: Direction,
    /// How `scales` lie in memory.
    pub layout: ScaleLayout,
    /// Out: `[T, cols]` rowwise, `[cols, Tp]` columnwise. Rows and token positions of nobody are 0, whatever their codes.
    pub out: ViewMut<'a, M, f32>,
}

/// Along which dimension of a `[T, cols]` tensor the blocks of a quantized copy run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Along columns; row `r` belongs to the expert that owns row `r`.
    Rowwise,
    /// Along tokens; position `p` belongs to the expert whose padded range holds it.
    Columnwise,
}

impl Direction {
    /// `[rows, k]` of the copy of a tensor with `cols` columns.
    pub fn shape(self, groups: &impl Extent, cols: usize) -> [usize; 2] {
        match self {
            Direction::Rowwise => [groups.rows(), cols],
            Direction::Columnwise => [cols, groups.padded_rows()],
        }
    }
}

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

/// A quantized operand as a BF16 matrix unit takes it: [`Cast::unpacked`] and the amaxes that its copy was made with.
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
    /// As written by [`QuantizeWeights`]. Both forms hold the same values: a backend reads either.
    Nvfp4 {
        /// Codes `[E, n, k/2]`, scales `[E, n, k/16]`, amaxes `[E]`.
        packed: Nvfp4<View<'a, M, u8>, View<'a, M, f32>>,
        /// `[E, n, k]`: `code · f32(block scale)`.
        unpacked: Option<View<'a, M, bf16>>,
    },
}

/// `out = a · W[e]`, each expert's rows with its own weight; BF16 output.
pub struct GroupedGemm<'a, M: Memory> {
    /// `[T, contraction]`.
    pub a: Operand<'a, M>,
    /// Weights of all experts.
    pub w: WeightOperand<'a, M>,
    /// Stored shape of a weight.
    pub shape: WeightShape,
    /// Contraction over stored columns or rows.
    pub side: Side,
    /// Rows of each expert.
    pub groups: &'a M::Groups,
    /// Added before rounding.
    pub bias: Option<Bias<'a, M>>,
    /// Out, `[T, output columns]`.
    pub out: ViewMut<'a, M, bf16>,
}

/// A bias of each expert, optionally scaled by each row's probability.
pub struct Bias<'a, M: Memory> {
    /// `[E, output columns]`.
    pub bias: View<'a, M, f32>,
    /// `[T]`.
    pub prob: Option<View<'a, M, f32>>,
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

/// FC1 with its epilogue: `c = bf16(x · W1ᵀ + b1)`, `h = bf16(act(c) · prob)`.
pub struct GroupedGemmAct<'a, M: Memory> {
    /// `[T, H]`.
    pub x: Operand<'a, M>,
    /// `[E, N1, H]`.
    pub w1: WeightOperand<'a, M>,
    /// `[E, N1]`.
    pub b1: Option<View<'a, M, f32>>,
    /// `H`.
    pub hidden: usize,
    /// `F`.
    pub ffn: usize,
    /// The activation.
    pub activation: Activation,
    /// Order of the rows of `W1`.
    pub layout: GluLayout,
    /// `[T]`.
    pub prob: View<'a, M, f32>,
    /// Rows of each expert.
    pub groups: &'a M::Groups,
    /// Out, `[T, N1]`.
    pub c: ViewMut<'a, M, bf16>,
    /// Out, `[T, F]`.
    pub h: ViewMut<'a, M, bf16>,
    /// Out: amaxes of `h`.
    pub h_amax: Option<AmaxOut<'a, M>>,
}

/// FC2 dgrad with the activation's backward as its epilogue.
///
/// `dh = dy · W2` in FP32, `dprob[t] = Σ_f act(c)[t,f] · dh[t,f]`, `dc = bf16(dh · prob · act'(c))`.
pub struct GroupedGemmDact<'a, M: Memory> {
    /// `[T, H]`.
    pub dy: Operand<'a, M>,
    /// `[E, H, F]`.
    pub w2: WeightOperand<'a, M>,
    /// `H`.
    pub hidden: usize,
    /// `F`.
    pub ffn: usize,
    /// The activation.
    pub activation: Activation,
    /// Order of the columns of `c`.
    pub layout: GluLayout,
    /// `[T, N1]`, from the forward.
    pub c: View<'a, M, bf16>,
    /// `[T]`.
    pub prob: View<'a, M, f32>,
    /// Rows of each expert.
    pub groups: &'a M::Groups,
    /// Out, `[T, N1]`.
    pub dc: ViewMut<'a, M, bf16>,
    /// Out, `[T]`.
    pub dprob: ViewMut<'a, M, f32>,
    /// Out, `[E, N1]`: sums of the BF16 `dc` over tokens.
    pub db1: Option<ViewMut<'a, M, f32>>,
    /// Out: amaxes of `dc`.
    pub dc_amax: Option<AmaxOut<'a, M>>,
    /// Out, `[T, F]`: the same bits as the forward's `h`.
    pub h: Option<ViewMut<'a, M, bf16>>,
    /// Out, `[T, F]`: the FP32 gradient that otherwise never leaves the kernel; for diagnosis.
    pub dh: Option<ViewMut<'a, M, f32>>,
}

/// `dW[e] (+)= aᵀ · b` over each expert's tokens.
pub struct GroupedWgrad<'a, M: Memory> {
    /// Output side: columnwise `[n, Tp]`, packed or unpacked, or BF16 `[T, n]`.
    pub a: Operand<'a, M>,
    /// Input side: columnwise `[k, Tp]`, packed or unpacked whatever `a` is, or BF16 `[T, k]`.
    pub b: Operand<'a, M>,
    /// Shape of a weight gradient.
    pub shape: WeightShape,
    /// Rows of each expert.
    pub groups: &'a M::Groups,
    /// Out, `[n, k]` an expert.
    pub dw: WeightGrad<'a, M>,
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

/// Backward of FC2's bias: `db2[e] = Σ_t prob[t] · dy[t]`, `dprob[t] += Σ_h b2[e,h] · dy[t,h]`.
pub struct GroupedBiasGrad<'a, M: Memory> {
    /// `[T, H]`.
    pub dy: View<'a, M, bf16>,
    /// `H`.
    pub hidden: usize,
    /// `[E, H]`.
    pub b2: View<'a, M, f32>,
    /// `[T]`.
    pub prob: View<'a, M, f32>,
    /// Rows of each expert.
    pub groups: &'a M::Groups,
    /// In and out, `[T]`.
    pub dprob: ViewMut<'a, M, f32>,
    /// Out, `[E, H]`.
    pub db2: Option<ViewMut<'a, M, f32>>,
}

/// Rows gathered into expert order: `out[s] = x[source[s]]`.
pub struct Permute<'a, M: Memory> {
    /// `[rows, cols]`.
    pub x: View<'a, M, bf16>,
    /// Columns.
    pub cols: usize,
    /// `[slots]`: a row of `x`, or [`NO_ROW`] for a zero row.
    pub source: View<'a, M, u32>,
    /// Out, `[slots, cols]`.
    pub out: ViewMut<'a, M, bf16>,
}

/// Rows summed back to their tokens: `out[t] = Σ_j weight[t,j] · y[slot[t,j]]`, in FP32, `j` ascending, rounded once.
pub struct Unpermute<'a, M: Memory> {
    /// `[slots, cols]`.
    pub y: View<'a, M, bf16>,
    /// Columns.
    pub cols: usize,
    /// `[tokens, top_k]`: a row of `y`, or [`NO_ROW`] for a dropped choice.
    pub slot: View<'a, M, u32>,
    /// Choices of each token.
    pub top_k: usize,
    /// `[tokens, top_k]`; 1 if absent.
    pub weights: Option<View<'a, M, f32>>,
    /// Out, `[tokens, cols]`.
    pub out: ViewMut<'a, M, bf16>,
}

/// The index of no row.
pub const NO_ROW: u32 = u32::MAX;

type Checked = Result<(), Misuse>;

fn multiple_of_block(what: &'static str, got: usize) -> Checked {
    if got > 0 && got.is_multiple_of(BLOCK) {
        return Ok(());
    }
    Err(Misuse::Multiple { what, multiple: BLOCK, got, fix: "pad the dimension with zeros" })
}

fn check_scales(kernel: &'static str, layout: ScaleLayout, rows: usize, k: usize, got: usize) -> Checked {
    let name = match layout {
        ScaleLayout::Plain => "scales",
        ScaleLayout::Swizzled128x4 => "scales, padded to tiles of 128x4,",
    };
    expect_len(kernel, name, &layout.padded_shape(rows, k / BLOCK), got)
}

fn check_unpacked<M: Memory>(
    kernel: &'static str,
    shape: &[usize],
    unpacked: &Option<ViewMut<'_, M, bf16>>,
) -> Checked {
    unpacked.as_ref().map_or(Ok(()), |v| expect_len(kernel, "unpacked", shape, M::len_mut(v)))
}

fn check_amax_out<M: Memory>(kernel: &'static str, out: &Option<AmaxOut<'_, M>>, experts: usize) -> Checked {
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

    fn check(
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
    fn check(
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

fn check_experts<M: Memory>(
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

impl<M: Memory> GroupAmax<'_, M> {
    /// Lengths against shapes.
    pub fn check(&self) -> Checked {
        expect_len("group_amax", "x", &[self.groups.rows(), self.cols], M::len(&self.x))?;
        expect_len("group_amax", "amax", &[self.groups.experts()], M::len_mut(&self.amax))
    }
}

impl<M: Memory> GroupHadamardAmax<'_, M> {
    /// Lengths against shapes.
    pub fn check(&self) -> Checked {
        let (kernel, experts) = ("group_hadamard_amax", self.groups.experts());
        expect_len(kernel, "x", &[self.groups.rows(), self.cols], M::len(&self.x))?;
        expect_len(kernel, "amax", &[experts], M::len_mut(&self.amax))?;
        expect_len(kernel, "amax after RHT", &[experts], M::len_mut(&self.amax_rht))
    }
}

impl<M: Memory> Cast<'_, M> {
    fn check(&self, rows: usize, k: usize, experts: usize) -> Checked {
        let kernel = "group_quantize";
        expect_len(kernel, "amax", &[experts], M::len(&self.amax))?;
        if let Some(PackedOut { codes, scales, layout }) = &self.packed {
            expect_len(kernel, "codes", &[rows, k / 2], M::len_mut(codes))?;
            check_scales(kernel, *layout, rows, k, M::len_mut(scales))?;
        } else if self.unpacked.is_none() {
            return Err(Misuse::Conflict {
                what: kernel,
                conflict: "expected codes and scales, BF16 values, or both as outputs of a copy, got neither"
                    .into(),
                fix: "pass one of them, or leave the copy out",
            });
        }
        check_unpacked::<M>(kernel, &[rows, k], &self.unpacked)
    }
}

impl<M: Memory> GroupQuantize<'_, M> {
    /// Lengths against shapes.
    pub fn check(&self) -> Checked {
        let (groups, cols) = (self.groups, self.cols);
        multiple_of_block("columns of a quantized tensor", cols)?;
        expect_len("group_quantize", "x", &[groups.rows(), cols], M::len(&self.x))?;
        if let Some(cast) = &self.rowwise {
            cast.check(groups.rows(), cols, groups.experts())?;
        }
        if let Some(columnwise) = &self.columnwise {
            columnwise.cast.check(cols, groups.padded_rows(), groups.experts())?;
        }
        Ok(())
    }
}

impl<M: Memory> QuantizeWeights<'_, M> {
    /// Lengths against shapes.
    pub fn check(&self) -> Checked {
        let (kernel, WeightShape { n, k }, experts) = ("quantize_weights", self.shape, self.w.len());
        multiple_of_block("rows of a quantized weight", n)?;
        multiple_of_block("columns of a quantized weight", k)?;
        check_experts::<M>(kernel, "w", &self.w, n, k, experts)?;
        expect_len(kernel, "codes", &[experts, n, k / 2], M::len_mut(&self.codes))?;
        expect_len(kernel, "scales", &[experts, n, k / BLOCK], M::len_mut(&self.scales))?;
        check_unpacked::<M>(kernel, &[experts, n, k], &self.unpacked)?;
        expect_len(kernel, "amax", &[experts], M::len_mut(&self.amax))
    }
}

impl<M: Memory> Dequantize<'_, M> {
    /// Lengths against shapes.
    pub fn check(&self) -> Checked {
        let kernel = "dequantize";
        multiple_of_block("columns of a quantized tensor", self.cols)?;
        let [rows, k] = self.direction.shape(self.groups, self.cols);
        expect_len(kernel, "codes", &[rows, k / 2], M::len(&self.codes))?;
        check_scales(kernel, self.layout, rows, k, M::len(&self.scales))?;
        expect_len(kernel, "amax", &[self.groups.experts()], M::len(&self.amax))?;
        expect_len(kernel, "out", &[rows, k], M::len_mut(&self.out))
    }
}

impl<M: Memory> GroupedGemm<'_, M> {
    /// Lengths against shapes.
    pub fn check(&self) -> Checked {
        let (kernel, t, experts) = ("grouped_gemm", self.groups.rows(), self.groups.experts());
        let (cols, contraction) = self.side.dims(self.shape);
        self.a.check(kernel, "a", [t, contraction], [t, contraction], experts)?;
        self.w.check(kernel, "w", self.shape, experts)?;
        if let Some(bias) = &self.bias {
            expect_len(kernel, "bias", &[experts, cols], M::len(&bias.bias))?;
            if let Some(prob) = &bias.prob {
                expect_len(kernel, "prob", &[t], M::len(prob))?;
            }
        }
        expect_len(kernel, "out", &[t, cols], M::len_mut(&self.out))
    }
}

impl<M: Memory> GroupedGemmAct<'_, M> {
    /// Lengths against shapes.
    pub fn check(&self) -> Checked {
        let (kernel, t, experts) = ("grouped_gemm_act", self.groups.rows(), self.groups.experts());
        let n1 = self.activation.fc1_rows(self.ffn);
        self.x.check(kernel, "x", [t, self.hidden], [t, self.hidden], experts)?;
        self.w1.check(kernel, "w1", WeightShape { n: n1, k: self.hidden }, experts)?;
        if let Some(b1) = &self.b1 {
            expect_len(kernel, "b1", &[experts, n1], M::len(b1))?;
        }
        self.layout.check(&self.activation, self.ffn)?;
        expect_len(kernel, "prob", &[t], M::len(&self.prob))?;
        expect_len(kernel, "c", &[t, n1], M::len_mut(&self.c))?;
        expect_len(kernel, "h", &[t, self.ffn], M::len_mut(&self.h))?;
        check_amax_out(kernel, &self.h_amax, experts)
    }
}

impl<M: Memory> GroupedGemmDact<'_, M> {
    /// Lengths against shapes.
    pub fn check(&self) -> Checked {
        let (kernel, t, experts) = ("grouped_gemm_dact", self.groups.rows(), self.groups.experts());
        let n1 = self.activation.fc1_rows(self.ffn);
        self.dy.check(kernel, "dy", [t, self.hidden], [t, self.hidden], experts)?;
        self.w2.check(kernel, "w2", WeightShape { n: self.hidden, k: self.ffn }, experts)?;
        self.layout.check(&self.activation, self.ffn)?;
        expect_len(kernel, "c", &[t, n1], M::len(&self.c))?;
        expect_len(kernel, "prob", &[t], M::len(&self.prob))?;
        expect_len(kernel, "dc", &[t, n1], M::len_mut(&self.dc))?;
        expect_len(kernel, "dprob", &[t], M::len_mut(&self.dprob))?;
        if let Some(db1) = &self.db1 {
            expect_len(kernel, "db1", &[experts, n1], M::len_mut(db1))?;
        }
        if let Some(h) = &self.h {
            expect_len(kernel, "h", &[t, self.ffn], M::len_mut(h))?;
        }
        if let Some(dh) = &self.dh {
            expect_len(kernel, "dh", &[t, self.ffn], M::len_mut(dh))?;
        }
        check_amax_out(kernel, &self.dc_amax, experts)
    }
}

impl<M: Memory> GroupedWgrad<'_, M> {
    /// Lengths against shapes.
    pub fn check(&self) -> Checked {
        let (kernel, groups, WeightShape { n, k }) = ("grouped_wgrad", self.groups, self.shape);
        let (t, tp, experts) = (groups.rows(), groups.padded_rows(), groups.experts());
        self.a.check(kernel, "a", [t, n], [n, tp], experts)?;
        self.b.check(kernel, "b", [t, k], [k, tp], experts)?;
        if matches!(self.a, Operand::Bf16(_)) != matches!(self.b, Operand::Bf16(_)) {
            return Err(Misuse::Conflict {
                what: "grouped_wgrad",
                conflict: "expected both operands in BF16 or both quantized, got one of each".into(),
                fix: "quantize both along tokens, or neither",
            });
        }
        self.dw.check(kernel, "dw", self.shape, experts)
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

impl<M: Memory> GroupedBiasGrad<'_, M> {
    /// Lengths against shapes.
    pub fn check(&self) -> Checked {
        let (kernel, t, experts) = ("grouped_bias_grad", self.groups.rows(), self.groups.experts());
        expect_len(kernel, "dy", &[t, self.hidden], M::len(&self.dy))?;
        expect_len(kernel, "b2", &[experts, self.hidden], M::len(&self.b2))?;
        expect_len(kernel, "prob", &[t], M::len(&self.prob))?;
        expect_len(kernel, "dprob", &[t], M::len_mut(&self.dprob))?;
        match &self.db2 {
            Some(db2) => expect_len(kernel, "db2", &[experts, self.hidden], M::len_mut(db2)),
            None => Ok(()),
        }
    }
}

impl<M: Memory> Permute<'_, M> {
    /// Lengths against shapes. Index values are checked by the pass itself where it can read them.
    pub fn check(&self) -> Checked {
        rows_of::<M>("permute", "x", &self.x, self.cols)?;
        expect_len("permute", "out", &[M::len(&self.source), self.cols], M::len_mut(&self.out))
    }
}

impl<M: Memory> Unpermute<'_, M> {
    /// Lengths against shapes. Index values are checked by the pass itself where it can read them.
    pub fn check(&self) -> Checked {
        let kernel = "unpermute";
        rows_of::<M>(kernel, "y", &self.y, self.cols)?;
        let tokens = M::len_mut(&self.out) / self.cols;
        expect_len(kernel, "out", &[tokens, self.cols], M::len_mut(&self.out))?;
        expect_len(kernel, "slot", &[tokens, self.top_k], M::len(&self.slot))?;
        match &self.weights {
            Some(w) => expect_len(kernel, "weights", &[tokens, self.top_k], M::len(w)),
            None => Ok(()),
        }
    }
}

fn rows_of<M: Memory>(
    kernel: &'static str,
    name: &'static str,
    x: &View<'_, M, bf16>,
    cols: usize,
) -> Checked {
    if cols == 0 {
        return Err(Misuse::Value {
            what: format!("{kernel}: columns"),
            expected: "at least 1",
            got: "0".into(),
        });
    }
    expect_len(kernel, name, &[M::len(x) / cols, cols], M::len(x))
}
