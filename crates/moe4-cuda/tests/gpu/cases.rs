//! Everything that the quantizers make of a tensor: amaxes, copies and their way back to f32, on any backend,
//! compared bit by bit.

use half::bf16;
use moe4::kernels::contract::Direction;
use moe4::kernels::cpu::Cpu;
use moe4::kernels::{Backend, Error};
use moe4::numerics::BLOCK;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::{RandomStream, Rounding};
use moe4::tensor::{Groups, ScaleLayout};
use moe4_conformance::Outcome;
use moe4_conformance::compare::{alive, bf16_bits, bytes, f32_bits};
use moe4_conformance::data::Random;
use moe4_conformance::drive::{self, Copy, Dequantize, Quantize};

/// How one copy is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    pub(crate) rounding: Rounding,
    pub(crate) packed: bool,
    pub(crate) layout: ScaleLayout,
    pub(crate) unpacked: bool,
}

impl Form {
    fn cast(self, amax: &[f32]) -> drive::Cast {
        let Form { rounding, packed, layout, unpacked } = self;
        drive::Cast { packed, layout, unpacked, ..drive::Cast::new(amax, rounding) }
    }
}

/// Which copies are made, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    /// The columnwise copy's transform.
    pub(crate) mask: Option<SignMask>,
    pub(crate) rowwise: Option<Form>,
    pub(crate) columnwise: Option<Form>,
}

/// Streams that use the upper halves of seed and stream; rowwise and columnwise.
pub(crate) fn stochastic(seed: u64) -> [Rounding; 2] {
    let stream =
        |direction| RandomStream { seed: seed << 33 | 0xF00D, stream: u64::MAX - 2 * seed - direction };
    [0, 1].map(|direction| Rounding::Stochastic(stream(direction)))
}

/// Transforms, roundings, directions and outputs, in 42 combinations.
pub(crate) fn settings(seed: u64) -> Vec<Setting> {
    const NEAREST: [Rounding; 2] = [Rounding::Nearest; 2];
    let random = SignMask(Random::new(seed).bits() as u16);
    let stochastic = stochastic(seed);
    let (plain, swizzled) = (ScaleLayout::Plain, ScaleLayout::Swizzled128x4);
    let form = |rounding, layout, unpacked| Some(Form { rounding, packed: true, layout, unpacked });
    let values = |rounding| Some(Form { rounding, packed: false, layout: plain, unpacked: true });
    let both = |mask, rounding: [Rounding; 2], layout, unpacked| Setting {
        mask,
        rowwise: form(rounding[0], layout, unpacked),
        columnwise: form(rounding[1], layout, unpacked),
    };
    let mut settings = Vec::new();
    for mask in [Some(SignMask::DEFAULT), Some(SignMask::NONE), Some(random), None] {
        for rounding in [NEAREST, stochastic] {
            settings.push(both(mask, rounding, plain, true));
            settings.push(both(mask, rounding, swizzled, false));
            settings.push(Setting { mask, rowwise: None, columnwise: form(rounding[1], plain, false) });
            settings.push(Setting { mask, rowwise: values(rounding[0]), columnwise: values(rounding[1]) });
        }
    }
    for rounding in [NEAREST, stochastic] {
        settings.push(Setting { mask: None, rowwise: form(rounding[0], plain, false), columnwise: None });
        settings.push(both(Some(SignMask::DEFAULT), rounding, swizzled, true));
        let (mask, of_rows) = (Some(SignMask::DEFAULT), values(rounding[0]));
        settings.push(Setting { mask, rowwise: of_rows, columnwise: form(rounding[1], plain, false) });
        settings.push(Setting { mask: None, rowwise: of_rows, columnwise: None });
    }
    let mixed = [[Rounding::Nearest, stochastic[1]], [stochastic[0], Rounding::Nearest]];
    settings.extend(mixed.map(|rounding| both(Some(SignMask::DEFAULT), rounding, plain, false)));
    settings
}

/// What is asked of the quantizers.
#[derive(Clone, Copy)]
pub(crate) struct Case<'a> {
    /// `[T, cols]`.
    pub(crate) x: &'a [bf16],
    pub(crate) cols: usize,
    pub(crate) groups: &'a Groups,
    pub(crate) setting: Setting,
    /// The amax that a copy is made with, from the one that was found.
    pub(crate) given: &'a (dyn Fn(f32) -> f32 + Sync),
}

/// A copy and its values: dequantized, or without the global scale if the copy has no codes.
pub(crate) struct MadeCopy {
    pub(crate) copy: Copy,
    pub(crate) values: Vec<f32>,
}

/// What they make of it.
pub(crate) struct Made {
    pub(crate) amax: Vec<f32>,
    pub(crate) amax_rht: Vec<f32>,
    pub(crate) rowwise: Option<MadeCopy>,
    pub(crate) columnwise: Option<MadeCopy>,
}

impl<'a> Case<'a> {
    /// With the amaxes that are found.
    pub(crate) fn new(x: &'a [bf16], cols: usize, groups: &'a Groups, setting: Setting) -> Self {
        Self { x, cols, groups, setting, given: &|amax| amax }
    }

    pub(crate) fn run<B: Backend>(&self, b: &B) -> Result<Made, Error> {
        let Case { x, cols, groups, setting: Setting { mask, rowwise, columnwise }, given } = *self;
        let transform = mask.unwrap_or(SignMask::DEFAULT);
        let (amax, amax_rht) = drive::hadamard_amax(b, x, cols, groups, transform)?;
        let plain_amax = drive::amax(b, x, cols, groups)?;
        let of = |found: &[f32]| -> Vec<f32> { found.iter().map(|&v| given(v)).collect() };
        let (of_rows, of_columns) = (of(&plain_amax), of(if mask.is_some() { &amax_rht } else { &amax }));
        let row = rowwise.map(|form| form.cast(&of_rows));
        let col = columnwise.map(|form| (mask, form.cast(&of_columns)));
        let (row, col) = Quantize { x, cols, groups, rowwise: row, columnwise: col }.run_copies(b)?;
        let back = |copy: Option<Copy>, form: Option<Form>, direction| -> Result<_, Error> {
            let Some((copy, form)) = copy.zip(form) else { return Ok(None) };
            if !form.packed {
                let values = copy.unpacked.iter().flatten().map(|v| v.to_f32()).collect();
                return Ok(Some(MadeCopy { copy, values }));
            }
            let pass = Dequantize { copy: &copy.packed, cols, groups, direction, layout: form.layout };
            let values = pass.run(b)?;
            Ok(Some(MadeCopy { copy, values }))
        };
        Ok(Made {
            amax,
            amax_rht,
            rowwise: back(row, rowwise, Direction::Rowwise)?,
            columnwise: back(col, columnwise, Direction::Columnwise)?,
        })
    }

    /// Byte for byte as on the CPU.
    pub(crate) fn as_on_the_cpu<B: Backend>(&self, b: &B) -> Outcome {
        self.same(&self.run(&Cpu::new())?, &self.run(b)?)
    }

    /// Something came out that is not zero.
    pub(crate) fn alive(&self, made: &Made) -> Outcome {
        alive("amax", &made.amax)?;
        [&made.rowwise, &made.columnwise].into_iter().flatten().try_for_each(|made| {
            if !made.copy.packed.codes.is_empty() {
                alive("codes", &made.copy.packed.codes)?;
            }
            alive("values", &made.values)
        })
    }

    pub(crate) fn same(&self, expected: &Made, got: &Made) -> Outcome {
        f32_bits("amax", &[expected.amax.len()], &expected.amax, &got.amax)?;
        f32_bits("amax after RHT", &[expected.amax_rht.len()], &expected.amax_rht, &got.amax_rht)?;
        let copies = [
            (Direction::Rowwise, self.setting.rowwise, &expected.rowwise, &got.rowwise),
            (Direction::Columnwise, self.setting.columnwise, &expected.columnwise, &got.columnwise),
        ];
        for (direction, form, expected, got) in copies {
            let Some(((form, expected), got)) = form.zip(expected.as_ref()).zip(got.as_ref()) else {
                continue;
            };
            let name = format!("{direction:?}");
            let [rows, k] = direction.shape(self.groups, self.cols);
            same_copy(&name, [rows, k], form.layout, &expected.copy, &got.copy)?;
            f32_bits(&format!("{name} dequantized"), &[rows, k], &expected.values, &got.values)?;
        }
        Ok(())
    }
}

/// Scales first: where one of them is wrong, so are the codes of its block.
pub(crate) fn same_copy(
    name: &str,
    [rows, k]: [usize; 2],
    layout: ScaleLayout,
    expected: &Copy,
    got: &Copy,
) -> Outcome {
    let (a, b) = (&expected.packed, &got.packed);
    f32_bits(&format!("{name} amax"), &[a.amax.len()], &a.amax, &b.amax)?;
    if !(a.codes.is_empty() && b.codes.is_empty()) {
        let of_scales = match layout {
            ScaleLayout::Plain => vec![rows, k / BLOCK],
            ScaleLayout::Swizzled128x4 => vec![layout.bytes(rows, k / BLOCK)],
        };
        bytes(&format!("{name} scales, {layout:?}"), &of_scales, &a.scales, &b.scales)?;
        bytes(&format!("{name} packed codes"), &[rows, k / 2], &a.codes, &b.codes)?;
    }
    let values = |copy: &Copy| copy.unpacked.clone().unwrap_or_default();
    let of_values = if expected.unpacked.is_some() { vec![rows, k] } else { vec![0] };
    bf16_bits(&format!("{name} unpacked"), &of_values, &values(expected), &values(got))
}
