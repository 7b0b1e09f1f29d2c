//! The grouped products, with what their epilogues do, and the bias gradient.

use super::Checked;
use super::operands::{AmaxOut, Operand, Side, WeightGrad, WeightOperand, WeightShape, check_amax_out};
use crate::kernels::activation::{Activation, GluLayout};
use crate::kernels::error::{Misuse, expect_len};
use crate::kernels::memory::{Extent, Memory, View, ViewMut};
use half::bf16;

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
