//! One forward and backward on a host backend, and its tensors by name.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use half::bf16;
use moe4::kernels::{Backend, Host};
use moe4::mlp::{
    BackwardArgs, Biases, Forward, ForwardArgs, GradBuffers, GradMode, Gradients, GroupedMlp,
    GroupedMlpConfig, Needs, RandomSeed, Trace, TracedData, TracedTensor, WeightGrad, WeightGrads,
    WeightSource,
};
use moe4::tensor::Groups;

use super::inputs::Inputs;
use super::tensor::{Data, Tensor};

/// What a replay computed.
pub(super) struct Replayed {
    config: GroupedMlpConfig,
    backend: String,
    forward: Duration,
    backward: Duration,
    y: Vec<bf16>,
    dw1: Vec<f32>,
    dw2: Vec<f32>,
    gradients: Gradients<Host>,
    trace: Trace,
}

/// Every tensor of a replay, and the rows of each expert.
pub(super) struct Computed {
    pub(super) tensors: Vec<Tensor>,
    pub(super) groups: Groups,
}

/// Whether a tensor is a result of the operator rather than an input or an intermediate.
pub(super) fn is_output(name: &str) -> bool {
    matches!(name, "y" | "dx" | "dw1" | "dw2" | "dprob" | "db1" | "db2")
}

/// Runs the operator; with `traced`, intermediate tensors are kept.
pub(super) fn replay<B: Backend<Memory = Host>>(
    backend: &B,
    config: GroupedMlpConfig,
    inputs: &Inputs,
    seed: u64,
    traced: bool,
) -> Result<Replayed> {
    let mlp = GroupedMlp::new(config.clone())?;
    let [shape1, shape2] = mlp.weight_shapes();
    let mut trace = Trace::default();
    let start = Instant::now();
    let biases = inputs.biases.as_ref().map(|(b1, b2)| Biases { b1: &b1[..], b2: &b2[..] });
    let (w1, w2) = (WeightSource::Packed(&inputs.w1[..]), WeightSource::Packed(&inputs.w2[..]));
    let weights = Arc::new(mlp.prepare_weights(backend, w1, w2, biases)?);
    let Forward { y, saved } = mlp.forward(
        backend,
        ForwardArgs {
            x: &inputs.x,
            prob: &inputs.prob,
            groups: &inputs.groups,
            weights: &weights,
            needs: Needs::ALL,
            trace: traced.then_some(&mut trace),
        },
    )?;
    let forward = start.elapsed();

    let mut dw1 = vec![0.0; config.experts * shape1.n * shape1.k];
    let mut dw2 = vec![0.0; config.experts * shape2.n * shape2.k];
    let start = Instant::now();
    let gradients = mlp.backward(
        backend,
        &saved,
        BackwardArgs {
            dy: &inputs.dy,
            random: RandomSeed { seed, call: 0 },
            dw: Some(WeightGrads {
                dw1: overwrite(&mut dw1, shape1.n * shape1.k),
                dw2: overwrite(&mut dw2, shape2.n * shape2.k),
            }),
            trace: traced.then_some(&mut trace),
        },
    )?;
    let backward = start.elapsed();
    let capabilities = backend.capabilities();
    let backend = format!("{} ({})", capabilities.backend, capabilities.path);
    Ok(Replayed { config, backend, forward, backward, y, dw1, dw2, gradients, trace })
}

fn overwrite(buffer: &mut [f32], expert: usize) -> WeightGrad<'_, Host> {
    WeightGrad {
        buffers: GradBuffers::F32(buffer.chunks_exact_mut(expert).collect()),
        mode: GradMode::Overwrite,
    }
}

impl Replayed {
    /// One line: what ran, where, and how long it took.
    pub(super) fn summary(&self, inputs: &Inputs) -> String {
        let config = &self.config;
        format!(
            "replayed {} {} E={} T={} H={} F={} on {}: forward {:.2?}, backward {:.2?}\n",
            config.precision,
            config.activation,
            config.experts,
            inputs.groups.rows(),
            config.hidden,
            config.ffn,
            self.backend,
            self.forward,
            self.backward,
        )
    }

    /// The results by name; with `traced` also the inputs, offsets and intermediates.
    pub(super) fn into_tensors(self, inputs: Inputs, traced: bool) -> Computed {
        let config = &self.config;
        let (experts, hidden, ffn, rows) = (config.experts, config.hidden, config.ffn, inputs.groups.rows());
        let n1 = config.fc1_rows();
        let mut tensors = Vec::new();
        let mut add = |name: &str, shape: &[usize], data: Data| tensors.push(Tensor::new(name, shape, data));
        add("y", &[rows, hidden], Data::Bf16(self.y));
        if let Some(dx) = self.gradients.dx {
            add("dx", &[rows, hidden], Data::Bf16(dx));
        }
        add("dw1", &[experts, n1, hidden], Data::F32(self.dw1));
        add("dw2", &[experts, hidden, ffn], Data::F32(self.dw2));
        add("dprob", &[rows], Data::F32(self.gradients.dprob));
        if let Some(db1) = self.gradients.db1 {
            add("db1", &[experts, n1], Data::F32(db1));
        }
        if let Some(db2) = self.gradients.db2 {
            add("db2", &[experts, hidden], Data::F32(db2));
        }
        let Inputs { x, w1, w2, prob, dy, splits, biases, groups, .. } = inputs;
        if !traced {
            return Computed { tensors, groups };
        }

        add("x", &[rows, hidden], Data::Bf16(x));
        add("w1", &[experts, n1, hidden], Data::Bf16(w1));
        add("w2", &[experts, hidden, ffn], Data::Bf16(w2));
        add("prob", &[rows], Data::F32(prob));
        add("dy", &[rows, hidden], Data::Bf16(dy));
        add("splits", &[experts], Data::I64(splits));
        if let Some((b1, b2)) = biases {
            add("b1", &[experts, n1], Data::F32(b1));
            add("b2", &[experts, hidden], Data::F32(b2));
        }
        let offsets = |start: &dyn Fn(usize) -> usize, end| {
            let starts = (0..experts).map(|expert| start(expert) as i64);
            Data::I64(starts.chain([end as i64]).collect())
        };
        add("row_off", &[experts + 1], offsets(&|expert| groups.range(expert).start, groups.live_rows()));
        add(
            "pad_off",
            &[experts + 1],
            offsets(&|expert| groups.padded_range(expert).start, groups.padded_rows()),
        );
        for TracedTensor { name, shape, data } in self.trace.tensors {
            if is_output(&name) {
                continue;
            }
            let data = match data {
                TracedData::U8(bytes) => Data::Bytes(bytes),
                TracedData::F32(values) => Data::F32(values),
                TracedData::Bf16(values) => Data::Bf16(values),
            };
            if let ("dc_amax", Data::F32(amax)) = (name.as_str(), &data) {
                // The upper bound of the amax after the RHT: 16 values, scaled by a quarter.
                add("dc_bound4", &shape, Data::F32(amax.iter().map(|amax| 4.0 * amax).collect()));
            }
            add(&name, &shape, data);
        }
        Computed { tensors, groups }
    }
}
