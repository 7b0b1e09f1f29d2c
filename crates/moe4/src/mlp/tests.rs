//! The operator on the reference backend: it follows its plan, and its options do not change results.

use super::*;
use crate::kernels::reference::Reference;
use crate::kernels::work::Rows;
use crate::kernels::{Host, Ledger, PassName};
use crate::numerics::philox::philox4x32;
use crate::tensor::Groups;
use half::bf16;
use std::sync::Arc;

const SPLITS: [usize; 4] = [21, 0, 1, 32];
const ROWS: usize = 56; // two rows past the last expert

pub(super) fn values(stream: u64, len: usize, scale: f32) -> Vec<f32> {
    let unit = |i: usize| philox4x32(7, stream, i as u64)[0] as f32 / u32::MAX as f32 * 2.0 - 1.0;
    (0..len).map(|i| unit(i) * scale).collect()
}

pub(super) fn bf16s(stream: u64, len: usize, scale: f32) -> Vec<bf16> {
    values(stream, len, scale).into_iter().map(bf16::from_f32).collect()
}

#[derive(PartialEq, Debug)]
struct Results {
    y: Vec<bf16>,
    dx: Option<Vec<bf16>>,
    dprob: Vec<f32>,
    dw1: Vec<f32>,
    dw2: Vec<f32>,
    db: [Option<Vec<f32>>; 2],
    saved_bytes: usize,
}

fn config() -> GroupedMlpConfig {
    GroupedMlpConfig::new(4, 32, 32)
}

/// One step; checks on the way that the passes are those of the plan.
fn step(config: GroupedMlpConfig, needs: Needs) -> Results {
    let mlp = GroupedMlp::new(config.clone()).unwrap();
    let backend = Ledger::new(&Reference);
    let groups = Groups::new(&SPLITS, ROWS).unwrap();
    let [s1, s2] = mlp.weight_shapes();
    let (w1, w2) = (bf16s(1, 4 * s1.n * s1.k, 0.5), bf16s(2, 4 * s2.n * s2.k, 0.5));
    let (b1, b2) = (values(3, 4 * s1.n, 0.5), values(4, 4 * s2.n, 0.5));
    let biases = config.bias.then_some(Biases { b1: &b1[..], b2: &b2[..] });
    let (w1, w2) = (WeightSource::Packed(&w1[..]), WeightSource::Packed(&w2[..]));
    let weights = Arc::new(mlp.prepare_weights(&backend, w1, w2, biases).unwrap());
    backend.take();
    let (mut x, mut dy) = (bf16s(5, ROWS * 32, 1.0), bf16s(6, ROWS * 32, 1.0));
    x[54 * 32..].fill(bf16::NAN);
    dy[54 * 32..].fill(bf16::NAN);
    let prob = values(8, ROWS, 1.0);
    let args =
        ForwardArgs { x: &x[..], prob: &prob[..], groups: &groups, weights: &weights, needs, trace: None };
    let Forward { y, saved } = mlp.forward(&backend, args).unwrap();
    let plan = mlp.plan(needs);
    let rows = Rows { rows: groups.rows(), padded: groups.padded_rows(), experts: groups.experts() };
    let planned =
        |passes: &[PlannedPass]| passes.iter().map(|p| (p.name, plan.work(p, rows))).collect::<Vec<_>>();
    let ran = || backend.take().iter().map(|e| (e.name, e.work)).collect::<Vec<_>>();
    assert_eq!(ran(), planned(&plan.forward));
    assert_eq!(saved.bytes(), plan.saved_bytes(rows).iter().map(|s| s.bytes).sum::<usize>());
    let (mut dw1, mut dw2) = (vec![f32::NAN; 4 * s1.n * s1.k], vec![f32::NAN; 4 * s2.n * s2.k]);
    let dw = needs.weights.then(|| WeightGrads::<Host> {
        dw1: WeightGrad::packed_f32(&mut dw1[..], 4, GradMode::Overwrite),
        dw2: WeightGrad::packed_f32(&mut dw2[..], 4, GradMode::Overwrite),
    });
    let args = BackwardArgs { dy: &dy[..], random: RandomSeed { seed: 1, call: 2 }, dw, trace: None };
    let grads = mlp.backward(&backend, &saved, args).unwrap();
    assert_eq!(ran(), planned(&plan.backward));
    if !needs.weights {
        (dw1, dw2) = (vec![], vec![]);
    }
    let (dx, dprob, db) = (grads.dx, grads.dprob, [grads.db1, grads.db2]);
    Results { y, dx, dprob, dw1, dw2, db, saved_bytes: saved.bytes() }
}

#[test]
fn recompute_changes_nothing_but_memory() {
    for activation in Activation::all() {
        for (precision, bias) in
            [(Precision::Nvfp4, false), (Precision::Nvfp4, true), (Precision::Bf16, true)]
        {
            let off = GroupedMlpConfig { activation, precision, bias, ..config() };
            let on = GroupedMlpConfig { recompute_activation: true, ..off.clone() };
            let (off, mut on) = (step(off, Needs::ALL), step(on, Needs::ALL));
            assert!(on.saved_bytes < off.saved_bytes, "{activation}");
            on.saved_bytes = off.saved_bytes;
            assert_eq!(off, on, "{activation}");
            assert!(off.dw1.iter().chain(&off.dw2).all(|v| v.is_finite()), "{activation}");
            assert!(off.y[54 * 32..].iter().all(|v| v.to_bits() == 0), "rows of no expert are zero");
        }
    }
}

#[test]
fn partial_needs_give_the_same_gradients() {
    for precision in [Precision::Nvfp4, Precision::Bf16] {
        let config = GroupedMlpConfig { precision, bias: true, ..config() };
        let all = step(config.clone(), Needs::ALL);
        let input = step(config.clone(), Needs::INPUT);
        assert_eq!((&input.dx, &input.dprob, &input.y), (&all.dx, &all.dprob, &all.y));
        assert_eq!(input.db, [None, None]);
        let weights = step(config.clone(), Needs::WEIGHTS);
        assert_eq!((&weights.dw1, &weights.dw2, &weights.db), (&all.dw1, &all.dw2, &all.db));
        assert_eq!(weights.dx, None);
        assert!(input.saved_bytes < all.saved_bytes);
    }
}

#[test]
fn a_separate_amax_pass_gives_the_same_bits() {
    let separate = GroupedMlpConfig { dc_amax: DcAmax::SeparatePass, ..config() };
    assert_eq!(step(config(), Needs::ALL), step(separate, Needs::ALL));
}

#[test]
fn without_transforms_the_rowwise_amax_serves_both_directions() {
    let plain = GroupedMlpConfig { fc1_rht: None, fc2_rht: None, ..config() };
    let on = GroupedMlpConfig { recompute_activation: true, ..plain.clone() };
    let (off, on) = (step(plain, Needs::ALL), step(on, Needs::ALL));
    assert_eq!((off.dw1, off.dw2), (on.dw1, on.dw2));
}

#[test]
fn misuse_is_refused_before_anything_runs() {
    let mlp = GroupedMlp::new(config()).unwrap();
    let groups = Groups::new(&SPLITS, ROWS).unwrap();
    let (w1, w2) = (bf16s(1, 4 * 64 * 32, 1.0), bf16s(2, 4 * 32 * 32, 1.0));
    let prepare = |mlp: &GroupedMlp, w1: &[bf16]| {
        mlp.prepare_weights(&Reference, WeightSource::Packed(w1), WeightSource::Packed(&w2[..]), None)
    };
    let message = prepare(&mlp, &w1[1..]).unwrap_err().to_string();
    assert!(message.contains("w1 of shape [4, 64, 32]: expected 8192 elements, got 8191"), "{message}");

    let weights = Arc::new(prepare(&mlp, &w1).unwrap());
    let (x, prob) = (bf16s(5, ROWS * 32, 1.0), vec![1.0; ROWS]);
    let forward = |mlp: &GroupedMlp, x: &[bf16], groups: &Groups, needs| {
        mlp.forward(
            &Reference,
            ForwardArgs { x, prob: &prob[..], groups, weights: &weights, needs, trace: None },
        )
    };
    assert!(forward(&mlp, &x[1..], &groups, Needs::ALL).unwrap_err().to_string().contains("forward: x"));
    let three = Groups::new(&SPLITS[..3], ROWS).unwrap();
    assert!(
        forward(&mlp, &x, &three, Needs::ALL).unwrap_err().to_string().contains("expected 4 experts, got 3")
    );
    let other = GroupedMlp::new(GroupedMlpConfig { precision: Precision::Bf16, ..config() }).unwrap();
    assert!(forward(&other, &x, &groups, Needs::ALL).unwrap_err().to_string().contains("prepare_weights"));

    fn refused<'a>(
        mlp: &GroupedMlp,
        saved: &Saved<Host>,
        dy: &'a [bf16],
        dw: Option<WeightGrads<'a, Host>>,
    ) -> String {
        let args = BackwardArgs { dy, random: RandomSeed::default(), dw, trace: None };
        mlp.backward(&Reference, saved, args).unwrap_err().to_string()
    }
    let saved = forward(&mlp, &x, &groups, Needs::ALL).unwrap().saved;
    assert!(refused(&mlp, &saved, &x, None).contains("got no buffers"));
    let mut dw1 = vec![0.0; 4 * 64 * 32];
    let mut dw2 = [0.0; 12];
    let dw = WeightGrads {
        dw1: WeightGrad::packed_f32(&mut dw1[..], 4, GradMode::Overwrite),
        dw2: WeightGrad::packed_f32(&mut dw2[..], 4, GradMode::Overwrite),
    };
    assert!(
        refused(&mlp, &saved, &x, Some(dw)).contains("dw2 of shape [32, 32]: expected 1024 elements, got 3")
    );
    let inference = forward(&mlp, &x, &groups, Needs::NONE).unwrap().saved;
    assert_eq!(inference.bytes(), 0);
    assert!(refused(&mlp, &inference, &x, None).contains("Needs::NONE"));
}

#[test]
fn recompute_saves_less_than_half_of_bf16() {
    // Each step above checks that `Saved` owns exactly what the plan says, so the plan can be asked about any shape.
    let config = |precision, recompute_activation| {
        let activation = Activation::SRELU;
        GroupedMlpConfig {
            precision,
            recompute_activation,
            activation,
            ..GroupedMlpConfig::new(8, 4096, 4096)
        }
    };
    let rows = Rows { rows: 65536, padded: 65536, experts: 8 };
    let total = |config: GroupedMlpConfig| {
        Plan::new(&config, Needs::ALL).saved_bytes(rows).iter().map(|s| s.bytes).sum::<usize>() as f64
    };
    assert!(total(config(Precision::Nvfp4, true)) <= 0.45 * total(config(Precision::Bf16, false)));
}

#[test]
fn the_bound_changes_the_fc1_weight_gradient_only() {
    for activation in [Activation::SWIGLU, Activation::SRELU] {
        let exact = GroupedMlpConfig { activation, gradient_rounding: GradientRounding::Nearest, ..config() };
        let bound = GroupedMlpConfig { dc_amax: DcAmax::Bound, ..exact.clone() };
        let (exact, mut bound) = (step(exact, Needs::ALL), step(bound, Needs::ALL));
        assert_ne!(exact.dw1, bound.dw1, "{activation}");
        bound.dw1.clone_from(&exact.dw1);
        assert_eq!(exact, bound, "{activation}");
    }
}

/// A forward and the inputs of its backward.
struct Ready {
    mlp: GroupedMlp,
    saved: Saved<Host>,
    dy: Vec<bf16>,
}

impl Ready {
    fn new(config: GroupedMlpConfig, needs: Needs) -> Self {
        let mlp = GroupedMlp::new(config.clone()).unwrap();
        let groups = Groups::new(&SPLITS, ROWS).unwrap();
        let [s1, s2] = mlp.weight_shapes();
        let (w1, w2) = (bf16s(1, 4 * s1.n * s1.k, 0.5), bf16s(2, 4 * s2.n * s2.k, 0.5));
        let (b1, b2) = (values(3, 4 * s1.n, 0.5), values(4, 4 * s2.n, 0.5));
        let biases = config.bias.then_some(Biases { b1: &b1[..], b2: &b2[..] });
        let (w1, w2) = (WeightSource::Packed(&w1[..]), WeightSource::Packed(&w2[..]));
        let weights = Arc::new(mlp.prepare_weights(&Reference, w1, w2, biases).unwrap());
        let (x, prob) = (bf16s(5, ROWS * 32, 1.0), values(8, ROWS, 1.0));
        let (x, prob, groups, weights) = (&x[..], &prob[..], &groups, &weights);
        let args = ForwardArgs { x, prob, groups, weights, needs, trace: None };
        let saved = mlp.forward(&Reference, args).unwrap().saved;
        Self { mlp, saved, dy: bf16s(6, ROWS * 32, 1.0) }
    }

    fn args<'a>(&'a self, dw: Option<WeightGrads<'a, Host>>) -> BackwardArgs<'a, Host> {
        BackwardArgs { dy: &self.dy, random: RandomSeed { seed: 1, call: 2 }, dw, trace: None }
    }

    /// Buffers for both weight gradients, with something in them.
    fn buffers(&self) -> [Vec<f32>; 2] {
        self.mlp.weight_shapes().map(|s| values(30, 4 * s.n * s.k, 1.0))
    }
}

fn grads<'a>([dw1, dw2]: &'a mut [Vec<f32>; 2], mode: GradMode) -> WeightGrads<'a, Host> {
    WeightGrads {
        dw1: WeightGrad::packed_f32(&mut dw1[..], 4, mode),
        dw2: WeightGrad::packed_f32(&mut dw2[..], 4, mode),
    }
}

#[test]
fn delayed_weight_gradients_have_the_same_bits() {
    for activation in Activation::all() {
        for (precision, recompute_activation) in [
            (Precision::Nvfp4, false),
            (Precision::Nvfp4, true),
            (Precision::Bf16, false),
            (Precision::Bf16, true),
        ] {
            let config =
                GroupedMlpConfig { activation, precision, recompute_activation, bias: true, ..config() };
            for (needs, mode) in [
                (Needs::ALL, GradMode::Overwrite),
                (Needs::ALL, GradMode::Accumulate),
                (Needs::WEIGHTS, GradMode::Overwrite),
            ] {
                let label = format!("{activation} {precision} {recompute_activation} {mode:?}");
                let at_once = Ready::new(config.clone(), needs);
                let mut expected = at_once.buffers();
                let grads_at_once = at_once
                    .mlp
                    .backward(&Reference, &at_once.saved, at_once.args(Some(grads(&mut expected, mode))))
                    .unwrap();

                let later = Ready::new(config.clone(), needs);
                let DelayedBackward { gradients, weights } =
                    later.mlp.backward_delayed(&Reference, &later.saved, later.args(None)).unwrap();
                assert_eq!(gradients.dx, grads_at_once.dx, "{label}");
                assert_eq!(gradients.dprob, grads_at_once.dprob, "{label}");
                assert_eq!([gradients.db1, gradients.db2], [grads_at_once.db1, grads_at_once.db2], "{label}");
                let mut got = later.buffers();
                assert_ne!(got, expected, "{label}");
                assert!(weights.bytes() > 0);
                drop(later);
                weights.run(&Reference, grads(&mut got, mode)).unwrap();
                assert_eq!(got, expected, "{label}");
            }
        }
    }
}

#[test]
fn a_delayed_gradient_is_two_products_and_may_be_dropped() {
    let ready = Ready::new(GroupedMlpConfig { recompute_activation: true, ..config() }, Needs::ALL);
    let ledger = Ledger::new(&Reference);
    let delayed = || ready.mlp.backward_delayed(&ledger, &ready.saved, ready.args(None)).unwrap().weights;
    let first = delayed();
    assert!(!ledger.take_names().contains(&PassName::GroupedWgrad));
    let (mut expected, mut got) = (ready.buffers(), ready.buffers());
    first.run(&ledger, grads(&mut expected, GradMode::Overwrite)).unwrap();
    assert_eq!(ledger.take_names(), [PassName::GroupedWgrad; 2]);
    drop(delayed());
    // What was saved is still there, for a backward at once as well.
    let dw = grads(&mut got, GradMode::Overwrite);
    ready.mlp.backward(&Reference, &ready.saved, ready.args(Some(dw))).unwrap();
    assert_eq!(got, expected);
}

#[test]
fn misuse_of_delayed_gradients_is_refused() {
    let ready = Ready::new(config(), Needs::ALL);
    let mut buffers = ready.buffers();
    let args = ready.args(Some(grads(&mut buffers, GradMode::Overwrite)));
    let refused = ready.mlp.backward_delayed(&Reference, &ready.saved, args).unwrap_err();
    assert!(refused.to_string().contains("DelayedWeightGrads::run"), "{refused}");
    let frozen = Ready::new(config(), Needs::INPUT);
    let refused = frozen.mlp.backward_delayed(&Reference, &frozen.saved, frozen.args(None)).unwrap_err();
    assert!(refused.to_string().contains("weights need no gradients"), "{refused}");

    let later = ready.mlp.backward_delayed(&Reference, &ready.saved, ready.args(None)).unwrap().weights;
    let (mut short, untouched) = ([buffers[0].clone(), buffers[1][4..].to_vec()], buffers[0].clone());
    let refused = later.run(&Reference, grads(&mut short, GradMode::Overwrite)).unwrap_err();
    assert!(refused.to_string().contains("dw2 of shape"), "{refused}");
    assert_eq!(short[0], untouched, "nothing is written");

    // Tensors that a delayed gradient will read do not go into pages.
    let later = ready.mlp.backward_delayed(&Reference, &ready.saved, ready.args(None)).unwrap().weights;
    let stash = PagedStash::new(64, 10_000).unwrap();
    let refused = stash.store(ready.saved).unwrap_err();
    assert!(refused.reason.to_string().contains("run those or drop them first"), "{}", refused.reason);
    drop(later);
    assert!(stash.store(refused.saved).is_ok());
}

/// One step over tensors that the caller keeps: what a framework does.
fn borrowed_step(config: &GroupedMlpConfig, tamper: impl FnOnce(&mut Kept)) -> Result<Results, Error> {
    let mlp = GroupedMlp::new(config.clone()).unwrap();
    let groups = Groups::new(&SPLITS, ROWS).unwrap();
    let [s1, s2] = mlp.weight_shapes();
    let (w1, w2) = (bf16s(1, 4 * s1.n * s1.k, 0.5), bf16s(2, 4 * s2.n * s2.k, 0.5));
    let (b1, b2) = (values(3, 4 * s1.n, 0.5), values(4, 4 * s2.n, 0.5));
    let biases = || config.bias.then_some(Biases { b1: &b1[..], b2: &b2[..] });
    let (p1, p2) = (WeightSource::Packed(&w1[..]), WeightSource::Packed(&w2[..]));
    let prepared = mlp.prepare_weights(&Reference, p1, p2, biases()).unwrap();
    let weights = || match prepared.nvfp4() {
        Some([q1, q2]) => mlp.weights_nvfp4::<Host>(q1, q2, biases()).unwrap(),
        None => {
            let (w1, w2) = (WeightSource::Packed(&w1[..]), WeightSource::Packed(&w2[..]));
            mlp.weights_bf16::<Host>(w1, w2, biases()).unwrap()
        }
    };
    let (mut x, mut dy) = (bf16s(5, ROWS * 32, 1.0), bf16s(6, ROWS * 32, 1.0));
    x[54 * 32..].fill(bf16::NAN);
    dy[54 * 32..].fill(bf16::NAN);
    let prob = values(8, ROWS, 1.0);
    let view = weights();
    let args = ForwardViewArgs {
        x: &x[..],
        prob: &prob[..],
        groups: &groups,
        weights: &view,
        needs: Needs::ALL,
        trace: None,
    };
    let ForwardTensors { y, c, x: saved_x, h } = mlp.forward_view(&Reference, args)?;
    let mut kept = Kept { c: c.unwrap(), prob, needs: Needs::ALL, swap: false, later: None };
    tamper(&mut kept);
    let plan = mlp.plan(Needs::ALL);
    let bytes =
        kept.c.len() * 2 + kept.prob.len() * 4 + x.len() * 2 * usize::from(plan.saved_x == SavedAs::Bf16);
    let x_view = match plan.saved_x {
        SavedAs::Bf16 => SavedTensorView::Bf16(&x[..]),
        _ => saved_x.view(),
    };
    let (x_view, h_view) = if kept.swap { (h.view(), x_view) } else { (x_view, h.view()) };
    let parts = SavedParts {
        groups: &groups,
        weights: weights(),
        c: &kept.c[..],
        prob: &kept.prob[..],
        x: x_view,
        h: h_view,
    };
    let saved = mlp.saved_view::<Host>(kept.needs, parts)?;
    let (mut dw1, mut dw2) = (vec![f32::NAN; 4 * s1.n * s1.k], vec![f32::NAN; 4 * s2.n * s2.k]);
    let dw = WeightGrads::<Host> {
        dw1: WeightGrad::packed_f32(&mut dw1[..], 4, GradMode::Overwrite),
        dw2: WeightGrad::packed_f32(&mut dw2[..], 4, GradMode::Overwrite),
    };
    let (random, trace) = (RandomSeed { seed: 1, call: 2 }, None);
    let grads = match kept.later {
        None => {
            mlp.backward_view(&Reference, &saved, BackwardArgs { dy: &dy[..], random, dw: Some(dw), trace })?
        }
        Some(swap) => {
            let args = BackwardArgs { dy: &dy[..], random, dw: None, trace };
            let BackwardTensors { gradients, weights } =
                mlp.backward_delayed_view(&Reference, &saved, args)?;
            // `c` and the weights are not needed any more.
            drop(saved);
            drop(kept);
            let x_view = match plan.saved_x {
                SavedAs::Bf16 => SavedTensorView::Bf16(&x[..]),
                _ => saved_x.view(),
            };
            let (x, h) = if swap { (h.view(), x_view) } else { (x_view, h.view()) };
            let dy = (config.precision == Precision::Bf16 && !swap).then_some(&dy[..]);
            weights.run(&Reference, WgradParts { dy, x, h }, dw)?;
            gradients
        }
    };
    let (dx, dprob, db) = (grads.dx, grads.dprob, [grads.db1, grads.db2]);
    Ok(Results { y, dx, dprob, dw1, dw2, db, saved_bytes: bytes })
}

/// What the caller of [`borrowed_step`] keeps between the halves.
struct Kept {
    c: Vec<bf16>,
    prob: Vec<f32>,
    needs: Needs,
    swap: bool,
    /// The weights' gradients later; with `x` and `h` swapped and without `dy` if true.
    later: Option<bool>,
}

#[test]
fn tensors_that_the_caller_keeps_give_the_same() {
    for precision in [Precision::Nvfp4, Precision::Bf16] {
        for (recompute_activation, bias) in [(false, false), (true, true)] {
            let config = GroupedMlpConfig { precision, recompute_activation, bias, ..config() };
            let owned = step(config.clone(), Needs::ALL);
            for later in [None, Some(false)] {
                let mut kept = borrowed_step(&config, |kept| kept.later = later).unwrap();
                kept.saved_bytes = owned.saved_bytes;
                assert_eq!(kept, owned, "{precision} {recompute_activation} {later:?}");
            }
        }
    }
}

#[test]
fn saved_tensors_of_another_forward_are_refused() {
    let refused = |tamper: fn(&mut Kept)| {
        let config = GroupedMlpConfig { recompute_activation: true, ..config() };
        borrowed_step(&config, tamper).unwrap_err().to_string()
    };
    let message = refused(|kept| kept.c.truncate(5));
    assert!(message.contains("saved_view: c of shape [56, 64]: expected 3584 elements, got 5"), "{message}");
    let message = refused(|kept| kept.prob.push(0.0));
    assert!(message.contains("prob of shape [56]"), "{message}");
    let message = refused(|kept| kept.swap = true);
    assert!(message.contains("x: expected it saved as Columnwise, got Amax"), "{message}");
    let message = refused(|kept| kept.needs = Needs::INPUT);
    assert!(message.contains("x: expected it saved as Nothing, got Columnwise"), "{message}");
    let message = refused(|kept| kept.needs = Needs::NONE);
    assert!(message.contains("expected a forward with gradients"), "{message}");
    let message = refused(|kept| kept.later = Some(true));
    assert!(message.contains("x: expected it saved as Columnwise, got Amax"), "{message}");
    let config = GroupedMlpConfig { precision: Precision::Bf16, ..config() };
    let message = borrowed_step(&config, |kept| kept.later = Some(true)).unwrap_err().to_string();
    assert!(message.contains("pass dy as the backward got it"), "{message}");
}

#[test]
fn weights_that_do_not_fit_are_named() {
    let mlp = GroupedMlp::new(config()).unwrap();
    let (w, f) = (vec![bf16::ONE; 4 * 64 * 32], vec![1.0_f32; 4]);
    let bytes = vec![0u8; 4 * 64 * 16];
    let q = |codes: &'static str| {
        let view = |cut| &bytes[..cut];
        let (c1, s1, c2, s2) = (4 * 64 * 16, 4 * 64 * 2, 4 * 32 * 16, 4 * 32 * 2);
        let cut = |name: &str, len: usize| if name == codes { len - 1 } else { len };
        mlp.weights_nvfp4::<Host>(
            PackedView::<Host> { codes: view(cut("w1", c1)), scales: view(s1), amax: &f[..] },
            Nvfp4Weights {
                packed: PackedView::<Host> { codes: view(c2), scales: view(cut("w2", s2)), amax: &f[..] },
                unpacked: Some(&w[..cut("w2 values", 4 * 32 * 32)]),
            },
            None,
        )
        .map(drop)
        .map_err(|e| e.to_string())
    };
    q("").unwrap();
    assert!(q("w1").unwrap_err().contains("w1 of shape [4, 64, 16]"));
    assert!(q("w2").unwrap_err().contains("w2 of shape [4, 32, 2]"));
    assert!(q("w2 values").unwrap_err().contains("w2 of shape [4, 32, 32]"));
    let plain = GroupedMlp::new(GroupedMlpConfig { precision: Precision::Bf16, ..config() }).unwrap();
    let short = WeightSource::PerExpert(vec![&w[..64 * 32]; 3]);
    let (w1, w2) = (WeightSource::Packed(&w[..]), WeightSource::Packed(&w[..4 * 32 * 32]));
    let message = plain.weights_bf16::<Host>(short, w2, None).map(drop).unwrap_err().to_string();
    assert!(message.contains("list of experts' weights of shape [4]: expected 4"), "{message}");
    let w2 = WeightSource::Packed(&w[..4 * 32 * 32]);
    let biases = Biases { b1: &f[..], b2: &f[..] };
    let message = plain.weights_bf16::<Host>(w1, w2, Some(biases)).map(drop).unwrap_err().to_string();
    assert!(message.contains("expected bias=false, got bias=true"), "{message}");
}
