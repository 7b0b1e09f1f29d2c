//! The work of a descriptor: its shapes given to [`super::work`].

#![forbid(unsafe_code)]

use super::contract::*;
use super::memory::{Extent, Memory};
use super::work::{self, CopyForm, DactOutputs, Rows, Work};

fn rows<G: Extent>(groups: &G) -> Rows {
    Rows { rows: groups.rows(), padded: groups.padded_rows(), experts: groups.experts() }
}

impl<M: Memory> Operand<'_, M> {
    fn bytes(&self) -> usize {
        match self {
            Operand::Bf16(x) => M::len(x) * 2,
            Operand::Nvfp4(q) => M::len(&q.codes) + M::len(&q.scales) + M::len(&q.amax) * 4,
            Operand::Unpacked(u) => M::len(&u.values) * 2 + M::len(&u.amax) * 4,
        }
    }
}

impl<M: Memory> WeightOperand<'_, M> {
    /// Of one form: where there are BF16 values, they are counted, though a backend may read the codes beside them.
    fn bytes(&self) -> usize {
        match self {
            WeightOperand::Bf16(w) => w.iter().map(|w| M::len(w) * 2).sum(),
            WeightOperand::Nvfp4 { packed, unpacked: None } => Operand::<M>::Nvfp4(*packed).bytes(),
            WeightOperand::Nvfp4 { packed, unpacked: Some(values) } => {
                Operand::<M>::Unpacked(Unpacked { values: *values, amax: packed.amax }).bytes()
            }
        }
    }
}

impl<M: Memory> AmaxOut<'_, M> {
    /// Numbers written for each expert.
    fn outputs(&self) -> usize {
        1 + self.rht.is_some() as usize
    }
}

impl<M: Memory> GroupAmax<'_, M> {
    /// Bytes and operations.
    pub fn work(&self) -> Work {
        work::amax(rows(self.groups), self.cols, 1)
    }
}

impl<M: Memory> GroupHadamardAmax<'_, M> {
    /// Bytes and operations.
    pub fn work(&self) -> Work {
        work::amax(rows(self.groups), self.cols, 2)
    }
}

impl<M: Memory> Cast<'_, M> {
    fn form(&self) -> CopyForm {
        CopyForm { packed: self.packed.as_ref().map(|out| out.layout), unpacked: self.unpacked.is_some() }
    }
}

impl<M: Memory> GroupQuantize<'_, M> {
    /// Bytes and operations.
    pub fn work(&self) -> Work {
        let rowwise = self.rowwise.as_ref().map(Cast::form);
        let columnwise = self.columnwise.as_ref().map(|c| c.cast.form());
        work::quantize(rows(self.groups), self.cols, rowwise, columnwise)
    }
}

impl<M: Memory> QuantizeWeights<'_, M> {
    /// Bytes and operations.
    pub fn work(&self) -> Work {
        work::quantize_weights(self.w.len(), self.shape, self.unpacked.is_some())
    }
}

impl<M: Memory> Dequantize<'_, M> {
    /// Bytes and operations.
    pub fn work(&self) -> Work {
        let [rows, k] = self.direction.shape(self.groups, self.cols);
        work::dequantize(rows, k, self.layout, self.groups.experts())
    }
}

impl<M: Memory> GroupedGemm<'_, M> {
    /// Bytes and operations.
    pub fn work(&self) -> Work {
        let (n, k) = self.side.dims(self.shape);
        let bias = self.bias.as_ref().map_or(0, |b| (M::len(&b.bias) + b.prob.map_or(0, |p| M::len(&p))) * 4);
        work::gemm(rows(self.groups), n, k, self.a.bytes() + self.w.bytes(), bias)
    }
}

impl<M: Memory> GroupedGemmAct<'_, M> {
    /// Bytes and operations.
    pub fn work(&self) -> Work {
        let dims = [self.hidden, self.ffn, self.activation.fc1_rows(self.ffn)];
        let amaxes = self.h_amax.as_ref().map_or(0, AmaxOut::outputs);
        work::gemm_act(rows(self.groups), dims, self.x.bytes() + self.w1.bytes(), self.b1.is_some(), amaxes)
    }
}

impl<M: Memory> GroupedGemmDact<'_, M> {
    /// Bytes and operations.
    pub fn work(&self) -> Work {
        let dims = [self.hidden, self.ffn, self.activation.fc1_rows(self.ffn)];
        let out = DactOutputs {
            db1: self.db1.is_some(),
            h: self.h.is_some(),
            dh: self.dh.is_some(),
            amaxes: self.dc_amax.as_ref().map_or(0, AmaxOut::outputs),
        };
        work::gemm_dact(rows(self.groups), dims, self.dy.bytes() + self.w2.bytes(), out)
    }
}

impl<M: Memory> GroupedWgrad<'_, M> {
    /// Bytes and operations.
    pub fn work(&self) -> Work {
        let element = match self.dw.buffers {
            GradBuffers::F32(_) => 4,
            GradBuffers::Bf16(_) => 2,
        };
        let accumulate = self.dw.mode == GradMode::Accumulate;
        work::wgrad(rows(self.groups), self.shape, self.a.bytes() + self.b.bytes(), element, accumulate)
    }
}

impl<M: Memory> GroupedBiasGrad<'_, M> {
    /// Bytes and operations.
    pub fn work(&self) -> Work {
        work::bias_grad(rows(self.groups), self.hidden, self.db2.is_some())
    }
}

impl<M: Memory> Permute<'_, M> {
    /// Bytes and operations.
    pub fn work(&self) -> Work {
        let slots = M::len(&self.source);
        work::gather(slots, slots, self.cols, false)
    }
}

impl<M: Memory> Unpermute<'_, M> {
    /// Bytes and operations.
    pub fn work(&self) -> Work {
        let tokens = M::len_mut(&self.out) / self.cols;
        work::gather(M::len(&self.slot), tokens, self.cols, self.weights.is_some())
    }
}
