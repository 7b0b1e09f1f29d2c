//! Amaxes, quantized copies, and the way back.

use super::operands::{WeightShape, check_experts};
use super::{Checked, multiple_of_block};
use crate::kernels::error::{Misuse, expect_len};
use crate::kernels::memory::{Extent, Memory, View, ViewMut};
use crate::numerics::BLOCK;
use crate::numerics::hadamard::SignMask;
use crate::numerics::rounding::Rounding;
use crate::tensor::ScaleLayout;
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
