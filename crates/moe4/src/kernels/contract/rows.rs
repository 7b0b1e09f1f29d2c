//! Tokens to expert order and back.

use super::Checked;
use crate::kernels::error::{Misuse, expect_len};
use crate::kernels::memory::{Memory, View, ViewMut};
use half::bf16;

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
