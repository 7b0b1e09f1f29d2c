//! All cores, vector instructions, the same bytes as the reference for every amax and quantized copy.
//!
//! | file | what |
//! |---|---|
//! | `isa` | which instructions run; compiling one function for each of them |
//! | `tile` | 16 x 16 elements in registers: load, RHT, amax, codes |
//! | `amax`, `quantize` | passes over tensors, band by band |
//! | `quantize_avx512` | the same with AVX-512 |
//! | `gemm` | grouped products over runs of rows, stripe by stripe |
//! | `engine` | what multiplies: vectors or matrix tiles, with the operands that each wants |
//! | `simd`, `micro` | a small vector trait; the register tile of a product |
//! | `matrix`, `codes_avx512` | operands to panels for vectors; the same for 4-bit codes with AVX-512 |
//! | `amx`, `tiles_avx512` | AMX; operands to its tiles |
//! | `epilogue`, `products` | what happens to a stripe of accumulators; the four products |
//! | `wide` | sixteen values in an epilogue |
//! | `rows`, `parallel` | permutation; cutting outputs into pieces for threads |
//!
//! Threads are those of the current rayon pool. Every output element is computed by one task in a fixed order, so
//! the number of threads never changes a result. Vector code accumulates along `k` one term after the other in every
//! lane, so neither does the width of the vectors: a term is exact in `f32`, and a fused multiply-add rounds as a
//! multiply and an add would. AMX has another order, see `docs/numerics.md`.

mod amax;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod codes_avx512;
mod engine;
mod epilogue;
mod gemm;
mod isa;
mod matrix;
mod micro;
mod parallel;
mod products;
mod quantize;
#[cfg(target_arch = "x86_64")]
mod quantize_avx512;
mod rows;
mod simd;
mod tile;
#[cfg(target_arch = "x86_64")]
mod tiles_avx512;
mod wide;

pub use isa::Isa;

use super::contract::*;
use super::memory::Host;
use super::{Backend, Capabilities, DeviceError, Element, Error};
use crate::tensor::Groups;
use rayon::prelude::*;
use std::mem::MaybeUninit;

/// The CPU backend, in host memory.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    isa: Isa,
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Cpu {
    /// With the best instructions of this machine.
    pub fn new() -> Self {
        let isa = Isa::best();
        log::debug!("cpu backend: {isa}, {} threads", rayon::current_num_threads());
        Self { isa }
    }

    /// With given instructions, which [`Isa::available`] lists. Quantized bytes are the same on each; products are the same
    /// on each without tiles ([`Isa::has_tiles`]), and within rounding of these with them.
    pub fn with_isa(isa: Isa) -> Self {
        Self { isa }
    }
}

/// `len` zeros, written by all cores: what one core clears, the others wait for.
fn zeros<T: Element>(len: usize) -> Result<Vec<T>, Error> {
    let mut buffer = Vec::<T>::new();
    buffer.try_reserve_exact(len).map_err(|e| DeviceError {
        device: "cpu".into(),
        call: format!("an allocation of {len} elements of {} bytes", size_of::<T>()),
        reason: e.to_string(),
    })?;
    let spare = &mut buffer.spare_capacity_mut()[..len];
    spare.par_chunks_mut(CLEARED_AT_ONCE).for_each(|part| part.fill(MaybeUninit::new(T::default())));
    // SAFETY: every element up to `len` has just been written.
    unsafe { buffer.set_len(len) };
    Ok(buffer)
}

/// Elements that a core clears at a time.
const CLEARED_AT_ONCE: usize = 1 << 16;

impl Backend for Cpu {
    type Memory = Host;

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            backend: "cpu",
            path: format!("{}, {} threads", self.isa, rayon::current_num_threads()),
            nvfp4: true,
            bf16: true,
            stochastic_rounding: true,
            unpacked_operands: false,
            products: true,
        }
    }

    fn groups(&self, groups: &Groups) -> Result<Groups, Error> {
        Ok(groups.clone())
    }
    fn empty<T: Element>(&self, len: usize) -> Result<Vec<T>, Error> {
        zeros(len)
    }
    fn duplicate<T: Element>(&self, x: &[T]) -> Result<Vec<T>, Error> {
        Ok(x.to_vec())
    }
    fn upload<T: Element>(&self, host: &[T]) -> Result<Vec<T>, Error> {
        Ok(host.to_vec())
    }
    fn download<T: Element>(&self, x: &[T]) -> Result<Vec<T>, Error> {
        Ok(x.to_vec())
    }

    fn group_amax(&self, pass: GroupAmax<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        amax::group_amax(self.isa, pass);
        Ok(())
    }
    fn group_hadamard_amax(&self, pass: GroupHadamardAmax<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        amax::group_hadamard_amax(self.isa, pass);
        Ok(())
    }
    fn group_quantize(&self, pass: GroupQuantize<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        quantize::group_quantize(self.isa, pass);
        Ok(())
    }
    fn quantize_weights(&self, pass: QuantizeWeights<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        quantize::quantize_weights(self.isa, pass);
        Ok(())
    }
    fn dequantize(&self, pass: Dequantize<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        quantize::dequantize(pass);
        Ok(())
    }
    fn grouped_gemm(&self, pass: GroupedGemm<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        products::grouped_gemm(self.isa, pass);
        Ok(())
    }
    fn grouped_gemm_act(&self, pass: GroupedGemmAct<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        products::grouped_gemm_act(self.isa, pass);
        Ok(())
    }
    fn grouped_gemm_dact(&self, pass: GroupedGemmDact<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        products::grouped_gemm_dact(self.isa, pass);
        Ok(())
    }
    fn grouped_wgrad(&self, pass: GroupedWgrad<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        products::grouped_wgrad(self.isa, pass);
        Ok(())
    }
    fn grouped_bias_grad(&self, pass: GroupedBiasGrad<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        rows::grouped_bias_grad(pass);
        Ok(())
    }
    fn permute(&self, pass: Permute<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        rows::permute(pass)
    }
    fn unpermute(&self, pass: Unpermute<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        rows::unpermute(pass)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        for len in [1 << 50, usize::MAX / 4] {
            let error = Cpu::new().empty::<f32>(len).expect_err("no machine has it").to_string();
            assert!(error.contains(&format!("an allocation of {len} elements of 4 bytes failed")), "{error}");
        }
    }
}
