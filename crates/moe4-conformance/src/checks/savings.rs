//! The work that the operator does not do: bounds instead of amaxes, passes left out, bytes counted.

use super::invariants::{Inputs, not_zero};
use crate::alter::{Altered, UnpackedOperands};
use crate::compare::{alive, bf16_bits, bytes, f32_bits};
use crate::drive::{Step, StepOut};
use crate::report::{Failure, InCase, Outcome};
use moe4::kernels::activation::Activation;
use moe4::kernels::pages::PagePool;
use moe4::kernels::reference::Reference;
use moe4::kernels::work::Work;
use moe4::kernels::{Backend, Entry, EpilogueAmax, Error, Host, Ledger, PassName};
use moe4::mlp::{
    DcAmax, GradientRounding, GroupedMlpConfig, InPlace, Needs, PagedStash, Precision, TracedData,
};

const SPLITS: [usize; 4] = [64, 37, 0, 96];
const ROWS: usize = 200;
const HIDDEN: usize = 64;
const FFN: usize = 32;

fn config(activation: Activation) -> GroupedMlpConfig {
    GroupedMlpConfig { activation, ..GroupedMlpConfig::new(SPLITS.len(), HIDDEN, FFN) }
}

/// What may differ when the amax of `dc` after the RHT is a bound.
const BOUND_CHANGES: [&str; 3] = ["dc_fp4_col", "dc_scale_col", "dc_amax_col"];

/// The bound of `dc`'s amax: valid, and visible in dW1 alone, whose error stays within 5 % of the exact amax's.
pub(super) fn bound<B: Backend>(b: &B) -> Outcome {
    for activation in Activation::all() {
        for seed in [1, 2, 3] {
            let case = || -> Outcome {
                let rounding =
                    if seed == 1 { GradientRounding::Nearest } else { GradientRounding::Stochastic };
                let inputs = Inputs::new(
                    GroupedMlpConfig { gradient_rounding: rounding, ..config(activation) },
                    &SPLITS,
                    ROWS,
                    50 * seed,
                );
                let exact = inputs.step().run(b)?;
                not_zero(&exact)?;
                let mut step = inputs.step();
                step.config.dc_amax = DcAmax::Bound;
                let bound = step.run(b)?;
                same_but_for_dw1(&exact, &bound)?;
                valid_bound(&exact, &bound)?;
                error_of_dw1(&inputs, &exact, &bound)
            };
            case().in_case(format!("{activation}, seed {seed}"))?;
        }
    }
    Ok(())
}

fn same_but_for_dw1(exact: &StepOut, bound: &StepOut) -> Outcome {
    bf16_bits("y", &[exact.y.len()], &exact.y, &bound.y)?;
    f32_bits("dprob", &[exact.dprob.len()], &exact.dprob, &bound.dprob)?;
    let (a, b) = (exact.dx.as_deref().unwrap_or_default(), bound.dx.as_deref().unwrap_or_default());
    bf16_bits("dx", &[a.len()], a, b)?;
    let (a, b) = (exact.dw2.as_deref().unwrap_or_default(), bound.dw2.as_deref().unwrap_or_default());
    f32_bits("dw2", &[a.len()], a, b)?;
    counted("number of traced tensors", exact.trace.tensors.len(), bound.trace.tensors.len())?;
    for (a, b) in exact.trace.tensors.iter().zip(&bound.trace.tensors) {
        match (&a.data, &b.data) {
            _ if BOUND_CHANGES.contains(&a.name.as_str()) => {}
            (TracedData::U8(x), TracedData::U8(y)) => bytes(&a.name, &a.shape, x, y)?,
            (TracedData::F32(x), TracedData::F32(y)) => f32_bits(&a.name, &a.shape, x, y)?,
            (TracedData::Bf16(x), TracedData::Bf16(y)) => bf16_bits(&a.name, &a.shape, x, y)?,
            _ => return Err(Failure::new(format!("{} and {} differ in type", a.name, b.name))),
        }
    }
    Ok(())
}

fn traced_f32<'a>(out: &'a StepOut, name: &str) -> Result<&'a [f32], Failure> {
    match out.trace.get(name).map(|t| &t.data) {
        Some(TracedData::F32(values)) => Ok(values),
        _ => Err(Failure::new(format!("{name} was not traced"))),
    }
}

fn valid_bound(exact: &StepOut, bound: &StepOut) -> Outcome {
    let (before, after) = (traced_f32(exact, "dc_amax")?, traced_f32(exact, "dc_amax_col")?);
    let bound = traced_f32(bound, "dc_amax_col")?;
    let expected: Vec<f32> = before.iter().map(|amax| 4.0 * amax).collect();
    f32_bits("bound of dc_amax_col", &[expected.len()], &expected, bound)?;
    match after.iter().zip(bound).position(|(after, bound)| after > bound) {
        None => Ok(()),
        Some(e) => {
            Err(Failure::new(format!("expert {e}: the amax {} exceeds its bound {}", after[e], bound[e])))
        }
    }
}

/// Against the same step without any quantization, summed in f64, expert by expert.
fn error_of_dw1(inputs: &Inputs, exact: &StepOut, bound: &StepOut) -> Outcome {
    let mut plain = inputs.step();
    plain.config.precision = Precision::Bf16;
    let truth = plain.run(&Reference)?.dw1.unwrap_or_default();
    let size = truth.len() / SPLITS.len();
    for (e, _) in SPLITS.iter().enumerate().filter(|(_, rows)| **rows > 0) {
        let part = e * size..(e + 1) * size;
        let error = |out: &StepOut| {
            let dw1 = &out.dw1.as_deref().unwrap_or_default()[part.clone()];
            let squares = dw1.iter().zip(&truth[part.clone()]).map(|(a, b)| (*a as f64 - *b as f64).powi(2));
            squares.sum::<f64>().sqrt()
        };
        let (exact, bound) = (error(exact), error(bound));
        if !(exact > 0.0 && bound <= 1.05 * exact) {
            return Err(Failure::new(format!(
                "dw1 of expert {e}: error {bound} with the bound, {exact} without"
            )));
        }
    }
    Ok(())
}

fn counted<T: PartialEq + std::fmt::Display>(what: &str, expected: T, got: T) -> Outcome {
    if expected == got {
        return Ok(());
    }
    Err(Failure::new(format!("{what}: expected {expected}, got {got}")))
}

/// The passes of a step after its weights are prepared.
fn passes<B: Backend>(b: &B, step: &Step<'_>) -> Result<Vec<Entry>, Failure> {
    let ledger = Ledger::new(b);
    alive("y", &step.run(&ledger)?.y)?;
    let mut entries = ledger.take();
    entries.retain(|e| e.name != PassName::QuantizeWeights);
    Ok(entries)
}

fn count(entries: &[Entry], name: PassName) -> usize {
    entries.iter().filter(|e| e.name == name).count()
}

const BOTH: PassName = PassName::GroupQuantize { rowwise: true, columnwise: true };
const ROWWISE: PassName = PassName::GroupQuantize { rowwise: true, columnwise: false };
const COLUMNWISE: PassName = PassName::GroupQuantize { rowwise: false, columnwise: true };

/// What each option leaves out, for each activation.
pub(super) fn passes_left_out<B: Backend>(b: &B) -> Outcome {
    for activation in Activation::all() {
        let case = || -> Outcome {
            let inputs = Inputs::new(config(activation), &SPLITS, ROWS, 9);
            let off = passes(b, &inputs.step())?;
            // x and dy alone take an amax pass: those of h and dc come from epilogues.
            counted("amax passes", 2, count(&off, PassName::GroupHadamardAmax))?;
            counted("plain amax passes", 0, count(&off, PassName::GroupAmax))?;
            counted("quantizations in both directions", 4, count(&off, BOTH))?;
            counted("all passes", 12, off.len())?;

            let mut step = inputs.step();
            step.config.recompute_activation = true;
            let on = passes(b, &step)?;
            counted("recompute: amax passes", 2, count(&on, PassName::GroupHadamardAmax))?;
            counted("recompute: quantizations in both directions", 3, count(&on, BOTH))?;
            counted("recompute: the forward's h", 1, count(&on, ROWWISE))?;
            counted("recompute: the backward's h", 1, count(&on, COLUMNWISE))?;
            let rebuilt = PassName::GroupedGemmDact { amax: EpilogueAmax::Rht, recompute: true };
            counted("recompute: h rebuilt", 1, count(&on, rebuilt))?;

            let mut step = inputs.step();
            step.config.dc_amax = DcAmax::SeparatePass;
            let separate = passes(b, &step)?;
            counted("separate pass: amax passes", 3, count(&separate, PassName::GroupHadamardAmax))?;

            let mut step = inputs.step();
            step.needs = Needs::INPUT;
            let input = passes(b, &step)?;
            counted("input only: amax passes", 2, count(&input, PassName::GroupAmax))?;
            counted("input only: transforms", 0, count(&input, PassName::GroupHadamardAmax))?;
            counted("input only: rowwise quantizations", 4, count(&input, ROWWISE))?;
            counted("input only: weight gradients", 0, count(&input, PassName::GroupedWgrad))?;

            let mut step = inputs.step();
            step.needs = Needs::WEIGHTS;
            let weights = passes(b, &step)?;
            counted("weights only: products", 1, count(&weights, PassName::GroupedGemm))?;
            counted("weights only: dc", 1, count(&weights, COLUMNWISE))
        };
        case().in_case(activation.to_string())?;
    }
    Ok(())
}

/// The ledger's bytes of quantization against sums written out here from the shapes.
pub(super) fn counted_bytes<B: Backend>(b: &B) -> Outcome {
    for (unpacked, traced) in [(false, false), (false, true), (true, false), (true, true)] {
        let b = Altered { inner: b, alteration: UnpackedOperands(unpacked) };
        counted_bytes_of(&b, unpacked, traced)
            .in_case(format!("unpacked operands: {unpacked}, traced: {traced}"))?;
    }
    Ok(())
}

fn counted_bytes_of<B: Backend>(b: &B, unpacked: bool, traced: bool) -> Outcome {
    let inputs = Inputs::new(config(Activation::SWIGLU), &SPLITS, ROWS, 9);
    let entries = passes(b, &Step { traced, ..inputs.step() })?;
    let (t, tp, e) = (ROWS as u64, (64 + 48 + 96) as u64, SPLITS.len() as u64);
    // A copy that waits for the backward is never unpacked; others are packed as well if a trace wants their codes.
    let quantized = |cols: u64, waits: bool| {
        let copy = |rows: u64, unpacked: bool| {
            let packed = if unpacked && !traced { 0 } else { rows * cols / 2 + rows * cols / 16 };
            packed + unpacked as u64 * rows * cols * 2
        };
        let written = copy(t, unpacked) + copy(tp, unpacked && !waits);
        Work { read: t * cols * 2 + 2 * e * 4, written, flops: 0 }
    };
    let found: Vec<Work> =
        entries.iter().filter(|entry| entry.name == BOTH).map(|entry| entry.work).collect();
    let (hidden, ffn) = (HIDDEN as u64, FFN as u64);
    let expected =
        [quantized(hidden, true), quantized(ffn, true), quantized(hidden, false), quantized(2 * ffn, false)];
    if found != expected {
        return Err(Failure::new(format!(
            "quantization of x, h, dy, dc: expected {expected:?}, got {found:?}"
        )));
    }
    // What the products read: operands, weights, c and probabilities, each once.
    let form = |rows: u64, k: u64, unpacked: bool| {
        e * 4 + if unpacked { rows * k * 2 } else { rows * k / 2 + rows * k / 16 }
    };
    let operand = |rows, k| form(rows, k, unpacked);
    let read = [
        operand(t, hidden) + operand(e * 2 * ffn, hidden) + t * 4,
        operand(t, ffn) + operand(e * hidden, ffn),
        operand(t, hidden) + operand(e * hidden, ffn) + t * (2 * ffn * 2 + 4),
        operand(hidden, tp) + form(ffn, tp, false),
        operand(2 * ffn, tp) + form(hidden, tp, false),
        operand(t, 2 * ffn) + operand(e * 2 * ffn, hidden),
    ];
    let products: Vec<u64> = entries.iter().filter(|e| e.work.flops > 0).map(|e| e.work.read).collect();
    if products != read {
        return Err(Failure::new(format!("bytes read by products: expected {read:?}, got {products:?}")));
    }
    let flops: u64 = entries.iter().map(|entry| entry.work.flops).sum();
    // FC1 and FC2, each once forward and twice backward.
    counted("operations", 3 * 2 * t * hidden * (2 * ffn + ffn), flops)
}

/// Defect 30, in pages of host memory.
pub(super) fn paged_stash<B: Backend<Memory = Host>>(b: &B) -> Outcome {
    paged_stash_over(b, || PagedStash::new(1000, 200))
}

/// Defect 30: a forward through a paged stash has the gradients of one kept in place, bit by bit.
pub fn paged_stash_over<B: Backend, P: PagePool<Memory = B::Memory>>(
    b: &B,
    new: impl Fn() -> Result<PagedStash<P>, Error>,
) -> Outcome {
    for (activation, recompute) in Activation::all().into_iter().zip([false, true, true, false, true]) {
        let case = || -> Outcome {
            let config = GroupedMlpConfig { recompute_activation: recompute, ..config(activation) };
            let inputs = Inputs::new(config, &SPLITS, ROWS, 77);
            let stash = new()?;
            let plain = inputs.step().run_stashed(b, &InPlace)?;
            let paged = inputs.step().run_stashed(b, &stash)?;
            f32_bits("gradients", &[plain.len()], &plain, &paged)?;
            counted("pages in use after the backward", 0, stash.stats().pages.used)?;
            counted("pages ever used", true, stash.stats().pages.peak > 0)
        };
        case().in_case(format!("{activation} recompute={recompute}"))?;
    }
    Ok(())
}
