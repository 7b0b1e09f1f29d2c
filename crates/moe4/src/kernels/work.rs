//! How much each pass reads, writes and computes, from shapes alone.
//!
//! Every tensor that a pass touches counts once, at the size in which it is stored, padding included. That is what a
//! pass has to move at least; a backend may read something twice.

#![forbid(unsafe_code)]

use super::contract::WeightShape;
use crate::numerics::BLOCK;
use crate::tensor::ScaleLayout;
use std::iter::Sum;
use std::ops::Add;

/// Bytes and operations of a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
    /// Multiplications and additions of matrix products.
    pub flops: u64,
}

impl Work {
    /// Bytes read and written.
    pub fn bytes(self) -> u64 {
        self.read + self.written
    }
}

impl Add for Work {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            read: self.read + other.read,
            written: self.written + other.written,
            flops: self.flops + other.flops,
        }
    }
}

impl Sum for Work {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), Add::add)
    }
}

/// What a pass over grouped rows knows of its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// `T`.
    pub rows: usize,
    /// `Tp`.
    pub padded: usize,
    /// `E`.
    pub experts: usize,
}

const BF16: usize = 2;
const F32: usize = 4;

/// Bytes of a packed operand `[rows, k]` without its amaxes.
pub fn packed_bytes(rows: usize, k: usize) -> usize {
    rows * (k / 2 + k / BLOCK)
}

fn work(read: usize, written: usize) -> Work {
    Work { read: read as u64, written: written as u64, flops: 0 }
}

/// `group_amax`, or `group_hadamard_amax` with two outputs.
pub fn amax(r: Rows, cols: usize, outputs: usize) -> Work {
    work(r.rows * cols * BF16, outputs * r.experts * F32)
}

/// The form in which `group_quantize` writes a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyForm {
    /// Codes and block scales, in this layout.
    pub packed: Option<ScaleLayout>,
    /// BF16 values.
    pub unpacked: bool,
}

impl CopyForm {
    /// Codes and scales in their plain layout.
    pub const PACKED: Self = Self { packed: Some(ScaleLayout::Plain), unpacked: false };

    fn bytes(self, rows: usize, k: usize) -> usize {
        let packed = self.packed.map_or(0, |layout| rows * (k / 2) + layout.bytes(rows, k / BLOCK));
        packed + self.unpacked as usize * rows * k * BF16
    }
}

/// `group_quantize` in the given directions, one read for both.
pub fn quantize(r: Rows, cols: usize, rowwise: Option<CopyForm>, columnwise: Option<CopyForm>) -> Work {
    let copies = rowwise.is_some() as usize + columnwise.is_some() as usize;
    let row = rowwise.map_or(0, |form| form.bytes(r.rows, cols));
    let column = columnwise.map_or(0, |form| form.bytes(cols, r.padded));
    work(r.rows * cols * BF16 + copies * r.experts * F32, row + column)
}

/// `quantize_weights`, with BF16 values as well if `unpacked`.
pub fn quantize_weights(experts: usize, WeightShape { n, k }: WeightShape, unpacked: bool) -> Work {
    let values = if unpacked { n * k * BF16 } else { 0 };
    work(experts * n * k * BF16, experts * (packed_bytes(n, k) + values + F32))
}

/// `dequantize` of a copy `[rows, k]`.
pub fn dequantize(rows: usize, k: usize, layout: ScaleLayout, experts: usize) -> Work {
    let form = CopyForm { packed: Some(layout), unpacked: false };
    work(form.bytes(rows, k) + experts * F32, rows * k * F32)
}

/// Bytes of an operand `[rows, k]` with its amaxes if it is packed.
pub fn operand_bytes(packed: bool, rows: usize, k: usize, experts: usize) -> usize {
    if packed { packed_bytes(rows, k) + experts * F32 } else { rows * k * BF16 }
}

/// Bytes of all experts' weights as an operand.
pub fn weight_bytes(packed: bool, WeightShape { n, k }: WeightShape, experts: usize) -> usize {
    operand_bytes(packed, experts * n, k, experts)
}

/// A product of `[rows, k]` with `n` outputs that reads and writes the given bytes.
pub fn product(rows: usize, n: usize, k: usize, read: usize, written: usize) -> Work {
    Work { flops: 2 * rows as u64 * n as u64 * k as u64, ..work(read, written) }
}

/// `grouped_gemm`: the output in BF16; a bias is read with the probabilities that scale it.
pub fn gemm(r: Rows, n: usize, k: usize, operands: usize, bias: usize) -> Work {
    product(r.rows, n, k, operands + bias, r.rows * n * BF16)
}

/// `grouped_gemm_act`: reads probabilities, writes `c`, `h` and `amaxes` numbers an expert.
pub fn gemm_act(r: Rows, [hidden, ffn, n1]: [usize; 3], operands: usize, bias: bool, amaxes: usize) -> Work {
    let bias = if bias { r.experts * n1 * F32 } else { 0 };
    let written = r.rows * (n1 + ffn) * BF16 + amaxes * r.experts * F32;
    product(r.rows, n1, hidden, operands + bias + r.rows * F32, written)
}

/// What `grouped_gemm_dact` writes beside `dc` and `dprob`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DactOutputs {
    /// The bias gradient.
    pub db1: bool,
    /// `h` again.
    pub h: bool,
    /// `dh`, for diagnosis.
    pub dh: bool,
    /// Amaxes an expert.
    pub amaxes: usize,
}

/// `grouped_gemm_dact`: reads `c` and probabilities.
pub fn gemm_dact(r: Rows, [hidden, ffn, n1]: [usize; 3], operands: usize, out: DactOutputs) -> Work {
    let optional = out.db1 as usize * r.experts * n1 * F32
        + out.h as usize * r.rows * ffn * BF16
        + out.dh as usize * r.rows * ffn * F32
        + out.amaxes * r.experts * F32;
    let read = operands + r.rows * (n1 * BF16 + F32);
    product(r.rows, ffn, hidden, read, r.rows * (n1 * BF16 + F32) + optional)
}

/// `grouped_wgrad` into buffers of `element` bytes, read as well when accumulating.
pub fn wgrad(
    r: Rows,
    WeightShape { n, k }: WeightShape,
    operands: usize,
    element: usize,
    accumulate: bool,
) -> Work {
    let buffers = r.experts * n * k * element;
    product(r.rows, n, k, operands + if accumulate { buffers } else { 0 }, buffers)
}

/// `grouped_bias_grad`.
pub fn bias_grad(r: Rows, hidden: usize, db2: bool) -> Work {
    let bias = r.experts * hidden * F32;
    work(r.rows * (hidden * BF16 + 2 * F32) + bias, r.rows * F32 + if db2 { bias } else { 0 })
}

/// `permute` of `slots` rows, or `unpermute` of `slots` rows to `tokens`.
pub fn gather(slots: usize, tokens: usize, cols: usize, weights: bool) -> Work {
    let index = slots * (size_of::<u32>() + if weights { F32 } else { 0 });
    work(slots * cols * BF16 + index, tokens * cols * BF16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_of_a_copy_count_what_they_store() {
        // [20, 48] and [48, 32]: 3 and 2 scales a row, in tiles of 128 x 4.
        let rows = Rows { rows: 20, padded: 32, experts: 2 };
        let form = |layout, unpacked| Some(CopyForm { packed: Some(layout), unpacked });
        let written = |row, column| quantize(rows, 48, row, column).written;
        let (plain, swizzled) = (ScaleLayout::Plain, ScaleLayout::Swizzled128x4);
        assert_eq!(written(form(plain, false), None), 20 * (24 + 3));
        assert_eq!(written(form(swizzled, false), None), 20 * 24 + 512);
        assert_eq!(written(None, form(swizzled, true)), 48 * 16 + 512 + 48 * 32 * 2);
        let values = Some(CopyForm { packed: None, unpacked: true });
        assert_eq!(written(values, values), 20 * 48 * 2 + 48 * 32 * 2);
        let shape = WeightShape { n: 16, k: 32 };
        assert_eq!(quantize_weights(3, shape, true).written, 3 * (16 * (16 + 2) + 16 * 32 * 2 + 4));
        let back = dequantize(20, 48, swizzled, 2);
        assert_eq!((back.read, back.written, back.flops), (20 * 24 + 512 + 8, 20 * 48 * 4, 0));
    }
}
