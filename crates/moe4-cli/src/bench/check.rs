//! Answers before times: against the scalar reference on a small shape, and against itself on the measured one.

use std::hash::{DefaultHasher, Hasher};

use anyhow::{Context, Result, ensure};
use moe4::kernels::reference::Reference;
use moe4::kernels::{Backend, Memory};
use moe4::mlp::Precision;

use super::case::{Case, Pass};
use super::h_passes::HSequence;
use super::passes::SinglePass;
use super::products::ProductPass;
use super::sequence::Part;
use super::shapes::Shape;
use super::step::{Extent, Step};
use super::tensors::Output;

/// A case made ready to run.
pub(super) enum Ready<M: Memory> {
    Single(SinglePass<M>),
    Product(ProductPass<M>),
    H(HSequence<M>),
    Step(Step<M>),
}

/// The same call whatever is ready.
macro_rules! each_kind {
    ($ready:expr, $kind:ident => $call:expr) => {
        match $ready {
            Self::Single($kind) => $call,
            Self::Product($kind) => $call,
            Self::H($kind) => $call,
            Self::Step($kind) => $call,
        }
    };
}

impl<M: Memory> Ready<M> {
    /// `unpacked`: whether products read BF16 values, see [`Capabilities`](moe4::kernels::Capabilities).
    pub(super) fn new<B: Backend<Memory = M>>(
        backend: &B,
        case: Case,
        shape: &Shape,
        unpacked: bool,
    ) -> Result<Self> {
        let mut ready = match case.pass {
            Pass::Step(precision) => Self::Step(Step::new(backend, Extent::Training, precision, shape)?),
            Pass::Forward(precision) => Self::Step(Step::new(backend, Extent::Forward, precision, shape)?),
            Pass::Product(product) => Self::Product(ProductPass::new(backend, product, shape, unpacked)?),
            Pass::H(kind) => Self::H(HSequence::new(backend, kind, shape, unpacked)?),
            _ => Self::Single(SinglePass::new(backend, case, shape)?),
        };
        ready.poison(backend, 0)?;
        Ok(ready)
    }

    fn poison<B: Backend<Memory = M>>(&mut self, backend: &B, byte: u8) -> Result<()> {
        each_kind!(self, kind => kind.poison(backend, byte))
    }

    pub(super) fn run<B: Backend<Memory = M>>(&mut self, backend: &B) -> Result<()> {
        each_kind!(self, kind => kind.run(backend))
    }

    fn outputs<B: Backend<Memory = M>>(
        &self,
        backend: &B,
        each: &mut dyn FnMut(Output) -> Result<()>,
    ) -> Result<()> {
        each_kind!(self, kind => kind.outputs(backend, each))
    }

    /// The passes of a run of several.
    pub(super) fn parts(&self) -> Vec<Part> {
        match self {
            Self::Single(_) | Self::Product(_) => vec![],
            Self::H(sequence) => sequence.parts(),
            Self::Step(step) => step.parts(),
        }
    }

    /// Bytes of `h` that wait for the backward, where that is what is compared.
    pub(super) fn saved_h_bytes(&self) -> Result<Option<usize>> {
        match self {
            Self::H(sequence) => sequence.saved_bytes().map(Some),
            _ => Ok(None),
        }
    }

    /// Two runs over different junk leave the same bytes: everything is written, and nothing depends on chance.
    pub(super) fn check_repeats<B: Backend<Memory = M>>(&mut self, backend: &B) -> Result<()> {
        let mut hash_after = |byte| -> Result<u64> {
            let mut hasher = DefaultHasher::new();
            self.poison(backend, byte)?;
            self.run(backend)?;
            self.outputs(backend, &mut |output| {
                output.hash(&mut hasher);
                Ok(())
            })?;
            Ok(hasher.finish())
        };
        let (first, second) = (hash_after(0xA5)?, hash_after(0x5A)?);
        ensure!(first == second, "two runs gave different bytes; nothing is measured");
        Ok(())
    }
}

/// Relative distances that results of products may be off by where sums run in another order; `None` for the same bytes.
/// A different order moves BF16 results by an ulp here and there, an amax by a whole one; in NVFP4 it flips now and then
/// a code that the next product reads, each of which counts for more.
fn tolerance(pass: Pass, output: &Output) -> Option<f64> {
    match pass {
        Pass::Product(_) if output.is_amax() => Some(5e-3),
        Pass::Product(_) | Pass::Forward(Precision::Bf16) | Pass::Step(Precision::Bf16) => Some(2e-3),
        Pass::Forward(Precision::Nvfp4) | Pass::Step(Precision::Nvfp4) => Some(2e-2),
        _ => None,
    }
}

/// A small shape like `shape`: bit by bit for single passes, by norm for products and what consists of them.
pub(super) fn against_reference<B: Backend>(backend: &B, case: Case, shape: &Shape) -> Result<()> {
    let small = shape.small();
    // The reference reads and writes operands in the form of the backend.
    let unpacked = backend.capabilities().unpacked_operands;
    let ours = outputs(backend, case, &small, unpacked)?;
    let theirs = outputs(&Reference, case, &small, unpacked)?;
    ensure!(ours.len() == theirs.len(), "expected {} outputs, got {}", theirs.len(), ours.len());
    for (ours, theirs) in ours.iter().zip(&theirs) {
        match tolerance(case.pass, ours) {
            Some(tolerance) => ours.expect_near(theirs, tolerance),
            None => ours.expect_same(theirs),
        }
        .with_context(|| {
            format!("{case} is wrong on {}, checked against the reference; nothing is measured", small.name)
        })?;
    }
    Ok(())
}

fn outputs<B: Backend>(backend: &B, case: Case, shape: &Shape, unpacked: bool) -> Result<Vec<Output>> {
    let mut ready = Ready::new(backend, case, shape, unpacked)?;
    ready.poison(backend, 0xA5)?;
    ready.run(backend)?;
    if let Ready::Product(product) = &ready {
        product.check_amaxes(backend).with_context(|| format!("{case}: nothing is measured"))?;
    }
    let mut all = vec![];
    ready.outputs(backend, &mut |output| {
        all.push(output);
        Ok(())
    })?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use moe4::kernels::contract::{GroupAmax, GroupQuantize, GroupedWgrad, Permute};
    use moe4::kernels::cpu::Cpu;
    use moe4::kernels::{Error, Host};
    use moe4_conformance::alter::{Alter, Altered};

    use super::*;
    use crate::bench::case::{CASES, select};
    use crate::bench::shapes::Shapes;

    /// Outputs that are never written.
    struct Idle;

    impl Alter<Cpu> for Idle {
        fn group_amax(&self, _: &Cpu, _: GroupAmax<'_, Host>) -> Result<(), Error> {
            Ok(())
        }
        fn group_quantize(&self, inner: &Cpu, mut pass: GroupQuantize<'_, Host>) -> Result<(), Error> {
            pass.rowwise = None;
            if pass.columnwise.is_some() { inner.group_quantize(pass) } else { Ok(()) }
        }
        fn grouped_wgrad(&self, _: &Cpu, _: GroupedWgrad<'_, Host>) -> Result<(), Error> {
            Ok(())
        }
        fn permute(&self, _: &Cpu, _: Permute<'_, Host>) -> Result<(), Error> {
            Ok(())
        }
    }

    fn shape() -> Shape {
        Shapes::read(None).expect("the shipped shapes").all[0].small()
    }

    #[test]
    fn a_right_backend_passes_and_a_wrong_one_is_caught() -> Result<()> {
        let (cpu, shape) = (Cpu::new(), shape());
        let idle = Altered { inner: &cpu, alteration: Idle };
        for case in CASES {
            against_reference(&cpu, case, &shape)?;
            let wrong = ["amax", "rowwise", "both", "step", "forward_nvfp4", "permute", "h_", "grouped_"];
            let wrong = wrong.iter().any(|part| case.to_string().contains(part))
                && !matches!(case.pass, Pass::GroupHadamardAmax | Pass::Unpermute);
            let caught = against_reference(&idle, case, &shape).err().map(|error| format!("{error:#}"));
            assert_eq!(caught.is_some(), wrong, "{case}: {caught:?}");
            let named =
                |error: String| error.contains(&case.to_string()) && error.contains("nothing is measured");
            assert!(caught.is_none_or(named), "{case}");
        }
        Ok(())
    }

    /// The form that a GPU's products read, which the CPU does not ask for.
    #[test]
    fn products_give_the_same_for_unpacked_operands() -> Result<()> {
        let (cpu, shape) = (Cpu::new(), shape());
        for case in select(&["grouped_".into()])? {
            let [packed, unpacked] = [false, true].map(|form| outputs(&cpu, case, &shape, form));
            for (packed, unpacked) in packed?.iter().zip(&unpacked?) {
                unpacked.expect_same(packed).with_context(|| case.to_string())?;
            }
        }
        for case in select(&["h_".into()])? {
            let (ours, theirs) =
                (outputs(&cpu, case, &shape, true)?, outputs(&Reference, case, &shape, true)?);
            assert!(ours.len() == theirs.len() && ours.len() > 3, "{case}");
            ours.iter().zip(&theirs).try_for_each(|(ours, theirs)| ours.expect_same(theirs))?;
        }
        Ok(())
    }

    #[test]
    fn what_stays_unwritten_shows_in_a_second_run() -> Result<()> {
        let (cpu, shape) = (Cpu::new(), shape());
        for case in
            select(&["group_amax", "group_quantize_both", "h_", "grouped_wgrad", "step"].map(Into::into))?
        {
            Ready::new(&cpu, case, &shape, false)?.check_repeats(&cpu)?;
            let idle = Altered { inner: &cpu, alteration: Idle };
            assert!(Ready::new(&cpu, case, &shape, false)?.check_repeats(&idle).is_err(), "{case}");
        }
        Ok(())
    }
}
