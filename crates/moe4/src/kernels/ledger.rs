//! A backend that writes down which passes ran.
#![forbid(unsafe_code)]

use super::contract::*;
use super::{Backend, Buffer, Capabilities, Element, Error, View};
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// A pass, with the choices that change how much work it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each variant is the pass of the same name in `Backend`")]
pub enum PassName {
    GroupAmax,
    GroupHadamardAmax,
    GroupQuantize { rowwise: bool, columnwise: bool },
    QuantizeWeights,
    GroupedGemm,
    GroupedGemmAct { amax: bool },
    GroupedGemmDact { amax: bool, recompute: bool },
    GroupedWgrad,
    GroupedBiasGrad,
    Permute,
    Unpermute,
}

impl fmt::Display for PassName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let with = |f: &mut fmt::Formatter<'_>, name: &str, parts: &[(bool, &str)]| {
            f.write_str(name)?;
            let on: Vec<_> = parts.iter().filter(|p| p.0).map(|p| p.1).collect();
            if on.is_empty() { Ok(()) } else { write!(f, " ({})", on.join(" + ")) }
        };
        match *self {
            PassName::GroupAmax => f.write_str("group_amax"),
            PassName::GroupHadamardAmax => f.write_str("group_hadamard_amax"),
            PassName::GroupQuantize { rowwise, columnwise } => {
                with(f, "group_quantize", &[(rowwise, "rowwise"), (columnwise, "columnwise")])
            }
            PassName::QuantizeWeights => f.write_str("quantize_weights"),
            PassName::GroupedGemm => f.write_str("grouped_gemm"),
            PassName::GroupedGemmAct { amax } => with(f, "grouped_gemm_act", &[(amax, "amax")]),
            PassName::GroupedGemmDact { amax, recompute } => {
                with(f, "grouped_gemm_dact", &[(amax, "amax"), (recompute, "recompute h")])
            }
            PassName::GroupedWgrad => f.write_str("grouped_wgrad"),
            PassName::GroupedBiasGrad => f.write_str("grouped_bias_grad"),
            PassName::Permute => f.write_str("permute"),
            PassName::Unpermute => f.write_str("unpermute"),
        }
    }
}

/// Passes everything on to `inner` and keeps a list of what ran, in order.
#[derive(Debug)]
pub struct Ledger<'b, B> {
    inner: &'b B,
    passes: Mutex<Vec<PassName>>,
}

impl<'b, B: Backend> Ledger<'b, B> {
    /// An empty ledger over `inner`.
    pub fn new(inner: &'b B) -> Self {
        Self { inner, passes: Mutex::default() }
    }

    /// The passes so far; the list starts anew.
    pub fn take(&self) -> Vec<PassName> {
        std::mem::take(&mut self.passes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn record(&self, name: PassName) {
        self.passes.lock().unwrap_or_else(PoisonError::into_inner).push(name);
    }
}

impl<B: Backend> Backend for Ledger<'_, B> {
    type Memory = B::Memory;

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn empty<T: Element>(&self, len: usize) -> Result<Buffer<B::Memory, T>, Error> {
        self.inner.empty(len)
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
        self.record(PassName::GroupAmax);
        self.inner.group_amax(pass)
    }
    fn group_hadamard_amax(&self, pass: GroupHadamardAmax<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::GroupHadamardAmax);
        self.inner.group_hadamard_amax(pass)
    }
    fn group_quantize(&self, pass: GroupQuantize<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::GroupQuantize {
            rowwise: pass.rowwise.is_some(),
            columnwise: pass.columnwise.is_some(),
        });
        self.inner.group_quantize(pass)
    }
    fn quantize_weights(&self, pass: QuantizeWeights<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::QuantizeWeights);
        self.inner.quantize_weights(pass)
    }
    fn grouped_gemm(&self, pass: GroupedGemm<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::GroupedGemm);
        self.inner.grouped_gemm(pass)
    }
    fn grouped_gemm_act(&self, pass: GroupedGemmAct<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::GroupedGemmAct { amax: pass.h_amax.is_some() });
        self.inner.grouped_gemm_act(pass)
    }
    fn grouped_gemm_dact(&self, pass: GroupedGemmDact<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::GroupedGemmDact { amax: pass.dc_amax.is_some(), recompute: pass.h.is_some() });
        self.inner.grouped_gemm_dact(pass)
    }
    fn grouped_wgrad(&self, pass: GroupedWgrad<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::GroupedWgrad);
        self.inner.grouped_wgrad(pass)
    }
    fn grouped_bias_grad(&self, pass: GroupedBiasGrad<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::GroupedBiasGrad);
        self.inner.grouped_bias_grad(pass)
    }
    fn permute(&self, pass: Permute<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::Permute);
        self.inner.permute(pass)
    }
    fn unpermute(&self, pass: Unpermute<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::Unpermute);
        self.inner.unpermute(pass)
    }
}
