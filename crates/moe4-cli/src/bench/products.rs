//! The products of a training step, one at a time, on operands as the operator hands them to the backend.
//!
//! ```text
//! grouped_gemm_act             c, h, amaxes of h       x · W1ᵀ, activation
//! grouped_gemm fc2             y                       h · W2ᵀ
//! grouped_gemm_dact            dc, dprob, amaxes       dy · W2, activation backward
//! grouped_gemm_dact recompute  and h again
//! grouped_gemm dx              dx                      dc · W1
//! grouped_wgrad dw1, dw2       dW in BF16              dcᵀ · x, dyᵀ · h
//! ```
//!
//! On a backend that asks for unpacked operands, those are unpacked that the operator unpacks: weights, what a product
//! reads in the phase that quantized it. `x` and `h` have waited for the backward, and are packed.

use anyhow::{Context, Result};
use half::bf16;
use moe4::kernels::contract::{
    AmaxOut, GradMode, GroupHadamardAmax, GroupedGemm, GroupedGemmAct, GroupedGemmDact, GroupedWgrad,
    RhtAmax, Side, WeightGrad, WeightShape,
};
use moe4::kernels::{Backend, Buffer, Memory};
use moe4::numerics::hadamard::SignMask;

use super::case::Product;
use super::copies::Quantized;
use super::inputs;
use super::shapes::Shape;
use super::tensors::{Output, download, poisoned};

/// A product made ready to run.
pub(super) struct ProductPass<M: Memory> {
    product: Product,
    shape: Shape,
    groups: M::Groups,
    /// Rows of tokens; of a wgrad the output side.
    a: Quantized<M>,
    /// Weights; of a wgrad the input side.
    b: Quantized<M>,
    /// `[T, N1]`: of a dact.
    c: Buffer<M, bf16>,
    prob: Buffer<M, f32>,
    /// `c`, `y`, `dc`, `dx` or `dW`.
    out: Buffer<M, bf16>,
    h: Buffer<M, bf16>,
    dprob: Buffer<M, f32>,
    /// Of `h` or `dc`, before and after the RHT.
    amax: [Buffer<M, f32>; 2],
}

/// Elements of what a product writes.
#[derive(Default)]
struct Lengths {
    out: usize,
    h: usize,
    dprob: usize,
    amax: usize,
}

impl Product {
    fn lengths(self, shape: &Shape) -> Lengths {
        let (rows, n1, amax) = (shape.rows, shape.config().fc1_rows(), shape.experts);
        let h = rows * shape.ffn;
        match self {
            Product::Fc1 => Lengths { out: rows * n1, h, amax, ..Lengths::default() },
            Product::Fc2 | Product::Dx => Lengths { out: rows * shape.hidden, ..Lengths::default() },
            Product::Dact => Lengths { out: rows * n1, dprob: rows, amax, h: 0 },
            Product::DactRecompute => Lengths { out: rows * n1, dprob: rows, amax, h },
            Product::Dw1 | Product::Dw2 => {
                let WeightShape { n, k } = self.weight(shape);
                Lengths { out: shape.experts * n * k, ..Lengths::default() }
            }
        }
    }

    /// Of the weight that it reads, or whose gradient it writes.
    fn weight(self, shape: &Shape) -> WeightShape {
        match self {
            Product::Fc1 | Product::Dx | Product::Dw1 => {
                WeightShape { n: shape.config().fc1_rows(), k: shape.hidden }
            }
            Product::Fc2 | Product::Dact | Product::DactRecompute | Product::Dw2 => {
                WeightShape { n: shape.hidden, k: shape.ffn }
            }
        }
    }
}

impl<M: Memory> ProductPass<M> {
    /// Operands in place; outputs are still empty.
    pub(super) fn new<B: Backend<Memory = M>>(
        backend: &B,
        product: Product,
        shape: &Shape,
        unpacked: bool,
    ) -> Result<Self> {
        let groups = backend.groups(&shape.groups()?)?;
        let (rows, n1) = (shape.rows, shape.config().fc1_rows());
        let weight = product.weight(shape);
        let normal = |stream, cols| inputs::normal(stream, rows * cols, 1.0);
        let rowwise =
            |stream, cols| Quantized::rowwise(backend, &groups, &normal(stream, cols), cols, unpacked);
        let columnwise = |stream, cols, unpacked| {
            Quantized::columnwise(backend, &groups, &normal(stream, cols), cols, unpacked)
        };
        let weights = || {
            let scale = (1.0 / weight.k as f32).sqrt();
            let values = inputs::normal(11, shape.experts * weight.n * weight.k, scale);
            Quantized::weights(backend, shape.experts, weight, &values, unpacked)
        };
        let [x, h, dy, dc] = [13, 16, 14, 17];
        let (a, b) = match product {
            Product::Fc1 => (rowwise(x, shape.hidden)?, weights()?),
            Product::Fc2 => (rowwise(h, shape.ffn)?, weights()?),
            Product::Dact | Product::DactRecompute => (rowwise(dy, shape.hidden)?, weights()?),
            Product::Dx => (rowwise(dc, n1)?, weights()?),
            Product::Dw1 => (columnwise(dc, n1, unpacked)?, columnwise(x, shape.hidden, false)?),
            Product::Dw2 => (columnwise(dy, shape.hidden, unpacked)?, columnwise(h, shape.ffn, false)?),
        };
        let c = match product {
            Product::Dact | Product::DactRecompute => normal(18, n1),
            _ => vec![],
        };
        Ok(Self {
            product,
            shape: shape.clone(),
            groups,
            a,
            b,
            c: backend.upload(&c)?,
            prob: backend.upload(&inputs::probabilities(15, rows))?,
            out: poisoned(backend, 0, 0)?,
            h: poisoned(backend, 0, 0)?,
            dprob: poisoned(backend, 0, 0)?,
            amax: [poisoned(backend, 0, 0)?, poisoned(backend, 0, 0)?],
        })
    }

    /// Fills every output with `byte`, so that what a pass does not write shows.
    pub(super) fn poison<B: Backend<Memory = M>>(&mut self, backend: &B, byte: u8) -> Result<()> {
        let Lengths { out, h, dprob, amax } = self.product.lengths(&self.shape);
        // The former one goes first: weight gradients are large.
        self.out = poisoned(backend, 0, byte)?;
        self.out = poisoned(backend, out, byte)?;
        self.h = poisoned(backend, h, byte)?;
        self.dprob = poisoned(backend, dprob, byte)?;
        self.amax = [poisoned(backend, amax, byte)?, poisoned(backend, amax, byte)?];
        Ok(())
    }

    /// One call of the pass.
    pub(super) fn run<B: Backend<Memory = M>>(&mut self, backend: &B) -> Result<()> {
        let config = self.shape.config();
        let (hidden, ffn, experts) = (config.hidden, config.ffn, config.experts);
        let (activation, layout) = (config.activation, config.glu_layout);
        let (groups, shape) = (&self.groups, self.product.weight(&self.shape));
        let prob = M::view(&self.prob);
        let [amax, rht] = &mut self.amax;
        let amaxes = AmaxOut {
            amax: M::view_mut(amax),
            rht: Some((RhtAmax::Exact(SignMask::DEFAULT), M::view_mut(rht))),
        };
        let out = M::view_mut(&mut self.out);
        match self.product {
            Product::Fc1 => backend.grouped_gemm_act(GroupedGemmAct {
                x: self.a.operand(),
                w1: self.b.weight_operand(),
                b1: None,
                hidden,
                ffn,
                activation,
                layout,
                prob,
                groups,
                c: out,
                h: M::view_mut(&mut self.h),
                h_amax: Some(amaxes),
            })?,
            Product::Fc2 | Product::Dx => backend.grouped_gemm(GroupedGemm {
                a: self.a.operand(),
                w: self.b.weight_operand(),
                shape,
                side: if self.product == Product::Fc2 { Side::Fprop } else { Side::Dgrad },
                groups,
                bias: None,
                out,
            })?,
            Product::Dact | Product::DactRecompute => backend.grouped_gemm_dact(GroupedGemmDact {
                dy: self.a.operand(),
                w2: self.b.weight_operand(),
                hidden,
                ffn,
                activation,
                layout,
                c: M::view(&self.c),
                prob,
                groups,
                dc: out,
                dprob: M::view_mut(&mut self.dprob),
                db1: None,
                dc_amax: Some(amaxes),
                h: (self.product == Product::DactRecompute).then(|| M::view_mut(&mut self.h)),
                dh: None,
            })?,
            Product::Dw1 | Product::Dw2 => backend.grouped_wgrad(GroupedWgrad {
                a: self.a.operand(),
                b: self.b.operand(),
                shape,
                groups,
                dw: WeightGrad::packed_bf16(out, experts, GradMode::Overwrite),
            })?,
        }
        Ok(())
    }

    /// The epilogue's amaxes are those of a pass over what it wrote, bit by bit.
    pub(super) fn check_amaxes<B: Backend<Memory = M>>(&self, backend: &B) -> Result<()> {
        let (tensor, cols) = match self.product {
            Product::Fc1 => (&self.h, self.shape.ffn),
            Product::Dact | Product::DactRecompute => (&self.out, self.shape.config().fc1_rows()),
            _ => return Ok(()),
        };
        let experts = self.shape.experts;
        let [mut amax, mut rht] = [poisoned(backend, experts, 0)?, poisoned(backend, experts, 0)?];
        backend.group_hadamard_amax(GroupHadamardAmax {
            x: M::view(tensor),
            cols,
            groups: &self.groups,
            sign_mask: SignMask::DEFAULT,
            amax: M::view_mut(&mut amax),
            amax_rht: M::view_mut(&mut rht),
        })?;
        for (epilogue, pass) in self.amax.iter().zip([&amax, &rht]) {
            let of = |buffer| download::<_, f32>(backend, "amaxes", buffer);
            of(epilogue)?.expect_same(&of(pass)?).context("those of the epilogue beside those of a pass")?;
        }
        Ok(())
    }

    /// Gives what the product wrote to `each`, tensor by tensor.
    pub(super) fn outputs<B: Backend<Memory = M>>(
        &self,
        backend: &B,
        each: &mut dyn FnMut(Output) -> Result<()>,
    ) -> Result<()> {
        let Lengths { h, dprob, amax, .. } = self.product.lengths(&self.shape);
        let (name, [before, after]) = match self.product {
            Product::Fc1 => ("c", ["amax of h", "amax of h after the RHT"]),
            Product::Fc2 => ("y", [""; 2]),
            Product::Dact | Product::DactRecompute => ("dc", ["amax of dc", "amax of dc after the RHT"]),
            Product::Dx => ("dx", [""; 2]),
            Product::Dw1 => ("dw1", [""; 2]),
            Product::Dw2 => ("dw2", [""; 2]),
        };
        each(download::<_, bf16>(backend, name, &self.out)?)?;
        if h > 0 {
            each(download::<_, bf16>(backend, "h", &self.h)?)?;
        }
        if dprob > 0 {
            each(download::<_, f32>(backend, "dprob", &self.dprob)?)?;
        }
        if amax > 0 {
            each(download::<_, f32>(backend, before, &self.amax[0])?)?;
            each(download::<_, f32>(backend, after, &self.amax[1])?)?;
        }
        Ok(())
    }
}
