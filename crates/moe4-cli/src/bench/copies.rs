//! One quantized copy of a tensor: an output that is measured, or an operand of a product.

use anyhow::Result;
use half::bf16;
use moe4::kernels::contract::{
    Cast, ColumnwiseCast, GroupAmax, GroupHadamardAmax, GroupQuantize, Operand, PackedOut, QuantizeWeights,
    Unpacked, WeightOperand, WeightShape,
};
use moe4::kernels::{Backend, Buffer, Extent, Memory};
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::Rounding;
use moe4::tensor::{Nvfp4, OperandShape, ScaleLayout};

use super::tensors::{Output, download, poisoned};

/// Names of the parts of a copy along rows.
pub(super) const ROWWISE: [&str; 3] = ["rowwise codes", "rowwise scales", "rowwise values"];
/// And along tokens.
pub(super) const COLUMNWISE: [&str; 3] = ["columnwise codes", "columnwise scales", "columnwise values"];

/// What a copy consists of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Codes and scales.
    Packed,
    /// BF16 values.
    Values,
    /// All of them, as weights have it.
    Both,
}

impl Form {
    /// Of a copy of tokens as the operator makes it for a product.
    pub(super) fn operand(unpacked: bool) -> Self {
        if unpacked { Form::Values } else { Form::Packed }
    }

    fn weights(unpacked: bool) -> Self {
        if unpacked { Form::Both } else { Form::Packed }
    }
}

/// Codes and scales, BF16 values, or both.
pub(super) struct Copy<M: Memory> {
    form: Form,
    /// Without elements if there are values alone, like `scales`.
    pub(super) codes: Buffer<M, u8>,
    pub(super) scales: Buffer<M, u8>,
    unpacked: Option<Buffer<M, bf16>>,
}

impl<M: Memory> Copy<M> {
    /// Every byte is `byte`; no elements without a shape.
    pub(super) fn poisoned<B: Backend<Memory = M>>(
        backend: &B,
        shape: Option<OperandShape>,
        form: Form,
        byte: u8,
    ) -> Result<Self> {
        let values = shape.map_or(0, |shape| shape.rows * shape.k);
        let [codes, scales] = match shape {
            Some(shape) if form != Form::Values => [shape.code_bytes(), shape.scale_bytes()],
            _ => [0; 2],
        };
        let unpacked = form != Form::Packed;
        Ok(Self {
            form,
            codes: poisoned(backend, codes, byte)?,
            scales: poisoned(backend, scales, byte)?,
            unpacked: unpacked.then(|| poisoned(backend, values, byte)).transpose()?,
        })
    }

    pub(super) fn cast<'a>(&'a mut self, amax: &'a Buffer<M, f32>, rounding: Rounding) -> Cast<'a, M> {
        Cast {
            amax: M::view(amax),
            rounding,
            packed: (self.form != Form::Values).then(|| PackedOut {
                codes: M::view_mut(&mut self.codes),
                scales: M::view_mut(&mut self.scales),
                layout: ScaleLayout::Plain,
            }),
            unpacked: self.unpacked.as_mut().map(M::view_mut),
        }
    }

    /// Gives codes, scales and values, those that there are, to `each` under these names.
    pub(super) fn outputs<B: Backend<Memory = M>>(
        &self,
        backend: &B,
        [codes, scales, values]: [&'static str; 3],
        each: &mut dyn FnMut(Output) -> Result<()>,
    ) -> Result<()> {
        if self.form != Form::Values {
            each(download::<_, u8>(backend, codes, &self.codes)?)?;
            each(download::<_, u8>(backend, scales, &self.scales)?)?;
        }
        if let Some(unpacked) = &self.unpacked {
            each(download::<_, bf16>(backend, values, unpacked)?)?;
        }
        Ok(())
    }
}

/// A copy with the amaxes that it was made with.
pub(super) struct Quantized<M: Memory> {
    copy: Copy<M>,
    amax: Buffer<M, f32>,
}

impl<M: Memory> Quantized<M> {
    /// Of `[T, cols]`, for fprop and dgrad.
    pub(super) fn rowwise<B: Backend<Memory = M>>(
        backend: &B,
        groups: &M::Groups,
        x: &[bf16],
        cols: usize,
        unpacked: bool,
    ) -> Result<Self> {
        let x = backend.upload(x)?;
        let mut amax = poisoned(backend, groups.experts(), 0)?;
        backend.group_amax(GroupAmax { x: M::view(&x), cols, groups, amax: M::view_mut(&mut amax) })?;
        let shape = OperandShape { rows: groups.rows(), k: cols };
        let mut copy = Copy::poisoned(backend, Some(shape), Form::operand(unpacked), 0)?;
        let rowwise = Some(copy.cast(&amax, Rounding::Nearest));
        backend.group_quantize(GroupQuantize { x: M::view(&x), cols, groups, rowwise, columnwise: None })?;
        Ok(Self { copy, amax })
    }

    /// Of `[T, cols]` after the RHT along tokens, for wgrad.
    pub(super) fn columnwise<B: Backend<Memory = M>>(
        backend: &B,
        groups: &M::Groups,
        x: &[bf16],
        cols: usize,
        unpacked: bool,
    ) -> Result<Self> {
        let x = backend.upload(x)?;
        let [mut before, mut amax] =
            [poisoned(backend, groups.experts(), 0)?, poisoned(backend, groups.experts(), 0)?];
        let sign_mask = SignMask::DEFAULT;
        backend.group_hadamard_amax(GroupHadamardAmax {
            x: M::view(&x),
            cols,
            groups,
            sign_mask,
            amax: M::view_mut(&mut before),
            amax_rht: M::view_mut(&mut amax),
        })?;
        let shape = OperandShape { rows: cols, k: groups.padded_rows() };
        let mut copy = Copy::poisoned(backend, Some(shape), Form::operand(unpacked), 0)?;
        let cast = copy.cast(&amax, Rounding::Nearest);
        let columnwise = Some(ColumnwiseCast { rht: Some(sign_mask), cast });
        backend.group_quantize(GroupQuantize { x: M::view(&x), cols, groups, rowwise: None, columnwise })?;
        Ok(Self { copy, amax })
    }

    /// Of weights `[E, n, k]`.
    pub(super) fn weights<B: Backend<Memory = M>>(
        backend: &B,
        experts: usize,
        shape: WeightShape,
        w: &[bf16],
        unpacked: bool,
    ) -> Result<Self> {
        let w = backend.upload(w)?;
        let mut amax = poisoned(backend, experts, 0)?;
        let packed = OperandShape { rows: experts * shape.n, k: shape.k };
        let mut copy = Copy::poisoned(backend, Some(packed), Form::weights(unpacked), 0)?;
        backend.quantize_weights(QuantizeWeights {
            w: M::split(M::view(&w), experts),
            shape,
            codes: M::view_mut(&mut copy.codes),
            scales: M::view_mut(&mut copy.scales),
            unpacked: copy.unpacked.as_mut().map(M::view_mut),
            amax: M::view_mut(&mut amax),
        })?;
        Ok(Self { copy, amax })
    }

    /// As one side of a product, in its BF16 values if it has them.
    pub(super) fn operand(&self) -> Operand<'_, M> {
        match &self.copy.unpacked {
            Some(values) => {
                Operand::Unpacked(Unpacked { values: M::view(values), amax: M::view(&self.amax) })
            }
            None => Operand::Nvfp4(self.packed()),
        }
    }

    /// As the weights of a product.
    pub(super) fn weight_operand(&self) -> WeightOperand<'_, M> {
        let unpacked = self.copy.unpacked.as_ref().map(M::view);
        WeightOperand::Nvfp4 { packed: self.packed(), unpacked }
    }

    fn packed(&self) -> Nvfp4<M::View<'_, u8>, M::View<'_, f32>> {
        let Copy { codes, scales, .. } = &self.copy;
        Nvfp4 { codes: M::view(codes), scales: M::view(scales), amax: M::view(&self.amax) }
    }
}
