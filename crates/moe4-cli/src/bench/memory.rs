//! What a case needs of the backend's memory, so that a shape that does not fit is left out rather than died of.

use moe4::kernels::work::packed_bytes;

use super::case::{Case, Pass, Quantize, Tensor};
use super::shapes::Shape;

/// Bytes, generously: inputs, outputs, and one more copy of the outputs for the checks.
pub(super) fn needed(case: Case, shape: &Shape) -> u64 {
    let cols = case.tensor.cols(shape);
    let (rows, experts) = (shape.rows, shape.experts);
    let x = rows * cols * 2;
    let padded: usize = shape.splits.iter().map(|split| split.next_multiple_of(16)).sum();
    let (row, column) = (packed_bytes(rows, cols), packed_bytes(cols, padded));
    let n1 = shape.config().fc1_rows();
    let bytes = match case.pass {
        Pass::GroupAmax | Pass::GroupHadamardAmax => x,
        Pass::GroupQuantize(Quantize::Rowwise) => x + 2 * row,
        Pass::GroupQuantize(Quantize::Columnwise) => x + 2 * column,
        Pass::GroupQuantize(Quantize::Both | Quantize::BothStochastic) => x + 2 * (row + column),
        Pass::QuantizeWeights => {
            let n = if case.tensor == Tensor::W1 { n1 } else { shape.hidden };
            experts * n * cols * 2 + 2 * packed_bytes(experts * n, cols)
        }
        Pass::Permute | Pass::Unpermute => 3 * x,
        // With BF16 values beside codes and scales.
        Pass::H(_) => rows * shape.ffn * (2 + 2 * 3) + padded * shape.ffn * 2 * 3,
        // Weights in BF16 and as a copy, packed and unpacked, and their gradients; x, dy, dx, y, c, dc, h, their copies and dh.
        Pass::Product(_) | Pass::Forward(_) | Pass::Step(_) => {
            let weights = experts * (n1 * shape.hidden + shape.hidden * shape.ffn);
            weights * (2 + 3 + 2 * 2) + rows * (shape.hidden + shape.ffn + n1) * 14
        }
    };
    bytes as u64
}
