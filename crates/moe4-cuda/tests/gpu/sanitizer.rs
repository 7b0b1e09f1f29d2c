//! Each variant of the catalog once, on shapes that are small and ragged, so that a checker of memory accesses or
//! races is done soon:
//!
//! ```text
//! compute-sanitizer --tool memcheck <this binary> --ignored --exact sanitizer::each_variant
//! compute-sanitizer --tool racecheck <this binary> --ignored --exact sanitizer::each_variant
//! ```

use crate::cases::{Case, Form, Setting, same_copy, stochastic};
use crate::support::{cuda, must, refused};
use half::bf16;
use moe4::kernels::contract::{NO_ROW, WeightShape};
use moe4::kernels::cpu::Cpu;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::Rounding;
use moe4::tensor::{Groups, ScaleLayout};
use moe4_conformance::compare::{bf16_bits, f32_bits};
use moe4_conformance::{InCase, Outcome, data, drive};
use moe4_cuda::catalog;
use moe4_cuda::variant::Variant;

/// Experts at odd rows, one of them empty, across tiles of 128 rows; rows of nobody.
const SPLITS: [usize; 5] = [37, 0, 1, 150, 20];
const ROWS: usize = 221;
/// A tile of 128 columns and one block.
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
    let form = Some(Form { rounding: Rounding::Nearest, layout, unpacked: false });
    let columnwise = chosen(variant, "COLUMNWISE");
    let (rowwise, columnwise) = if columnwise { (None, form) } else { (form, None) };
    let setting = Setting { mask: Some(SignMask::DEFAULT), rowwise, columnwise };
    Case::new(&tensor(COLS, groups), COLS, groups, setting).as_on_the_cpu(cuda())
}

fn weights(unpacked: bool) -> Outcome {
    let shape = WeightShape { n: 48, k: COLS };
    let w = data::normal(3 * shape.n * shape.k, 1.0, 1410);
    let w: Vec<&[bf16]> = w.chunks_exact(shape.n * shape.k).collect();
    let expected = drive::quantize_weights_apart(&Cpu::new(), &w, shape, unpacked)?;
    let got = drive::quantize_weights_apart(cuda(), &w, shape, unpacked)?;
    same_copy("weights", [3 * shape.n, shape.k], ScaleLayout::Plain, &expected, &got)
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
        "weights_amax" => weights(false),
        "quantize_weights" => weights(chosen(variant, "UNPACKED")),
        "dequantize" => dequantize(variant, groups),
        "permute" | "unpermute" => permutation(variant),
        "copy_pages" => crate::pages::round_trips(16),
        other => panic!("no pass is known for {other}: add it here"),
    }
}

#[test]
#[ignore = "needs a GPU"]
fn each_variant() {
    let groups = Groups::new(&SPLITS, ROWS).expect("fits");
    for entry in catalog() {
        must(run(&entry.variant, &groups).in_case(&entry.variant));
    }
}
