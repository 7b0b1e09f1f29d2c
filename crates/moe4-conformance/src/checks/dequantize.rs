//! Quantized copies back to f32: each value by the formula of the contract, written out here.

use crate::compare::{alive, all_zero, ensure, f32_bits};
use crate::data::{self, Kind};
use crate::drive::{Cast, Dequantize, Packed, Quantize, hadamard_amax, quantize_weights};
use crate::report::{Failure, InCase, Outcome};
use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::contract::{Direction, WeightShape};
use moe4::kernels::reference::Reference;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::{BLOCK, bf16 as bf, e2m1, e4m3};
use moe4::tensor::{Groups, OperandShape, Quantized, ScaleLayout};

const LAYOUTS: [ScaleLayout; 2] = [ScaleLayout::Plain, ScaleLayout::Swizzled128x4];

/// `((scale · amax) · 1/2688) · code`; `owner(row, i)` is the expert whose amax counts.
fn expected(plain: &Packed, k: usize, owner: impl Fn(usize, usize) -> Option<usize>) -> Vec<f32> {
    let value = |at: usize| {
        let (row, i) = (at / k, at % k);
        let Some(e) = owner(row, i) else { return 0.0 };
        let (even, odd) = e2m1::unpack(plain.codes[at / 2]);
        let scale = e4m3::decode(plain.scales[at / BLOCK]);
        let scale = (scale * plain.amax[e]) * (1.0 / 2688.0);
        let value = scale * e2m1::decode(if at.is_multiple_of(2) { even } else { odd });
        if value.is_nan() { f32::from_bits(0x7FC0_0000) } else { value }
    };
    (0..plain.codes.len() * 2).map(value).collect()
}

/// The rowwise and the columnwise copy of the reference, plain.
fn copies(x: &[bf16], cols: usize, groups: &Groups) -> Result<[Packed; 2], Failure> {
    let mask = SignMask::DEFAULT;
    let (before, after) = hadamard_amax(&Reference, x, cols, groups, mask)?;
    let rowwise = Some(Cast::nearest(&before));
    let columnwise = Some((Some(mask), Cast::nearest(&after)));
    let (row, col) = Quantize { x, cols, groups, rowwise, columnwise }.run(&Reference)?;
    Ok([row.expect("asked for"), col.expect("asked for")])
}

/// The same copy with its scales in `layout`; padding holds `dirt`, which nothing may read.
fn relaid(plain: &Packed, [rows, k]: [usize; 2], layout: ScaleLayout, dirt: u8) -> Packed {
    let blocks = k / BLOCK;
    let mut scales = vec![dirt; layout.bytes(rows, blocks)];
    for (i, &scale) in plain.scales.iter().enumerate() {
        scales[layout.offset(i / blocks, i % blocks, blocks)] = scale;
    }
    Packed { scales, ..plain.clone() }
}

fn owner(groups: &Groups, direction: Direction) -> impl Fn(usize, usize) -> Option<usize> {
    move |row, i| {
        (0..groups.experts()).find(|&e| match direction {
            Direction::Rowwise => groups.range(e).contains(&row),
            Direction::Columnwise => groups.padded_range(e).contains(&i),
        })
    }
}

/// Both copies in both layouts, ragged and empty experts, every kind of data, NaN blocks.
pub(super) fn values<B: Backend>(b: &B) -> Outcome {
    let shapes: [(&[usize], usize, usize); 4] =
        [(&[5, 0, 17, 1], 30, 32), (&[1], 1, 16), (&[100, 33, 0, 150], 300, 144), (&[0, 129, 1], 133, 272)];
    for (seed, (splits, rows, cols)) in shapes.into_iter().enumerate() {
        for kind in Kind::ALL {
            let case = || -> Outcome {
                let groups = Groups::new(splits, rows).expect("fits");
                let mut x = data::tensor(kind, rows * cols, 360 + seed as u64);
                if rows > 1 {
                    x[cols + 5] = bf16::NAN;
                }
                let directions = [Direction::Rowwise, Direction::Columnwise];
                for (direction, mut plain) in directions.into_iter().zip(copies(&x, cols, &groups)?) {
                    let shape = direction.shape(&groups, cols);
                    let all = expected(&plain, shape[1], owner(&groups, direction));
                    if kind != Kind::Zeros {
                        alive("expected values", &all)?;
                    }
                    if direction == Direction::Rowwise {
                        // What rows of nobody hold does not matter.
                        plain.codes[groups.live_rows() * cols / 2..].fill(0x77);
                        plain.scales[groups.live_rows() * cols / BLOCK..].fill(0x38);
                    }
                    for layout in LAYOUTS {
                        let copy = relaid(&plain, shape, layout, 0x7F);
                        let got =
                            Dequantize { copy: &copy, cols, groups: &groups, direction, layout }.run(b)?;
                        f32_bits(&format!("{direction:?}, {layout:?}"), &shape, &all, &got)?;
                    }
                }
                Ok(())
            };
            case().in_case(format!("{kind:?}, splits {splits:?} of {rows} rows, {cols} columns"))?;
        }
    }
    Ok(())
}

/// Rows past `sum(splits)` give 0 whatever their codes and scales, NaN scales included.
pub(super) fn rows_of_nobody<B: Backend>(b: &B) -> Outcome {
    for (splits, rows) in [(&[3usize, 0, 9][..], 20), (&[0, 0], 4), (&[17, 0], 40)] {
        let (cols, groups) = (48, Groups::new(splits, rows).expect("fits"));
        let live = groups.live_rows();
        let [mut plain, _] = copies(&data::normal(rows * cols, 1.0, 380), cols, &groups)?;
        for (code, scale) in [(0xFF, 0x7F), (0x77, 0x7E), (0x88, 0)] {
            plain.codes[live * cols / 2..].fill(code);
            plain.scales[live * cols / BLOCK..].fill(scale);
            for layout in LAYOUTS {
                let copy = relaid(&plain, [rows, cols], layout, scale);
                let direction = Direction::Rowwise;
                let got = Dequantize { copy: &copy, cols, groups: &groups, direction, layout }.run(b)?;
                if live > 0 {
                    alive("values of live rows", &got[..live * cols])?;
                }
                all_zero("values past sum(splits)", live * cols, &got[live * cols..])?;
            }
        }
    }
    Ok(())
}

/// Where `scale · amax` overflows: infinities, NaN for codes of zero, always the same NaN. Where it is subnormal: exact.
pub(super) fn overflow<B: Backend>(b: &B) -> Outcome {
    let (cols, groups) = (16, Groups::new(&[127; 6], 6 * 127).expect("fits"));
    // Row r of each expert has scale byte r and every code.
    let copy = Packed {
        codes: (0..6 * 127).flat_map(|_| (0..8).map(|i| e2m1::pack(2 * i, 2 * i + 1))).collect(),
        scales: (0..6).flat_map(|_| 1..=0x7F).collect(),
        amax: vec![3e38, 1e36, f32::MIN_POSITIVE, 1e-39, bf::to_f32(bf16::MAX), 0.0],
    };
    let (direction, layout) = (Direction::Rowwise, ScaleLayout::Plain);
    let all = expected(&copy, cols, owner(&groups, direction));
    ensure(all.iter().any(|v| v.is_infinite()) && all.iter().any(|v| v.is_subnormal()), || {
        "no infinity or no subnormal among the expected values".into()
    })?;
    let got = Dequantize { copy: &copy, cols, groups: &groups, direction, layout }.run(b)?;
    f32_bits("values", &[6 * 127, cols], &all, &got)
}

/// Weights are a rowwise copy of `E · n` rows.
pub(super) fn weights<B: Backend>(b: &B) -> Outcome {
    let (experts, n, k) = (3, 32, 80);
    let w = data::normal(experts * n * k, 1.0, 390);
    let packed = quantize_weights(b, &w, experts, WeightShape { n, k })?;
    let groups = Groups::new(&[n; 3], experts * n).expect("fits");
    let (direction, layout) = (Direction::Rowwise, ScaleLayout::Plain);
    let got = Dequantize { copy: &packed, cols: k, groups: &groups, direction, layout }.run(b)?;
    let shape = OperandShape { rows: experts * n, k };
    let all = Quantized { shape, packed }.dequantize(|row, _| row / n);
    f32_bits("values", &[experts, n, k], &all, &got)?;
    // A weight is off by at most half the widest step of E2M1, 1 of 6, and the rounding of its tile's scale.
    let amax = w.iter().fold(0f32, |a, v| a.max(bf::to_f32(*v).abs()));
    let far = w.iter().zip(&got).position(|(w, v)| (bf::to_f32(*w) - v).abs() > amax / 4.0);
    ensure(far.is_none(), || format!("element {far:?} is far from the weight"))
}
