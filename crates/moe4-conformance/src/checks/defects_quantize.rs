//! Faults that users met elsewhere in quantization: entries 1 to 10 of the table in the crate's documentation.

use crate::compare::{alive, bytes, codes, ensure, equal, unpack};
use crate::data::{self, Kind};
use crate::drive::{Cast, Packed, Quantize, amax, hadamard_amax, quantize_weights};
use crate::report::{Failure, InCase, Outcome};
use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::contract::WeightShape;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::{columnwise_position, rowwise_position};
use moe4::numerics::scale::dequantize;
use moe4::numerics::{BLOCK, bf16 as bf, e2m1, e4m3};
use moe4::tensor::{Groups, scale_layout};

/// Amax by its pass, then the rowwise copy.
pub(super) fn rowwise<B: Backend>(b: &B, x: &[bf16], cols: usize) -> Result<Packed, Failure> {
    let groups = Groups::single(x.len() / cols);
    let cast = Cast::nearest(&amax(b, x, cols, &groups)?);
    let (row, _) = Quantize { x, cols, groups: &groups, rowwise: Some(cast), columnwise: None }.run(b)?;
    Ok(row.expect("asked for"))
}

fn values(q: &Packed) -> Vec<f32> {
    let flat = unpack(&q.codes);
    flat.iter().enumerate().map(|(i, &code)| dequantize(code, q.scales[i / BLOCK], q.amax[0])).collect()
}

fn bf16s(x: &[f32]) -> Vec<bf16> {
    x.iter().map(|&v| bf::from_f32(v)).collect()
}

/// 1: a zero block has a finite scale, codes 0 and value 0; finite data never gives a NaN scale.
pub(super) fn zero_blocks<B: Backend>(b: &B) -> Outcome {
    for (seed, kind) in Kind::ALL.into_iter().enumerate() {
        let (rows, cols) = (32, 48);
        let mut x = data::tensor(kind, rows * cols, 500 + seed as u64);
        x[5 * BLOCK..6 * BLOCK].fill(bf16::ZERO);
        let row = rowwise(b, &x, cols)?;
        equal("scale of a zero block", &[1], &[0], &row.scales[5..6])?;
        equal("codes of a zero block", &[BLOCK / 2], &[0; BLOCK / 2], &row.codes[5 * BLOCK / 2..3 * BLOCK])?;
        ensure(values(&row)[5 * BLOCK..6 * BLOCK].iter().all(|v| *v == 0.0), || {
            "a zero block has a value".into()
        })?;
        let groups = Groups::single(rows);
        let (_, after) = hadamard_amax(b, &x, cols, &groups, SignMask::DEFAULT)?;
        let columnwise = Some((Some(SignMask::DEFAULT), Cast::nearest(&after)));
        let (_, col) = Quantize { x: &x, cols, groups: &groups, rowwise: None, columnwise }.run(b)?;
        let weights = quantize_weights(b, &x, 1, WeightShape { n: rows, k: cols })?;
        for (name, q) in [("rowwise", &row), ("columnwise", &col.expect("asked for")), ("weights", &weights)]
        {
            let nan = q.scales.iter().position(|s| s & 0x7F == e4m3::NAN);
            ensure(nan.is_none(), || format!("{kind:?}, {name} scale {nan:?}: NaN from finite data"))?;
            ensure(q.amax[0].is_finite(), || format!("{kind:?}, {name} amax: {}", q.amax[0]))?;
            if kind != Kind::Zeros {
                alive(&format!("{kind:?}, {name} codes"), &q.codes)?;
            }
        }
    }
    Ok(())
}

/// `[16, 32]`, with a nonzero block far below the amax.
pub(super) fn with_a_tiny_block() -> Vec<bf16> {
    let mut x = vec![bf16::ZERO; 16 * 32];
    x[0] = bf::from_f32(3.0e4);
    x[BLOCK..2 * BLOCK].copy_from_slice(&bf16s(&[1e-6; BLOCK]));
    x
}

/// 2: a nonzero block far below the tensor's amax has scale 0 and value 0.
pub(super) fn scale_underflow<B: Backend>(b: &B) -> Outcome {
    let q = rowwise(b, &with_a_tiny_block(), 32)?;
    equal("scales of the block with the amax and of a tiny one", &[2], &[0x7E, 0], &q.scales[..2])?;
    ensure(values(&q)[BLOCK..2 * BLOCK].iter().all(|v| *v == 0.0), || "a value under a zero scale".into())
}

/// The scale byte and the codes of one block, by the given arithmetic.
type BlockRule = fn(f32, [f32; BLOCK]) -> (u8, [u8; BLOCK]);

fn contract_rule(amax: f32, v: [f32; BLOCK]) -> (u8, [u8; BLOCK]) {
    let s_enc = 2688.0 / amax;
    let top = v.iter().fold(0f32, |a, v| a.max(v.abs()));
    let s = e4m3::encode((top * (s_enc * (1.0 / 6.0))).min(448.0));
    let e = (1.0 / (e4m3::decode(s) * (1.0 / s_enc))).min(f32::MAX);
    (s, v.map(|v| e2m1::encode(v * e)))
}

/// Shortcuts that look equivalent and are not.
const SHORTCUTS: [(&str, BlockRule); 4] = [
    ("2688 · (1/amax) for 2688/amax", |amax, v| contract_rule_with(2688.0 * (1.0 / amax), v)),
    ("S_enc/s for 1/(s · S_dec)", |amax, v| {
        let (s, _) = contract_rule(amax, v);
        (s, v.map(|v| e2m1::encode(v * ((2688.0 / amax) / e4m3::decode(s)))))
    }),
    ("division by s · S_dec for multiplication", |amax, v| {
        let (s, _) = contract_rule(amax, v);
        (s, v.map(|v| e2m1::encode(v / (e4m3::decode(s) * (1.0 / (2688.0 / amax))))))
    }),
    ("amax/6 · S_enc for amax · (S_enc · 1/6)", |amax, v| {
        let top = v.iter().fold(0f32, |a, v| a.max(v.abs()));
        let s_enc = 2688.0 / amax;
        let s = e4m3::encode((top / 6.0 * s_enc).min(448.0));
        let e = (1.0 / (e4m3::decode(s) * (1.0 / s_enc))).min(f32::MAX);
        (s, v.map(|v| e2m1::encode(v * e)))
    }),
];

fn contract_rule_with(s_enc: f32, v: [f32; BLOCK]) -> (u8, [u8; BLOCK]) {
    let top = v.iter().fold(0f32, |a, v| a.max(v.abs()));
    let s = e4m3::encode((top * (s_enc * (1.0 / 6.0))).min(448.0));
    let e = (1.0 / (e4m3::decode(s) * (1.0 / s_enc))).min(f32::MAX);
    (s, v.map(|v| e2m1::encode(v * e)))
}

/// Blocks under one amax on which a shortcut gives other bytes than the contract.
fn telling_blocks(shortcut: BlockRule, amax: f32) -> Vec<[f32; BLOCK]> {
    let mut found = vec![];
    let grid = e2m1::MAGNITUDES.windows(2).map(|pair| (pair[0] + pair[1]) * 0.5);
    let midpoints: Vec<f32> = grid.collect();
    for byte in 8..0x7Eu8 {
        // Elements next to the boundaries between codes under this block scale, in BF16 steps.
        let unit = e4m3::decode(byte) * (amax / 2688.0);
        for step in -1..=1i32 {
            let nudge = |v: f32| f32::from_bits((bf::bits(v) as i32 + step) as u32 * 65536);
            let mut v: [f32; BLOCK] = std::array::from_fn(|i| nudge(midpoints[i % midpoints.len()] * unit));
            v[BLOCK - 1] = nudge(6.0 * unit).min(amax);
            // The block maximum next to the boundary between this byte and the next.
            v[BLOCK - 2] = if byte < 0x7D {
                nudge(6.0 * (e4m3::decode(byte) + e4m3::decode(byte + 1)) * 0.5 * (amax / 2688.0)).min(amax)
            } else {
                0.0
            };
            if shortcut(amax, v) != contract_rule(amax, v) {
                found.push(v);
            }
        }
    }
    found
}

/// 3: a reciprocal is no division, and three more shortcuts; on blocks where each gives other bytes.
pub(super) fn reciprocals<B: Backend>(b: &B) -> Outcome {
    for (name, shortcut) in SHORTCUTS {
        let case = || -> Outcome {
            let mut blocks = 0;
            for seed in 0..400 {
                let amax = bf::round(1.0 + data::Random::new(seed).unit() * 7.0);
                let found = telling_blocks(shortcut, amax);
                if found.is_empty() {
                    continue;
                }
                blocks += found.len();
                let mut v = found.concat();
                v.extend([amax; BLOCK]);
                let q = rowwise(b, &bf16s(&v), BLOCK)?;
                let (scales, flat): (Vec<u8>, Vec<[u8; BLOCK]>) = v
                    .chunks(BLOCK)
                    .map(|block| contract_rule(amax, block.try_into().expect("a block")))
                    .unzip();
                bytes("scale", &[scales.len()], &scales, &q.scales).in_case(format!("amax {amax}"))?;
                let flat = flat.concat();
                equal("code", &[flat.len()], &flat, &unpack(&q.codes)).in_case(format!("amax {amax}"))?;
                if blocks > 64 {
                    break;
                }
            }
            ensure(blocks > 0, || "no data tells the two apart".into())
        };
        case().in_case(name)?;
    }
    Ok(())
}

/// 4: the global scale carries inputs above 2688.
pub(super) fn large_inputs<B: Backend>(b: &B) -> Outcome {
    let mut x = vec![1.0f32; 16 * 16];
    x[0] = 1e5;
    x[17] = -1e5;
    let x = bf16s(&x);
    let got = values(&rowwise(b, &x, 16)?);
    for i in [0, 17] {
        let (expected, got) = (bf::to_f32(x[i]), got[i]);
        // The amax element is 6 times its block scale, which is 448 exactly.
        ensure((got - expected).abs() <= expected.abs() * 1e-6, || {
            format!("element {i}: expected {expected}, got {got}")
        })?;
    }
    Ok(())
}

/// 5: x and -x have the same scales and opposite codes.
pub(super) fn negation<B: Backend>(b: &B) -> Outcome {
    for (seed, kind) in Kind::ALL.into_iter().enumerate() {
        let x = data::tensor(kind, 32 * 48, 900 + seed as u64);
        let negated: Vec<bf16> = x.iter().map(|&v| -v).collect();
        let (plain, other) = (rowwise(b, &x, 48)?, rowwise(b, &negated, 48)?);
        if kind != Kind::Zeros {
            alive("scale of x", &plain.scales)?;
        }
        bytes("scale of -x", &[32, 3], &plain.scales, &other.scales)?;
        let flipped: Vec<u8> = plain.codes.iter().map(|byte| byte ^ 0x88).collect();
        codes("code of -x", (32, 48), &flipped, &other.codes)?;
    }
    Ok(())
}

/// 6: block scales at every midpoint of E4M3, and one BF16 unit to either side.
pub(super) fn scale_midpoints<B: Backend>(b: &B) -> Outcome {
    // Under an amax of 2688 the global scale is 1, and a block maximum of 6 m asks for a scale of exactly m.
    let (mut x, mut expected) = (vec![bf::from_f32(2688.0); BLOCK], vec![0x7E]);
    for low in 0..0x7Du8 {
        let middle = (e4m3::decode(low) + e4m3::decode(low + 1)) * 0.5;
        let at = bf::from_f32(6.0 * middle);
        ensure(bf::to_f32(at) == 6.0 * middle, || format!("6 · {middle} is no BF16 value"))?;
        let neighbours =
            [(at.to_bits() - 1, low), (at.to_bits(), low + (low & 1)), (at.to_bits() + 1, low + 1)];
        for (bits, byte) in neighbours {
            x.extend([bf16::from_bits(bits); BLOCK]);
            expected.push(byte);
        }
    }
    bytes("scale", &[expected.len()], &expected, &rowwise(b, &x, BLOCK)?.scales)
}

/// 7: padding is zero whatever the buffer held, and real bytes survive the layouts.
pub(super) fn padding<B: Backend>(b: &B) -> Outcome {
    for (rows, cols) in [(1, 1), (48, 5), (130, 6), (200, 3), (128, 4)] {
        let plain: Vec<u8> = (0..rows * cols).map(|i| (i * 37 % 255) as u8 + 1).collect();
        let mut swizzled = vec![0xAA; scale_layout::swizzled_len(rows, cols)];
        scale_layout::swizzle(&plain, rows, cols, &mut swizzled);
        let zeros = swizzled.iter().filter(|&&byte| byte == 0).count();
        equal("zero bytes of padding", &[1], &[swizzled.len() - plain.len()], &[zeros])?;
        let mut back = vec![0x55; plain.len()];
        scale_layout::unswizzle(&swizzled, rows, cols, &mut back);
        bytes("unswizzled", &[rows, cols], &plain, &back)?;
    }
    // The tail of each expert's last columnwise tile, and rowwise rows of nobody.
    let (cols, groups) = (32, Groups::new(&[5, 0, 17, 1], 30).expect("fits"));
    let mut x = data::normal(30 * cols, 1.0, 77);
    x[groups.live_rows() * cols..].fill(bf16::NAN);
    let cast = Cast::nearest(&amax(b, &x, cols, &groups)?);
    let columnwise = Some((None, cast.clone()));
    let (row, col) = Quantize { x: &x, cols, groups: &groups, rowwise: Some(cast), columnwise }.run(b)?;
    let (row, col) = (row.expect("asked for"), col.expect("asked for"));
    let live = groups.live_rows();
    alive("codes of live rows", &row.codes[..live * cols / 2])?;
    alive("columnwise codes", &col.codes)?;
    ensure(row.codes[live * cols / 2..].iter().all(|&byte| byte == 0), || "codes of nobody's rows".into())?;
    ensure(row.scales[live * cols / 16..].iter().all(|&byte| byte == 0), || {
        "scales of nobody's rows".into()
    })?;
    let flat = unpack(&col.codes);
    for e in 0..groups.experts() {
        let padded = groups.padded_range(e);
        for position in padded.start + groups.range(e).len()..padded.end {
            let dirty = (0..cols).find(|c| flat[c * groups.padded_rows() + position] != 0);
            ensure(dirty.is_none(), || {
                format!("expert {e}, padding at {position}: column {dirty:?} is not 0")
            })?;
        }
    }
    Ok(())
}

/// 8: rows that are no multiple of 128 and splits that are no multiple of 32 give the bytes of each expert alone, and
/// what cannot be served is refused with its size.
pub(super) fn odd_shapes<B: Backend>(b: &B) -> Outcome {
    let (cols, splits) = (48, [16usize, 3, 0, 80, 45]);
    let groups = Groups::new(&splits, 144).expect("fits");
    let x = data::normal(144 * cols, 1.0, 8);
    let (before, after) = hadamard_amax(b, &x, cols, &groups, SignMask::DEFAULT)?;
    let case = Quantize {
        x: &x,
        cols,
        groups: &groups,
        rowwise: Some(Cast::nearest(&before)),
        columnwise: Some((Some(SignMask::DEFAULT), Cast::nearest(&after))),
    };
    let (row, col) = case.run(b)?;
    let (row, col) = (row.expect("asked for"), col.expect("asked for"));
    for (e, &split) in splits.iter().enumerate() {
        let range = groups.range(e);
        let alone_x = &x[range.start * cols..range.end * cols];
        let alone = Groups::single(split);
        let (one, two) = hadamard_amax(b, alone_x, cols, &alone, SignMask::DEFAULT)?;
        let case = Quantize {
            x: alone_x,
            cols,
            groups: &alone,
            rowwise: Some(Cast::nearest(&one)),
            columnwise: Some((Some(SignMask::DEFAULT), Cast::nearest(&two))),
        };
        let (r, c) = case.run(b)?;
        let label = format!("expert {e} of {split} rows");
        let part = &row.codes[range.start * cols / 2..range.end * cols / 2];
        if split > 0 {
            alive(&label, part)?;
        }
        codes(&label, (split, cols), &r.expect("asked for").codes, part)?;
        let (width, at) = (groups.padded_rows() / 2, groups.padded_range(e));
        let part: Vec<u8> =
            col.codes.chunks(width).flat_map(|row| &row[at.start / 2..at.end / 2]).copied().collect();
        codes(&label, (cols, at.len()), &c.expect("asked for").codes, &part)?;
    }
    let refused =
        Quantize { cols: 24, x: &x[..24 * 144], rowwise: None, columnwise: None, groups: &groups }.run(b);
    let message = refused.err().map(|e| e.to_string()).unwrap_or_default();
    ensure(message.contains("16") && message.contains("24"), || format!("24 columns: got '{message}'"))
}

/// 9: positions beyond 2^31 and 2^32 elements.
pub(super) fn large_offsets<B: Backend>(_: &B) -> Outcome {
    let groups = Groups::new(&[3 << 30, 3 << 30], 6 << 30).expect("fits");
    equal("first row of expert 1", &[1], &[3usize << 30], &[groups.range(1).start])?;
    equal("padded rows", &[1], &[6usize << 30], &[groups.padded_rows()])?;
    equal("swizzled offset", &[1], &[(1usize << 33) - 1], &[scale_layout::offset((1 << 27) - 1, 63, 64)])?;
    equal("rowwise position", &[1], &[(1u64 << 38) + 7], &[rowwise_position(1 << 30, 7, 1 << 8)])?;
    equal("columnwise position", &[1], &[(1u64 << 44) + 7], &[columnwise_position(1 << 30, 7, 1 << 14)])
}

/// 10: E2M1 has no infinity and no NaN; ties, signs and values beyond 6.
pub(super) fn e2m1_edges<B: Backend>(b: &B) -> Outcome {
    // Under an amax of 2688 a block with maximum 6 has scale 1: codes are those of the values themselves.
    let values =
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.0, -0.25, -0.75, -2.5, -5.0, -6.0, 5.96875, 0.0];
    let nearest = [0, 2, 2, 4, 4, 6, 6, 7, 8, 8, 10, 12, 14, 15, 7, 0];
    let mut x = vec![2688.0; BLOCK];
    x.extend(values);
    // A maximum of 6.1875 still rounds to scale 1: what lies beyond 6 saturates.
    x.extend([6.1875, -6.1875, 6.03125, 5.03125].into_iter().chain([1.0; 12]));
    let got = rowwise(b, &bf16s(&x), BLOCK)?;
    equal("scales", &[3], &[0x7E, 0x38, 0x38], &got.scales)?;
    let flat = unpack(&got.codes);
    equal("codes of ties, signs and zeros", &[BLOCK], &nearest, &flat[BLOCK..2 * BLOCK])?;
    equal("codes beyond 6", &[4], &[7, 15, 7, 7], &flat[2 * BLOCK..2 * BLOCK + 4])?;
    equal(
        "inf, -inf, NaN",
        &[3],
        &[7, 15, 7],
        &[f32::INFINITY, f32::NEG_INFINITY, f32::NAN].map(e2m1::encode),
    )?;
    for damage in [bf16::INFINITY, bf16::NEG_INFINITY, bf16::NAN] {
        non_finite_blocks(b, damage).in_case(format!("{damage} in the input"))?;
    }
    Ok(())
}

/// One damaged element: its blocks in every copy get the NaN scale and codes 0, and nothing else changes.
fn non_finite_blocks<B: Backend>(b: &B, damage: bf16) -> Outcome {
    let (rows, cols, at) = (32, 48, 20 * 48 + 37);
    let (mut x, groups) = (data::normal(rows * cols, 1.0, 10), Groups::single(rows));
    x[at] = bf16::ZERO;
    let mask = SignMask::DEFAULT;
    let run = |x: &[bf16], amaxes: &(Vec<f32>, Vec<f32>)| -> Result<[Packed; 2], Failure> {
        let case = Quantize {
            x,
            cols,
            groups: &groups,
            rowwise: Some(Cast::nearest(&amaxes.0)),
            columnwise: Some((Some(mask), Cast::nearest(&amaxes.1))),
        };
        let (row, col) = case.run(b)?;
        Ok([row.expect("asked for"), col.expect("asked for")])
    };
    let mut damaged = x.clone();
    damaged[at] = damage;
    let amaxes = hadamard_amax(b, &damaged, cols, &groups, mask)?;
    ensure(amaxes.0[0].is_finite() && amaxes.1[0].is_finite(), || format!("amaxes {amaxes:?}"))?;
    let (clean, got) = (run(&x, &amaxes)?, run(&damaged, &amaxes)?);
    let blocks = [20 * 3 + 37 / 16, 37 * 2 + 20 / 16];
    for (((name, mut expected), got), block) in
        ["rowwise", "columnwise"].into_iter().zip(clean).zip(got).zip(blocks)
    {
        expected.scales[block] = e4m3::NAN;
        expected.codes[block * 8..block * 8 + 8].fill(0);
        bytes(&format!("{name} scale"), &[96], &expected.scales, &got.scales)?;
        bytes(&format!("{name} packed codes"), &[96, 8], &expected.codes, &got.codes)?;
    }
    let weights = |x: &[bf16]| quantize_weights(b, x, 1, WeightShape { n: rows, k: cols });
    let (mut expected, got) = (weights(&x)?, weights(&damaged)?);
    equal("amax of a damaged weight", &[1], &expected.amax, &got.amax)?;
    for row in 16..32 {
        expected.scales[row * 3 + 2] = e4m3::NAN;
        expected.codes[row * 24 + 16..row * 24 + 24].fill(0);
    }
    bytes("weight scale", &[32, 3], &expected.scales, &got.scales)?;
    bytes("weight packed codes", &[32, 24], &expected.codes, &got.codes)
}
