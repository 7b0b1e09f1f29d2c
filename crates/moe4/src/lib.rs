//! Mixture-of-experts training in NVFP4: the fused grouped MLP, exact to the byte.
//!
//! For tokens already sorted by expert, [`mlp::GroupedMlp`] runs FC1, a gated or squared activation scaled by the
//! routing probability, and FC2, forward and backward, with every matrix product on 4-bit operands.
//!
//! The layers, each seeing only those before it:
//!
//! | module | what |
//! |---|---|
//! | [`numerics`] | E2M1, E4M3, rounding, Philox, Hadamard: single values and blocks of 16 |
//! | [`tensor`] | groups of tokens, packed operands, scale layouts |
//! | [`kernels`] | the contract between operator and hardware, and the CPU backends |
//! | [`mlp`] | the operator: configuration, plan, forward, backward |
//! | [`routing`] | top-k router, tokens to expert order and back |
//! | [`checkpoint`] | tensors in safetensors files, in and out |

pub mod checkpoint;
pub mod kernels;
pub mod mlp;
pub mod numerics;
pub mod routing;
pub mod tensor;

/// The README's code, compiled and run with the doc tests.
#[cfg(all(doctest, feature = "cpu"))]
#[doc = include_str!("../../../README.md")]
struct Readme;
