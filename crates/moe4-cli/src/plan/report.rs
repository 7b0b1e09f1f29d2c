//! The plan as data, for tables and for JSON.

use std::time::Duration;

use moe4::kernels::work::{Rows, Work};
use moe4::mlp::{
    AmaxSource, CopyPlan, DcAmax, GradientRounding, GroupedMlp, GroupedMlpConfig, Needs, OperandPlan, Phase,
    Plan, Precision, SavedAs,
};
use moe4::tensor::{Groups, OperandShape};
use serde::Serialize;

/// Everything that `moe4 plan` tells.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) operator: Operator,
    pub(super) copies: Vec<Copy>,
    pub(super) passes: Vec<Pass>,
    pub(super) saved: Vec<Saved>,
    pub(super) peak: Vec<Peak>,
    pub(super) options: Vec<Alternative>,
    pub(super) measured_on: Option<String>,
}

#[derive(Serialize)]
pub(super) struct Operator {
    pub(super) precision: String,
    pub(super) experts: usize,
    pub(super) tokens: usize,
    pub(super) top_k: usize,
    pub(super) rows: usize,
    pub(super) hidden: usize,
    pub(super) ffn: usize,
    pub(super) activation: String,
    pub(super) glu_layout: Option<String>,
    pub(super) bias: bool,
    pub(super) recompute: bool,
    pub(super) weight_bytes: usize,
}

/// One quantized copy of a tensor.
#[derive(Serialize)]
pub(super) struct Copy {
    pub(super) tensor: &'static str,
    pub(super) usage: &'static str,
    pub(super) made_in: &'static str,
    pub(super) rounding: &'static str,
    pub(super) rht: Option<String>,
    pub(super) amax_from: &'static str,
    pub(super) saved_as: &'static str,
    pub(super) bytes: usize,
}

/// One pass, in the order in which it runs.
#[derive(Serialize)]
pub(super) struct Pass {
    pub(super) phase: &'static str,
    pub(super) tensor: &'static str,
    pub(super) pass: String,
    pub(super) read: u64,
    pub(super) written: u64,
    pub(super) flops: u64,
    pub(super) ms: Option<f64>,
}

/// Bytes of one tensor that wait for the backward, in four variants.
#[derive(Serialize)]
pub(super) struct Saved {
    pub(super) tensor: &'static str,
    pub(super) form: &'static str,
    pub(super) this_plan: usize,
    pub(super) recompute_off: usize,
    pub(super) recompute_on: usize,
    pub(super) bf16: usize,
}

/// The most bytes that buffers of the operator hold at once.
#[derive(Serialize)]
pub(super) struct Peak {
    pub(super) phase: &'static str,
    /// On a backend whose products read packed operands, such as a CPU.
    pub(super) packed: usize,
    /// On one whose products read BF16 values, such as a GPU.
    pub(super) unpacked: usize,
}

/// What another choice of one option would change.
#[derive(Serialize)]
pub(super) struct Alternative {
    pub(super) option: &'static str,
    pub(super) passes: i64,
    pub(super) bytes_moved: i64,
    pub(super) bytes_saved: i64,
    pub(super) note: &'static str,
}

impl Report {
    pub(super) fn new(mlp: &GroupedMlp, needs: Needs, groups: &Groups, tokens: usize, top_k: usize) -> Self {
        let (config, plan) = (mlp.config(), mlp.plan(needs));
        let rows = Rows { rows: groups.rows(), padded: groups.padded_rows(), experts: groups.experts() };
        let packed = config.precision == Precision::Nvfp4;
        let weight = |shape| moe4::kernels::work::weight_bytes(packed, shape, config.experts);
        Self {
            operator: Operator {
                precision: config.precision.to_string(),
                experts: config.experts,
                tokens,
                top_k,
                rows: rows.rows,
                hidden: config.hidden,
                ffn: config.ffn,
                activation: config.activation.to_string(),
                glu_layout: config.activation.is_gated().then(|| config.glu_layout.to_string()),
                bias: config.bias,
                recompute: config.recompute_activation,
                weight_bytes: mlp.weight_shapes().into_iter().map(weight).sum(),
            },
            copies: copies(&plan, groups),
            passes: passes(&plan, rows),
            saved: saved(config, needs, rows),
            peak: peak(&plan, rows),
            options: alternatives(config, needs, rows),
            measured_on: None,
        }
    }

    /// Times of every pass, in order.
    pub(super) fn add_times(&mut self, (machine, times): (String, Vec<Duration>)) {
        self.measured_on = Some(machine);
        for (pass, time) in self.passes.iter_mut().zip(times) {
            pass.ms = Some(time.as_secs_f64() * 1e3);
        }
    }
}

fn copies(plan: &Plan, groups: &Groups) -> Vec<Copy> {
    let c = &plan.config;
    let tensors: [(&'static str, &OperandPlan, usize, SavedAs); 4] = [
        ("x", &plan.x, c.hidden, plan.saved_x),
        ("h", &plan.h, c.ffn, plan.saved_h),
        ("dy", &plan.dy, c.hidden, SavedAs::Nothing),
        ("dc", &plan.dc, c.fc1_rows(), SavedAs::Nothing),
    ];
    let mut all = vec![];
    for (tensor, operand, cols, saved) in tensors {
        let bytes = |shape: OperandShape| shape.code_bytes() + shape.scale_bytes();
        if let Some(copy) = operand.rowwise {
            all.push(one_copy(tensor, "rowwise", copy, "-", bytes(OperandShape::rowwise(groups, cols))));
        }
        if let Some(copy) = operand.columnwise {
            let saved = match saved {
                SavedAs::Columnwise => "packed",
                SavedAs::Amax => "amax only",
                SavedAs::Nothing | SavedAs::Bf16 => "-",
            };
            all.push(one_copy(
                tensor,
                "columnwise",
                copy,
                saved,
                bytes(OperandShape::columnwise(groups, cols)),
            ));
        }
    }
    all
}

fn one_copy(
    tensor: &'static str,
    usage: &'static str,
    copy: CopyPlan,
    saved_as: &'static str,
    bytes: usize,
) -> Copy {
    Copy {
        tensor,
        usage,
        made_in: match copy.made {
            Phase::Forward => "forward",
            Phase::Backward => "backward",
        },
        rounding: match copy.rounding {
            GradientRounding::Nearest => "nearest",
            GradientRounding::Stochastic => "stochastic",
        },
        rht: copy.rht.map(|mask| mask.to_string()),
        amax_from: match copy.amax {
            AmaxSource::Pass => "a pass",
            AmaxSource::Epilogue => "epilogue",
            AmaxSource::Reused => "forward's epilogue",
            AmaxSource::Bound => "4 x rowwise",
        },
        saved_as,
        bytes,
    }
}

fn passes(plan: &Plan, rows: Rows) -> Vec<Pass> {
    let phase = |phase, passes: &[_]| {
        let one = |pass: &moe4::mlp::PlannedPass| {
            let Work { read, written, flops } = plan.work(pass, rows);
            Pass { phase, tensor: pass.tensor, pass: pass.name.to_string(), read, written, flops, ms: None }
        };
        passes.iter().map(one).collect::<Vec<_>>()
    };
    let mut all = phase("forward", &plan.forward);
    all.extend(phase("backward", &plan.backward));
    all
}

fn saved(config: &GroupedMlpConfig, needs: Needs, rows: Rows) -> Vec<Saved> {
    let variant = |precision, recompute_activation| {
        let config = GroupedMlpConfig { precision, recompute_activation, ..config.clone() };
        Plan::new(&config, needs).saved_bytes(rows)
    };
    let this = variant(config.precision, config.recompute_activation);
    let (off, on) = (variant(config.precision, false), variant(config.precision, true));
    let bf16 = variant(Precision::Bf16, false);
    let row = |i: usize| Saved {
        tensor: this[i].tensor,
        form: match this[i].form {
            SavedAs::Nothing => "-",
            SavedAs::Columnwise => "columnwise, packed",
            SavedAs::Amax => "amax only",
            SavedAs::Bf16 if this[i].tensor == "prob" => "fp32",
            SavedAs::Bf16 => "bf16",
        },
        this_plan: this[i].bytes,
        recompute_off: off[i].bytes,
        recompute_on: on[i].bytes,
        bf16: bf16[i].bytes,
    };
    (0..this.len()).map(row).collect()
}

fn peak(plan: &Plan, rows: Rows) -> Vec<Peak> {
    let [packed, unpacked] = [false, true].map(|unpacked| plan.peak_bytes(rows, unpacked));
    vec![
        Peak { phase: "forward", packed: packed.forward, unpacked: unpacked.forward },
        Peak { phase: "backward", packed: packed.backward, unpacked: unpacked.backward },
    ]
}

fn alternatives(config: &GroupedMlpConfig, needs: Needs, rows: Rows) -> Vec<Alternative> {
    let totals = |config: &GroupedMlpConfig, needs| {
        let plan = Plan::new(config, needs);
        let passes = plan.forward.iter().chain(&plan.backward);
        let moved: u64 = passes.clone().map(|pass| plan.work(pass, rows).bytes()).sum();
        let saved: usize = plan.saved_bytes(rows).iter().map(|s| s.bytes).sum();
        [passes.count() as i64, moved as i64, saved as i64]
    };
    let base = totals(config, needs);
    let mut all = vec![];
    let mut add = |option, note, other: &GroupedMlpConfig, other_needs: Needs| {
        if other != config || other_needs != needs {
            let [passes, moved, saved] = totals(other, other_needs);
            let (passes, bytes_moved, bytes_saved) = (passes - base[0], moved - base[1], saved - base[2]);
            all.push(Alternative { option, passes, bytes_moved, bytes_saved, note });
        }
    };
    let with = |change: &dyn Fn(&mut GroupedMlpConfig)| {
        let mut other = config.clone();
        change(&mut other);
        other
    };
    let same = "same results, to the bit";
    add("--recompute on", same, &with(&|c| c.recompute_activation = true), needs);
    add("--recompute off", same, &with(&|c| c.recompute_activation = false), needs);
    if config.precision == Precision::Nvfp4 && needs.backward() {
        add("--dc-amax exact", "finer dW1 than with the bound", &with(&|c| c.dc_amax = DcAmax::Exact), needs);
        let note = "less work in an epilogue; a slightly noisier dW1";
        add("--dc-amax bound", note, &with(&|c| c.dc_amax = DcAmax::Bound), needs);
        add(
            "--dc-amax separate",
            "as exact, to the bit",
            &with(&|c| c.dc_amax = DcAmax::SeparatePass),
            needs,
        );
        let off = with(&|c| (c.fc1_rht, c.fc2_rht) = (None, None));
        add("--rht off", "outliers along tokens cost precision in dW", &off, needs);
    }
    add("--needs input", "no gradients of weights", config, Needs::INPUT);
    add("--needs weights", "no gradient of x", config, Needs::WEIGHTS);
    add("--needs none", "no backward", config, Needs::NONE);
    add(
        "--precision bf16",
        "no quantization: the baseline",
        &with(&|c| c.precision = Precision::Bf16),
        needs,
    );
    all
}
