//! A plan run on this machine, pass by pass.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use half::bf16;
use moe4::kernels::cpu::Cpu;
use moe4::kernels::work::Rows;
use moe4::kernels::{Backend, Host, Ledger};
use moe4::mlp::{
    BackwardArgs, Biases, Forward, ForwardArgs, GradMode, GroupedMlp, Needs, PeakBytes, PreparedWeights,
    RandomSeed, WeightGrad, WeightGrads, WeightSource,
};
use moe4::numerics::philox::philox4x32;
use moe4::tensor::Groups;
use sysinfo::{MemoryRefreshKind, RefreshKind, System};

use crate::output;

/// Steps measured after one to warm up.
const STEPS: usize = 5;

/// Made-up inputs of the planned shape.
struct Step<'a> {
    mlp: &'a GroupedMlp,
    groups: &'a Groups,
    needs: Needs,
    weights: Arc<PreparedWeights<Host>>,
    x: Vec<bf16>,
    dy: Vec<bf16>,
    prob: Vec<f32>,
    dw: [Vec<f32>; 2],
}

/// The machine, and the median time of each pass in the order of the plan.
pub(super) fn run(mlp: &GroupedMlp, needs: Needs, groups: &Groups) -> Result<(String, Vec<Duration>)> {
    check_memory(mlp, needs, groups)?;
    let backend = Cpu::new();
    let ledger = Ledger::new(&backend);
    let bar = output::step_progress("measuring", STEPS as u64 + 1);
    let mut step = Step::new(&backend, mlp, needs, groups)?;
    let mut times: Vec<Vec<Duration>> = vec![];
    for repetition in 0..=STEPS {
        step.run(&ledger)?;
        let entries = ledger.take();
        if repetition > 0 {
            times.push(entries.into_iter().map(|entry| entry.time).collect());
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let passes = times[0].len();
    if times.iter().any(|t| t.len() != passes) {
        bail!("two steps of one plan ran different passes; please report this");
    }
    let median = |pass: usize| {
        let mut of_pass: Vec<_> = times.iter().map(|t| t[pass]).collect();
        of_pass.sort();
        of_pass[STEPS / 2]
    };
    Ok((format!("cpu: {}", backend.capabilities().path), (0..passes).map(median).collect()))
}

/// Refuses a shape that this machine has no room for, rather than dying half-way.
fn check_memory(mlp: &GroupedMlp, needs: Needs, groups: &Groups) -> Result<()> {
    let c = mlp.config();
    let weights: usize = mlp.weight_shapes().iter().map(|s| c.experts * s.n * s.k).sum();
    let rows = Rows { rows: groups.rows(), padded: groups.padded_rows(), experts: groups.experts() };
    let PeakBytes { forward, backward } = mlp.plan(needs).peak_bytes(rows, false);
    // Weights in BF16, packed, and their gradients; x, dy and y; the operator, and a fifth for scratch of its kernels.
    let needed = weights * (2 + 1 + 4) + rows.rows * c.hidden * 3 * 2 + forward.max(backward) / 5 * 6;
    let ram = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
    let Ok(system) = System::new_with_specifics(ram) else { return Ok(()) };
    let available = system.available_memory();
    if needed as u64 > available {
        let gib = |n: u64| n as f64 / (1u64 << 30) as f64;
        bail!(
            "--measure: expected a shape that fits in {:.1} GiB of free memory, got one of about {:.1} GiB; \
             choose fewer tokens, experts or a smaller size",
            gib(available),
            gib(needed as u64)
        );
    }
    Ok(())
}

/// Uniform values between `-scale` and `scale`.
fn values(stream: u64, len: usize, scale: f32) -> Vec<bf16> {
    let unit = |i: usize| philox4x32(0, stream, i as u64)[0] as f32 / u32::MAX as f32 * 2.0 - 1.0;
    (0..len).map(|i| bf16::from_f32(unit(i) * scale)).collect()
}

impl<'a> Step<'a> {
    fn new(backend: &Cpu, mlp: &'a GroupedMlp, needs: Needs, groups: &'a Groups) -> Result<Self> {
        let c = mlp.config();
        let [s1, s2] = mlp.weight_shapes();
        let (n1, n2) = (c.experts * s1.n * s1.k, c.experts * s2.n * s2.k);
        let w1 = values(1, n1, (3.0 / c.hidden as f32).sqrt());
        let w2 = values(2, n2, (3.0 / c.ffn as f32).sqrt());
        let (b1, b2) = (vec![0.1; c.experts * s1.n], vec![0.1; c.experts * s2.n]);
        let biases = c.bias.then_some(Biases { b1: &b1[..], b2: &b2[..] });
        let (w1, w2) = (WeightSource::Packed(&w1[..]), WeightSource::Packed(&w2[..]));
        let dw = |n: usize| vec![0.0; if needs.weights { n } else { 0 }];
        Ok(Self {
            weights: Arc::new(mlp.prepare_weights(backend, w1, w2, biases)?),
            x: values(3, groups.rows() * c.hidden, 1.7),
            dy: values(4, groups.rows() * c.hidden, 1.7),
            prob: vec![0.5; groups.rows()],
            dw: [dw(n1), dw(n2)],
            mlp,
            groups,
            needs,
        })
    }

    fn run(&mut self, backend: &Ledger<'_, Cpu>) -> Result<()> {
        let args = ForwardArgs {
            x: &self.x[..],
            prob: &self.prob[..],
            groups: self.groups,
            weights: &self.weights,
            needs: self.needs,
            trace: None,
        };
        let Forward { saved, .. } = self.mlp.forward(backend, args)?;
        if !self.needs.backward() {
            return Ok(());
        }
        let experts = self.mlp.config().experts;
        let [dw1, dw2] = &mut self.dw;
        let dw = self.needs.weights.then(|| WeightGrads::<Host> {
            dw1: WeightGrad::packed_f32(&mut dw1[..], experts, GradMode::Overwrite),
            dw2: WeightGrad::packed_f32(&mut dw2[..], experts, GradMode::Overwrite),
        });
        let args = BackwardArgs { dy: &self.dy[..], random: RandomSeed::default(), dw, trace: None };
        self.mlp.backward(backend, &saved, args)?;
        Ok(())
    }
}
