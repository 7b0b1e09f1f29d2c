//! More than 2^31 elements in one tensor: places on both sides of that mark, byte for byte as on the CPU.
//!
//! The tensor repeats N rows, gathered on the device from a small one; N is prime, so that an expert of 16 N rows
//! meets every run of 16 rows in its transforms, and the amaxes of a whole expert are those of its last rows. The
//! copies are compared at the beginning, in the middle and at the end of each expert; elements that are rounded
//! stochastically at the beginning, where the CPU counts tokens as the whole expert does. Takes 17 GB of device
//! memory.

use crate::cases::stochastic;
use crate::support::{cuda, must};
use half::bf16;
use moe4::kernels::contract::{
    self, Direction, GroupAmax, GroupHadamardAmax, GroupQuantize, Permute, Unpermute,
};
use moe4::kernels::cpu::Cpu;
use moe4::kernels::{Backend, Element, Error};
use moe4::numerics::BLOCK;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::Rounding;
use moe4::tensor::{Groups, ScaleLayout};
use moe4_conformance::compare::{all_zero, bf16_bits, bytes, f32_bits};
use moe4_conformance::drive::{self, Cast, Copy, Dequantize, Quantize};
use moe4_conformance::{InCase, Outcome, data};
use moe4_cuda::{Cuda, DeviceBuffer, DeviceGroups, DeviceMemory, DeviceView, DeviceViewMut};
use std::ops::Range;

const COLS: usize = 2048;
const ROWS: usize = 1_100_000;
/// The third expert begins a few rows past element 2^31; 1400 rows are nobody's.
const SPLITS: [usize; 4] = [400_007, 648_590, 30_003, 20_000];
const EXPERTS: usize = SPLITS.len();
const MARK: usize = (1 << 31) / COLS;
/// Rows that repeat; one more holds NaN and stands for those of nobody.
const N: usize = 1021;
const MASK: SignMask = SignMask::DEFAULT;

fn pattern() -> Vec<bf16> {
    let mut rows = data::normal((N + 1) * COLS, 1.0, 1000);
    rows[N * COLS..].fill(bf16::NAN);
    rows
}

fn source(row: usize) -> usize {
    if row < SPLITS.iter().sum() { row % N } else { N }
}

fn rows_of(pattern: &[bf16], rows: Range<usize>) -> Vec<bf16> {
    rows.flat_map(|row| &pattern[source(row) * COLS..][..COLS]).copied().collect()
}

/// Tokens of an expert that are compared: whole runs of 16, except at its end.
fn parts(tokens: usize) -> [Range<usize>; 3] {
    let from = |token: usize| token / BLOCK * BLOCK;
    [0..144, from(tokens / 2)..from(tokens / 2) + 144, from(tokens - 150)..tokens]
}

/// Columns whose lines of the columnwise copy are looked at; the last of them lie past element 2^31.
const LINES: [usize; 10] = [0, 1, 15, 16, 1000, 1951, 1952, 1953, 2046, 2047];

struct DeviceCopy {
    codes: DeviceBuffer<u8>,
    scales: DeviceBuffer<u8>,
    unpacked: DeviceBuffer<bf16>,
}

impl DeviceCopy {
    fn new(cuda: &Cuda, elements: usize) -> Result<Self, Error> {
        let poison = |len| cuda.upload(&vec![0xAAu8; len]);
        let (codes, scales) = (poison(elements / 2)?, poison(elements / BLOCK)?);
        Ok(Self { codes, scales, unpacked: cuda.empty(elements)? })
    }

    fn cast<'a>(
        &'a mut self,
        amax: DeviceView<'a, f32>,
        rounding: Rounding,
    ) -> contract::Cast<'a, DeviceMemory> {
        contract::Cast {
            amax,
            rounding,
            packed: Some(contract::PackedOut {
                codes: self.codes.view_mut(),
                scales: self.scales.view_mut(),
                layout: ScaleLayout::Plain,
            }),
            unpacked: Some(self.unpacked.view_mut()),
        }
    }

    /// `elements` of it, flat.
    fn same(&self, cuda: &Cuda, elements: Range<usize>, expected: &Copy, from: usize) -> Outcome {
        let len = elements.len();
        let (codes, scales) =
            (part(cuda, self.codes.view(), &elements, 2)?, part(cuda, self.scales.view(), &elements, BLOCK)?);
        let unpacked = part(cuda, self.unpacked.view(), &elements, 1)?;
        let of = &expected.packed;
        let values = expected.unpacked.as_ref().expect("asked for");
        bytes("scales", &[len / BLOCK], &of.scales[from / BLOCK..(from + len) / BLOCK], &scales)?;
        bytes("packed codes", &[len / 2], &of.codes[from / 2..(from + len) / 2], &codes)?;
        bf16_bits("unpacked", &[len], &values[from..from + len], &unpacked)
    }
}

/// What a device tensor holds for `elements`, `per` of which share an entry.
fn part<T: Element>(
    cuda: &Cuda,
    view: DeviceView<'_, T>,
    elements: &Range<usize>,
    per: usize,
) -> Result<Vec<T>, Error> {
    cuda.download(view.slice(elements.start / per..elements.end / per))
}

/// A part of an expert, quantized on the CPU under the amaxes of the whole.
struct Expected {
    row: Copy,
    col: Copy,
    row_values: Vec<f32>,
    col_values: Vec<f32>,
    /// Token positions of the part.
    k: usize,
}

fn on_the_cpu(x: &[bf16], amax: f32, amax_rht: f32, rounding: [Rounding; 2]) -> Result<Expected, Error> {
    let (cpu, groups) = (Cpu::new(), Groups::single(x.len() / COLS));
    let cast = |amax, rounding| Cast { unpacked: true, ..Cast::new(&[amax], rounding) };
    let rowwise = Some(cast(amax, rounding[0]));
    let columnwise = Some((Some(MASK), cast(amax_rht, rounding[1])));
    let (row, col) = Quantize { x, cols: COLS, groups: &groups, rowwise, columnwise }.run_copies(&cpu)?;
    let (row, col) = (row.expect("asked for"), col.expect("asked for"));
    let values = |copy: &Copy, direction| {
        let (groups, layout) = (&groups, ScaleLayout::Plain);
        Dequantize { copy: &copy.packed, cols: COLS, groups, direction, layout }.run(&cpu)
    };
    let row_values = values(&row, Direction::Rowwise)?;
    let col_values = values(&col, Direction::Columnwise)?;
    Ok(Expected { row, col, row_values, col_values, k: groups.padded_rows() })
}

/// The tensor, its groups, and on the host what it was made of.
struct Large {
    pattern: Vec<bf16>,
    host_groups: Groups,
    groups: DeviceGroups,
    x: DeviceBuffer<bf16>,
}

impl Large {
    fn new(cuda: &Cuda) -> Result<Self, Error> {
        let pattern = pattern();
        let host_groups = Groups::new(&SPLITS, ROWS)?;
        let sources: Vec<u32> = (0..ROWS).map(|row| source(row) as u32).collect();
        let (small, sources) = (cuda.upload(&pattern)?, cuda.upload(&sources)?);
        let mut x = cuda.empty(ROWS * COLS)?;
        let (view, out) = (small.view(), x.view_mut());
        cuda.permute(Permute { x: view, cols: COLS, source: sources.view(), out })?;
        Ok(Self { pattern, groups: cuda.groups(&host_groups)?, host_groups, x })
    }

    fn amaxes(&self, cuda: &Cuda) -> Result<[Vec<f32>; 3], Error> {
        let (x, groups) = (self.x.view(), &self.groups);
        let nan = [f32::NAN; EXPERTS];
        let (mut amax, mut before, mut after) = (cuda.upload(&nan)?, cuda.upload(&nan)?, cuda.upload(&nan)?);
        cuda.group_amax(GroupAmax { x, cols: COLS, groups, amax: amax.view_mut() })?;
        cuda.group_hadamard_amax(GroupHadamardAmax {
            x,
            cols: COLS,
            groups,
            sign_mask: MASK,
            amax: before.view_mut(),
            amax_rht: after.view_mut(),
        })?;
        Ok([cuda.download(amax.view())?, cuda.download(before.view())?, cuda.download(after.view())?])
    }

    /// Before and after the transform, of as many of each expert's last rows as hold everything.
    fn amaxes_on_the_cpu(&self) -> Result<(Vec<f32>, Vec<f32>), Error> {
        let telling = SPLITS.map(|tokens| BLOCK * N + tokens % BLOCK);
        let ends = (0..EXPERTS).map(|e| self.host_groups.range(e).end);
        let x: Vec<bf16> =
            ends.zip(telling).flat_map(|(end, rows)| rows_of(&self.pattern, end - rows..end)).collect();
        let groups = Groups::new(&telling, telling.iter().sum())?;
        drive::hadamard_amax(&Cpu::new(), &x, COLS, &groups, MASK)
    }

    /// Rows in the middle and at the end reach other tensors.
    fn rows_leave(&self, cuda: &Cuda) -> Outcome {
        let live: usize = SPLITS.iter().sum();
        let picked = [live - 1, MARK, MARK - 1, MARK + 1, 0, live - 1];
        let places = cuda.upload(&picked.map(|row| row as u32))?;
        let (places, x) = (places.view(), self.x.view());
        let expected: Vec<bf16> =
            picked.iter().flat_map(|&row| rows_of(&self.pattern, row..row + 1)).collect();
        let mut out = cuda.upload(&vec![bf16::NAN; 6 * COLS])?;
        cuda.permute(Permute { x, cols: COLS, source: places, out: out.view_mut() })?;
        bf16_bits("permuted", &[6, COLS], &expected, &cuda.download(out.view())?)?;
        let out_view = out.view_mut();
        cuda.unpermute(Unpermute { y: x, cols: COLS, slot: places, top_k: 1, weights: None, out: out_view })?;
        bf16_bits("unpermuted", &[6, COLS], &expected, &cuda.download(out.view())?)
    }

    fn copies(&self, cuda: &Cuda, found: [&[f32]; 2]) -> Outcome {
        // Amaxes that tell experts of the same values apart.
        let factors = [1.0, 0.5, 3.0, 1.5];
        let given = found.map(|amax| amax.iter().zip(factors).map(|(a, f)| a * f).collect::<Vec<f32>>());
        let (amax, amax_rht) = (cuda.upload(&given[0])?, cuda.upload(&given[1])?);
        let k = self.host_groups.padded_rows();
        let (mut row, mut col) = (DeviceCopy::new(cuda, ROWS * COLS)?, DeviceCopy::new(cuda, COLS * k)?);
        for rounding in [stochastic(11), [Rounding::Nearest; 2]] {
            cuda.group_quantize(GroupQuantize {
                x: self.x.view(),
                cols: COLS,
                groups: &self.groups,
                rowwise: Some(row.cast(amax.view(), rounding[0])),
                columnwise: Some(contract::ColumnwiseCast {
                    rht: Some(MASK),
                    cast: col.cast(amax_rht.view(), rounding[1]),
                }),
            })?;
            self.each_part(&given, rounding, |rows, positions, expected| {
                let elements = rows.start * COLS..rows.end * COLS;
                row.same(cuda, elements, &expected.row, 0).in_case("rowwise")?;
                LINES.into_iter().try_for_each(|line| {
                    let elements = line * k + positions.start..line * k + positions.end;
                    col.same(cuda, elements, &expected.col, line * expected.k)
                        .in_case(format!("columnwise, column {line}"))
                })
            })
            .in_case(format!("{rounding:?}"))?;
            let nobody = self.host_groups.live_rows() * COLS..ROWS * COLS;
            all_zero("codes of nobody", nobody.start / 2, &part(cuda, row.codes.view(), &nobody, 2)?)?;
            all_zero(
                "scales of nobody",
                nobody.start / BLOCK,
                &part(cuda, row.scales.view(), &nobody, BLOCK)?,
            )?;
        }
        // Room for the values.
        let ([row_codes, row_scales], [col_codes, col_scales]) =
            ([row.codes, row.scales], [col.codes, col.scales]);
        drop((row.unpacked, col.unpacked));
        let rounding = [Rounding::Nearest; 2];
        let mut values = cuda.empty::<f32>(ROWS * COLS)?;
        let (codes, scales) = (row_codes.view(), row_scales.view());
        self.dequantize(cuda, codes, scales, amax.view(), (Direction::Rowwise, values.view_mut()))?;
        self.each_part(&given, rounding, |rows, _, expected| {
            let elements = rows.start * COLS..rows.end * COLS;
            let got = part(cuda, values.view(), &elements, 1)?;
            f32_bits("rowwise dequantized", &[rows.len(), COLS], &expected.row_values, &got)
        })?;
        drop(values);
        let mut values = cuda.empty::<f32>(COLS * k)?;
        let (codes, scales) = (col_codes.view(), col_scales.view());
        self.dequantize(cuda, codes, scales, amax_rht.view(), (Direction::Columnwise, values.view_mut()))?;
        self.each_part(&given, rounding, |_, positions, expected| {
            LINES.into_iter().try_for_each(|line| {
                let elements = line * k + positions.start..line * k + positions.end;
                let got = part(cuda, values.view(), &elements, 1)?;
                let of_line = &expected.col_values[line * expected.k..(line + 1) * expected.k];
                f32_bits(&format!("column {line} dequantized"), &[got.len()], of_line, &got)
            })
        })
    }

    fn dequantize(
        &self,
        cuda: &Cuda,
        codes: DeviceView<'_, u8>,
        scales: DeviceView<'_, u8>,
        amax: DeviceView<'_, f32>,
        (direction, out): (Direction, DeviceViewMut<'_, f32>),
    ) -> Result<(), Error> {
        let (cols, groups, layout) = (COLS, &self.groups, ScaleLayout::Plain);
        cuda.dequantize(contract::Dequantize { codes, scales, amax, cols, groups, direction, layout, out })
    }

    /// Calls `compare` with rows, token positions and expected copies.
    fn each_part(
        &self,
        given: &[Vec<f32>; 2],
        rounding: [Rounding; 2],
        compare: impl Fn(Range<usize>, Range<usize>, &Expected) -> Outcome,
    ) -> Outcome {
        for e in 0..EXPERTS {
            let (first, position) = (self.host_groups.range(e).start, self.host_groups.padded_range(e).start);
            for tokens in parts(SPLITS[e]) {
                if rounding[0] != Rounding::Nearest && tokens.start > 0 {
                    continue;
                }
                let rows = first + tokens.start..first + tokens.end;
                let x = rows_of(&self.pattern, rows.clone());
                let expected = on_the_cpu(&x, given[0][e], given[1][e], rounding)?;
                let positions = position + tokens.start..position + tokens.start + expected.k;
                compare(rows, positions, &expected).in_case(format!("expert {e}, tokens {tokens:?}"))?;
            }
        }
        Ok(())
    }
}

#[test]
#[ignore = "needs a GPU with 17 GB of free memory"]
fn more_than_2_to_the_31_elements() {
    let cuda = cuda();
    let compared = || -> Outcome {
        let large = Large::new(cuda)?;
        let (expected, expected_rht) = large.amaxes_on_the_cpu()?;
        let [amax, before, after] = large.amaxes(cuda)?;
        f32_bits("amax", &[EXPERTS], &expected, &amax)?;
        f32_bits("amax before RHT", &[EXPERTS], &expected, &before)?;
        f32_bits("amax after RHT", &[EXPERTS], &expected_rht, &after)?;
        large.rows_leave(cuda)?;
        large.copies(cuda, [&amax, &after])
    };
    must(compared());
}
