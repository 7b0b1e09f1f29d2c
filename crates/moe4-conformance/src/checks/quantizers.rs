//! The invariants for amax, quantize and dequantize passes alone, and shapes on which tilings of the work go wrong.
//!
//! Everything that these passes make of a tensor is compared at once, bit by bit: amaxes, both copies in both layouts,
//! BF16 values, and the way back to f32.

use super::properties::same_copy;
use crate::compare::{alive, all_zero, bytes, f32_bits};
use crate::data::{self, Kind};
use crate::drive::{Cast, Copy, Dequantize, Packed, Quantize, amax, hadamard_amax};
use crate::report::{InCase, Outcome};
use half::bf16;
use moe4::kernels::contract::Direction;
use moe4::kernels::reference::Reference;
use moe4::kernels::{Backend, Error};
use moe4::numerics::BLOCK;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::{RandomStream, Rounding};
use moe4::tensor::{Groups, ScaleLayout, scale_layout};

/// What is asked of the quantizers.
#[derive(Clone, Copy)]
struct Case<'a> {
    x: &'a [bf16],
    cols: usize,
    groups: &'a Groups,
    mask: Option<SignMask>,
    /// Rowwise and columnwise.
    rounding: [Rounding; 2],
}

/// What they make of it; pairs are rowwise and columnwise.
struct Made {
    amax: Vec<f32>,
    amax_rht: Vec<f32>,
    /// Plain scales, with BF16 values.
    plain: [Copy; 2],
    swizzled: [Copy; 2],
    values: [Vec<f32>; 2],
}

const DIRECTIONS: [Direction; 2] = [Direction::Rowwise, Direction::Columnwise];

impl Case<'_> {
    fn run<B: Backend>(&self, b: &B) -> Result<Made, Error> {
        let Case { x, cols, groups, mask, rounding } = *self;
        let (_, amax_rht) = hadamard_amax(b, x, cols, groups, mask.unwrap_or(SignMask::DEFAULT))?;
        let amax = amax(b, x, cols, groups)?;
        let of_columns = if mask.is_some() { &amax_rht } else { &amax };
        let copies = |layout, unpacked| -> Result<[Copy; 2], Error> {
            let cast = |amax: &[f32], rounding| Cast { layout, unpacked, ..Cast::new(amax, rounding) };
            let rowwise = Some(cast(&amax, rounding[0]));
            let columnwise = Some((mask, cast(of_columns, rounding[1])));
            let (row, col) = Quantize { x, cols, groups, rowwise, columnwise }.run_copies(b)?;
            Ok([row.expect("asked for"), col.expect("asked for")])
        };
        let plain = copies(ScaleLayout::Plain, true)?;
        let swizzled = copies(ScaleLayout::Swizzled128x4, false)?;
        let back = |i: usize, copy: &Copy, layout| {
            Dequantize { copy: &copy.packed, cols, groups, direction: DIRECTIONS[i], layout }.run(b)
        };
        let values =
            [back(0, &plain[0], ScaleLayout::Plain)?, back(1, &swizzled[1], ScaleLayout::Swizzled128x4)?];
        Ok(Made { amax, amax_rht, plain, swizzled, values })
    }

    /// Against the reference, and alive where there is something to see.
    fn as_the_reference<B: Backend>(&self, b: &B) -> Outcome {
        let expected = self.run(&Reference)?;
        if self.x[..self.groups.live_rows() * self.cols].iter().any(|v| v.to_f32() != 0.0) {
            expected.alive()?;
        }
        expected.same(&self.run(b)?, self)
    }
}

impl Made {
    fn alive(&self) -> Outcome {
        alive("amax", &self.amax)?;
        for (direction, (copy, values)) in DIRECTIONS.iter().zip(self.plain.iter().zip(&self.values)) {
            alive(&format!("{direction:?} codes"), &copy.packed.codes)?;
            alive(&format!("{direction:?} values"), values)?;
        }
        Ok(())
    }

    fn same(&self, got: &Self, case: &Case<'_>) -> Outcome {
        f32_bits("amax", &[self.amax.len()], &self.amax, &got.amax)?;
        f32_bits("amax after RHT", &[self.amax_rht.len()], &self.amax_rht, &got.amax_rht)?;
        for (i, direction) in DIRECTIONS.into_iter().enumerate() {
            let ([rows, k], name) = (direction.shape(case.groups, case.cols), format!("{direction:?}"));
            same_copy(&name, &self.plain[i], &got.plain[i], k, ScaleLayout::Plain)?;
            same_copy(&name, &self.swizzled[i], &got.swizzled[i], k, ScaleLayout::Swizzled128x4)?;
            f32_bits(&format!("{name} dequantized"), &[rows, k], &self.values[i], &got.values[i])?;
        }
        Ok(())
    }

    /// The part of one expert, plain: what it would be alone.
    fn expert(&self, case: &Case<'_>, e: usize) -> [(Copy, Vec<f32>); 2] {
        let (groups, cols) = (case.groups, case.cols);
        let (rows, padded, width) = (groups.range(e), groups.padded_range(e), groups.padded_rows());
        let of_rows = |per: usize| {
            let range = rows.start * cols / per..rows.end * cols / per;
            vec![range]
        };
        let of_columns = |per: usize| -> Vec<std::ops::Range<usize>> {
            (0..cols).map(|c| (c * width + padded.start) / per..(c * width + padded.end) / per).collect()
        };
        let pick = |i: usize, per: usize| if i == 0 { of_rows(per) } else { of_columns(per) };
        let part = |i: usize| {
            let Copy { packed, unpacked } = &self.plain[i];
            let codes = cut(&packed.codes, pick(i, 2));
            let scales = cut(&packed.scales, pick(i, BLOCK));
            let packed = Packed { codes, scales, amax: vec![packed.amax[e]] };
            let unpacked = unpacked.as_ref().map(|values| cut(values, pick(i, 1)));
            (Copy { packed, unpacked }, cut(&self.values[i], pick(i, 1)))
        };
        [part(0), part(1)]
    }
}

fn cut<T: std::marker::Copy>(x: &[T], ranges: Vec<std::ops::Range<usize>>) -> Vec<T> {
    ranges.into_iter().flat_map(|range| x[range].to_vec()).collect()
}

/// Streams that use the upper halves of seed and stream, one for each direction.
fn stochastic(i: u64) -> [Rounding; 2] {
    [0, 1].map(|direction| {
        let (seed, stream) = (0xF00D_0000_0000_0001 ^ (i << 40), u64::MAX - 2 * i - direction);
        Rounding::Stochastic(RandomStream { seed, stream })
    })
}

const NEAREST: [Rounding; 2] = [Rounding::Nearest; 2];

/// Transforms and roundings, each with each; one mask is random.
fn settings(seed: u64) -> Vec<(Option<SignMask>, [Rounding; 2])> {
    let random = SignMask(data::Random::new(seed).bits() as u16);
    let masks = [Some(SignMask::DEFAULT), Some(SignMask::NONE), Some(random), None];
    let with = |(i, mask)| [(mask, NEAREST), (mask, stochastic(seed + i as u64))];
    masks.into_iter().enumerate().flat_map(with).collect()
}

/// Ragged experts at odd rows, one of them empty, inside tiles of 16 and 128 rows and across them.
const SPLITS: [usize; 6] = [1, 0, 100, 37, 150, 5];
const ROWS: usize = 310;
const COLS: usize = 144;

fn each(check: impl Fn(Case<'_>) -> Outcome) -> Outcome {
    let groups = Groups::new(&SPLITS, ROWS).expect("fits");
    for (i, (mask, rounding)) in settings(460).into_iter().enumerate() {
        let kind = Kind::ALL[i % 5];
        let mut x = data::tensor(kind, ROWS * COLS, 400 + i as u64);
        // So that something is left of sparse data in the first expert, which has one row.
        x[..2].copy_from_slice(&[bf16::ONE, bf16::NEG_ONE]);
        x[groups.live_rows() * COLS..].fill(bf16::NAN);
        let case = Case { x: &x, cols: COLS, groups: &groups, mask, rounding };
        check(case).in_case(format!("{kind:?}, RHT {mask:?}, {rounding:?}"))?;
    }
    Ok(())
}

/// 4: two runs.
pub(super) fn two_runs<B: Backend>(b: &B) -> Outcome {
    each(|case| {
        let (first, second) = (case.run(b)?, case.run(b)?);
        first.alive()?;
        first.same(&second, &case)
    })
}

/// 5: each expert alone.
pub(super) fn experts_alone<B: Backend>(b: &B) -> Outcome {
    each(|case| alone_as_grouped(b, &case, &[0, 1, 2, 3, 4, 5]))
}

fn alone_as_grouped<B: Backend>(b: &B, case: &Case<'_>, experts: &[usize]) -> Outcome {
    let all = case.run(b)?;
    all.alive()?;
    for &e in experts {
        let rows = case.groups.range(e);
        let groups = Groups::single(rows.len());
        let x = &case.x[rows.start * case.cols..rows.end * case.cols];
        let alone = Case { x, groups: &groups, ..*case }.run(b)?;
        let compared = || -> Outcome {
            f32_bits("amax", &[1], &alone.amax, &all.amax[e..=e])?;
            f32_bits("amax after RHT", &[1], &alone.amax_rht, &all.amax_rht[e..=e])?;
            for (i, (copy, values)) in all.expert(case, e).into_iter().enumerate() {
                let ([rows, k], name) =
                    (DIRECTIONS[i].shape(&groups, case.cols), format!("{:?}", DIRECTIONS[i]));
                same_copy(&name, &alone.plain[i], &copy, k, ScaleLayout::Plain)?;
                f32_bits(&format!("{name} dequantized"), &[rows, k], &alone.values[i], &values)?;
            }
            Ok(())
        };
        compared().in_case(format!("expert {e} of {} rows, alone against grouped", rows.len()))?;
    }
    Ok(())
}

/// 6: rows past `sum(splits)` hold NaN, infinities or numbers larger than all others; what is made is that of the
/// trimmed tensor, and zero there.
pub(super) fn rows_of_nobody<B: Backend>(b: &B) -> Outcome {
    each(|case| {
        let live = case.groups.live_rows();
        let groups = Groups::new(&SPLITS, live).expect("fits");
        let trimmed = Case { x: &case.x[..live * COLS], groups: &groups, ..case };
        let expected = trimmed.run(b)?;
        expected.alive()?;
        for fill in [bf16::NAN, bf16::MAX, bf16::NEG_INFINITY] {
            let mut x = case.x.to_vec();
            x[live * COLS..].fill(fill);
            let compared = || -> Outcome {
                let mut got = Case { x: &x, ..case }.run(b)?;
                let Copy { packed, unpacked } = &mut got.plain[0];
                // The swizzled scales are those of the longer matrix.
                let swizzled = &mut got.swizzled[0].packed;
                let mut relaid = vec![0xAA; swizzled.scales.len()];
                scale_layout::swizzle(&packed.scales, ROWS, COLS / BLOCK, &mut relaid);
                bytes("swizzled scales", &[relaid.len()], &relaid, &swizzled.scales)?;
                swizzled.scales = expected.swizzled[0].packed.scales.clone();
                let unpacked = unpacked.as_mut().expect("asked for");
                let dirty = [&packed.codes[live * COLS / 2..], &swizzled.codes[live * COLS / 2..]];
                dirty.iter().try_for_each(|codes| all_zero("codes of nobody", live * COLS / 2, codes))?;
                all_zero("scales of nobody", live * COLS / BLOCK, &packed.scales[live * COLS / BLOCK..])?;
                all_zero("BF16 values of nobody", live * COLS, &unpacked[live * COLS..])?;
                all_zero("values of nobody", live * COLS, &got.values[0][live * COLS..])?;
                packed.codes.truncate(live * COLS / 2);
                swizzled.codes.truncate(live * COLS / 2);
                packed.scales.truncate(live * COLS / BLOCK);
                unpacked.truncate(live * COLS);
                got.values[0].truncate(live * COLS);
                expected.same(&got, &trimmed)
            };
            compared().in_case(format!("filled with {fill}"))?;
        }
        Ok(())
    })
}

/// 7: an expert without tokens has amaxes of 0, and the others are as they would be without it.
pub(super) fn empty_experts<B: Backend>(b: &B) -> Outcome {
    let (with, without) = ([0, 21, 0, 0, 5, 16, 0], [21, 5, 16]);
    let (cols, rows) = (80, 45);
    let (with, without) =
        (Groups::new(&with, rows).expect("fits"), Groups::new(&without, rows).expect("fits"));
    for (i, (mask, rounding)) in settings(461).into_iter().enumerate() {
        let mut x = data::normal(rows * cols, 1.0, 420 + i as u64);
        x[with.live_rows() * cols..].fill(bf16::MAX);
        let dense = Case { x: &x, cols, groups: &without, mask, rounding };
        let (expected, mut got) = (dense.run(b)?, Case { groups: &with, ..dense }.run(b)?);
        expected.alive()?;
        let amaxes = [&mut got.amax, &mut got.amax_rht].into_iter();
        let copies = got.plain.iter_mut().chain(&mut got.swizzled).map(|copy| &mut copy.packed.amax);
        for amax in amaxes.chain(copies) {
            let (empty, others): (Vec<_>, Vec<_>) =
                amax.iter().enumerate().partition(|(e, _)| with.range(*e).is_empty());
            let empty: Vec<f32> = empty.into_iter().map(|(_, &v)| v).collect();
            let others = others.into_iter().map(|(_, &v)| v).collect();
            f32_bits("amaxes of empty experts", &[4], &[0.0; 4], &empty)?;
            *amax = others;
        }
        expected.same(&got, &dense).in_case(format!("RHT {mask:?}, {rounding:?}"))?;
    }
    Ok(())
}

/// 18: no tokens at all, tokens of nobody only, and a first and a last expert without any.
pub(super) fn all_empty<B: Backend>(b: &B) -> Outcome {
    for (splits, rows) in [([0, 0, 0], 0), ([0, 0, 0], 19), ([0, 17, 0], 17), ([0, 0, 16], 20)] {
        let (cols, groups) = (48, Groups::new(&splits, rows).expect("fits"));
        let mut x = data::normal(rows * cols, 1.0, 430);
        x[groups.live_rows() * cols..].fill(bf16::NAN);
        for (mask, rounding) in settings(rows as u64) {
            let case = Case { x: &x, cols, groups: &groups, mask, rounding };
            case.as_the_reference(b).in_case(format!("splits {splits:?} of {rows} rows"))?;
        }
    }
    Ok(())
}

/// 21: batches of different sizes, one after the other.
pub(super) fn growing_batches<B: Backend>(b: &B) -> Outcome {
    for (i, rows) in [48, 1536, 3072, 16].into_iter().enumerate() {
        let groups = Groups::new(&[rows / 3, rows - rows / 3], rows).expect("fits");
        let x = data::normal(rows * 32, 1.0, 440 + i as u64);
        let mask = Some(SignMask::DEFAULT);
        let case = Case { x: &x, cols: 32, groups: &groups, mask, rounding: stochastic(i as u64) };
        case.as_the_reference(b).in_case(format!("{rows} rows"))?;
    }
    Ok(())
}

/// Hundreds of experts with a handful of rows each, or none.
pub(super) fn tiny_experts<B: Backend>(b: &B) -> Outcome {
    let handful: Vec<usize> = (0..300).map(|e| e * 7 % 6).collect();
    let mut mostly_empty = vec![0; 128];
    (mostly_empty[5], mostly_empty[77], mostly_empty[127]) = (40, 1, 16);
    let mut last_only = vec![0; 513];
    last_only[512] = 3;
    for (i, splits) in [handful, mostly_empty, vec![1; 257], last_only].into_iter().enumerate() {
        let (cols, live) = (48, splits.iter().sum::<usize>());
        let groups = Groups::new(&splits, live + 7).expect("fits");
        // Amaxes that differ from one expert to the next.
        let mut x = data::normal((live + 7) * cols, 1.0, 450 + i as u64);
        for e in 0..splits.len() {
            let rows = groups.range(e);
            let scale = [1.0, 0.0625, 32.0][e % 3];
            let part = &mut x[rows.start * cols..rows.end * cols];
            part.iter_mut().for_each(|v| *v = bf16::from_f32(v.to_f32() * scale));
        }
        x[live * cols..].fill(bf16::MAX);
        for (mask, rounding) in settings(live as u64) {
            let case = Case { x: &x, cols, groups: &groups, mask, rounding };
            let compared = || -> Outcome {
                case.as_the_reference(b)?;
                let last = splits.len() - 1;
                alone_as_grouped(b, &case, &[0, 5, 31, 32, 127.min(last), 255.min(last), 256.min(last), last])
            };
            compared().in_case(format!("{} experts, {live} rows, RHT {mask:?}", splits.len()))?;
        }
    }
    Ok(())
}

/// Rows and columns next to the sizes in which work is cut: 16, 128, 256, 1024.
pub(super) fn tile_edges<B: Backend>(b: &B) -> Outcome {
    let mut i = 0;
    for rows in [1, 15, 16, 17, 127, 128, 129, 255] {
        for cols in [16, 48, 112, 128, 144, 272, 1040] {
            // One expert with all rows, or three of which the last starts at an odd row, and rows of nobody.
            let first = ((rows / 3) | 1).min(rows);
            let ragged = [first, 0, (rows - first) * 2 / 3];
            let splits = if i % 2 == 0 { &ragged[..] } else { &[rows] };
            let groups = Groups::new(splits, rows).expect("fits");
            let mut x = data::tensor(Kind::ALL[i % 4], rows * cols, 500 + i as u64);
            x[0] = bf16::ONE;
            x[groups.live_rows() * cols..].fill(bf16::NAN);
            // Each shape with two of the settings, so that all of them meet every size.
            let settings = settings(i as u64);
            for pick in [i, i + 3] {
                let (mask, rounding) = settings[pick % settings.len()];
                let case = Case { x: &x, cols, groups: &groups, mask, rounding };
                case.as_the_reference(b)
                    .in_case(format!("splits {splits:?} of {rows} rows, {cols} columns"))?;
            }
            i += 1;
        }
    }
    Ok(())
}
