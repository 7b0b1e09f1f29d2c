//! One suite of checks, run against every backend of moe4.
//!
//! ```
//! use moe4::kernels::reference::Reference;
//!
//! let report = moe4_conformance::run_only(&Reference, &["golden/q1d_row", "defect 6/scale midpoints"]);
//! assert!(report.passed(), "{report}");
//! ```
//!
//! A check takes a backend and says that it passed, or which tensor, which index, what was expected and what came
//! out. Host data goes in and host data comes out, so a backend in device memory runs the same list: it implements
//! [`Backend`], which adds one method to the contract, and calls [`run`]. Every output is filled with poison (bytes
//! 0xAA, NaN) before its pass, and rows past `sum(splits)` hold NaN or huge numbers.
//!
//! Each check says what it needs ([`checks::Need`]). On a backend whose capabilities lack it the check is skipped, and
//! the report says so: a backend without products runs everything about amaxes, copies, scale layouts and permutation.
//!
//! | module | what |
//! |---|---|
//! | [`checks`] | the list |
//! | [`drive`] | passes and the whole operator, from host data to host data |
//! | [`exact`], [`judge`] | exact products, and how far f32 accumulation and BF16 rounding may be from them, element by element |
//! | [`golden`], [`mlp_rule`] | the golden files, and the tolerance rule of those of the whole operator |
//! | [`alter`], [`broken`] | backends with one thing altered; those that are wrong on purpose |
//!
//! # Tolerances
//!
//! Bytes of amax and quantize passes are compared exactly. A product's element may be off by what its own terms
//! explain ([`exact`]), an epilogue's by what the accuracy of the activation explains on top ([`judge`]), each fed with
//! the backend's own rounded intermediate; nothing is averaged over a tensor, so one bad row fails. The golden operator
//! data come with a rule of their own ([`mlp_rule`]); where it speaks of a norm, each expert is looked at as well.
//!
//! # Faults that users met elsewhere
//!
//! | entry | what | checked by |
//! |---|---|---|
//! | 1 | zero blocks; no NaN scale from finite data | `defect 1/zero blocks` |
//! | 2 | a scale that underflows | `defect 2/scale underflow`, `defect 2/products with an underflowed scale` |
//! | 3 | a reciprocal is no division | `defect 3/reciprocals` |
//! | 4 | inputs above 2688 | `defect 4/large inputs` |
//! | 5 | the scale of -x | `defect 5/negation` |
//! | 6 | E4M3 midpoints | `defect 6/scale midpoints` |
//! | 7 | padding of scale layouts and tiles | `defect 7/padding`, `golden/swizzle`, `layout/swizzled scales` |
//! | 8 | rows and splits of odd sizes | `defect 8/odd shapes`, all property checks |
//! | 9 | offsets past 2^31 | `defect 9/large offsets` |
//! | 10 | E2M1 has no infinity and no NaN | `defect 10/E2M1 edges and non-finite blocks`, `defect 10/non-finite blocks show in products`, `golden/edge` |
//! | 11 | an amax of the unsigned transform | `defect 11/amax of the signed transform`, `golden/q1d_rht and q1d_rht_nosign` |
//! | 12 | the bound of the amax after RHT | `defect 12/amax after RHT is bounded` |
//! | 13 | order of additions in the RHT | `defect 13/order of additions in the RHT` |
//! | 14 | stochastic rounding is unbiased | `defect 14/stochastic rounding is unbiased` |
//! | 15 | copies, tensors and steps share no random numbers | `defect 15/random bytes of each element`, `defect 15/streams of the operator` |
//! | 16 | splits with experts without tokens | `defect 16/reported splits` |
//! | 17 | empty expert: overwrite, accumulate | `defect 17/accumulation`, `invariant 7/empty expert`, `invariant 7/quantized empty experts` |
//! | 18 | all splits zero, last expert empty | `defect 18/all splits zero`, `defect 18/quantization with all splits zero` |
//! | 19 | boundaries inside a tile; garbage past the end | `defect 19/boundaries inside a tile`, `invariant 5/experts alone equal grouped`, `invariant 5/experts quantized alone equal grouped`, `invariant 6/rows of nobody`, `invariant 6/quantized rows of nobody` |
//! | 20 | weights in one tensor or apart | `defect 20/weights in one tensor or apart`, `invariant 1/bytes of weights` |
//! | 21 | a second, larger batch | `defect 21/batches of growing size`, `defect 21/quantization of growing batches` |
//! | 22 | gradients at clamps, `alpha` in them | `defect 22/gradients at clamps` |
//! | 23 | activation parameters in the backward; bad ones refused | `defect 23/activation parameters` |
//! | 24 | clamps act | `defect 24/clamps act` |
//! | 25 | recompute on and off | `invariant 2/recompute on equals off`, `golden/mlp, end to end` |
//! | 26 | files keep the gate/up layout | not here: no backend is involved; belongs to the checkpoint module |
//! | 27 | conventions of global scales in files | not here, likewise |
//! | 28 | missing experts and NaN scales in files | not here, likewise |
//! | 29 | which GPU this is | not here: belongs to the driver of the CUDA backend |
//! | 30 | paged stash | `savings/paged stash` in host memory; [`checks::paged_stash_over`] with another pool |
#![forbid(unsafe_code)]

pub mod alter;
pub mod broken;
pub mod checks;
pub mod compare;
pub mod data;
pub mod drive;
pub mod exact;
pub mod golden;
pub mod judge;
pub mod mlp_rule;
mod report;

use moe4::kernels::{Backend, Host};
pub use report::{Failure, InCase, Line, Outcome, Report, Verdict};

use checks::Check;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs every check.
pub fn run<B: Backend>(backend: &B) -> Report {
    run_watched(backend, |_| {})
}

/// Runs every check and tells the name of each before it starts: some take seconds, and one that never ends should be
/// known by its name.
pub fn run_watched<B: Backend>(backend: &B, starts: impl FnMut(&'static str)) -> Report {
    run_checks(backend, checks::all(), starts)
}

/// Runs the checks that need host memory.
pub fn run_host_memory<B: Backend<Memory = Host>>(backend: &B) -> Report {
    run_checks(backend, checks::host_memory(), |_| {})
}

/// Runs the checks of these names.
///
/// # Panics
/// If no check has one of the names.
pub fn run_only<B: Backend>(backend: &B, names: &[&str]) -> Report {
    let mut checks = checks::all::<B>();
    for name in names {
        assert!(checks.iter().any(|check| check.name == *name), "no check is named {name}");
    }
    checks.retain(|check| names.contains(&check.name));
    run_checks(backend, checks, |_| {})
}

fn run_checks<B: Backend>(
    backend: &B,
    checks: Vec<Check<B>>,
    mut starts: impl FnMut(&'static str),
) -> Report {
    let capabilities = backend.capabilities();
    let line = |Check { name, run, needs }: Check<B>| {
        starts(name);
        if let Some(reason) = needs.missing(&capabilities) {
            return Line { name, verdict: Verdict::Skipped(reason) };
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| run(backend))).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
            Err(Failure::new(format!("panicked: {}", text.unwrap_or_default())))
        });
        Line { name, verdict: outcome.map_or_else(Verdict::Failed, |()| Verdict::Passed) }
    };
    Report {
        backend: format!("{} ({})", capabilities.backend, capabilities.path),
        lines: checks.into_iter().map(line).collect(),
    }
}
