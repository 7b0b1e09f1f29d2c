//! Each variant of the catalog once, on shapes that are small and ragged, so that a checker of memory accesses or
//! races is done soon:
//!
//! ```text
//! compute-sanitizer --tool memcheck <this binary> --ignored --exact sanitizer::each_variant
//! compute-sanitizer --tool racecheck <this binary> --ignored --exact sanitizer::each_variant
//! ```

use crate::cases::{Case, Form, Setting, same_copy, stochastic};
use crate::products::{self, operand, scattered_weights};
use crate::support::{cuda, must, portable, refused};
use half::bf16;
use moe4::kernels::activation::{Activation, GluLayout};
use moe4::kernels::contract::{GradMode, NO_ROW, Side, WeightShape};
use moe4::kernels::cpu::Cpu;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::Rounding;
use moe4::tensor::{Groups, ScaleLayout};
use moe4_conformance::compare::{alive, bf16_bits, f32_bits};
use moe4_conformance::{InCase, Outcome, data, drive, judge};
use moe4_cuda::variant::Variant;
use moe4_cuda::{Cuda, catalog};

/// Experts at odd rows, one of them empty, across tiles of 128 rows; rows of nobody.
const SPLITS: [usize; 5] = [37, 0, 1, 150, 20];
const ROWS: usize = 221;
/// A tile of 128 columns and one block. Weights that are read packed have whole pairs of blocks.
const COLS: usize = 144;

fn choice(variant: &Variant, name: &str) -> u32 {
    let of_name = variant.defines.iter().find(|(define, _)| *define == name);
    of_name.unwrap_or_else(|| panic!("{variant} has no {name}")).1
}

fn chosen(variant: &Variant, name: &str) -> bool {
    choice(variant, name) == 1
}

/// The mask that a variant is for; any, for the one that gets it at launch.
fn mask(variant: &Variant) -> SignMask {
    u16::try_from(choice(variant, "SIGN_MASK")).map_or(SignMask(0x1234), SignMask)
}

fn layout(swizzled: bool) -> ScaleLayout {
    if swizzled { ScaleLayout::Swizzled128x4 } else { ScaleLayout::Plain }
}

fn tensor(cols: usize, groups: &Groups) -> Vec<bf16> {
    let mut x = data::normal(ROWS * cols, 1.0, 1400);
    // Both the usual path and the other.
    (x[0], x[cols], x[3 * cols + 5]) = (bf16::NAN, bf16::INFINITY, bf16::MIN_POSITIVE_SUBNORMAL);
    x[groups.live_rows() * cols..].fill(bf16::NAN);
    x
}

fn quantize(variant: &Variant, groups: &Groups) -> Outcome {
    let form = |made: &str, prefix: &str, rounding| {
        chosen(variant, made).then(|| Form {
            rounding: if chosen(variant, &format!("{prefix}_STOCHASTIC")) {
                rounding
            } else {
                Rounding::Nearest
            },
            packed: chosen(variant, &format!("{prefix}_PACKED")),
            layout: layout(chosen(variant, &format!("{prefix}_SWIZZLED"))),
            unpacked: chosen(variant, &format!("{prefix}_UNPACKED")),
        })
    };
    let rounding = stochastic(14);
    let setting = Setting {
        mask: chosen(variant, "RHT").then(|| mask(variant)),
        rowwise: form("ROWWISE", "ROW", rounding[0]),
        columnwise: form("COLUMNWISE", "COL", rounding[1]),
    };
    Case::new(&tensor(COLS, groups), COLS, groups, setting).as_on_the_cpu(cuda())
}

fn dequantize(variant: &Variant, groups: &Groups) -> Outcome {
    let layout = layout(chosen(variant, "SWIZZLED"));
    let form = Some(Form { rounding: Rounding::Nearest, packed: true, layout, unpacked: false });
    let columnwise = chosen(variant, "COLUMNWISE");
    let (rowwise, columnwise) = if columnwise { (None, form) } else { (form, None) };
    let setting = Setting { mask: Some(SignMask::DEFAULT), rowwise, columnwise };
    Case::new(&tensor(COLS, groups), COLS, groups, setting).as_on_the_cpu(cuda())
}

/// Few experts are read twice, more of them once.
fn weights(experts: usize, unpacked: bool) -> Outcome {
    let shape = WeightShape { n: 48, k: COLS };
    let w = data::normal(experts * shape.n * shape.k, 1.0, 1410);
    let expected = drive::quantize_weights_together(&Cpu::new(), &w, experts, shape, unpacked)?;
    let got = drive::quantize_weights_together(cuda(), &w, experts, shape, unpacked)?;
    same_copy("weights", [experts * shape.n, shape.k], ScaleLayout::Plain, &expected, &got)
}

/// Columns for accesses of 8 elements, or of 1.
fn cols_for(variant: &Variant) -> usize {
    if choice(variant, "VECTOR") == 1 { 17 } else { COLS }
}

fn permutation(variant: &Variant) -> Outcome {
    let cols = cols_for(variant);
    let x = data::normal(ROWS * cols, 1.0, 1420);
    let mut places: Vec<u32> = (0..ROWS as u32).rev().collect();
    places[7] = NO_ROW;
    let cpu = Cpu::new();
    if variant.kernel == "permute" {
        let expected = drive::permute(&cpu, &x, cols, &places)?;
        bf16_bits("permuted", &[ROWS, cols], &expected, &drive::permute(cuda(), &x, cols, &places)?)?;
        places[9] = ROWS as u32;
        return refused(drive::permute(cuda(), &x, cols, &places), "permute: source[9]");
    }
    places.pop();
    let (slots, weights) = ((&places[..], 2), data::normal_f32(ROWS - 1, 1430));
    for weights in [None, Some(&weights[..])] {
        let expected = drive::unpermute(&cpu, &x, cols, slots, weights)?;
        let got = drive::unpermute(cuda(), &x, cols, slots, weights)?;
        bf16_bits("unpermuted", &[ROWS / 2, cols], &expected, &got)?;
    }
    places[9] = ROWS as u32;
    refused(drive::unpermute(cuda(), &x, cols, (&places, 2), None), "unpermute: slot[9]")
}

/// Also with more experts than the kernel has threads, and with splits that do not fit.
fn offsets() -> Outcome {
    for (experts, split) in [(5, 3), (1500, 1), (3, -1)] {
        let cuda = cuda();
        let mut groups = cuda.empty_groups(experts, 1600)?;
        let splits = cuda.upload_plain(&vec![split; experts])?;
        cuda.compute_groups(splits.view(), &mut groups)?;
        match split {
            -1 => refused(cuda.synchronize(), "splits[0]")?,
            _ => cuda.synchronize()?,
        }
    }
    Ok(())
}

/// One that runs this variant.
fn backend_of(variant: &Variant) -> &'static Cuda {
    if variant.kernel.starts_with("hopper_") || reads_packed(variant) { cuda() } else { portable() }
}

/// Kernels for few rows an expert.
fn reads_packed(variant: &Variant) -> bool {
    variant.kernel.starts_with("packed_")
}

/// The rows of `SPLITS`, and as many experts without any as make the average that a packed variant is for.
fn groups_for(variant: &Variant) -> Groups {
    let rows = if reads_packed(variant) { choice(variant, "ROWS") } else { 0 };
    let empty = match rows {
        16 => 24,
        32 => 5,
        _ => 0,
    };
    Groups::new(&[&SPLITS[..], &vec![0; empty]].concat(), ROWS).expect("fits")
}

/// Unpacked, and in BF16.
fn product(variant: &Variant, groups: &Groups) -> Outcome {
    let side = if variant.kernel != "unpack" && chosen(variant, "DGRAD") { Side::Dgrad } else { Side::Fprop };
    let (shape, experts) =
        (WeightShape { n: 48, k: if reads_packed(variant) { 160 } else { COLS } }, groups.experts());
    let contraction = side.dims(shape).1;
    for quantized in [false, true] {
        let a = operand(&data_of(groups, contraction), contraction, groups, quantized, false)?;
        let w = products::weights(experts, shape, quantized, 1440)?;
        let bias = data::normal_f32(experts * side.dims(shape).0, 1441);
        let bias = Some(drive::Bias { bias: &bias, prob: None });
        let case = drive::Gemm { a: &a, w: &w, shape, side, groups, bias };
        judge::gemm(&case, &case.run(backend_of(variant))?)?;
    }
    Ok(())
}

/// Values for products, finite where experts have rows.
fn data_of(groups: &Groups, cols: usize) -> Vec<bf16> {
    products::tensor(groups, cols, 1442)
}

/// FC1 or FC2's dgrad. The passes of the suite ask for both amaxes or none; other choices run in tests of their own.
fn epilogue(variant: &Variant, groups: &Groups) -> Outcome {
    let define =
        |name| variant.defines.iter().find(|(define, _)| *define == name).map_or(0, |(_, value)| *value);
    let activation = Activation::all()[define("ACTIVATION") as usize];
    let layout = GluLayout::ALL[define("LAYOUT") as usize];
    let quantized = reads_packed(variant);
    let (hidden, ffn, mask) =
        (if quantized { 96 } else { 48 }, 160, (define("AMAX") == 2).then(|| mask(variant)));
    let (n1, experts) = (activation.fc1_rows(ffn), groups.experts());
    let prob = data::probabilities(ROWS, 1450);
    let x = operand(&data_of(groups, hidden), hidden, groups, quantized, false)?;
    if variant.kernel.ends_with("gemm_act") {
        let w1 = products::weights(experts, WeightShape { n: n1, k: hidden }, quantized, 1451)?;
        let case = drive::GemmAct {
            x: &x,
            w1: &w1,
            b1: None,
            hidden,
            ffn,
            activation,
            layout,
            prob: &prob,
            groups,
            amax: mask,
        };
        return judge::gemm_act(&case, &case.run(backend_of(variant))?);
    }
    let w2 = products::weights(experts, WeightShape { n: hidden, k: ffn }, quantized, 1452)?;
    let c = data_of(groups, n1);
    let case = drive::GemmDact {
        dy: &x,
        w2: &w2,
        hidden,
        ffn,
        activation,
        layout,
        c: &c,
        prob: &prob,
        groups,
        extras: mask,
    };
    judge::gemm_dact(&case, &case.run(backend_of(variant))?)
}

fn gradient(variant: &Variant, groups: &Groups) -> Outcome {
    // Hopper's kernel is for quantized operands only.
    let quantized = variant.kernel == "hopper_wgrad" || chosen(variant, "QUANTIZED");
    let shape = WeightShape { n: 48, k: COLS };
    let a = operand(&data_of(groups, shape.n), shape.n, groups, quantized, true)?;
    let b = operand(&data_of(groups, shape.k), shape.k, groups, quantized, true)?;
    let count = SPLITS.len() * shape.n * shape.k;
    let before = match chosen(variant, "BF16_GRADIENT") {
        true => drive::Grads::Bf16(data::normal(count, 1.0, 1460)),
        false => drive::Grads::F32(data::normal_f32(count, 1460)),
    };
    let mode = if chosen(variant, "ACCUMULATE") { GradMode::Accumulate } else { GradMode::Overwrite };
    let case = drive::Wgrad { a: &a, b: &b, shape, groups, mode, before };
    judge::wgrad(&case, &case.run(backend_of(variant))?)
}

/// `column_sums` without weights is part of FC2's dgrad.
fn bias_gradient(groups: &Groups) -> Outcome {
    let dy = data_of(groups, COLS);
    let (b2, prob) = (data::normal_f32(SPLITS.len() * COLS, 1470), data::probabilities(ROWS, 1471));
    let case =
        drive::BiasGrad { dy: &dy, hidden: COLS, b2: &b2, prob: &prob, groups, dprob: &vec![0.0; ROWS] };
    let (dprob, db2) = case.run(cuda())?;
    alive("dprob", &dprob)?;
    alive("db2", &db2)
}

fn run(variant: &Variant, groups: &Groups) -> Outcome {
    let (cpu, experts) = (Cpu::new(), SPLITS.len());
    match variant.kernel {
        "group_offsets" => offsets(),
        "group_amax" => {
            let x = tensor(COLS, groups);
            let expected = drive::amax(&cpu, &x, COLS, groups)?;
            f32_bits("amax", &[experts], &expected, &drive::amax(cuda(), &x, COLS, groups)?)
        }
        "group_hadamard_amax" => {
            let (cols, mask) = (cols_for(variant), mask(variant));
            let x = tensor(cols, groups);
            let expected = drive::hadamard_amax(&cpu, &x, cols, groups, mask)?;
            let got = drive::hadamard_amax(cuda(), &x, cols, groups, mask)?;
            f32_bits("amax", &[experts], &expected.0, &got.0)?;
            f32_bits("amax after RHT", &[experts], &expected.1, &got.1)
        }
        "group_quantize" => quantize(variant, groups),
        "weights_amax" => weights(3, false),
        "quantize_weights" => weights(3, chosen(variant, "UNPACKED")),
        "quantize_cached_weights" => weights(5, chosen(variant, "UNPACKED")),
        "dequantize" => dequantize(variant, groups),
        "permute" | "unpermute" => permutation(variant),
        "addresses" => scattered_weights(260),
        "grouped_gemm" | "hopper_gemm" | "packed_gemm" | "unpack" => product(variant, groups),
        "grouped_gemm_act" | "grouped_gemm_dact" | "hopper_gemm_act" | "hopper_gemm_dact"
        | "packed_gemm_act" | "packed_gemm_dact" | "sum_slices" => epilogue(variant, groups),
        "grouped_wgrad" | "hopper_wgrad" => gradient(variant, groups),
        "grouped_bias_grad" | "column_sums" | "sum_tiles" => bias_gradient(groups),
        "copy_pages" => crate::pages::round_trips(16),
        other => panic!("no pass is known for {other}: add it here"),
    }
}

#[test]
#[ignore = "needs a GPU"]
fn each_variant() {
    let arch = cuda().device().facts().arch;
    for entry in catalog().iter().filter(|entry| entry.runs_on(arch)) {
        must(run(&entry.variant, &groups_for(&entry.variant)).in_case(&entry.variant));
    }
}
