//! A GPU's clock: events on the backend's stream.
//!
//! Runs follow each other on the stream. A pass that takes the device less time than the host needs to launch it, some
//! microseconds, is told with the host's time.

use anyhow::{Error, Result};
use half::bf16;
use moe4::kernels::contract::{GroupedGemm, Operand, Side, WeightOperand, WeightShape};
use moe4::kernels::{Backend, DeviceError};
use moe4::tensor::Groups;
use moe4_cuda::Cuda;

use super::clock::{Ceilings, Clock, Timing};
use super::inputs;
use crate::cuda::version;

impl Clock for Cuda {
    fn time(&self, runs: usize, warmup: usize, mut work: impl FnMut() -> Result<()>) -> Result<Timing> {
        for _ in 0..warmup {
            work()?;
        }
        // The backend's closures have the contract's errors; the work's own is kept beside.
        let mut failed = None::<Error>;
        let times = Cuda::time(self, runs, || {
            work().map_err(|error| {
                let reason = error.to_string();
                failed = Some(error);
                let device = Clock::device(self);
                DeviceError { device, call: "work that is timed".into(), reason }.into()
            })
        });
        match failed {
            Some(error) => Err(error),
            None => Timing::of(times?.into_iter().map(f64::from).collect()),
        }
    }

    type Marks = Self;
    fn marks(&self) -> &Self {
        self
    }

    /// The copy lies in the backend's pool, so that after the warm-up nothing is allocated.
    fn ceilings(&self) -> Result<Ceilings> {
        let most = self.available_memory().map_or(COPY_BYTES, |free| free / 4);
        let len = usize::try_from(most.min(COPY_BYTES))?.max(1 << 20);
        let from = self.upload(&vec![1_u8; len])?;
        let timing = Clock::time(self, 9, 2, || {
            drop(self.duplicate(from.view())?);
            Ok(())
        })?;
        Ok(Ceilings {
            copy_gb_s: 2.0 * len as f64 / timing.median / 1e6,
            matrix_tflop_s: matrix_rate(self).ok(),
        })
    }

    fn available_memory(&self) -> Option<u64> {
        // What is freed at the end of the stream is free only then.
        self.synchronize().ok()?;
        Some(Cuda::device(self).free_memory().ok()? as u64)
    }

    fn device(&self) -> String {
        Cuda::device(self).facts().name.clone()
    }

    fn facts(&self) -> Vec<(&'static str, String)> {
        let facts = Cuda::device(self).facts();
        let gib = facts.memory as f64 / (1_u64 << 30) as f64;
        vec![
            ("gpu", facts.name.clone()),
            ("gpu_arch", facts.arch.to_string()),
            ("gpu_multiprocessors", facts.multiprocessors.to_string()),
            ("gpu_memory_gib", format!("{gib:.1}")),
            ("cuda", version(facts.driver)),
            ("nvrtc", self.compiler().version().to_string()),
        ]
    }
}

/// TFLOP/s of a large square product of BF16 operands, an error where the backend has none or no room. It is what this
/// backend's own products reach at best; PyTorch's stand among the facts of the peers.
fn matrix_rate(cuda: &Cuda) -> Result<f64> {
    let n = MATRIX;
    let groups = Backend::groups(cuda, &Groups::new(&[n], n)?)?;
    let [a, w] = [21, 22].map(|stream| cuda.upload(&inputs::normal(stream, n * n, 1.0)));
    let (a, w) = (a?, w?);
    let mut out = cuda.empty::<bf16>(n * n)?;
    let timing = Clock::time(cuda, 9, 2, || {
        Ok(cuda.grouped_gemm(GroupedGemm {
            a: Operand::Bf16(a.view()),
            w: WeightOperand::Bf16(vec![w.view()]),
            shape: WeightShape { n, k: n },
            side: Side::Fprop,
            groups: &groups,
            bias: None,
            out: out.view_mut(),
        })?)
    })?;
    Ok(2.0 * (n as f64).powi(3) / timing.median / 1e9)
}

/// Rows and columns of the product.
const MATRIX: usize = 8192;
/// Far more than any cache holds.
const COPY_BYTES: u64 = 2 << 30;
