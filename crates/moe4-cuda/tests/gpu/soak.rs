//! Ten thousand steps of the operator with random splits, twice: every output has the same bits in both runs, and memory
//! stays as it is.

use crate::support::cuda;
use bytemuck::cast_slice;
use half::bf16;
use moe4::kernels::activation::{Activation, GluLayout};
use moe4::mlp::{GroupedMlpConfig, Needs, RandomSeed};
use moe4::tensor::Groups;
use moe4_conformance::data::{self, Random};
use moe4_conformance::drive::{Step, StepOut};
use std::hash::{DefaultHasher, Hasher};

const STEPS: u64 = 10_000;
const EXPERTS: usize = 6;
const HIDDEN: usize = 144;
const FFN: usize = 96;
const MOST_ROWS: usize = 400;
/// Tensors of steps are windows of these many rows, so that a step costs the host little.
const POOL_ROWS: usize = 4 * MOST_ROWS;

/// What all steps draw from.
struct Pool {
    x: Vec<bf16>,
    dy: Vec<bf16>,
    prob: Vec<f32>,
    w1: Vec<bf16>,
    w2: Vec<bf16>,
    b1: Vec<f32>,
    b2: Vec<f32>,
}

impl Pool {
    fn new() -> Self {
        Self {
            x: data::normal(POOL_ROWS * HIDDEN, 1.0, 1300),
            dy: data::normal(POOL_ROWS * HIDDEN, 1.0, 1301),
            prob: data::probabilities(POOL_ROWS, 1302),
            w1: data::normal(EXPERTS * 2 * FFN * HIDDEN, 0.1, 1303),
            w2: data::normal(EXPERTS * HIDDEN * FFN, 0.1, 1304),
            b1: data::normal_f32(EXPERTS * 2 * FFN, 1305),
            b2: data::normal_f32(EXPERTS * HIDDEN, 1306),
        }
    }
}

/// Some experts have no rows, some a few, one may have all; some rows are nobody's.
fn splits(random: &mut Random, rows: usize) -> Vec<usize> {
    let mut left = rows;
    let mut splits: Vec<usize> = (0..EXPERTS)
        .map(|_| {
            let most = [0, 3, 40, left][random.below(4)].min(left);
            let taken = random.below(most + 1);
            left -= taken;
            taken
        })
        .collect();
    for i in (1..EXPERTS).rev() {
        splits.swap(i, random.below(i + 1));
    }
    splits
}

/// Step `number`, which says everything about it.
fn step(pool: &Pool, number: u64) -> StepOut {
    let mut random = Random::new(number);
    let rows = random.below(MOST_ROWS + 1);
    let from = random.below(POOL_ROWS - rows);
    let groups = Groups::new(&splits(&mut random, rows), rows).expect("the sum fits");
    let activations = Activation::all();
    let activation = activations[random.below(activations.len())];
    let gated = activation.is_gated();
    let glu_layout =
        if gated { GluLayout::ALL[random.below(GluLayout::ALL.len())] } else { GluLayout::ALL[0] };
    let bias = random.below(2) == 1;
    let config = GroupedMlpConfig {
        activation,
        glu_layout,
        bias,
        recompute_activation: random.below(2) == 1,
        ..GroupedMlpConfig::new(EXPERTS, HIDDEN, FFN)
    };
    let n1 = config.fc1_rows();
    let window = |tensor: &'_ [bf16]| tensor[from * HIDDEN..(from + rows) * HIDDEN].to_vec();
    Step {
        groups: &groups,
        x: &window(&pool.x),
        w1: &pool.w1[..EXPERTS * n1 * HIDDEN],
        w2: &pool.w2,
        biases: bias.then(|| (&pool.b1[..EXPERTS * n1], &pool.b2[..])),
        prob: &pool.prob[from..from + rows],
        dy: &window(&pool.dy),
        needs: Needs::ALL,
        random: RandomSeed { seed: 7, call: number },
        weights_per_expert: random.below(2) == 1,
        accumulate_onto: [None, Some(0.5)][random.below(2)],
        delayed: random.below(2) == 1,
        traced: false,
        config,
    }
    .run(cuda())
    .unwrap_or_else(|e| panic!("step {number}: {e}"))
}

fn digest(out: &StepOut) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(cast_slice(&out.y));
    out.dx.iter().for_each(|x| hasher.write(cast_slice(x)));
    hasher.write(cast_slice(&out.dprob));
    let single = [&out.dw1, &out.dw2, &out.db1, &out.db2];
    single.into_iter().flatten().for_each(|x| hasher.write(cast_slice(x)));
    hasher.finish()
}

fn free_memory() -> usize {
    cuda().synchronize().unwrap_or_else(|e| panic!("{e}"));
    cuda().device().free_memory().unwrap_or_else(|e| panic!("{e}"))
}

#[test]
#[ignore = "needs a GPU"]
fn ten_thousand_steps_twice() {
    let pool = Pool::new();
    // Every kernel is loaded before memory is looked at.
    (0..500).for_each(|number| drop(step(&pool, number)));
    let settled = free_memory();
    let run = |told: &str| -> Vec<u64> {
        (0..STEPS)
            .map(|number| {
                if number % 1000 == 0 {
                    println!("{told} run: step {number} of {STEPS}, {} bytes free", free_memory());
                }
                digest(&step(&pool, number))
            })
            .collect()
    };
    let (first, second) = (run("first"), run("second"));
    let differing: Vec<usize> = (0..first.len()).filter(|&i| first[i] != second[i]).collect();
    assert_eq!(differing, Vec::<usize>::new(), "steps whose outputs differ between the runs");
    let (after, slack) = (free_memory(), 8 << 20);
    assert!(after + slack >= settled, "free memory: expected about {settled} bytes, got {after}");
}
