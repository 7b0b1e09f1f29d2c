//! Faults that users met elsewhere in the RHT and in stochastic rounding: entries 11 to 15.

use super::invariants::{Inputs, not_zero};
use crate::alter::{Alter, Altered};
use crate::compare::{bytes, codes, ensure, equal, f32_bits, unpack};
use crate::data::{self, Kind};
use crate::drive::{Cast, Packed, Quantize, amax, hadamard_amax};
use crate::report::{Failure, InCase, Outcome};
use half::bf16;
use moe4::kernels::contract::GroupQuantize;
use moe4::kernels::{Backend, Error};
use moe4::mlp::{GradientRounding, GroupedMlpConfig, RandomSeed};
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::philox::philox4x32;
use moe4::numerics::rounding::{RandomStream, Rounding};
use moe4::numerics::scale::GlobalScale;
use moe4::numerics::{BLOCK, bf16 as bf, e2m1, e4m3};
use moe4::tensor::Groups;
use std::sync::{Mutex, PoisonError};

/// One group transformed as the contract orders it, unless told otherwise.
fn transform(x: [f32; BLOCK], mask: SignMask, strides: [usize; 4]) -> [f32; BLOCK] {
    let mut v: [f32; BLOCK] = std::array::from_fn(|i| x[i] * mask.sign(i));
    for stride in strides {
        let old = v;
        for (i, v) in v.iter_mut().enumerate() {
            *v = if i & stride == 0 { old[i] + old[i + stride] } else { old[i - stride] - old[i] };
        }
    }
    v.map(|v| bf::round(v * 0.25))
}

const ORDER: [usize; 4] = [1, 2, 4, 8];

fn column(x: &[bf16], cols: usize, col: usize) -> [f32; BLOCK] {
    std::array::from_fn(|i| bf::to_f32(x[i * cols + col]))
}

fn largest(x: impl IntoIterator<Item = f32>) -> f32 {
    x.into_iter().fold(0.0, |a, v| a.max(v.abs()))
}

/// 11: the amax after the transform belongs to the mask that was asked for.
pub(super) fn signed_amax<B: Backend>(b: &B) -> Outcome {
    let groups = Groups::single(16);
    for (i, mask) in
        [SignMask::DEFAULT, SignMask::NONE, SignMask(0x8001), SignMask(0xFFFF)].into_iter().enumerate()
    {
        // Each column holds the sign pattern of a mask: under its own mask it adds up, under others it cancels.
        let patterns = [SignMask::DEFAULT, SignMask(0x0F0F), SignMask(0x8001)];
        let values = data::normal_f32(16 * patterns.len(), 40 + i as u64);
        let x: Vec<bf16> = (0..16 * patterns.len())
            .map(|at| {
                let (row, col) = (at / patterns.len(), at % patterns.len());
                bf::from_f32(patterns[col].sign(row) * (1.0 + 0.1 * values[at]))
            })
            .collect();
        let cols = patterns.len();
        let found = |mask| largest((0..cols).flat_map(|c| transform(column(&x, cols, c), mask, ORDER)));
        let (before, after) = hadamard_amax(b, &x, cols, &groups, mask)?;
        f32_bits("amax", &[1], &[largest(x.iter().map(|&v| bf::to_f32(v)))], &before)?;
        f32_bits(&format!("amax after RHT {mask}"), &[1], &[found(mask)], &after)?;
        if mask == SignMask::DEFAULT {
            let one = &x.iter().copied().step_by(cols).collect::<Vec<_>>()[..];
            let (_, after) = hadamard_amax(b, one, 1, &groups, mask)?;
            let (_, unsigned) = hadamard_amax(b, one, 1, &groups, SignMask::NONE)?;
            ensure(unsigned[0] < 0.9 * after[0], || {
                format!("signed amax {}, unsigned {}: the mask has no effect", after[0], unsigned[0])
            })?;
        }
    }
    Ok(())
}

/// 12: the amax after the transform is at most 4 times the one before, each expert; 0 for an empty one.
pub(super) fn amax_bound<B: Backend>(b: &B) -> Outcome {
    let (cols, groups) = (48, Groups::new(&[16, 0, 33, 7], 60).expect("fits"));
    for (seed, kind) in Kind::ALL.into_iter().enumerate() {
        let mut x = data::tensor(kind, 60 * cols, 60 + seed as u64);
        x[..16 * cols].fill(bf16::ONE); // the unsigned transform of a constant reaches the bound
        for mask in [SignMask::DEFAULT, SignMask::NONE] {
            let (before, after) = hadamard_amax(b, &x, cols, &groups, mask)?;
            for e in 0..groups.experts() {
                ensure(after[e] <= 4.0 * before[e], || {
                    format!("expert {e}, {kind:?}, mask {mask}: {} before, {} after", before[e], after[e])
                })?;
            }
            f32_bits("amaxes of an empty expert", &[2], &[0.0; 2], &[before[1], after[1]])?;
            if mask == SignMask::NONE {
                f32_bits("amax after RHT of ones", &[1], &[4.0], &after[..1])?;
            }
        }
    }
    Ok(())
}

/// 13: the order of the additions, on columns where another order gives another BF16 value.
pub(super) fn addition_order<B: Backend>(b: &B) -> Outcome {
    let (mut tell, mut seed) = (vec![], 0);
    while tell.len() < 32 && seed < 100_000 {
        let mut random = data::Random::new(seed);
        let group: [f32; BLOCK] =
            std::array::from_fn(|_| bf::round(random.normal() * (random.below(28) as f32).exp2()));
        if transform(group, SignMask::DEFAULT, ORDER) != transform(group, SignMask::DEFAULT, [8, 4, 2, 1]) {
            tell.push(group);
        }
        seed += 1;
    }
    let cols = tell.len() / 16 * 16;
    ensure(cols >= 16, || "no data tells the orders apart".into())?;
    let x: Vec<bf16> = (0..BLOCK * cols).map(|i| bf::from_f32(tell[i % cols][i / cols])).collect();
    let mask = SignMask::DEFAULT;
    for (c, group) in tell[..cols].iter().enumerate() {
        let one: Vec<bf16> = group.iter().map(|&v| bf::from_f32(v)).collect();
        let (_, after) = hadamard_amax(b, &one, 1, &Groups::single(BLOCK), mask)?;
        let expected = largest(transform(*group, mask, ORDER));
        f32_bits(&format!("amax of column {c}"), &[1], &[expected], &after)?;
    }
    // 1 + 2^-8 lies halfway between two BF16 values; two terms of 2^-24 tip it only if they meet each other first.
    let tipping =
        |i: usize| [1.0, 0.00390625, 5.9604645e-8, 5.9604645e-8].get(i).map_or(0.0, |v| v * mask.sign(i));
    let column: Vec<bf16> = (0..BLOCK).map(|i| bf::from_f32(tipping(i))).collect();
    let (_, after) = hadamard_amax(b, &column, 1, &Groups::single(BLOCK), mask)?;
    f32_bits("amax that the order decides", &[1], &[1.0078125 * 0.25], &after)?;
    let groups = Groups::single(BLOCK);
    let (_, after) = hadamard_amax(b, &x, cols, &groups, mask)?;
    let columnwise = Some((Some(mask), Cast::nearest(&after)));
    let (_, col) = Quantize { x: &x, cols, groups: &groups, rowwise: None, columnwise }.run(b)?;
    let global = GlobalScale::from_amax(after[0]);
    let expected: Vec<u8> = tell[..cols]
        .iter()
        .flat_map(|group| {
            let v = transform(*group, mask, ORDER);
            let multiplier = global.multiplier(global.block_scale(largest(v)));
            (0..8).map(move |i| {
                e2m1::pack(e2m1::encode(v[2 * i] * multiplier), e2m1::encode(v[2 * i + 1] * multiplier))
            })
        })
        .collect();
    codes("columnwise code", (cols, BLOCK), &expected, &col.expect("asked for").codes)
}

fn stochastic<B: Backend>(
    b: &B,
    x: &[bf16],
    cols: usize,
    groups: &Groups,
    streams: [RandomStream; 2],
) -> Result<[Packed; 2], Failure> {
    let (before, after) = hadamard_amax(b, x, cols, groups, SignMask::DEFAULT)?;
    let cast = |amax: &[f32], stream| Cast::new(amax, Rounding::Stochastic(stream));
    let case = Quantize {
        x,
        cols,
        groups,
        rowwise: Some(cast(&before, streams[0])),
        columnwise: Some((Some(SignMask::DEFAULT), cast(&after, streams[1]))),
    };
    let (row, col) = case.run(b)?;
    Ok([row.expect("asked for"), col.expect("asked for")])
}

/// 14: the mean over seeds tends to x, in both directions.
pub(super) fn unbiased<B: Backend>(b: &B) -> Outcome {
    let (cols, rows, seeds) = (32, 16, 1024u64);
    let (x, groups) = (data::normal(rows * cols, 1.0, 70), Groups::single(rows));
    let mut sums = [vec![0f64; rows * cols], vec![0f64; rows * cols]];
    let mut last = None;
    for seed in 0..seeds {
        let streams = [0, 1].map(|stream| RandomStream { seed, stream });
        let copies = stochastic(b, &x, cols, &groups, streams)?;
        for (sums, q) in sums.iter_mut().zip(&copies) {
            for (i, code) in unpack(&q.codes).into_iter().enumerate() {
                sums[i] += e2m1::decode(code) as f64;
            }
        }
        last = Some(copies);
    }
    let copies = last.ok_or_else(|| Failure::new("no seeds"))?;
    let target = |direction: usize, i: usize| match direction {
        0 => bf::to_f32(x[i]),
        _ => transform(column(&x, cols, i / BLOCK), SignMask::DEFAULT, ORDER)[i % BLOCK],
    };
    for (direction, (sums, q)) in sums.iter().zip(&copies).enumerate() {
        let global = GlobalScale::from_amax(q.amax[0]);
        for (i, sum) in sums.iter().enumerate() {
            let v = (target(direction, i) * global.multiplier(q.scales[i / BLOCK])) as f64;
            let step = if v.abs() < 2.0 {
                0.5
            } else if v.abs() < 4.0 {
                1.0
            } else {
                2.0
            };
            // Eight random bits round up with a probability too small by less than 1/256; five standard errors.
            let bound = step / 256.0 + 5.0 * step * 0.5 / (seeds as f64).sqrt();
            let (mean, v) = (sum / seeds as f64, v.clamp(-6.0, 6.0));
            ensure((mean - v).abs() <= bound, || {
                let name = ["rowwise", "columnwise"][direction];
                format!("{name} element {i}: expected a mean of {v:.4} ± {bound:.4}, got {mean:.4}")
            })?;
        }
    }
    Ok(())
}

fn random_byte(stream: RandomStream, position: u64, i: usize) -> u8 {
    (philox4x32(stream.seed, stream.stream, position)[i / 4] >> (8 * (i % 4))) as u8
}

/// 15, first half: every element takes the byte that the contract names, in both directions, so copies with different
/// streams share none.
pub(super) fn random_bytes<B: Backend>(b: &B) -> Outcome {
    let (cols, groups) = (48, Groups::new(&[16, 0, 37, 3], 60).expect("fits"));
    let x = data::normal(60 * cols, 1.0, 80);
    let streams = [RandomStream { seed: 9, stream: 4 }, RandomStream { seed: 9, stream: u64::MAX - 4 }];
    let [row, col] = stochastic(b, &x, cols, &groups, streams)?;
    let block = |v: [f32; BLOCK], amax: f32, stream: RandomStream, position: u64| {
        let global = GlobalScale::from_amax(amax);
        let scale = global.block_scale(largest(v));
        let multiplier = global.multiplier(scale);
        let code = |i| e2m1::encode_stochastic(v[i] * multiplier, random_byte(stream, position, i));
        (scale, std::array::from_fn::<u8, 8, _>(|i| e2m1::pack(code(2 * i), code(2 * i + 1))))
    };
    for e in 0..groups.experts() {
        let rows = groups.range(e);
        for (token, t) in rows.clone().enumerate() {
            for k in 0..cols / BLOCK {
                let v = std::array::from_fn(|i| bf::to_f32(x[t * cols + k * BLOCK + i]));
                let position = (token * (cols / BLOCK) + k) as u64;
                let (scale, codes) = block(v, row.amax[e], streams[0], position);
                let at = t * (cols / BLOCK) + k;
                bytes(
                    &format!("rowwise codes, row {t} block {k}"),
                    &[8],
                    &codes,
                    &row.codes[at * 8..at * 8 + 8],
                )?;
                bytes(&format!("rowwise scale, row {t} block {k}"), &[1], &[scale], &row.scales[at..=at])?;
            }
        }
        for tile in 0..rows.len().div_ceil(BLOCK) {
            for c in 0..cols {
                let v = std::array::from_fn(|i| {
                    let t = rows.start + tile * BLOCK + i;
                    if t < rows.end { bf::to_f32(x[t * cols + c]) } else { 0.0 }
                });
                let v = transform(v, SignMask::DEFAULT, ORDER);
                let (scale, codes) = block(v, col.amax[e], streams[1], (tile * cols + c) as u64);
                let at = c * (groups.padded_rows() / BLOCK) + groups.padded_range(e).start / BLOCK + tile;
                let name = format!("columnwise codes, column {c}, expert {e}, tile {tile}");
                bytes(&name, &[8], &codes, &col.codes[at * 8..at * 8 + 8])?;
                bytes(&name, &[1], &[scale], &col.scales[at..=at])?;
            }
        }
    }
    ensure(row.scales.iter().all(|s| s & 0x7F != e4m3::NAN), || "NaN scales from finite data".into())
}

/// Writes down the rounding of every copy.
#[derive(Default)]
struct Spy(Mutex<Vec<Rounding>>);

impl<B: Backend> Alter<B> for &Spy {
    fn group_quantize(&self, inner: &B, pass: GroupQuantize<'_, B::Memory>) -> Result<(), Error> {
        let casts = pass.rowwise.iter().chain(pass.columnwise.iter().map(|c| &c.cast));
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.extend(casts.map(|cast| cast.rounding));
        drop(seen);
        inner.group_quantize(pass)
    }
}

/// 15, second half: within the operator, `dy` and `dc`, rowwise and columnwise, and successive calls use streams of
/// their own, and everything that is no gradient is rounded to nearest.
pub(super) fn operator_streams<B: Backend>(b: &B) -> Outcome {
    let config = GroupedMlpConfig {
        gradient_rounding: GradientRounding::Stochastic,
        ..GroupedMlpConfig::new(2, 32, 32)
    };
    let inputs = Inputs::new(config, &[16, 5], 21, 90);
    let spy = Spy::default();
    let watched = Altered { inner: b, alteration: &spy };
    for call in 0..8 {
        let mut step = inputs.step();
        step.random = RandomSeed { seed: 5, call };
        let out = step.run(&watched).map_err(Failure::from).in_case(format!("call {call}"))?;
        not_zero(&out)?;
    }
    let seen = spy.0.into_inner().unwrap_or_else(PoisonError::into_inner);
    let streams: Vec<_> = seen.iter().filter(|r| **r != Rounding::Nearest).collect();
    equal(
        "copies rounded to nearest: x and h, two ways, 8 calls",
        &[1],
        &[32],
        &[seen.len() - streams.len()],
    )?;
    equal("copies rounded at random: dy and dc, two ways, 8 calls", &[1], &[32], &[streams.len()])?;
    let distinct: std::collections::HashSet<_> = streams.iter().collect();
    equal("different streams", &[1], &[streams.len()], &[distinct.len()])
}

/// 14 and 15 need an amax pass that agrees with the copies; this pins the plain one on ragged groups.
pub(super) fn plain_amax<B: Backend>(b: &B) -> Outcome {
    let (cols, groups) = (7, Groups::new(&[3, 0, 18, 1], 25).expect("fits"));
    let mut x = data::normal(25 * cols, 1.0, 95);
    x[4 * cols] = bf16::INFINITY;
    x[21 * cols] = bf16::NAN;
    let expected = crate::exact::amax(&x, cols, &groups);
    for nobody in [bf16::NAN, bf16::MAX] {
        x[22 * cols..].fill(nobody);
        f32_bits("amax over finite values", &[4], &expected, &amax(b, &x, cols, &groups)?)?;
    }
    Ok(())
}
