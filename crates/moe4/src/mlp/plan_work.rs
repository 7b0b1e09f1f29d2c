//! What a plan costs: bytes and operations of each pass, and bytes saved for the backward, from shapes alone.

use super::config::Precision;
use super::plan::{Plan, PlannedPass, SavedAs};
use crate::kernels::PassName;
use crate::kernels::contract::WeightShape;
use crate::kernels::work::{self, CopyForm, DactOutputs, Rows, Work};
use crate::tensor::ScaleLayout;

/// One tensor that waits for the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedBytes {
    /// Its name.
    pub tensor: &'static str,
    /// In which form.
    pub form: SavedAs,
    /// Bytes.
    pub bytes: usize,
}

impl Plan {
    /// The work of one planned pass over `rows`. Weight gradients are taken as overwritten FP32 buffers.
    ///
    /// Operands are taken as packed. A plan is made without a backend; on one that asks for
    /// [unpacked operands](crate::kernels::Capabilities::unpacked_operands) quantization writes, and
    /// products read, 2 B an element instead, except for what was saved. A [`Ledger`](crate::kernels::Ledger) counts what moved.
    pub fn work(&self, pass: &PlannedPass, rows: Rows) -> Work {
        let c = &self.config;
        let (hidden, ffn, n1) = (c.hidden, c.ffn, c.fc1_rows());
        let packed = c.precision == Precision::Nvfp4;
        let cols = match pass.tensor {
            "h" => ffn,
            "dc" => n1,
            _ => hidden, // x, dy
        };
        let operand = |k| work::operand_bytes(packed, rows.rows, k, rows.experts);
        let column =
            |n| if packed { work::operand_bytes(true, n, rows.padded, rows.experts) } else { operand(n) };
        let w1 = WeightShape { n: n1, k: hidden };
        let w2 = WeightShape { n: hidden, k: ffn };
        let weight = |w| work::weight_bytes(packed, w, rows.experts);
        let dims = [hidden, ffn, n1];
        match pass.name {
            PassName::GroupAmax => work::amax(rows, cols, 1),
            PassName::GroupHadamardAmax => work::amax(rows, cols, 2),
            PassName::GroupQuantize { rowwise, columnwise } => {
                let plain = |made: bool| made.then_some(CopyForm::PACKED);
                work::quantize(rows, cols, plain(rowwise), plain(columnwise))
            }
            PassName::GroupedGemmAct { amax } => {
                work::gemm_act(rows, dims, operand(hidden) + weight(w1), c.bias, amax.outputs())
            }
            PassName::GroupedGemmDact { amax, recompute } => {
                let db1 = c.bias && self.needs.weights;
                let out = DactOutputs { db1, h: recompute, dh: false, amaxes: amax.outputs() };
                work::gemm_dact(rows, dims, operand(hidden) + weight(w2), out)
            }
            PassName::GroupedGemm if pass.tensor == "dx" => {
                work::gemm(rows, hidden, n1, operand(n1) + weight(w1), 0)
            }
            PassName::GroupedGemm => {
                let bias = if c.bias { (rows.experts * hidden + rows.rows) * size_of::<f32>() } else { 0 };
                work::gemm(rows, hidden, ffn, operand(ffn) + weight(w2), bias)
            }
            PassName::GroupedWgrad if pass.tensor == "dw1" => {
                work::wgrad(rows, w1, column(n1) + column(hidden), size_of::<f32>(), false)
            }
            PassName::GroupedWgrad => {
                work::wgrad(rows, w2, column(hidden) + column(ffn), size_of::<f32>(), false)
            }
            PassName::GroupedBiasGrad => work::bias_grad(rows, hidden, self.needs.weights),
            // Not part of a plan: weights are prepared, copies looked at, and tokens sorted, outside of it.
            PassName::QuantizeWeights => {
                work::quantize_weights(rows.experts, if pass.tensor == "w1" { w1 } else { w2 }, false)
            }
            PassName::Dequantize => work::dequantize(rows.rows, cols, ScaleLayout::Plain, rows.experts),
            PassName::Permute | PassName::Unpermute => work::gather(rows.rows, rows.rows, hidden, false),
        }
    }

    /// What waits for the backward, as [`Saved`](super::Saved) will own it.
    pub fn saved_bytes(&self, rows: Rows) -> Vec<SavedBytes> {
        let c = &self.config;
        let one = |tensor, form, cols| {
            let amax = rows.experts * size_of::<f32>();
            let bytes = match form {
                SavedAs::Nothing => 0,
                SavedAs::Columnwise => work::packed_bytes(cols, rows.padded) + amax,
                SavedAs::Amax => amax,
                SavedAs::Bf16 => rows.rows * cols * 2,
            };
            SavedBytes { tensor, form, bytes }
        };
        let form = if self.saved_c { SavedAs::Bf16 } else { SavedAs::Nothing };
        let prob = if self.saved_c { rows.rows * size_of::<f32>() } else { 0 };
        vec![
            one("x", self.saved_x, c.hidden),
            one("c", form, c.fc1_rows()),
            one("h", self.saved_h, c.ffn),
            SavedBytes { tensor: "prob", form, bytes: prob },
        ]
    }
}
