//! The golden operator data: what the stages and the whole operator share.

use crate::drive::Packed;
use crate::golden::MlpGolden;
use crate::mlp_rule::Tensor;
use std::ops::Range;

impl MlpGolden {
    /// A stored copy, `suffix` empty or `_col`.
    pub(super) fn packed(&self, name: &str, suffix: &str) -> Packed {
        Packed {
            codes: self.file.u8(&format!("{name}_fp4{suffix}")),
            scales: self.file.u8(&format!("{name}_scale{suffix}")),
            amax: self.file.f32(&format!("{name}_amax{suffix}")),
        }
    }

    /// Columns of a tensor with a row for each token.
    pub(super) fn cols(&self, name: &str) -> usize {
        match name {
            "c" | "dc" => self.n1(),
            "h" | "dh" => self.ffn,
            "dprob" => 1,
            _ => self.hidden,
        }
    }

    fn rows_of_expert(&self, cols: usize) -> Vec<Range<usize>> {
        let flat = |e: usize| self.groups.range(e).start * cols..self.groups.range(e).end * cols;
        (0..self.groups.experts()).map(flat).collect()
    }

    /// A tensor with a row for each token, for the tolerance rule.
    pub(super) fn by_token(&self, name: &'static str) -> Tensor {
        let cols = self.cols(name);
        Tensor { name, shape: vec![self.groups.rows(), cols], experts: self.rows_of_expert(cols) }
    }

    /// A weight gradient, for the tolerance rule.
    pub(super) fn by_expert(&self, name: &'static str) -> Tensor {
        let [rows, cols] = if name == "dw1" { [self.n1(), self.hidden] } else { [self.hidden, self.ffn] };
        let experts = self.groups.experts();
        let slab = |e: usize| e * rows * cols..(e + 1) * rows * cols;
        Tensor { name, shape: vec![experts, rows, cols], experts: (0..experts).map(slab).collect() }
    }
}

/// The shape of a tensor with a row for each token.
pub(super) fn token_shape(golden: &MlpGolden, name: &str) -> [usize; 2] {
    [golden.groups.rows(), golden.cols(name)]
}
