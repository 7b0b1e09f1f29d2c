//! A backend that writes down which passes ran, what they moved and how long they took.
//!
//! It wraps another backend, so a run without it costs nothing. A backend that returns before its work is done is timed by
//! its own [`Marks`]; the time of a call says nothing there.
#![forbid(unsafe_code)]

use super::contract::*;
use super::work::Work;
use super::{Backend, Buffer, Capabilities, Element, Error, Memory, View};
use crate::tensor::Groups;
use std::fmt::{self, Debug};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A pass, with the choices that change how much work it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each variant is the pass of the same name in `Backend`")]
pub enum PassName {
    GroupAmax,
    GroupHadamardAmax,
    GroupQuantize { rowwise: bool, columnwise: bool },
    QuantizeWeights,
    Dequantize,
    GroupedGemm,
    GroupedGemmAct { amax: EpilogueAmax },
    GroupedGemmDact { amax: EpilogueAmax, recompute: bool },
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
            PassName::Dequantize => f.write_str("dequantize"),
            PassName::GroupedGemm => f.write_str("grouped_gemm"),
            PassName::GroupedGemmAct { amax } => with(f, "grouped_gemm_act", &amax.parts()),
            PassName::GroupedGemmDact { amax, recompute } => {
                let [row, rht, bound] = amax.parts();
                with(f, "grouped_gemm_dact", &[row, rht, bound, (recompute, "recompute h")])
            }
            PassName::GroupedWgrad => f.write_str("grouped_wgrad"),
            PassName::GroupedBiasGrad => f.write_str("grouped_bias_grad"),
            PassName::Permute => f.write_str("permute"),
            PassName::Unpermute => f.write_str("unpermute"),
        }
    }
}

/// Which amaxes an epilogue leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EpilogueAmax {
    /// None.
    None,
    /// Of the tensor.
    Rowwise,
    /// Of the tensor and of its transform.
    Rht,
    /// Of the tensor, and 4 times it for its transform.
    Bound,
}

impl EpilogueAmax {
    fn of<M: Memory>(out: &Option<AmaxOut<'_, M>>) -> Self {
        match out.as_ref().map(|o| o.rht.as_ref().map(|(kind, _)| *kind)) {
            None => Self::None,
            Some(None) => Self::Rowwise,
            Some(Some(RhtAmax::Exact(_))) => Self::Rht,
            Some(Some(RhtAmax::Bound)) => Self::Bound,
        }
    }

    /// Numbers left for each expert.
    pub fn outputs(self) -> usize {
        match self {
            Self::None => 0,
            Self::Rowwise => 1,
            Self::Rht | Self::Bound => 2,
        }
    }

    fn parts(self) -> [(bool, &'static str); 3] {
        [(self != Self::None, "amax"), (self == Self::Rht, "RHT amax"), (self == Self::Bound, "RHT bound")]
    }
}

/// One pass that ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Which pass.
    pub name: PassName,
    /// What it moved and computed.
    pub work: Work,
    /// How long it took, by the ledger's marks: by default the time of the call.
    pub time: Duration,
}

/// Marks in the order of a backend's work, and times between them.
pub trait Marks: Debug + Send + Sync {
    /// A place in that order.
    type Mark: Debug + Send;

    /// Behind all work so far. Does not wait for it.
    fn mark(&self) -> Result<Self::Mark, Error>;

    /// From one mark to a later one; waits until both are reached.
    fn elapsed(&self, start: &Self::Mark, end: &Self::Mark) -> Result<Duration, Error>;
}

/// Marks of the host's clock: the times of calls, for backends that return when their work is done.
#[derive(Clone, Copy, Debug, Default)]
pub struct CallTimes;

impl Marks for CallTimes {
    type Mark = Instant;

    fn mark(&self) -> Result<Instant, Error> {
        Ok(Instant::now())
    }
    fn elapsed(&self, start: &Instant, end: &Instant) -> Result<Duration, Error> {
        Ok(end.duration_since(*start))
    }
}

/// Passes everything on to `inner` and keeps a list of what ran, in order. Refused and failed passes are left out.
#[derive(Debug)]
pub struct Ledger<'b, B, C: Marks = CallTimes> {
    inner: &'b B,
    marks: &'b C,
    entries: Mutex<Vec<Marked<C::Mark>>>,
}

/// A pass between its marks.
#[derive(Debug)]
struct Marked<T> {
    name: PassName,
    work: Work,
    start: T,
    end: T,
}

impl<'b, B: Backend> Ledger<'b, B> {
    /// An empty ledger over `inner` that takes the times of calls.
    pub fn new(inner: &'b B) -> Self {
        Self::with_marks(inner, &CallTimes)
    }

    /// What ran so far; the list starts anew.
    pub fn take(&self) -> Vec<Entry> {
        let entry = |Marked { name, work, start, end }: Marked<Instant>| Entry {
            name,
            work,
            time: end.duration_since(start),
        };
        self.take_marked().into_iter().map(entry).collect()
    }

    /// The names of [`Ledger::take`].
    pub fn take_names(&self) -> Vec<PassName> {
        self.take().into_iter().map(|e| e.name).collect()
    }
}

impl<'b, B: Backend, C: Marks> Ledger<'b, B, C> {
    /// An empty ledger over `inner` that takes times by `marks`, which are marks in the order of the work of `inner`.
    pub fn with_marks(inner: &'b B, marks: &'b C) -> Self {
        Self { inner, marks, entries: Mutex::default() }
    }

    /// What ran so far with its times, once it is done; the list starts anew.
    pub fn take_timed(&self) -> Result<Vec<Entry>, Error> {
        let entry = |Marked { name, work, start, end }: Marked<C::Mark>| {
            Ok(Entry { name, work, time: self.marks.elapsed(&start, &end)? })
        };
        self.take_marked().into_iter().map(entry).collect()
    }

    fn take_marked(&self) -> Vec<Marked<C::Mark>> {
        std::mem::take(&mut self.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn record(
        &self,
        name: PassName,
        work: Work,
        pass: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let start = self.marks.mark()?;
        pass()?;
        let marked = Marked { name, work, start, end: self.marks.mark()? };
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).push(marked);
        Ok(())
    }
}

impl<B: Backend, C: Marks> Backend for Ledger<'_, B, C> {
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

    fn group_amax(&self, pass: GroupAmax<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::GroupAmax, pass.work(), || self.inner.group_amax(pass))
    }
    fn group_hadamard_amax(&self, pass: GroupHadamardAmax<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::GroupHadamardAmax, pass.work(), || self.inner.group_hadamard_amax(pass))
    }
    fn group_quantize(&self, pass: GroupQuantize<'_, B::Memory>) -> Result<(), Error> {
        let (rowwise, columnwise) = (pass.rowwise.is_some(), pass.columnwise.is_some());
        let name = PassName::GroupQuantize { rowwise, columnwise };
        self.record(name, pass.work(), || self.inner.group_quantize(pass))
    }
    fn quantize_weights(&self, pass: QuantizeWeights<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::QuantizeWeights, pass.work(), || self.inner.quantize_weights(pass))
    }
    fn dequantize(&self, pass: Dequantize<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::Dequantize, pass.work(), || self.inner.dequantize(pass))
    }
    fn grouped_gemm(&self, pass: GroupedGemm<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::GroupedGemm, pass.work(), || self.inner.grouped_gemm(pass))
    }
    fn grouped_gemm_act(&self, pass: GroupedGemmAct<'_, B::Memory>) -> Result<(), Error> {
        let name = PassName::GroupedGemmAct { amax: EpilogueAmax::of(&pass.h_amax) };
        self.record(name, pass.work(), || self.inner.grouped_gemm_act(pass))
    }
    fn grouped_gemm_dact(&self, pass: GroupedGemmDact<'_, B::Memory>) -> Result<(), Error> {
        let name =
            PassName::GroupedGemmDact { amax: EpilogueAmax::of(&pass.dc_amax), recompute: pass.h.is_some() };
        self.record(name, pass.work(), || self.inner.grouped_gemm_dact(pass))
    }
    fn grouped_wgrad(&self, pass: GroupedWgrad<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::GroupedWgrad, pass.work(), || self.inner.grouped_wgrad(pass))
    }
    fn grouped_bias_grad(&self, pass: GroupedBiasGrad<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::GroupedBiasGrad, pass.work(), || self.inner.grouped_bias_grad(pass))
    }
    fn permute(&self, pass: Permute<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::Permute, pass.work(), || self.inner.permute(pass))
    }
    fn unpermute(&self, pass: Unpermute<'_, B::Memory>) -> Result<(), Error> {
        self.record(PassName::Unpermute, pass.work(), || self.inner.unpermute(pass))
    }
}

#[cfg(test)]
mod tests {
    use super::super::reference::Reference;
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A clock that goes on by a second a mark.
    #[derive(Debug, Default)]
    struct Ticks(AtomicU64);

    impl Marks for Ticks {
        type Mark = u64;

        fn mark(&self) -> Result<u64, Error> {
            Ok(self.0.fetch_add(1, Ordering::Relaxed))
        }
        fn elapsed(&self, start: &u64, end: &u64) -> Result<Duration, Error> {
            Ok(Duration::from_secs(end - start))
        }
    }

    #[test]
    fn times_are_those_between_the_marks_of_a_pass() {
        let ticks = Ticks::default();
        let ledger = Ledger::with_marks(&Reference, &ticks);
        let groups = Groups::new(&[1], 1).unwrap();
        let mut amax = [0.0];
        for cols in [16, 16, 15] {
            // The last one does not fit and leaves no entry.
            let x = &vec![half::bf16::ONE; 16][..];
            let outcome = ledger.group_amax(GroupAmax { x, cols, groups: &groups, amax: &mut amax });
            assert_eq!(outcome.is_ok(), cols == 16);
        }
        let entries = ledger.take_timed().unwrap();
        assert_eq!(entries.len(), 2);
        assert!(entries.iter().all(|e| e.name == PassName::GroupAmax && e.time == Duration::from_secs(1)));
        assert!(ledger.take_timed().unwrap().is_empty(), "the list starts anew");
    }
}
