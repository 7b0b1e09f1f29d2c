//! Edge values, stochastic rounding, scale layouts and plain products against the golden data.

use crate::compare::{Expected, bytes, codes, ensure, equal, f32_bits, widen, widen_f32, within};
use crate::drive::{Cast, Gemm, Grads, Packed, Quantize, Side, Wgrad, amax};
use crate::exact;
use crate::golden;
use crate::judge;
use crate::report::{InCase, Outcome};
use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::contract::{self, GradMode, WeightShape};
use moe4::numerics::philox::philox4x32;
use moe4::numerics::{BLOCK, bf16 as bf, e2m1, e4m3};
use moe4::tensor::{Groups, scale_layout};

/// `edge`: a block that holds an infinity or a NaN gets scale 0x7F and codes 0; the amax runs over finite values, and
/// every other block is what it would be if the damaged ones held zeros.
pub(super) fn edge<B: Backend>(b: &B) -> Outcome {
    for file in golden::category("edge") {
        let case = || -> Outcome {
            let [rows, cols] = file.shape("x")[..] else { unreachable!("two dimensions") };
            let x = file.bf16("x");
            let groups = Groups::single(rows);
            let damaged = |block: &[bf16]| block.iter().any(|v| !v.is_finite());
            let repaired: Vec<bf16> = x
                .chunks(BLOCK)
                .flat_map(|block| if damaged(block) { vec![bf16::ZERO; BLOCK] } else { block.to_vec() })
                .collect();
            let finite = x.iter().filter(|v| v.is_finite()).map(|&v| bf::to_f32(v).abs()).fold(0.0, f32::max);
            let found = amax(b, &x, cols, &groups)?;
            f32_bits("amax over finite values", &[1], &[finite], &found)?;
            let quantize = |x: &[bf16]| {
                let rowwise = Some(Cast::nearest(&found));
                Quantize { x, cols, groups: &groups, rowwise, columnwise: None }.run(b)
            };
            let got = quantize(&x)?.0.expect("asked for");
            let mut expected = quantize(&repaired)?.0.expect("asked for");
            for (block, _) in x.chunks(BLOCK).enumerate().filter(|(_, values)| damaged(values)) {
                expected.scales[block] = e4m3::NAN;
                expected.codes[block * BLOCK / 2..][..BLOCK / 2].fill(0);
            }
            let damage = x.chunks(BLOCK).filter(|block| damaged(block)).count();
            ensure(damage > 0, || "no damaged block in the input".into())?;
            bytes("scale", &[rows, cols / BLOCK], &expected.scales, &got.scales)?;
            codes("fp4", (rows, cols), &expected.codes, &got.codes)
        };
        case().in_case(&file.name)?;
    }
    Ok(())
}

/// `sr`: codes for every random byte, a tensor with given random words, and the generator's words.
pub(super) fn sr<B: Backend>(_: &B) -> Outcome {
    for file in golden::category("sr") {
        match file.name.as_str() {
            "sr__table" => {
                let (low, high, first) = (file.u8("code_low"), file.u8("code_high"), file.i64("first_high"));
                for (i, &v) in file.f32("v").iter().enumerate() {
                    let row: Vec<u8> =
                        (0..256).map(|r| if r < first[i] { low[i] } else { high[i] }).collect();
                    let got: Vec<u8> = (0..=255).map(|r| e2m1::encode_stochastic(v, r)).collect();
                    equal(&format!("sr__table: code of {v} by random byte"), &[256], &row, &got)?;
                }
            }
            "sr__quant" => {
                let [rows, cols] = file.shape("x")[..] else { unreachable!("two dimensions") };
                let (x, words) = (file.bf16("x"), file.i64("rbits"));
                let multipliers = file.f32("block_encode_scale");
                let code = |i: usize| {
                    let random = (words[i / 4] >> (8 * (i % 4))) as u8;
                    e2m1::encode_stochastic(bf::to_f32(x[i]) * multipliers[i / BLOCK], random)
                };
                let got: Vec<u8> =
                    (0..x.len() / 2).map(|i| e2m1::pack(code(2 * i), code(2 * i + 1))).collect();
                codes("sr__quant: fp4", (rows, cols), &file.u8("fp4"), &got)?;
            }
            "sr__philox" => {
                let words = file.i64("words");
                for (i, keys) in file.i64("seed_seq_off").chunks(3).enumerate() {
                    let [seed, stream, offset] = [keys[0] as u64, keys[1] as u64, keys[2] as u64];
                    let got: Vec<i64> =
                        (0..4).flat_map(|n| philox4x32(seed, stream, offset + n)).map(i64::from).collect();
                    equal(&format!("sr__philox: words of {keys:?}"), &[16], &words[i * 16..][..16], &got)?;
                }
            }
            other => unreachable!("golden file {other} has no check"),
        }
    }
    Ok(())
}

/// `swizzle`: the 128x4 layout into a dirty buffer, and back.
pub(super) fn swizzle<B: Backend>(_: &B) -> Outcome {
    for file in golden::category("swizzle") {
        let [rows, cols] = file.shape("scale")[..] else { unreachable!("two dimensions") };
        let (plain, expected) = (file.u8("scale"), file.u8("swizzled"));
        let mut swizzled = vec![0xAA; scale_layout::swizzled_len(rows, cols)];
        scale_layout::swizzle(&plain, rows, cols, &mut swizzled);
        bytes("swizzled", &[expected.len()], &expected, &swizzled).in_case(&file.name)?;
        let mut back = vec![0xAA; plain.len()];
        scale_layout::unswizzle(&swizzled, rows, cols, &mut back);
        bytes("unswizzled", &[rows, cols], &plain, &back).in_case(&file.name)?;
    }
    Ok(())
}

/// What lies within both bounds of an exact value: ours, and that of TransformerEngine's own f32 result.
fn around(stored: &[f32], exact: &[Expected]) -> Vec<Expected> {
    let pair = stored.iter().zip(exact);
    pair.map(|(&value, exact)| Expected { value: value as f64, bound: 2.0 * exact.bound }).collect()
}

/// `gemm`: the three products of a linear layer, against exact arithmetic and against the stored f32 results.
pub(super) fn gemm<B: Backend>(b: &B) -> Outcome {
    for file in golden::category("gemm") {
        let case = || -> Outcome {
            let (m, n, k) = (file.number("tokens"), file.number("out_features"), file.number("in_features"));
            let operand = |name: &str, suffix: &str| {
                Side::Nvfp4(Packed {
                    codes: file.u8(&format!("{name}_fp4{suffix}")),
                    scales: file.u8(&format!("{name}_scale{suffix}")),
                    amax: file.f32(&format!("{name}_amax{suffix}")),
                })
            };
            let (x, w, dy) = (operand("x", ""), operand("w", ""), operand("dy", ""));
            let (groups, shape) = (Groups::single(m), WeightShape { n, k });
            let product = |a, side| Gemm { a, w: &w, shape, side, groups: &groups, bias: None };
            for (name, a, side) in
                [("y_f32", &x, contract::Side::Fprop), ("dx_f32", &dy, contract::Side::Dgrad)]
            {
                let product = product(a, side);
                let got = product.run(b)?;
                judge::gemm(&product, &got).in_case(name)?;
                let stored = around(&file.f32(name), &exact::gemm(&product));
                let stored: Vec<_> = stored.into_iter().map(exact::rounded).collect();
                within(name, &file.shape(name), &stored, &widen(&got))?;
            }
            let (a, x) = (operand("dy", "_col"), operand("x", "_col"));
            let before = Grads::poison(1, shape);
            let product = Wgrad { a: &a, b: &x, shape, groups: &groups, mode: GradMode::Overwrite, before };
            let got = product.run(b)?;
            judge::wgrad(&product, &got)?;
            let stored = around(&file.f32("dw_f32"), &exact::wgrad(&product));
            within("dw_f32", &[n, k], &stored, &widen_f32(&got.into_f32()))
        };
        case().in_case(&file.name)?;
    }
    Ok(())
}
