//! What a benchmark needs of a backend beyond its passes: times, ceilings, memory, a name.
//!
//! The CPU's implementation is here, that of CUDA in `clock_cuda.rs`.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Result, bail};
use moe4::kernels::cpu::Cpu;
use moe4::kernels::{Backend, CallTimes, Marks};
use rayon::prelude::*;

use crate::doctor::machine::Machine;

/// A backend that can be measured.
pub(super) trait Clock: Backend {
    /// Times `work`: `warmup` calls that do not count, then `runs` calls, each timed alone and complete when its
    /// time is taken. Inputs stay where they are, in whatever caches they fit.
    fn time(&self, runs: usize, warmup: usize, work: impl FnMut() -> Result<()>) -> Result<Timing>;

    /// Marks around single passes.
    type Marks: Marks;
    /// Those of this backend.
    fn marks(&self) -> &Self::Marks;

    /// What the hardware reaches on plain work, measured now.
    fn ceilings(&self) -> Result<Ceilings>;

    /// Free bytes where its tensors live; `None` if nobody knows.
    fn available_memory(&self) -> Option<u64>;

    /// Name of the device that computes, such as `NVIDIA H200`, from which the record's folder is named.
    fn device(&self) -> String;

    /// More about the device for the record, such as its driver's version.
    fn facts(&self) -> Vec<(&'static str, String)>;
}

/// Times of one piece of work, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Timing {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Timing {
    /// Of single runs; the upper median for an even number.
    pub(super) fn of(mut times: Vec<f64>) -> Result<Self> {
        times.sort_by(f64::total_cmp);
        let (Some(&min), Some(&max)) = (times.first(), times.last()) else {
            bail!("runs: expected at least 1, got 0");
        };
        Ok(Self { median: times[times.len() / 2], min, max })
    }
}

/// Rates that no pass can beat as long as its tensors do not stay in a cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ceilings {
    /// Bytes read plus bytes written a second by a large copy, in 1e9.
    pub(super) copy_gb_s: f64,
    /// A large BF16 matrix product of the backend, in 1e12 multiplications and additions a second; `None` where it was
    /// not measured, and then products have no floor.
    pub(super) matrix_tflop_s: Option<f64>,
}

impl Clock for Cpu {
    fn time(&self, runs: usize, warmup: usize, mut work: impl FnMut() -> Result<()>) -> Result<Timing> {
        for _ in 0..warmup {
            work()?;
        }
        let mut times = Vec::with_capacity(runs);
        for _ in 0..runs {
            let start = Instant::now();
            work()?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
        Timing::of(times)
    }

    type Marks = CallTimes;
    fn marks(&self) -> &CallTimes {
        &CallTimes
    }

    /// The copy runs on all threads. The matrix rate stays unknown: a loop of multiplications and additions would
    /// measure the compiler's target, not the instructions that the kernels are chosen by.
    fn ceilings(&self) -> Result<Ceilings> {
        let most = self.available_memory().map_or(1 << 26, |free| free / 8);
        let len = usize::try_from(most.min(COPY_BYTES))?.max(1 << 20);
        let (from, mut to) = (vec![1_u8; len], vec![2_u8; len]);
        let timing = self.time(9, 2, || {
            to.par_chunks_mut(COPY_CHUNK).zip(from.par_chunks(COPY_CHUNK)).for_each(|(to, from)| {
                to.copy_from_slice(from);
            });
            black_box(&mut to);
            Ok(())
        })?;
        // The fastest: a ceiling that a neighbour on the machine has lowered would be none.
        Ok(Ceilings { copy_gb_s: 2.0 * len as f64 / timing.min / 1e6, matrix_tflop_s: None })
    }

    fn available_memory(&self) -> Option<u64> {
        Machine::detect().memory.map(|memory| memory.available)
    }

    fn device(&self) -> String {
        let machine = Machine::detect();
        let cores = machine.cores.map_or_else(String::new, |cores| format!(" {cores}cores"));
        format!("{}{cores}", machine.processor.as_deref().unwrap_or(std::env::consts::ARCH))
    }

    fn facts(&self) -> Vec<(&'static str, String)> {
        vec![]
    }
}

/// Far more than any cache holds.
const COPY_BYTES: u64 = 512 << 20;
/// Large enough that a thread's start does not show.
const COPY_CHUNK: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_one_of_the_times() -> Result<()> {
        assert_eq!(Timing::of(vec![3.0, 1.0, 2.0])?, Timing { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Timing::of(vec![4.0, 1.0])?, Timing { median: 4.0, min: 1.0, max: 4.0 });
        assert!(Timing::of(vec![]).is_err());
        Ok(())
    }

    #[test]
    fn warm_up_does_not_count() -> Result<()> {
        let mut calls = 0;
        Cpu::new().time(3, 2, || {
            calls += 1;
            Ok(())
        })?;
        assert_eq!(calls, 5);
        Ok(())
    }
}
