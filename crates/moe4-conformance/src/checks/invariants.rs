//! The invariants of the design that belong to the operator. The first, equal bytes on every backend, is a property
//! check; the third is part of every verdict on an epilogue and is checked here against the backend's own pass.

use crate::compare::{alive, all_zero, bf16_bits, bytes, equal, f32_bits};
use crate::data;
use crate::drive::{GemmAct, GemmDact, Side, Step, StepOut, amax, hadamard_amax};
use crate::report::{Failure, InCase, Outcome};
use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::activation::{Activation, GluLayout};
use moe4::mlp::{DcAmax, GradientRounding, GroupedMlpConfig, Needs, Precision, RandomSeed, TracedData};
use moe4::numerics::hadamard::SignMask;
use moe4::tensor::Groups;

/// Inputs of a step that outlive it.
pub(super) struct Inputs {
    pub(super) config: GroupedMlpConfig,
    pub(super) groups: Groups,
    pub(super) x: Vec<bf16>,
    pub(super) w1: Vec<bf16>,
    pub(super) w2: Vec<bf16>,
    pub(super) b1: Vec<f32>,
    pub(super) b2: Vec<f32>,
    pub(super) prob: Vec<f32>,
    pub(super) dy: Vec<bf16>,
}

impl Inputs {
    /// Bell-shaped inputs; rows past the last expert's are NaN everywhere.
    pub(super) fn new(config: GroupedMlpConfig, splits: &[usize], rows: usize, seed: u64) -> Self {
        let groups = Groups::new(splits, rows).expect("splits fit");
        let (e, hidden, ffn, n1) = (config.experts, config.hidden, config.ffn, config.fc1_rows());
        let live = groups.live_rows();
        let mut x = data::normal(rows * hidden, 1.0, seed);
        let mut dy = data::normal(rows * hidden, 1.0, seed + 1);
        let mut prob = data::probabilities(rows, seed + 2);
        x[live * hidden..].fill(bf16::NAN);
        dy[live * hidden..].fill(bf16::NAN);
        prob[live..].fill(f32::NAN);
        Self {
            w1: data::normal(e * n1 * hidden, 0.2, seed + 3),
            w2: data::normal(e * hidden * ffn, 0.2, seed + 4),
            b1: data::normal_f32(e * n1, seed + 5),
            b2: data::normal_f32(e * hidden, seed + 6),
            config,
            groups,
            x,
            prob,
            dy,
        }
    }

    pub(super) fn step(&self) -> Step<'_> {
        Step {
            config: self.config.clone(),
            groups: &self.groups,
            x: &self.x,
            w1: &self.w1,
            w2: &self.w2,
            biases: self.config.bias.then_some((&self.b1[..], &self.b2[..])),
            prob: &self.prob,
            dy: &self.dy,
            needs: Needs::ALL,
            random: RandomSeed { seed: 11, call: 3 },
            weights_per_expert: false,
            accumulate_onto: None,
            delayed: false,
            traced: true,
        }
    }

    /// The same step with the rows of one expert, and nothing else in the world.
    pub(super) fn expert_alone(&self, e: usize) -> Inputs {
        let rows = self.groups.range(e);
        let (hidden, n1) = (self.config.hidden, self.config.fc1_rows());
        let wide = |x: &[bf16], cols: usize| x[rows.start * cols..rows.end * cols].to_vec();
        let slab = |len: usize, experts: usize| e * len / experts..(e + 1) * len / experts;
        let experts = self.config.experts;
        Inputs {
            config: GroupedMlpConfig { experts: 1, ..self.config.clone() },
            groups: Groups::single(rows.len()),
            x: wide(&self.x, hidden),
            dy: wide(&self.dy, hidden),
            w1: self.w1[slab(self.w1.len(), experts)].to_vec(),
            w2: self.w2[slab(self.w2.len(), experts)].to_vec(),
            b1: self.b1[e * n1..(e + 1) * n1].to_vec(),
            b2: self.b2[e * hidden..(e + 1) * hidden].to_vec(),
            prob: self.prob[rows].to_vec(),
        }
    }
}

/// Every result of two steps, bit by bit.
pub(super) fn same(expected: &StepOut, got: &StepOut) -> Outcome {
    bf16_bits("y", &[expected.y.len()], &expected.y, &got.y)?;
    f32_bits("dprob", &[expected.dprob.len()], &expected.dprob, &got.dprob)?;
    match (&expected.dx, &got.dx) {
        (Some(a), Some(b)) => bf16_bits("dx", &[a.len()], a, b)?,
        (None, None) => {}
        _ => return Err(Failure::new("dx is there in one run and not in the other")),
    }
    for (name, a, b) in [
        ("dw1", &expected.dw1, &got.dw1),
        ("dw2", &expected.dw2, &got.dw2),
        ("db1", &expected.db1, &got.db1),
        ("db2", &expected.db2, &got.db2),
    ] {
        match (a, b) {
            (Some(a), Some(b)) => f32_bits(name, &[a.len()], a, b)?,
            (None, None) => {}
            _ => return Err(Failure::new(format!("{name} is there in one run and not in the other"))),
        }
    }
    Ok(())
}

/// No result of a step with live rows is all zero.
pub(super) fn not_zero(out: &StepOut) -> Outcome {
    alive("y", &out.y)?;
    alive("dprob", &out.dprob)?;
    alive("dx", out.dx.as_deref().unwrap_or_default())?;
    for (name, dw) in [("dw1", &out.dw1), ("dw2", &out.dw2)] {
        alive(name, dw.as_deref().unwrap_or_default())?;
    }
    Ok(())
}

/// Every traced tensor of two steps, bit by bit.
pub(super) fn same_trace(expected: &StepOut, got: &StepOut) -> Outcome {
    let names = |out: &StepOut| out.trace.tensors.iter().map(|t| t.name.clone()).collect::<Vec<_>>();
    if names(expected) != names(got) {
        return Err(Failure::new("the two runs traced different tensors"));
    }
    for (a, b) in expected.trace.tensors.iter().zip(&got.trace.tensors) {
        match (&a.data, &b.data) {
            (TracedData::U8(x), TracedData::U8(y)) => bytes(&a.name, &a.shape, x, y)?,
            (TracedData::F32(x), TracedData::F32(y)) => f32_bits(&a.name, &a.shape, x, y)?,
            (TracedData::Bf16(x), TracedData::Bf16(y)) => bf16_bits(&a.name, &a.shape, x, y)?,
            _ => return Err(Failure::new(format!("{}: two types", a.name))),
        }
    }
    Ok(())
}

const SPLITS: [usize; 5] = [21, 0, 1, 32, 16];
const ROWS: usize = 77;

/// Every activation, layout, precision and rounding, with and without biases, each once or more.
pub(super) fn configurations() -> Vec<GroupedMlpConfig> {
    let mut out = vec![];
    for (i, activation) in Activation::all().into_iter().enumerate() {
        for (j, glu_layout) in GluLayout::ALL.into_iter().enumerate() {
            if !activation.is_gated() && j > 0 {
                continue;
            }
            let nearest = (i + j) % 3 == 2;
            out.push(GroupedMlpConfig {
                activation,
                glu_layout,
                bias: (i + j) % 2 == 1,
                gradient_rounding: match nearest {
                    true => GradientRounding::Nearest,
                    false => GradientRounding::Stochastic,
                },
                ..GroupedMlpConfig::new(SPLITS.len(), 48, 32)
            });
        }
    }
    out.push(GroupedMlpConfig {
        precision: Precision::Bf16,
        bias: true,
        ..GroupedMlpConfig::new(SPLITS.len(), 48, 32)
    });
    out.push(GroupedMlpConfig {
        fc1_rht: None,
        fc2_rht: None,
        ..GroupedMlpConfig::new(SPLITS.len(), 48, 32)
    });
    let unsigned = Some(SignMask::NONE);
    out.push(GroupedMlpConfig {
        fc1_rht: unsigned,
        fc2_rht: Some(SignMask(0x1234)),
        ..GroupedMlpConfig::new(SPLITS.len(), 48, 32)
    });
    out
}

fn label(config: &GroupedMlpConfig) -> String {
    let GroupedMlpConfig { activation, glu_layout, precision, gradient_rounding, bias, .. } = config;
    format!("{activation} {glu_layout} {precision} {gradient_rounding:?} bias={bias}")
}

fn each(check: impl Fn(Inputs) -> Outcome) -> Outcome {
    configurations().into_iter().enumerate().try_for_each(|(seed, config)| {
        let label = label(&config);
        check(Inputs::new(config, &SPLITS, ROWS, 100 * seed as u64)).in_case(label)
    })
}

/// 2, and defect 25: recompute on and off.
pub(super) fn recompute<B: Backend>(b: &B) -> Outcome {
    each(|inputs| {
        let mut step = inputs.step();
        let off = step.run(b)?;
        not_zero(&off)?;
        step.config.recompute_activation = true;
        same(&off, &step.run(b)?)
    })
}

/// Weight gradients computed later, overwritten and accumulated: the same bits.
pub(super) fn delayed<B: Backend>(b: &B) -> Outcome {
    each(|inputs| {
        for (recompute, onto) in [(false, None), (true, None), (false, Some(0.5)), (true, Some(0.5))] {
            let mut step = inputs.step();
            step.config.recompute_activation = recompute;
            step.accumulate_onto = onto;
            let at_once = step.run(b)?;
            not_zero(&at_once)?;
            step.delayed = true;
            let later = step.run(b)?;
            same(&at_once, &later).in_case(format!("recompute={recompute}, onto {onto:?}"))?;
            same_trace(&at_once, &later)?;
        }
        Ok(())
    })
}

/// Amaxes of `dc` by a pass of their own, and partial needs: the same bits for what is asked for.
pub(super) fn needs_and_separate_pass<B: Backend>(b: &B) -> Outcome {
    each(|inputs| {
        let all = inputs.step().run(b)?;
        not_zero(&all)?;
        let mut step = inputs.step();
        step.config.dc_amax = DcAmax::SeparatePass;
        same(&all, &step.run(b)?).in_case("amaxes of dc by a separate pass")?;
        for (needs, name) in [(Needs::INPUT, "input only"), (Needs::WEIGHTS, "weights only")] {
            let mut step = inputs.step();
            step.needs = needs;
            let part = step.run(b)?;
            let expected = StepOut {
                dx: all.dx.clone().filter(|_| needs.input),
                dw1: all.dw1.clone().filter(|_| needs.weights),
                dw2: all.dw2.clone().filter(|_| needs.weights),
                db1: all.db1.clone().filter(|_| needs.weights),
                db2: all.db2.clone().filter(|_| needs.weights),
                ..all.clone()
            };
            same(&expected, &part).in_case(name)?;
            let idle = |tensor: &str| part.trace.get(tensor).is_some();
            let unneeded: &[&str] =
                if needs.weights { &["dc_fp4"] } else { &["x_fp4_col", "h_fp4_col", "dc_fp4_col"] };
            let made = unneeded.iter().find(|tensor| idle(tensor));
            if let Some(tensor) = made {
                return Err(Failure::new(format!("{name}: {tensor} was made for nothing")));
            }
        }
        Ok(())
    })
}

/// 3: amaxes of an epilogue against the same backend's pass over what the epilogue wrote.
pub(super) fn epilogue_amaxes<B: Backend>(b: &B) -> Outcome {
    for (i, config) in configurations().into_iter().enumerate() {
        let label = label(&config);
        let case = || -> Outcome {
            let mask = if i % 2 == 0 { SignMask::DEFAULT } else { SignMask(0x00F3) };
            let inputs = Inputs::new(config, &SPLITS, ROWS, 7000 + i as u64);
            let GroupedMlpConfig { hidden, ffn, activation, glu_layout: layout, .. } = inputs.config;
            let (w1, w2) = (Side::Bf16(inputs.w1.clone()), Side::Bf16(inputs.w2.clone()));
            let (x, dy) = (Side::Bf16(inputs.x.clone()), Side::Bf16(inputs.dy.clone()));
            let (groups, prob) = (&inputs.groups, &inputs.prob[..]);
            let act = GemmAct {
                x: &x,
                w1: &w1,
                b1: None,
                hidden,
                ffn,
                activation,
                layout,
                prob,
                groups,
                amax: Some(mask),
            };
            let forward = act.run(b)?;
            alive("h", &forward.h)?;
            let same = |name: &str, x: &[bf16], cols: usize, got: &(Vec<f32>, Vec<f32>)| -> Outcome {
                let (before, after) = hadamard_amax(b, x, cols, groups, mask)?;
                f32_bits(&format!("{name}_amax"), &[before.len()], &before, &got.0)?;
                f32_bits(&format!("{name}_amax after RHT {mask}"), &[after.len()], &after, &got.1)?;
                f32_bits("amax by the plain pass", &[before.len()], &before, &amax(b, x, cols, groups)?)
            };
            same("h", &forward.h, ffn, &forward.amax.expect("asked for"))?;
            let (c, extras) = (&forward.c[..], Some(mask));
            let dact =
                GemmDact { dy: &dy, w2: &w2, hidden, ffn, activation, layout, c, prob, groups, extras };
            let with = dact.run(b)?;
            let extras = with.extras.expect("asked for");
            same("dc", &with.dc, dact.n1(), &extras.amax)?;
            bf16_bits("h written again", &[groups.rows(), ffn], &forward.h, &extras.h)?;
            // What is asked for on the side changes nothing.
            let without = GemmDact { extras: None, ..dact }.run(b)?;
            bf16_bits("dc without extras", &[with.dc.len()], &with.dc, &without.dc)?;
            f32_bits("dprob without extras", &[with.dprob.len()], &with.dprob, &without.dprob)?;
            let without = GemmAct { amax: None, ..act }.run(b)?;
            bf16_bits("h without amaxes", &[forward.h.len()], &forward.h, &without.h)
        };
        case().in_case(label)?;
    }
    Ok(())
}

/// Steps large enough to be cut into several pieces for threads or thread blocks.
pub fn large_steps<B: Backend>(b: &B) -> Result<Vec<StepOut>, Failure> {
    let splits = [300, 0, 17, 129, 64];
    let shape = GroupedMlpConfig { bias: true, ..GroupedMlpConfig::new(splits.len(), 80, 96) };
    let configurations = [
        shape.clone(),
        GroupedMlpConfig { recompute_activation: true, activation: Activation::SRELU, ..shape.clone() },
        GroupedMlpConfig { precision: Precision::Bf16, glu_layout: GluLayout::Elementwise, ..shape },
    ];
    let run = |config| Ok(Inputs::new(config, &splits, 515, 300).step().run(b)?);
    configurations.into_iter().map(run).collect()
}

/// Every result and every intermediate of two series of steps, bit by bit.
pub fn same_steps(expected: &[StepOut], got: &[StepOut]) -> Outcome {
    for (expected, got) in expected.iter().zip(got) {
        not_zero(expected)?;
        same(expected, got)?;
        same_trace(expected, got)?;
    }
    Ok(())
}

/// 4: two runs.
pub(super) fn two_runs<B: Backend>(b: &B) -> Outcome {
    each(|inputs| {
        let (first, second) = (inputs.step().run(b)?, inputs.step().run(b)?);
        not_zero(&first)?;
        same(&first, &second)?;
        same_trace(&first, &second)
    })?;
    same_steps(&large_steps(b)?, &large_steps(b)?)
}

/// 5: each expert alone.
pub(super) fn experts_alone<B: Backend>(b: &B) -> Outcome {
    each(|inputs| {
        let all = inputs.step().run(b)?;
        not_zero(&all)?;
        for e in 0..SPLITS.len() {
            let alone = inputs.expert_alone(e).step().run(b)?;
            let rows = inputs.groups.range(e);
            let hidden = inputs.config.hidden;
            let wide = |x: &[bf16]| x[rows.start * hidden..rows.end * hidden].to_vec();
            let slab = |x: &Option<Vec<f32>>| {
                x.as_ref().map(|x| x[e * x.len() / SPLITS.len()..(e + 1) * x.len() / SPLITS.len()].to_vec())
            };
            let part = StepOut {
                y: wide(&all.y),
                dx: all.dx.as_deref().map(wide),
                dprob: all.dprob[rows.clone()].to_vec(),
                dw1: slab(&all.dw1),
                dw2: slab(&all.dw2),
                db1: slab(&all.db1),
                db2: slab(&all.db2),
                trace: Default::default(),
            };
            same(&alone, &part).in_case(format!("expert {e} of {SPLITS:?}, alone against grouped"))?;
        }
        Ok(())
    })
}

/// 6, and defect 19: rows past `sum(splits)` hold NaN, or numbers larger than all others; results are those of the
/// trimmed tensors, and zero there.
pub(super) fn rows_of_nobody<B: Backend>(b: &B) -> Outcome {
    each(|mut inputs| {
        let (live, hidden) = (inputs.groups.live_rows(), inputs.config.hidden);
        let groups = Groups::new(&SPLITS, live).expect("splits fit");
        let mut step = inputs.step();
        step.groups = &groups;
        step.x = &inputs.x[..live * hidden];
        step.dy = &inputs.dy[..live * hidden];
        step.prob = &inputs.prob[..live];
        let trimmed = step.run(b)?;
        not_zero(&trimmed)?;
        for fill in [bf16::NAN, bf16::MAX] {
            inputs.x[live * hidden..].fill(fill);
            inputs.dy[live * hidden..].fill(fill);
            inputs.prob[live..].fill(fill.to_f32());
            let dirty = inputs.step().run(b)?;
            let dx = dirty.dx.clone().ok_or_else(|| Failure::new("dx was asked for"))?;
            all_zero("y past sum(splits)", live * hidden, &dirty.y[live * hidden..])?;
            all_zero("dx past sum(splits)", live * hidden, &dx[live * hidden..])?;
            all_zero("dprob past sum(splits)", live, &dirty.dprob[live..])?;
            let cut = StepOut {
                y: dirty.y[..live * hidden].to_vec(),
                dx: Some(dx[..live * hidden].to_vec()),
                dprob: dirty.dprob[..live].to_vec(),
                ..dirty
            };
            same(&trimmed, &cut).in_case(format!("filled with {fill}"))?;
        }
        Ok(())
    })
}

/// 7, and defect 17: an empty expert.
pub(super) fn empty_expert<B: Backend>(b: &B) -> Outcome {
    each(|inputs| {
        let empty = 1;
        let slab = |x: &Option<Vec<f32>>| -> Result<Vec<f32>, Failure> {
            let x = x.as_ref().ok_or_else(|| Failure::new("a weight gradient was asked for"))?;
            Ok(x[empty * x.len() / SPLITS.len()..(empty + 1) * x.len() / SPLITS.len()].to_vec())
        };
        let overwritten = inputs.step().run(b)?;
        not_zero(&overwritten)?;
        all_zero("dw1 of an empty expert, overwritten", 0, &slab(&overwritten.dw1)?)?;
        all_zero("dw2 of an empty expert, overwritten", 0, &slab(&overwritten.dw2)?)?;
        for name in ["x_amax", "x_amax_col", "h_amax", "h_amax_col", "dc_amax", "dc_amax_col"] {
            if let Some(TracedData::F32(amax)) = overwritten.trace.get(name).map(|t| &t.data) {
                equal(&format!("{name} of an empty expert"), &[1], &[0], &[amax[empty].to_bits()])?;
            }
        }
        let mut step = inputs.step();
        step.accumulate_onto = Some(-0.0);
        let accumulated = step.run(b)?;
        for (name, dw) in [("dw1", &accumulated.dw1), ("dw2", &accumulated.dw2)] {
            let dw = slab(dw)?;
            f32_bits(
                &format!("{name} of an empty expert, accumulated"),
                &[dw.len()],
                &vec![-0.0; dw.len()],
                &dw,
            )?;
        }
        Ok(())
    })
}
