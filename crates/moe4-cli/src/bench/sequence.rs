//! Times of the single passes within a run of several, by the backend's own clock.
//!
//! ```text
//! for each run:   a ledger with marks around every pass
//! for each pass:  the median over the runs
//! ```
//!
//! What a run does between its passes, such as allocating, is in the row's time and in none of these. A pass that takes
//! a device less time than the host needs to enqueue it is told with the host's time.

use std::time::Duration;

use anyhow::{Result, ensure};
use moe4::kernels::work::Work;
use moe4::kernels::{Entry, Ledger, PassName};
use moe4::mlp::{Phase, PlannedPass};
use serde::Serialize;

use super::check::Ready;
use super::clock::{Ceilings, Clock, Timing};
use super::measure::WARM_UP;
use super::row::floor_ms;

/// One pass that a run is expected to make.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// `None` for the weights.
    pub(super) phase: Option<Phase>,
    pub(super) pass: PlannedPass,
}

impl Part {
    pub(super) fn of(phase: Phase, passes: &[PlannedPass]) -> impl Iterator<Item = Self> {
        passes.iter().map(move |&pass| Self { phase: Some(phase), pass })
    }

    pub(super) fn weights(tensor: &'static str) -> Self {
        Self { phase: None, pass: PlannedPass { name: PassName::QuantizeWeights, tensor } }
    }
}

/// One pass of a run as records keep it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PassTime {
    pub(super) phase: &'static str,
    pub(super) pass: String,
    pub(super) tensor: &'static str,
    pub(super) ms: f64,
    pub(super) floor_ms: Option<f64>,
    pub(super) bytes: u64,
    pub(super) flops: u64,
}

/// Times the parts of a run; none for a row that is one pass.
pub(super) fn time<B: Clock>(
    backend: &B,
    ready: &mut Ready<B::Memory>,
    runs: usize,
    ceilings: Ceilings,
) -> Result<Vec<PassTime>> {
    let parts = ready.parts();
    if parts.is_empty() {
        return Ok(vec![]);
    }
    let mut times = vec![vec![]; parts.len()];
    let mut work = vec![Work::default(); parts.len()];
    let ledgers: Vec<_> = (0..WARM_UP + runs).map(|_| Ledger::with_marks(backend, backend.marks())).collect();
    // Nothing waits in between, so that a device has its work before it is done with what came before.
    for ledger in &ledgers {
        ready.run(ledger)?;
    }
    let planned: Vec<_> = parts.iter().map(|part| part.pass.name).collect();
    for ledger in &ledgers[WARM_UP..] {
        let entries = ledger.take_timed()?;
        let names: Vec<_> = entries.iter().map(|entry| entry.name).collect();
        ensure!(names == planned, "expected the passes {planned:?}, got {names:?}; please report this");
        for (index, entry) in entries.into_iter().enumerate() {
            times[index].push(entry.time.as_secs_f64() * 1e3);
            work[index] = entry.work;
        }
    }
    let one = |((part, times), work): ((Part, Vec<f64>), Work)| {
        let timing = Timing::of(times)?;
        let entry = Entry { name: part.pass.name, work, time: Duration::ZERO };
        Ok(PassTime {
            phase: match part.phase {
                None => "weights",
                Some(Phase::Forward) => "forward",
                Some(Phase::Backward) => "backward",
            },
            pass: part.pass.name.to_string(),
            tensor: part.pass.tensor,
            ms: timing.median,
            floor_ms: floor_ms(&[entry], ceilings),
            bytes: work.bytes(),
            flops: work.flops,
        })
    };
    parts.into_iter().zip(times).zip(work).map(one).collect()
}
