//! How much memory a plan takes at its most, from shapes alone.
//!
//! Forward and backward drop a buffer as soon as no later pass reads it. The two functions at the end follow them
//! line by line; a test counts what is really allocated.

use super::config::Precision;
use super::plan::{OperandPlan, Phase, Plan, SavedAs};
use crate::kernels::work::{Rows, packed_bytes};

/// The most bytes that lie in buffers at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeakBytes {
    /// In the forward, what it saves and `y` included.
    pub forward: usize,
    /// In the backward, what was saved and `dx` included; 0 if there is none.
    pub backward: usize,
}

/// Buffers that come and go.
struct Live {
    now: usize,
    most: usize,
}

impl Live {
    fn starting_with(bytes: usize) -> Self {
        Self { now: bytes, most: bytes }
    }

    fn make(&mut self, bytes: usize) {
        self.now += bytes;
        self.most = self.most.max(self.now);
    }

    fn free(&mut self, bytes: usize) {
        self.now -= bytes;
    }
}

const BF16: usize = 2;
const F32: usize = 4;

/// A plan for tensors of one size on one kind of backend.
struct Shaped<'a> {
    plan: &'a Plan,
    rows: Rows,
    /// [`Capabilities::unpacked_operands`](crate::kernels::Capabilities::unpacked_operands).
    unpacked: bool,
}

impl Plan {
    /// The most bytes that buffers of the operator hold at once: what it makes, saves and returns.
    ///
    /// `unpacked` is what the backend says in
    /// [`Capabilities::unpacked_operands`](crate::kernels::Capabilities::unpacked_operands). Not counted are the caller's
    /// tensors (inputs, prepared weights, buffers of weight gradients, `y` once the backward runs), a [trace](super::Trace),
    /// and what a backend needs within a pass: on a CPU some MiB a thread, on a GPU
    /// partial sums, the largest of them `dprob`'s, `[F/32, T]` in FP32.
    pub fn peak_bytes(&self, rows: Rows, unpacked: bool) -> PeakBytes {
        let shaped = Shaped { plan: self, rows, unpacked };
        PeakBytes { forward: shaped.forward(), backward: shaped.backward() }
    }
}

impl Shaped<'_> {
    /// A BF16 tensor of `[T, cols]`.
    fn tensor(&self, cols: usize) -> usize {
        self.rows.rows * cols * BF16
    }

    /// The rowwise and the columnwise copy that are made in a phase, with their amaxes; 0 for none.
    fn copies(&self, operand: &OperandPlan, cols: usize, phase: Phase) -> [usize; 2] {
        let Rows { rows, padded, experts } = self.rows;
        let bytes = |rows, k, unpacked| match unpacked {
            true => rows * k * BF16 + experts * F32,
            false => packed_bytes(rows, k) + experts * F32,
        };
        let made = |copy: Option<super::CopyPlan>| copy.is_some_and(|copy| copy.made == phase);
        // A columnwise copy of the forward waits for the backward, and is packed on every backend.
        let columnwise_unpacked = self.unpacked && phase == Phase::Backward;
        [
            if made(operand.rowwise) { bytes(rows, cols, self.unpacked) } else { 0 },
            if made(operand.columnwise) { bytes(cols, padded, columnwise_unpacked) } else { 0 },
        ]
    }

    fn forward(&self) -> usize {
        let (plan, config) = (self.plan, &self.plan.config);
        let [c, h] = [config.fc1_rows(), config.ffn].map(|cols| self.tensor(cols));
        let [x_row, x_column] = self.copies(&plan.x, config.hidden, Phase::Forward);
        let [h_row, h_column] = self.copies(&plan.h, config.ffn, Phase::Forward);
        let mut live = Live::starting_with(0);
        live.make(x_row + x_column);
        live.make(c + h);
        live.free(x_row);
        live.make(h_row + h_column);
        live.free(if plan.saved_c { 0 } else { c });
        let quantized = config.precision == Precision::Nvfp4;
        live.free(if quantized { h } else { 0 });
        live.make(self.tensor(config.hidden)); // y
        live.free(if quantized || plan.saved_h == SavedAs::Bf16 { h_row } else { h });
        live.make(if plan.saved_x == SavedAs::Bf16 { self.tensor(config.hidden) } else { 0 });
        live.make(if plan.saved_c { self.rows.rows * F32 } else { 0 }); // prob
        live.most
    }

    fn backward(&self) -> usize {
        let (plan, config) = (self.plan, &self.plan.config);
        if !plan.needs.backward() {
            return 0;
        }
        let quantized = config.precision == Precision::Nvfp4;
        let dc = self.tensor(config.fc1_rows());
        let h = if plan.rebuilds_h { self.tensor(config.ffn) } else { 0 };
        let bias = if config.bias && plan.needs.weights { self.rows.experts * F32 } else { 0 };
        let [dy_row, dy_column] = self.copies(&plan.dy, config.hidden, Phase::Backward);
        let [dc_row, dc_column] = self.copies(&plan.dc, config.fc1_rows(), Phase::Backward);
        let [_, h_column] = self.copies(&plan.h, config.ffn, Phase::Backward);
        let mut live = Live::starting_with(plan.saved_bytes(self.rows).iter().map(|saved| saved.bytes).sum());
        live.make(dy_row + dy_column);
        live.make(dc + self.rows.rows * F32 + bias * config.fc1_rows() + h); // and dprob, db1
        live.free(dy_row);
        live.make(bias * config.hidden); // db2
        live.make(h_column);
        live.free(if quantized { h } else { 0 });
        live.make(dc_row + dc_column);
        live.free(if quantized { dc } else { h });
        live.free(h_column + dy_column); // by then dW2 is there
        live.make(if plan.needs.input { self.tensor(config.hidden) } else { 0 });
        live.most
    }
}
