//! Amax, quantize and weight passes against the golden bytes.
//!
//! Bytes are compared exactly. Where a file holds `fp4_kernel_emul`, the CUDA kernel and the Python reference differ
//! (the sign of a negative zero), and moe4 follows CUDA.

use crate::compare::{bf16_bits, bytes, codes, f32_bits, unpack};
use crate::drive::{Cast, Packed, Quantize, amax, hadamard_amax, quantize_weights};
use crate::golden::{self, Golden};
use crate::report::{InCase, Outcome};
use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::contract::WeightShape;
use moe4::numerics::hadamard::{SignMask, rht};
use moe4::numerics::scale::GlobalScale;
use moe4::numerics::{BLOCK, bf16 as bf, e2m1};
use moe4::tensor::{Groups, OperandShape, Quantized};

/// Codes and scales as the file has them, `suffix` empty or `_col`.
fn stored(file: &Golden, suffix: &str) -> (Vec<u8>, Vec<u8>) {
    let pick = |tensor: &str| {
        let emulated = format!("{tensor}_kernel_emul{suffix}");
        if file.has(&emulated) { emulated } else { format!("{tensor}{suffix}") }
    };
    (file.u8(&pick("fp4")), file.u8(&pick("scale")))
}

fn same_copy(file: &Golden, suffix: &str, shape: OperandShape, got: &Packed) -> Outcome {
    let OperandShape { rows, k } = shape;
    let (fp4, scale) = stored(file, suffix);
    bytes(&format!("scale{suffix}"), &[rows, k / BLOCK], &scale, &got.scales)?;
    codes(&format!("fp4{suffix}"), (rows, k), &fp4, &got.codes)?;
    let dequant = format!("dequant{suffix}");
    if file.has(&dequant) {
        let values = Quantized { shape, packed: got.clone() }.dequantize(|_, _| 0);
        f32_bits(&dequant, &[rows, k], &file.f32(&dequant), &values)?;
    }
    Ok(())
}

/// All tensors of one file: leading dimensions are independent tensors, which become experts.
fn rowwise<B: Backend>(b: &B, file: &Golden) -> Outcome {
    let shape = file.shape("x");
    let [tensors, rows, cols] = match shape[..] {
        [rows, cols] => [1, rows, cols],
        [tensors, rows, cols] => [tensors, rows, cols],
        _ => unreachable!("golden inputs have two or three dimensions"),
    };
    let (x, groups) = (file.bf16("x"), Groups::new(&vec![rows; tensors], tensors * rows).expect("fits"));
    let found = amax(b, &x, cols, &groups)?;
    f32_bits("amax", &[tensors], &file.f32("amax"), &found)?;
    let cast = Cast::nearest(&found);
    let (row, _) = Quantize { x: &x, cols, groups: &groups, rowwise: Some(cast), columnwise: None }.run(b)?;
    same_copy(file, "", OperandShape { rows: tensors * rows, k: cols }, &row.expect("asked for"))
}

fn each(category: &str, check: impl Fn(&Golden) -> Outcome) -> Outcome {
    golden::category(category).iter().try_for_each(|file| check(file).in_case(&file.name))
}

/// `q1d_row`: one tensor of each kind.
pub(super) fn q1d_row<B: Backend>(b: &B) -> Outcome {
    each("q1d_row", |file| rowwise(b, file))
}

/// `q1d_sweep`: amaxes over the whole range of exponents, `q1d_ordertie`: block scales on ties of E4M3.
pub(super) fn q1d_sweep_and_ordertie<B: Backend>(b: &B) -> Outcome {
    let bf16_only = |file: &Golden| if file.name.ends_with("bf16") { rowwise(b, file) } else { Ok(()) };
    each("q1d_sweep", bf16_only)?;
    each("q1d_ordertie", bf16_only)
}

fn both_directions<B: Backend>(b: &B, file: &Golden, mask: Option<SignMask>) -> Outcome {
    let [rows, cols] = file.shape("x")[..] else { unreachable!("two dimensions") };
    let (x, groups) = (file.bf16("x"), Groups::single(rows));
    let (before, after) = match mask {
        Some(mask) => hadamard_amax(b, &x, cols, &groups, mask)?,
        None => (amax(b, &x, cols, &groups)?, amax(b, &x, cols, &groups)?),
    };
    f32_bits("amax", &[1], &file.f32("amax"), &before)?;
    f32_bits("amax_col", &[1], &file.f32("amax_col"), &after)?;
    let row_cast = Cast::nearest(&before);
    let col_cast = Cast::nearest(&after);
    let both = Quantize {
        x: &x,
        cols,
        groups: &groups,
        rowwise: Some(row_cast.clone()),
        columnwise: Some((mask, col_cast.clone())),
    };
    let (row, col) = both.run(b)?;
    let (row, col) = (row.expect("asked for"), col.expect("asked for"));
    same_copy(file, "", OperandShape { rows, k: cols }, &row)?;
    same_copy(file, "_col", OperandShape { rows: cols, k: rows }, &col)?;
    // Each copy alone has the same bytes as both in one read.
    let (alone, _) = Quantize { columnwise: None, ..both.clone() }.run(b)?;
    bytes("fp4, rowwise alone", &[rows, cols / 2], &row.codes, &alone.expect("asked for").codes)?;
    let (_, alone) = Quantize { rowwise: None, ..both }.run(b)?;
    bytes("fp4_col, columnwise alone", &[cols, rows / 2], &col.codes, &alone.expect("asked for").codes)
}

/// `q1d_rowcol`: rowwise and columnwise under one amax, no transform.
pub(super) fn q1d_rowcol<B: Backend>(b: &B) -> Outcome {
    each("q1d_rowcol", |file| both_directions(b, file, None))
}

fn mask_of(file: &Golden) -> SignMask {
    let text = file.settings["rht_sign_mask"].as_str().expect("a mask in the settings");
    text.parse().expect("a 16-bit mask")
}

fn transformed(x: &[bf16], rows: usize, cols: usize, mask: SignMask) -> Vec<bf16> {
    let mut out = Vec::with_capacity(rows * cols);
    for col in 0..cols {
        for block in 0..rows / BLOCK {
            let group = std::array::from_fn(|i| bf::to_f32(x[(block * BLOCK + i) * cols + col]));
            out.extend(rht(group, mask).map(bf::from_f32));
        }
    }
    out
}

/// `q1d_rht`, `q1d_rht_nosign`: the transform itself, its amax, and both copies.
pub(super) fn q1d_rht<B: Backend>(b: &B) -> Outcome {
    for category in ["q1d_rht", "q1d_rht_nosign"] {
        each(category, |file| {
            let mask = mask_of(file);
            if file.has("rht") {
                let [rows, cols] = file.shape("x")[..] else { unreachable!("two dimensions") };
                let got = transformed(&file.bf16("x"), rows, cols, mask);
                bf16_bits("rht", &[cols, rows], &file.bf16("rht"), &got)?;
            }
            both_directions(b, file, Some(mask))
        })?;
    }
    Ok(())
}

/// `[rows, k]` packed codes transposed.
fn transposed_codes(packed: &[u8], rows: usize, k: usize) -> Vec<u8> {
    let flat = unpack(packed);
    let pair = |i: usize| {
        let (row, col) = (2 * i / rows, 2 * i % rows);
        e2m1::pack(flat[col * k + row], flat[(col + 1) * k + row])
    };
    (0..rows * k / 2).map(pair).collect()
}

/// `q2d`: 16x16 tiles. The columnwise copy is the transpose of the same codes and tile scales.
pub(super) fn q2d<B: Backend>(b: &B) -> Outcome {
    each("q2d", |file| {
        let [n, k] = file.shape("x")[..] else { unreachable!("two dimensions") };
        let got = quantize_weights(b, &file.bf16("x"), 1, WeightShape { n, k })?;
        f32_bits("amax", &[1], &file.f32("amax"), &got.amax)?;
        same_copy(file, "", OperandShape { rows: n, k }, &got)?;
        codes("fp4_col", (k, n), &file.u8("fp4_col"), &transposed_codes(&got.codes, n, k))?;
        let tile = |i: usize| got.scales[(i % (n / BLOCK)) * BLOCK * (k / BLOCK) + i / (n / BLOCK) / BLOCK];
        let scales: Vec<u8> = (0..k * n / BLOCK).map(tile).collect();
        bytes("scale_col", &[k, n / BLOCK], &file.u8("scale_col"), &scales)
    })
}

/// `group`: each expert with its own amaxes, one of them empty, RHT groups within their expert.
pub(super) fn group<B: Backend>(b: &B) -> Outcome {
    each("group", |file| {
        let [rows, cols] = file.shape("x")[..] else { unreachable!("two dimensions") };
        let (x, groups) = (file.bf16("x"), Groups::from_i64(&file.i64("splits"), rows).expect("fits"));
        let (before, after) = hadamard_amax(b, &x, cols, &groups, mask_of(file))?;
        let case = Quantize {
            x: &x,
            cols,
            groups: &groups,
            rowwise: Some(Cast::nearest(&before)),
            columnwise: Some((Some(mask_of(file)), Cast::nearest(&after))),
        };
        let (row, col) = case.run(b)?;
        let (row, col) = (row.expect("asked for"), col.expect("asked for"));
        for e in 0..groups.experts() {
            let (range, padded) = (groups.range(e), groups.padded_range(e));
            if range.is_empty() {
                f32_bits("amax and amax_col of an empty expert", &[2], &[0.0; 2], &[before[e], after[e]])?;
                continue;
            }
            let name = |tensor: &str| format!("g{e}_{tensor}");
            let amaxes = [file.f32(&name("amax"))[0], file.f32(&name("amax_col"))[0]];
            f32_bits(&name("amax, amax_col"), &[2], &amaxes, &[before[e], after[e]])?;
            let rows_of = |x: &[u8], width: usize| x[range.start * width..range.end * width].to_vec();
            let columns_of = |x: &[u8], per: usize| -> Vec<u8> {
                let (width, first, last) = (groups.padded_rows() / per, padded.start / per, padded.end / per);
                x.chunks(width).flat_map(|row| &row[first..last]).copied().collect()
            };
            let (t, c) = (range.len(), cols);
            codes(&name("fp4"), (t, c), &file.u8(&name("fp4")), &rows_of(&row.codes, c / 2))?;
            bytes(&name("scale"), &[t, c / 16], &file.u8(&name("scale")), &rows_of(&row.scales, c / 16))?;
            codes(&name("fp4_col"), (c, t), &file.u8(&name("fp4_col")), &columns_of(&col.codes, 2))?;
            bytes(
                &name("scale_col"),
                &[c, t / 16],
                &file.u8(&name("scale_col")),
                &columns_of(&col.scales, BLOCK),
            )?;
        }
        Ok(())
    })
}

/// Codes and scales of `[rows, k]` FP32 values in blocks of 16 or tiles of 16 x 16, by the numerics alone.
fn quantize_f32(x: &[f32], (rows, k): (usize, usize), amax: f32, tile_rows: usize) -> (Vec<u8>, Vec<u8>) {
    let global = GlobalScale::from_amax(amax);
    let (mut fp4, mut scales) = (vec![], vec![]);
    for row in 0..rows {
        for block in 0..k / BLOCK {
            let first = row - row % tile_rows;
            let tile = (first..first + tile_rows).flat_map(|r| &x[r * k + block * BLOCK..][..BLOCK]);
            let scale = global.block_scale(tile.fold(0.0, |a: f32, v| a.max(v.abs())));
            let multiplier = global.multiplier(scale);
            let code = |i: usize| e2m1::encode(x[row * k + block * BLOCK + i] * multiplier);
            fp4.extend((0..BLOCK / 2).map(|i| e2m1::pack(code(2 * i), code(2 * i + 1))));
            scales.push(scale);
        }
    }
    (fp4, scales)
}

fn transpose(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
}

/// `*_f32`: the arithmetic of scales and codes on FP32 inputs, which no pass reads.
pub(super) fn f32_numerics<B: Backend>(_: &B) -> Outcome {
    let categories = [
        ("q1d_row_f32", 1),
        ("q1d_rowcol_f32", 1),
        ("q1d_sweep", 1),
        ("q1d_ordertie", 1),
        ("q2d_f32", BLOCK),
    ];
    for (category, tile_rows) in categories {
        each(category, |file| {
            if category.starts_with("q1d_sweep") && file.name.ends_with("bf16")
                || file.name.ends_with("tie__bf16")
            {
                return Ok(());
            }
            let shape = file.shape("x");
            let (k, rows) = (shape[shape.len() - 1], shape[shape.len() - 2]);
            let (fp4, scales) = stored(file, "");
            let x = file.f32("x");
            for (i, x) in x.chunks(rows * k).enumerate() {
                let found = x.iter().fold(0.0, |a: f32, v| a.max(v.abs()));
                f32_bits("amax", &[1], &file.f32("amax")[i..=i], &[found])?;
                let got = quantize_f32(x, (rows, k), found, tile_rows);
                let part =
                    |all: &[u8], per: usize| all[i * rows * k / per..(i + 1) * rows * k / per].to_vec();
                bytes("scale", &[rows, k / BLOCK], &part(&scales, BLOCK), &got.1)?;
                codes("fp4", (rows, k), &part(&fp4, 2), &got.0)?;
                if file.has("fp4_col") {
                    let got = quantize_f32(&transpose(x, rows, k), (k, rows), found, tile_rows);
                    bytes("scale_col", &[k, rows / BLOCK], &file.u8("scale_col"), &got.1)?;
                    codes("fp4_col", (k, rows), &file.u8("fp4_col"), &got.0)?;
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}
