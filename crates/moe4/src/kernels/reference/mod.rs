//! The oracle: every pass as plain loops, one element at a time, sums in `f64`.
//!
//! Written to be compared with the contract line by line, not to be fast. Quantization gives the exact bytes that
//! every backend must give; products and activations are the correctly rounded values that others approximate.
#![forbid(unsafe_code)]

mod products;
mod quantize;
mod rows;

#[cfg(feature = "cpu")]
pub(super) use rows::check_indices;

use super::contract::*;
use super::memory::Host;
use super::{Backend, Capabilities, Element, Error};
use crate::tensor::Groups;

/// The scalar reference backend, in host memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

impl Backend for Reference {
    type Memory = Host;

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            backend: "reference",
            path: "scalar, f64 accumulation".into(),
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
        Ok(vec![T::default(); len])
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
        quantize::group_amax(pass.x, pass.cols, pass.groups, pass.amax);
        Ok(())
    }
    fn group_hadamard_amax(&self, pass: GroupHadamardAmax<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        quantize::group_amax(pass.x, pass.cols, pass.groups, pass.amax);
        quantize::group_amax_rht(pass.x, pass.cols, pass.groups, pass.sign_mask, pass.amax_rht);
        Ok(())
    }
    fn group_quantize(&self, pass: GroupQuantize<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        quantize::group_quantize(pass);
        Ok(())
    }
    fn quantize_weights(&self, pass: QuantizeWeights<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        quantize::quantize_weights(pass);
        Ok(())
    }
    fn dequantize(&self, pass: Dequantize<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        quantize::dequantize(pass);
        Ok(())
    }
    fn grouped_gemm(&self, pass: GroupedGemm<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        products::grouped_gemm(pass);
        Ok(())
    }
    fn grouped_gemm_act(&self, pass: GroupedGemmAct<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        products::grouped_gemm_act(pass);
        Ok(())
    }
    fn grouped_gemm_dact(&self, pass: GroupedGemmDact<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        products::grouped_gemm_dact(pass);
        Ok(())
    }
    fn grouped_wgrad(&self, pass: GroupedWgrad<'_, Host>) -> Result<(), Error> {
        pass.check()?;
        products::grouped_wgrad(pass);
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
