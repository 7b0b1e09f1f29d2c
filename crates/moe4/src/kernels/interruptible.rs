//! A backend that stops between passes when told to, for callers who are asked to give up: a person, a deadline.
//!
//! It wraps another backend. A pass that has begun is finished; the next one is refused with a [`DeviceError`],
//! so that the operator returns as on any failure.
#![forbid(unsafe_code)]

use super::contract::*;
use super::{Backend, Buffer, Capabilities, DeviceError, Element, Error, Memory, View};
use crate::tensor::Groups;
use std::sync::atomic::{AtomicBool, Ordering};

/// Passes everything on to `inner` until the flag is set.
#[derive(Debug)]
pub struct Interruptible<'b, B> {
    inner: &'b B,
    stop: &'b AtomicBool,
}

impl<'b, B: Backend> Interruptible<'b, B> {
    /// `inner`, until `stop` is true.
    pub fn new(inner: &'b B, stop: &'b AtomicBool) -> Self {
        Self { inner, stop }
    }

    /// The backend itself, which does not stop.
    pub fn inner(&self) -> &'b B {
        self.inner
    }

    fn go_on(&self) -> Result<(), Error> {
        if !self.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(Error::Device(DeviceError {
            device: self.inner.capabilities().backend.into(),
            call: "next pass".into(),
            reason: "interrupted".into(),
        }))
    }
}

macro_rules! passes {
    ($($name:ident($pass:ident)),+ $(,)?) => {$(
        fn $name(&self, pass: $pass<'_, B::Memory>) -> Result<(), Error> {
            self.go_on()?;
            self.inner.$name(pass)
        }
    )+};
}

impl<B: Backend> Backend for Interruptible<'_, B> {
    type Memory = B::Memory;

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn groups(&self, groups: &Groups) -> Result<<Self::Memory as Memory>::Groups, Error> {
        self.inner.groups(groups)
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

    passes! {
        group_amax(GroupAmax),
        group_hadamard_amax(GroupHadamardAmax),
        group_quantize(GroupQuantize),
        quantize_weights(QuantizeWeights),
        dequantize(Dequantize),
        grouped_gemm(GroupedGemm),
        grouped_gemm_act(GroupedGemmAct),
        grouped_gemm_dact(GroupedGemmDact),
        grouped_wgrad(GroupedWgrad),
        grouped_bias_grad(GroupedBiasGrad),
        permute(Permute),
        unpermute(Unpermute),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::reference::Reference;
    use half::bf16;

    #[test]
    fn passes_run_until_the_flag_is_set() {
        let stop = AtomicBool::new(false);
        let backend = Interruptible::new(&Reference, &stop);
        let (x, groups) = ([bf16::from_f32(-3.0); 16], Groups::single(1));
        let mut amax = [0.0];
        let mut pass = || backend.group_amax(GroupAmax { x: &x, cols: 16, groups: &groups, amax: &mut amax });
        pass().unwrap();
        stop.store(true, Ordering::Relaxed);
        let message = pass().unwrap_err().to_string();
        assert!(message.contains("interrupted"), "{message}");
        assert_eq!(amax, [3.0]);
    }
}
