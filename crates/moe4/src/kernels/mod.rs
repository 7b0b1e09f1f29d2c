//! The contract between the operator and the hardware.
//!
//! [`Backend`] is a short list of passes; [`contract`] describes each by what it reads and writes. The operator in
//! [`crate::mlp`] is written against this module alone. Backends here: [`mod@reference`] (scalar, the oracle) and
//! [`cpu`] (SIMD, all cores).

pub mod activation;
pub mod contract;
mod contract_work;
#[cfg(feature = "cpu")]
pub mod cpu;
pub(crate) mod error;
mod interruptible;
mod ledger;
mod memory;
pub mod pages;
pub mod reference;
pub mod work;

pub(crate) use error::expect_len;
pub use error::{DeviceError, Error, Misuse, Unsupported};
pub use interruptible::Interruptible;
pub use ledger::{CallTimes, Entry, EpilogueAmax, Ledger, Marks, PassName};
pub use memory::{Buffer, Element, Extent, Host, Memory, View, ViewMut};

use crate::tensor::Groups;
use contract::*;

/// What a backend can do. The operator asks once, before the first pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// A short name for messages, such as `cpu`.
    pub backend: &'static str,
    /// Which hardware path runs, such as `AVX-512, 2 threads`.
    pub path: String,
    /// Quantized operands.
    pub nvfp4: bool,
    /// Unquantized operands.
    pub bf16: bool,
    /// Stochastic rounding of gradients.
    pub stochastic_rounding: bool,
    /// Products are fastest on unpacked operands, so the operator lets quantization write them: BF16 values of every copy
    /// that a product reads at once, and of the weights for as long as they are prepared (2 B an element more). Results
    /// are the same either way, and every backend with products takes both forms.
    pub unpacked_operands: bool,
    /// `grouped_gemm`, `grouped_gemm_act`, `grouped_gemm_dact`, `grouped_wgrad` and `grouped_bias_grad`. A backend
    /// without them quantizes, dequantizes and permutes; these five passes and the operator give [`Unsupported`].
    pub products: bool,
}

/// One implementation of the passes. A pass checks its descriptor, writes all its outputs or returns an error.
///
/// Results never depend on thread count, launch shape or neighbours; two runs give the same bytes.
pub trait Backend: Send + Sync {
    /// Where its tensors live.
    type Memory: Memory;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Groups known on the host, where this backend's passes read them.
    fn groups(&self, groups: &Groups) -> Result<<Self::Memory as Memory>::Groups, Error>;
    /// A buffer of unspecified contents.
    fn empty<T: Element>(&self, len: usize) -> Result<Buffer<Self::Memory, T>, Error>;
    /// A copy of a tensor.
    fn duplicate<T: Element>(&self, x: View<'_, Self::Memory, T>) -> Result<Buffer<Self::Memory, T>, Error>;
    /// Host data to this backend's memory.
    fn upload<T: Element>(&self, host: &[T]) -> Result<Buffer<Self::Memory, T>, Error>;
    /// This backend's data to the host.
    fn download<T: Element>(&self, x: View<'_, Self::Memory, T>) -> Result<Vec<T>, Error>;

    /// Per-expert max of absolute values.
    fn group_amax(&self, pass: GroupAmax<'_, Self::Memory>) -> Result<(), Error>;
    /// Per-expert amax before and after RHT, one pass.
    fn group_hadamard_amax(&self, pass: GroupHadamardAmax<'_, Self::Memory>) -> Result<(), Error>;
    /// Per-expert quantization with given amaxes.
    fn group_quantize(&self, pass: GroupQuantize<'_, Self::Memory>) -> Result<(), Error>;
    /// 16x16 tiles, amax included.
    fn quantize_weights(&self, pass: QuantizeWeights<'_, Self::Memory>) -> Result<(), Error>;
    /// A quantized copy back to `f32`.
    fn dequantize(&self, pass: Dequantize<'_, Self::Memory>) -> Result<(), Error>;
    /// Rows times their expert's weight, optional bias.
    fn grouped_gemm(&self, pass: GroupedGemm<'_, Self::Memory>) -> Result<(), Error>;
    /// FC1, activation and probability; `h`'s amaxes.
    fn grouped_gemm_act(&self, pass: GroupedGemmAct<'_, Self::Memory>) -> Result<(), Error>;
    /// FC2 dgrad and activation backward; `dc`'s amaxes, and `h` again.
    fn grouped_gemm_dact(&self, pass: GroupedGemmDact<'_, Self::Memory>) -> Result<(), Error>;
    /// Weight gradients over each expert's tokens.
    fn grouped_wgrad(&self, pass: GroupedWgrad<'_, Self::Memory>) -> Result<(), Error>;
    /// Gradient of FC2's bias and its part of the probabilities' gradient.
    fn grouped_bias_grad(&self, pass: GroupedBiasGrad<'_, Self::Memory>) -> Result<(), Error>;
    /// Tokens to expert order.
    fn permute(&self, pass: Permute<'_, Self::Memory>) -> Result<(), Error>;
    /// Expert order back to tokens.
    fn unpermute(&self, pass: Unpermute<'_, Self::Memory>) -> Result<(), Error>;
}
