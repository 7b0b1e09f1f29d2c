//! One optimizer step over two micro-batches: weights are quantized once, gradients accumulate in FP32.
//!
//! `cargo run --release -p moe4 --example micro_batches`

use half::bf16;
use moe4::kernels::Host;
use moe4::kernels::cpu::Cpu;
use moe4::mlp::{
    BackwardArgs, Forward, ForwardArgs, GradMode, GroupedMlp, GroupedMlpConfig, Needs, RandomSeed,
    WeightCache, WeightGrad, WeightGrads, WeightSource,
};
use moe4::routing::{RouterConfig, Routing};
use moe4::tensor::Groups;
use std::error::Error;

const EXPERTS: usize = 4;
const HIDDEN: usize = 64;
const FFN: usize = 32;
const TOKENS: usize = 48;

fn wave(len: usize, phase: f32) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * 0.37 + phase).sin()).collect()
}

fn bf16s(len: usize, phase: f32, size: f32) -> Vec<bf16> {
    wave(len, phase).into_iter().map(|v| bf16::from_f32(size * v)).collect()
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let backend = Cpu::new();
    let mlp = GroupedMlp::new(GroupedMlpConfig {
        recompute_activation: true,
        ..GroupedMlpConfig::new(EXPERTS, HIDDEN, FFN)
    })?;
    let (w1, w2) = (bf16s(EXPERTS * 2 * FFN * HIDDEN, 0.0, 0.1), bf16s(EXPERTS * HIDDEN * FFN, 1.0, 0.1));
    let mut main_grad = [vec![0.0; w1.len()], vec![0.0; w2.len()]];
    let mut cache = WeightCache::<Host>::default();
    let step = 0; // the version of the weights: it changes with every optimizer step

    for micro_batch in 0..2 {
        let phase = micro_batch as f32;
        let config = RouterConfig { experts: EXPERTS, top_k: 2, normalize: true };
        let routing = Routing::new(&wave(TOKENS * EXPERTS, phase), config)?;
        let permutation = routing.permutation()?;
        let x = permutation.permute(&backend, &bf16s(TOKENS * HIDDEN, phase, 1.0)[..], HIDDEN)?;
        let prob = permutation.permute_choices(&routing.prob)?;
        let groups = Groups::new(&permutation.splits, 2 * TOKENS)?;

        let weights = cache.get_or_prepare(step, || {
            mlp.prepare_weights(&backend, WeightSource::Packed(&w1[..]), WeightSource::Packed(&w2[..]), None)
        })?;
        let (x, prob) = (&x[..], &prob[..]);
        let args =
            ForwardArgs { x, prob, groups: &groups, weights: &weights, needs: Needs::ALL, trace: None };
        let Forward { y, saved } = mlp.forward(&backend, args)?;
        let out = permutation.unpermute(&backend, &y[..], HIDDEN)?;
        if micro_batch == 0 {
            println!("{}", saved.plan());
        }

        // The loss is half the sum of squares, so its gradient is the output itself.
        let dy = permutation.permute(&backend, &out[..], HIDDEN)?;
        let [dw1, dw2] = &mut main_grad;
        let dw = WeightGrads {
            dw1: WeightGrad::packed_f32(&mut dw1[..], EXPERTS, GradMode::Accumulate),
            dw2: WeightGrad::packed_f32(&mut dw2[..], EXPERTS, GradMode::Accumulate),
        };
        let random = RandomSeed { seed: 1, call: 2 * step + micro_batch };
        let grads =
            mlp.backward(&backend, &saved, BackwardArgs { dy: &dy[..], random, dw: Some(dw), trace: None })?;
        let dlogits = routing.backward(&permutation.unpermute_choices(&grads.dprob)?, 0.01)?;
        let norm = |v: &[f32]| v.iter().map(|v| v * v).sum::<f32>().sqrt();
        println!(
            "micro-batch {micro_batch}: splits {:?}, {} bytes saved, |dW1| {:.3}, |dW2| {:.3}, |dlogits| {:.3}",
            permutation.splits,
            saved.bytes(),
            norm(&main_grad[0]),
            norm(&main_grad[1]),
            norm(&dlogits),
        );
    }
    Ok(())
}
