//! A quantized operand: 4-bit codes, a scale for each block of 16 along the contraction, an amax for each group.

use super::Groups;
use crate::numerics::{BLOCK, e2m1, scale};

/// One operand of a product, `rows x k` with the contraction along `k`.
///
/// `B` stores bytes and `A` stores `f32`: owned, borrowed or on a device.
///
/// | field | shape | contents |
/// |---|---|---|
/// | `codes` | `[rows, k/2]` | E2M1, the even element in the low nibble |
/// | `scales` | `[rows, k/16]` | E4M3 |
/// | `amax` | `[groups]` | largest finite magnitude that the global scale was derived from |
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nvfp4<B, A> {
    /// Packed E2M1 codes.
    pub codes: B,
    /// E4M3 block scales.
    pub scales: B,
    /// Amax of each group.
    pub amax: A,
}

/// The logical shape of an operand; the packed shapes follow from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperandShape {
    /// Rows, one for each output row or column of the product.
    pub rows: usize,
    /// Contraction length in elements, a multiple of 16.
    pub k: usize,
}

impl OperandShape {
    /// Bytes of packed codes.
    pub fn code_bytes(self) -> usize {
        self.rows * (self.k / 2)
    }

    /// Number of block scales.
    pub fn scale_bytes(self) -> usize {
        self.rows * (self.k / BLOCK)
    }

    /// The shape of the rowwise operand of a `[T, cols]` activation.
    pub fn rowwise(groups: &Groups, cols: usize) -> Self {
        Self { rows: groups.rows(), k: cols }
    }

    /// The shape of the columnwise operand: transposed, each expert's tokens padded to a multiple of 16.
    pub fn columnwise(groups: &Groups, cols: usize) -> Self {
        Self { rows: cols, k: groups.padded_rows() }
    }
}

/// What one scale covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Tile {
    /// 16 consecutive elements of a row: activations and gradients.
    #[default]
    Row16,
    /// A square of 16 x 16: weights, whose transpose then has the same codes.
    Square16,
}

/// A quantized operand in host memory, with its shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// The logical shape.
    pub shape: OperandShape,
    /// The packed contents.
    pub packed: Nvfp4<Vec<u8>, Vec<f32>>,
}

impl Quantized {
    /// A zero operand with `groups` amaxes.
    pub fn zeros(shape: OperandShape, groups: usize) -> Self {
        let packed = Nvfp4 {
            codes: vec![0; shape.code_bytes()],
            scales: vec![0; shape.scale_bytes()],
            amax: vec![0.0; groups],
        };
        Self { shape, packed }
    }

    /// The values as `f32`, `[rows, k]`. `group_of(row, column)` names the amax that an element was scaled with.
    pub fn dequantize(&self, group_of: impl Fn(usize, usize) -> usize) -> Vec<f32> {
        let OperandShape { rows, k } = self.shape;
        let mut out = Vec::with_capacity(rows * k);
        for row in 0..rows {
            for col in 0..k {
                let (even, odd) = e2m1::unpack(self.packed.codes[row * (k / 2) + col / 2]);
                let code = if col % 2 == 0 { even } else { odd };
                let block = self.packed.scales[row * (k / BLOCK) + col / BLOCK];
                out.push(scale::dequantize(code, block, self.packed.amax[group_of(row, col)]));
            }
        }
        out
    }
}
