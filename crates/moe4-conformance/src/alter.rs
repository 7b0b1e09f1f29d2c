//! A backend that passes everything on to another one, but for what it alters.
//!
//! [`Alter`] has a method for each pass that hands it to the inner backend. An alteration overrides one of them:
//! that is how memory is poisoned, how passes are watched, and how backends are made that are wrong on purpose.

use moe4::kernels::contract::*;
use moe4::kernels::{Backend, Buffer, Capabilities, Element, Error, Memory, Unsupported, View};
use moe4::tensor::Groups;

/// What to do differently.
#[allow(missing_docs, reason = "each method is the pass of the same name in `Backend`")]
pub trait Alter<B: Backend>: Send + Sync {
    fn capabilities(&self, inner: &B) -> Capabilities {
        inner.capabilities()
    }
    fn empty<T: Element>(&self, inner: &B, len: usize) -> Result<Buffer<B::Memory, T>, Error> {
        inner.empty(len)
    }
    fn group_amax(&self, inner: &B, pass: GroupAmax<'_, B::Memory>) -> Result<(), Error> {
        inner.group_amax(pass)
    }
    fn group_hadamard_amax(&self, inner: &B, pass: GroupHadamardAmax<'_, B::Memory>) -> Result<(), Error> {
        inner.group_hadamard_amax(pass)
    }
    fn group_quantize(&self, inner: &B, pass: GroupQuantize<'_, B::Memory>) -> Result<(), Error> {
        inner.group_quantize(pass)
    }
    fn quantize_weights(&self, inner: &B, pass: QuantizeWeights<'_, B::Memory>) -> Result<(), Error> {
        inner.quantize_weights(pass)
    }
    fn dequantize(&self, inner: &B, pass: Dequantize<'_, B::Memory>) -> Result<(), Error> {
        inner.dequantize(pass)
    }
    fn grouped_gemm(&self, inner: &B, pass: GroupedGemm<'_, B::Memory>) -> Result<(), Error> {
        inner.grouped_gemm(pass)
    }
    fn grouped_gemm_act(&self, inner: &B, pass: GroupedGemmAct<'_, B::Memory>) -> Result<(), Error> {
        inner.grouped_gemm_act(pass)
    }
    fn grouped_gemm_dact(&self, inner: &B, pass: GroupedGemmDact<'_, B::Memory>) -> Result<(), Error> {
        inner.grouped_gemm_dact(pass)
    }
    fn grouped_wgrad(&self, inner: &B, pass: GroupedWgrad<'_, B::Memory>) -> Result<(), Error> {
        inner.grouped_wgrad(pass)
    }
    fn grouped_bias_grad(&self, inner: &B, pass: GroupedBiasGrad<'_, B::Memory>) -> Result<(), Error> {
        inner.grouped_bias_grad(pass)
    }
    fn permute(&self, inner: &B, pass: Permute<'_, B::Memory>) -> Result<(), Error> {
        inner.permute(pass)
    }
    fn unpermute(&self, inner: &B, pass: Unpermute<'_, B::Memory>) -> Result<(), Error> {
        inner.unpermute(pass)
    }
}

/// `inner` with an alteration.
#[derive(Clone, Copy, Debug)]
pub struct Altered<'b, B, A> {
    /// The backend that does the work.
    pub inner: &'b B,
    /// What is different.
    pub alteration: A,
}

impl<B: Backend, A: Alter<B>> Backend for Altered<'_, B, A> {
    type Memory = B::Memory;

    fn capabilities(&self) -> Capabilities {
        self.alteration.capabilities(self.inner)
    }
    fn groups(&self, groups: &Groups) -> Result<<Self::Memory as Memory>::Groups, Error> {
        self.inner.groups(groups)
    }
    fn empty<T: Element>(&self, len: usize) -> Result<Buffer<B::Memory, T>, Error> {
        self.alteration.empty(self.inner, len)
    }
    fn duplicate<T: Element>(&self, x: View<'_, B::Memory, T>) -> Result<Buffer<B::Memory, T>, Error> {
        self.inner.duplicate(x)
    }
    fn upload<T: Element>(&self, host: &[T]) -> Result<Buffer<B::Memory, T>, Error> {
        self.inner.upload(host)
    }
    fn download<T: Element>(&self, x: View<'_, B::Memory, T>) -> Result<Vec<T>, Error> {
        self.inner.download(x)
    }
    fn group_amax(&self, pass: GroupAmax<'_, B::Memory>) -> Result<(), Error> {
        self.alteration.group_amax(self.inner, pass)
    }
    fn group_hadamard_amax(&self, pass: GroupHadamardAmax<'_, B::Memory>) -> Result<(), Error> {
        self.alteration.group_hadamard_amax(self.inner, pass)
    }
    fn group_quantize(&self, pass: GroupQuantize<'_, B::Memory>) -> Result<(), Error> {
        self.alteration.group_quantize(self.inner, pass)
    }
    fn quantize_weights(&self, pass: QuantizeWeights<'_, B::Memory>) -> Result<(), Error> {
        self.alteration.quantize_weights(self.inner, pass)
    }
    fn dequantize(&self, pass: Dequantize<'_, B::Memory>) -> Result<(), Error> {
        self.alteration.dequantize(self.inner, pass)
    }
    fn grouped_gemm(&self, pass: GroupedGemm<'_, B::Memory>) -> Result<(), Error> {
        self.alteration.grouped_gemm(self.inner, pass)
    }
    fn grouped_gemm_act(&self, pass: GroupedGemmAct<'_, B::Memory>) -> Result<(), Error> {
        self.alteration.grouped_gemm_act(self.inner, pass)
    }
    fn grouped_gemm_dact(&self, pass: GroupedGemmDact<'_, B::Memory>) -> Result<(), Error> {
        self.alteration.grouped_gemm_dact(self.inner, pass)
    }
    fn grouped_wgrad(&self, pass: GroupedWgrad<'_, B::Memory>) -> Result<(), Error> {
        self.alteration.grouped_wgrad(self.inner, pass)
    }
    fn grouped_bias_grad(&self, pass: GroupedBiasGrad<'_, B::Memory>) -> Result<(), Error> {
        self.alteration.grouped_bias_grad(self.inner, pass)
    }
    fn permute(&self, pass: Permute<'_, B::Memory>) -> Result<(), Error> {
        self.alteration.permute(self.inner, pass)
    }
    fn unpermute(&self, pass: Unpermute<'_, B::Memory>) -> Result<(), Error> {
        self.alteration.unpermute(self.inner, pass)
    }
}

/// Buffers of unspecified contents hold bytes 0xFF: NaN as a float, a NaN scale, an index of no row.
#[derive(Clone, Copy, Debug)]
pub struct Poisoned;

impl<B: Backend> Alter<B> for Poisoned {
    fn empty<T: Element>(&self, inner: &B, len: usize) -> Result<Buffer<B::Memory, T>, Error> {
        let poison: T = bytemuck::pod_read_unaligned(&[0xFF; 8][..size_of::<T>()]);
        inner.upload(&vec![poison; len])
    }
}

/// A backend that asks for unpacked operands, or does not.
#[derive(Clone, Copy, Debug)]
pub struct UnpackedOperands(pub bool);

impl<B: Backend> Alter<B> for UnpackedOperands {
    fn capabilities(&self, inner: &B) -> Capabilities {
        Capabilities { unpacked_operands: self.0, ..inner.capabilities() }
    }
}

/// A backend without products: it quantizes, dequantizes and permutes.
#[derive(Clone, Copy, Debug)]
pub struct QuantizersOnly;

impl QuantizersOnly {
    fn refuse<B: Backend>(self, inner: &B, pass: &str) -> Result<(), Error> {
        Err(Unsupported::products(&self.capabilities(inner), pass).into())
    }
}

impl<B: Backend> Alter<B> for QuantizersOnly {
    fn capabilities(&self, inner: &B) -> Capabilities {
        Capabilities { products: false, ..inner.capabilities() }
    }
    fn grouped_gemm(&self, inner: &B, _: GroupedGemm<'_, B::Memory>) -> Result<(), Error> {
        self.refuse(inner, "grouped_gemm")
    }
    fn grouped_gemm_act(&self, inner: &B, _: GroupedGemmAct<'_, B::Memory>) -> Result<(), Error> {
        self.refuse(inner, "grouped_gemm_act")
    }
    fn grouped_gemm_dact(&self, inner: &B, _: GroupedGemmDact<'_, B::Memory>) -> Result<(), Error> {
        self.refuse(inner, "grouped_gemm_dact")
    }
    fn grouped_wgrad(&self, inner: &B, _: GroupedWgrad<'_, B::Memory>) -> Result<(), Error> {
        self.refuse(inner, "grouped_wgrad")
    }
    fn grouped_bias_grad(&self, inner: &B, _: GroupedBiasGrad<'_, B::Memory>) -> Result<(), Error> {
        self.refuse(inner, "grouped_bias_grad")
    }
}
