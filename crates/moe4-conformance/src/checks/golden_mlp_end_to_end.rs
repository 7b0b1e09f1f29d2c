//! The golden operator data from `x` and `dy` to every gradient, through `moe4::mlp`.

use super::golden_mlp;
use crate::compare::{bf16_bits, ensure, f32_bits, widen, widen_f32};
use crate::drive::{Packed, Step, StepOut};
use crate::golden::{self, MlpGolden};
use crate::mlp_rule::{Flips, exact_copy, few_flips};
use crate::report::{Failure, InCase, Outcome};
use half::bf16;
use moe4::kernels::Backend;
use moe4::mlp::{GradientRounding, GroupedMlpConfig, Needs, RandomSeed, TracedData};

fn traced<'t, T>(
    out: &'t StepOut,
    name: &str,
    pick: impl Fn(&'t TracedData) -> Option<&'t Vec<T>>,
) -> Result<&'t Vec<T>, Failure> {
    let data = out.trace.get(name).and_then(|tensor| pick(&tensor.data));
    data.ok_or_else(|| Failure::new(format!("the trace has no {name} of the expected type")))
}

fn traced_bf16<'t>(out: &'t StepOut, name: &str) -> Result<&'t Vec<bf16>, Failure> {
    traced(out, name, |data| if let TracedData::Bf16(x) = data { Some(x) } else { None })
}

fn traced_f32<'t>(out: &'t StepOut, name: &str) -> Result<&'t Vec<f32>, Failure> {
    traced(out, name, |data| if let TracedData::F32(x) = data { Some(x) } else { None })
}

fn traced_copy(out: &StepOut, name: &str, suffix: &str) -> Result<Packed, Failure> {
    let bytes = |part: &str| {
        let name = format!("{name}_{part}{suffix}");
        traced(out, &name, |data| if let TracedData::U8(x) = data { Some(x) } else { None }).cloned()
    };
    Ok(Packed {
        codes: bytes("fp4")?,
        scales: bytes("scale")?,
        amax: traced_f32(out, &format!("{name}_amax{suffix}"))?.clone(),
    })
}

fn run<B: Backend>(b: &B, golden: &MlpGolden, recompute: bool) -> Result<StepOut, Failure> {
    let (file, experts) = (&golden.file, golden.groups.experts());
    let config = GroupedMlpConfig {
        activation: golden.activation,
        glu_layout: golden.layout,
        recompute_activation: recompute,
        gradient_rounding: GradientRounding::Nearest,
        ..GroupedMlpConfig::new(experts, golden.hidden, golden.ffn)
    };
    let (x, w1, w2) = (file.bf16("x"), file.bf16("w1"), file.bf16("w2"));
    let step = Step {
        config,
        groups: &golden.groups,
        x: &x,
        w1: &w1,
        w2: &w2,
        biases: None,
        prob: &file.f32("prob"),
        dy: &file.bf16("dy"),
        needs: Needs::ALL,
        random: RandomSeed::default(),
        weights_per_expert: false,
        accumulate_onto: None,
        delayed: false,
        traced: true,
    };
    Ok(step.run(b)?)
}

fn both_copies(
    golden: &MlpGolden,
    out: &StepOut,
    name: &str,
    compare: impl Fn(&str, usize, &Packed, &Packed) -> Result<Flips, Failure>,
) -> Result<[Flips; 2], Failure> {
    let row = compare(name, golden.cols(name), &golden.packed(name, ""), &traced_copy(out, name, "")?)?;
    let (stored, got) = (golden.packed(name, "_col"), traced_copy(out, name, "_col")?);
    let col = compare(&format!("{name} columnwise"), golden.groups.padded_rows(), &stored, &got)?;
    Ok([row, col])
}

fn judge(golden: &MlpGolden, out: &StepOut) -> Outcome {
    let file = &golden.file;
    let exact =
        |name: &str, k: usize, a: &Packed, b: &Packed| exact_copy(name, k, a, b).map(|()| Flips::default());
    both_copies(golden, out, "x", exact)?;
    both_copies(golden, out, "dy", exact)?;
    for (name, k) in [("w1", golden.hidden), ("w2", golden.ffn)] {
        exact_copy(name, k, &golden.packed(name, ""), &traced_copy(out, name, "")?)?;
    }
    golden.by_token("c").stage_bf16(&file.bf16("c"), traced_bf16(out, "c")?)?;
    golden.by_token("h").chained_bf16(&file.bf16("h"), traced_bf16(out, "h")?)?;
    golden.by_token("dc").chained_bf16(&file.bf16("dc"), traced_bf16(out, "dc")?)?;
    let [h_row, h_col] = both_copies(golden, out, "h", few_flips)?;
    let [dc_row, dc_col] = both_copies(golden, out, "dc", few_flips)?;

    golden.by_token("y").chained_product(&file.bf16("y"), &out.y, h_row)?;
    let dx = out.dx.as_ref().ok_or_else(|| Failure::new("dx was asked for"))?;
    golden.by_token("dx").chained_product(&file.bf16("dx"), dx, dc_row)?;
    let dh = widen_f32(traced_f32(out, "dh")?);
    golden.by_token("dh").relative_norm(&widen_f32(&file.f32("dh")), &dh, 1e-6)?;
    for (name, got, flips) in [("dw1", &out.dw1, dc_col), ("dw2", &out.dw2, h_col)] {
        let got = got.as_ref().ok_or_else(|| Failure::new(format!("{name} was asked for")))?;
        golden.by_expert(name).relative_norm(&widen_f32(&file.f32(name)), &widen_f32(got), flips.norm())?;
    }
    // dprob reads neither h nor dc.
    let dprob = widen_f32(&file.f32("dprob"));
    golden.by_token("dprob").relative_norm(&dprob, &widen_f32(&out.dprob), Flips::default().norm())
}

/// Every intermediate and every result under the tolerance rule, and recompute on equal to recompute off, bitwise.
pub(super) fn operator<B: Backend>(b: &B) -> Outcome {
    for golden in golden::mlp() {
        let case = || -> Outcome {
            let (off, on) = (run(b, &golden, false)?, run(b, &golden, true)?);
            judge(&golden, &off).in_case("recompute off")?;
            judge(&golden, &on).in_case("recompute on")?;
            same_results(&golden, &off, &on).in_case("recompute on against off")
        };
        case().in_case(&golden.file.name)?;
    }
    Ok(())
}

fn same_results(golden: &MlpGolden, off: &StepOut, on: &StepOut) -> Outcome {
    let token = |name| golden_mlp::token_shape(golden, name);
    bf16_bits("y", &token("y"), &off.y, &on.y)?;
    f32_bits("dprob", &token("dprob"), &off.dprob, &on.dprob)?;
    for name in ["h", "dc"] {
        bf16_bits(name, &token(name), traced_bf16(off, name)?, traced_bf16(on, name)?)?;
    }
    let [Some(dx), Some(on_dx)] = [&off.dx, &on.dx] else { return Err(Failure::new("dx was asked for")) };
    bf16_bits("dx", &token("dx"), dx, on_dx)?;
    for (name, a, b) in [("dw1", &off.dw1, &on.dw1), ("dw2", &off.dw2, &on.dw2)] {
        let (Some(a), Some(b)) = (a, b) else { return Err(Failure::new(format!("{name} was asked for"))) };
        f32_bits(name, &golden.by_expert(name).shape, a, b)?;
    }
    ensure(!widen(dx).iter().all(|&v| v == 0.0), || "dx is all zero".into())
}
