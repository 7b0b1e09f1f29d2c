//! Passes with host data in and host data out.
//!
//! A struct here has the name of its pass and holds the inputs; `run` uploads them, hands the backend outputs filled
//! with poison (bytes 0xAA, NaN), and downloads what it wrote. Whatever a pass forgets to write is thus seen.

mod dequantize;
mod operator;
mod products;
mod quantize;
mod rows;

pub use dequantize::Dequantize;
pub use operator::{Step, StepOut};
pub use products::{Bias, Gemm, GemmAct, GemmActOut, GemmDact, GemmDactExtras, GemmDactOut, Grads, Wgrad};
pub use quantize::{
    Cast, Copy, Quantize, amax, hadamard_amax, quantize_weights, quantize_weights_apart,
    quantize_weights_together,
};
pub use rows::{BiasGrad, permute, unpermute};

use half::bf16;
use moe4::kernels::contract::{Operand, Unpacked, WeightOperand};
use moe4::kernels::{Backend, Buffer, Element, Error, Memory, View};
use moe4::numerics::{BLOCK, scale};
use moe4::tensor::Nvfp4;

/// A quantized operand on the host.
pub type Packed = Nvfp4<Vec<u8>, Vec<f32>>;

/// What outputs hold before a pass.
pub trait Poison: Element {
    /// A value that no correct pass leaves behind.
    const POISON: Self;
}

impl Poison for u8 {
    const POISON: u8 = 0xAA;
}
impl Poison for f32 {
    const POISON: f32 = f32::NAN;
}
impl Poison for bf16 {
    const POISON: bf16 = bf16::NAN;
}

fn poisoned<B: Backend, T: Poison>(b: &B, len: usize) -> Result<Buffer<B::Memory, T>, Error> {
    b.upload(&vec![T::POISON; len])
}

fn host<B: Backend, T: Element>(b: &B, buffer: &Buffer<B::Memory, T>) -> Result<Vec<T>, Error> {
    b.download(B::Memory::view(buffer))
}

/// One side of a product on the host.
#[derive(Clone, Debug)]
pub enum Side {
    /// Unquantized.
    Bf16(Vec<bf16>),
    /// Quantized.
    Nvfp4(Packed),
    /// Quantized, with its BF16 values. An operand is given as these alone, weights as both.
    Unpacked(Packed, Vec<bf16>),
}

type UploadedPacked<M> = Nvfp4<Buffer<M, u8>, Buffer<M, f32>>;

enum Uploaded<M: Memory> {
    Bf16(Buffer<M, bf16>),
    Nvfp4(UploadedPacked<M>),
    Unpacked(UploadedPacked<M>, Buffer<M, bf16>),
}

impl Side {
    /// A quantized side with the BF16 values of its codes; another is left as it is.
    pub fn unpacked(self) -> Self {
        let Side::Nvfp4(q) = self else { return self };
        let codes = crate::compare::unpack(&q.codes).into_iter().enumerate();
        let values = codes.map(|(i, code)| scale::unpacked(code, q.scales[i / BLOCK])).collect();
        Side::Unpacked(q, values)
    }

    /// The packed form of a quantized side.
    pub fn packed(&self) -> Option<&Packed> {
        match self {
            Side::Bf16(_) => None,
            Side::Nvfp4(q) | Side::Unpacked(q, _) => Some(q),
        }
    }

    fn upload<B: Backend>(&self, b: &B) -> Result<Uploaded<B::Memory>, Error> {
        Ok(match self {
            Side::Bf16(x) => Uploaded::Bf16(b.upload(x)?),
            Side::Nvfp4(q) => Uploaded::Nvfp4(upload_packed(b, q)?),
            Side::Unpacked(q, values) => Uploaded::Unpacked(upload_packed(b, q)?, b.upload(values)?),
        })
    }
}

fn upload_packed<B: Backend>(b: &B, q: &Packed) -> Result<UploadedPacked<B::Memory>, Error> {
    Ok(Nvfp4 { codes: b.upload(&q.codes)?, scales: b.upload(&q.scales)?, amax: b.upload(&q.amax)? })
}

impl<M: Memory> Uploaded<M> {
    fn packed(q: &UploadedPacked<M>) -> Nvfp4<View<'_, M, u8>, View<'_, M, f32>> {
        Nvfp4 { codes: M::view(&q.codes), scales: M::view(&q.scales), amax: M::view(&q.amax) }
    }

    fn operand(&self) -> Operand<'_, M> {
        match self {
            Uploaded::Bf16(x) => Operand::Bf16(M::view(x)),
            Uploaded::Nvfp4(q) => Operand::Nvfp4(Self::packed(q)),
            Uploaded::Unpacked(q, values) => {
                Operand::Unpacked(Unpacked { values: M::view(values), amax: M::view(&q.amax) })
            }
        }
    }

    fn weights(&self, experts: usize) -> WeightOperand<'_, M> {
        match self {
            Uploaded::Bf16(x) => WeightOperand::Bf16(M::split(M::view(x), experts)),
            Uploaded::Nvfp4(q) => WeightOperand::Nvfp4 { packed: Self::packed(q), unpacked: None },
            Uploaded::Unpacked(q, values) => {
                WeightOperand::Nvfp4 { packed: Self::packed(q), unpacked: Some(M::view(values)) }
            }
        }
    }
}
