//! Times one forward and backward of the grouped MLP on this machine's CPU, NVFP4 beside BF16.
//!
//! `cargo run --release -p moe4 --example step_time [-- E T H F]`; the default is E=8 T=2048 H=512 F=1024, SwiGLU.
//! Before timing, the result is checked against the scalar reference on a small shape. Prints JSON, as it is kept in
//! `bench/record/`: quantization of the weights, forward and backward, with all gradients.

use half::bf16;
use moe4::kernels::cpu::Cpu;
use moe4::kernels::reference::Reference;
use moe4::kernels::{Backend, Host};
use moe4::mlp::{
    BackwardArgs, Forward, ForwardArgs, GradMode, GroupedMlp, GroupedMlpConfig, Needs, Precision,
    PreparedWeights, RandomSeed, WeightGrad, WeightGrads, WeightSource,
};
use moe4::numerics::philox::philox4x32;
use moe4::tensor::Groups;
use std::sync::Arc;
use std::time::Instant;

struct Step {
    mlp: GroupedMlp,
    groups: Groups,
    weights: [Vec<bf16>; 2],
    x: Vec<bf16>,
    dy: Vec<bf16>,
    prob: Vec<f32>,
    dw: [Vec<f32>; 2],
}

impl Step {
    fn new([experts, tokens, hidden, ffn]: [usize; 4], precision: Precision) -> Self {
        let config = GroupedMlpConfig { precision, ..GroupedMlpConfig::new(experts, hidden, ffn) };
        let mlp = GroupedMlp::new(config).expect("a valid shape");
        let values = |stream: u64, len: usize, scale: f32| -> Vec<bf16> {
            let unit = |i: usize| philox4x32(1, stream, i as u64)[0] as f32 / u32::MAX as f32 * 2.0 - 1.0;
            (0..len).map(|i| bf16::from_f32(unit(i) * scale)).collect()
        };
        let [s1, s2] = mlp.weight_shapes();
        // Skewed: expert e gets a share proportional to e + 2, the last one takes what is left.
        let total: usize = (0..experts).map(|e| e + 2).sum();
        let mut splits: Vec<usize> = (0..experts).map(|e| tokens * (e + 2) / total).collect();
        splits[experts - 1] += tokens - splits.iter().sum::<usize>();
        Self {
            groups: Groups::new(&splits, tokens).expect("splits of all tokens"),
            weights: [
                values(1, experts * s1.n * s1.k, (3.0 / hidden as f32).sqrt()),
                values(2, experts * s2.n * s2.k, (3.0 / ffn as f32).sqrt()),
            ],
            x: values(3, tokens * hidden, 1.7),
            dy: values(4, tokens * hidden, 1.7),
            prob: vec![0.5; tokens],
            dw: [vec![0.0; experts * s1.n * s1.k], vec![0.0; experts * s2.n * s2.k]],
            mlp,
        }
    }

    fn prepare<B: Backend<Memory = Host>>(&self, backend: &B) -> Arc<PreparedWeights<Host>> {
        let [w1, w2] = &self.weights;
        let prepared = self.mlp.prepare_weights(
            backend,
            WeightSource::Packed(&w1[..]),
            WeightSource::Packed(&w2[..]),
            None,
        );
        Arc::new(prepared.expect("weights of the configured shape"))
    }

    /// Quantization of the weights, forward and backward.
    fn run<B: Backend<Memory = Host>>(&mut self, backend: &B) -> [Vec<bf16>; 2] {
        let weights = self.prepare(backend);
        let (x, prob, groups) = (&self.x[..], &self.prob[..], &self.groups);
        let args = ForwardArgs { x, prob, groups, weights: &weights, needs: Needs::ALL, trace: None };
        let Forward { y, saved } = self.mlp.forward(backend, args).expect("forward");
        let experts = self.mlp.config().experts;
        let [dw1, dw2] = &mut self.dw;
        let dw = WeightGrads {
            dw1: WeightGrad::packed_f32(&mut dw1[..], experts, GradMode::Overwrite),
            dw2: WeightGrad::packed_f32(&mut dw2[..], experts, GradMode::Overwrite),
        };
        let random = RandomSeed { seed: 1, call: 0 };
        let args = BackwardArgs { dy: &self.dy[..], random, dw: Some(dw), trace: None };
        let grads = self.mlp.backward(backend, &saved, args).expect("backward");
        [y, grads.dx.expect("dx was asked for")]
    }
}

/// The relative distance of two results in the Euclidean norm.
fn distance(a: &[bf16], b: &[bf16]) -> f64 {
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut a.iter().zip(b).map(|(a, b)| a.to_f64() - b.to_f64()));
    difference / norm(&mut b.iter().map(|b| b.to_f64()))
}

const RUNS: usize = 15;

fn main() {
    let given: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let shape = <[usize; 4]>::try_from(given).unwrap_or([8, 2048, 512, 1024]);
    let cpu = Cpu::new();
    let mut rows = vec![];
    for precision in [Precision::Bf16, Precision::Nvfp4] {
        let small = [4, 96, 64, 96];
        let (ours, oracle) =
            (Step::new(small, precision).run(&cpu), Step::new(small, precision).run(&Reference));
        for (ours, oracle) in ours.iter().zip(&oracle) {
            let distance = distance(ours, oracle);
            assert!(distance < 5e-3, "the result is wrong: off by {distance}");
        }
        let mut step = Step::new(shape, precision);
        step.run(&cpu);
        let mut times: Vec<f64> = (0..RUNS)
            .map(|_| {
                let start = Instant::now();
                step.run(&cpu);
                start.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        times.sort_by(f64::total_cmp);
        let [experts, tokens, hidden, ffn] = shape;
        let flops = 3 * 2 * tokens * hidden * 3 * ffn;
        let median = times[RUNS / 2];
        rows.push(serde_json::json!({
            "name": format!("grouped_mlp step, {precision}, swiglu"),
            "shape": { "E": experts, "T": tokens, "H": hidden, "F": ffn },
            "backend": format!("cpu: {}", cpu.capabilities().path),
            "median_ms": round(median),
            "min_ms": round(times[0]),
            "max_ms": round(times[RUNS - 1]),
            "runs": RUNS,
            "flops": flops,
            "gflops_per_s": round(flops as f64 / median / 1e6),
        }));
    }
    println!("{:#}", serde_json::json!({ "rows": rows }));
}

/// To a tenth.
fn round(v: f64) -> f64 {
    (v * 10.0).round() / 10.0
}
