//! The forms of a quantized copy: scales in the 128x4 layout, BF16 values beside the codes. Expected bytes come from
//! formulas written out here and the plain copy, which other checks pin.

use crate::compare::{alive, bf16_bits, bytes, ensure, unpack};
use crate::data::{self, Kind};
use crate::drive::{Cast, Copy, Quantize, hadamard_amax, quantize_weights_apart};
use crate::report::{Failure, InCase, Outcome};
use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::contract::WeightShape;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::{RandomStream, Rounding};
use moe4::numerics::{BLOCK, e2m1, e4m3};
use moe4::tensor::{Groups, ScaleLayout};

/// Splits, rows and columns: one tile or less, tiles in both directions, padding in both, none at all.
const SHAPES: [(&[usize], usize, usize); 6] = [
    (&[5, 0, 17, 1], 30, 32),
    (&[1], 1, 16),
    (&[100, 33, 0, 150], 300, 144),
    (&[128, 128], 256, 64),
    (&[129, 1], 130, 272),
    (&[0, 0], 5, 48),
];

/// `[rows, cols]` scales in tiles of 128 x 4, zeros in between: the formula of cuBLAS.
fn tiles(plain: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let across = cols.div_ceil(4);
    let mut out = vec![0; rows.div_ceil(128) * across * 512];
    for (i, &scale) in plain.iter().enumerate() {
        let (r, c) = (i / cols, i % cols);
        out[((r / 128) * across + c / 4) * 512 + (r % 32) * 16 + ((r % 128) / 32) * 4 + c % 4] = scale;
    }
    out
}

/// `code · scale` in BF16, by way of f32.
fn values(codes: &[u8], scales: &[u8]) -> Result<Vec<bf16>, Failure> {
    let value = |(i, code): (usize, u8)| {
        let scale = scales[i / BLOCK];
        if scale & 0x7F == e4m3::NAN {
            return Ok(bf16::from_bits(0x7FC0));
        }
        let exact = e2m1::decode(code) * e4m3::decode(scale);
        ensure(exact.to_bits() & 0xFFFF == 0, || {
            format!("code {code}, scale {scale:#04x}: {exact} in BF16")
        })?;
        Ok(bf16::from_bits((exact.to_bits() >> 16) as u16))
    };
    unpack(codes).into_iter().enumerate().map(value).collect()
}

/// What is written of a copy.
#[derive(Clone, Copy, Debug)]
struct Form {
    packed: bool,
    unpacked: bool,
}

const PACKED: Form = Form { packed: true, unpacked: false };
const VALUES: Form = Form { packed: false, unpacked: true };
const BOTH: Form = Form { packed: true, unpacked: true };

/// Both copies of `x` in the given layouts and forms.
fn both<B: Backend>(
    b: &B,
    (x, cols, groups): (&[bf16], usize, &Groups),
    rounding: Rounding,
    layouts: [ScaleLayout; 2],
    forms: [Form; 2],
) -> Result<[Copy; 2], Failure> {
    let mask = SignMask::DEFAULT;
    let (before, after) = hadamard_amax(b, x, cols, groups, mask)?;
    let cast = |amax: &[f32], i: usize| {
        let Form { packed, unpacked } = forms[i];
        Cast { packed, layout: layouts[i], unpacked, ..Cast::new(amax, rounding) }
    };
    let case = Quantize {
        x,
        cols,
        groups,
        rowwise: Some(cast(&before, 0)),
        columnwise: Some((Some(mask), cast(&after, 1))),
    };
    let (row, col) = case.run_copies(b)?;
    Ok([row.expect("asked for"), col.expect("asked for")])
}

const PLAIN: [ScaleLayout; 2] = [ScaleLayout::Plain; 2];

/// Swizzled scales are the plain ones in their places, whichever direction has them; padding is zero.
pub(super) fn swizzled<B: Backend>(b: &B) -> Outcome {
    use ScaleLayout::{Plain, Swizzled128x4};
    for (seed, (splits, rows, cols)) in SHAPES.into_iter().enumerate() {
        let case = || -> Outcome {
            let groups = Groups::new(splits, rows).expect("fits");
            let live = groups.live_rows();
            let mut x = data::normal(rows * cols, 1.0, 300 + seed as u64);
            x[live * cols..].fill(bf16::NAN);
            let tensor = (&x[..], cols, &groups);
            let plain = both(b, tensor, Rounding::Nearest, PLAIN, [PACKED; 2])?;
            if live > 0 {
                alive("scales", &plain[0].packed.scales)?;
                alive("scales of columns", &plain[1].packed.scales)?;
            }
            let shapes = [[rows, cols / BLOCK], [cols, groups.padded_rows() / BLOCK]];
            for layouts in [[Swizzled128x4; 2], [Swizzled128x4, Plain], [Plain, Swizzled128x4]] {
                let got = both(b, tensor, Rounding::Nearest, layouts, [PACKED; 2])?;
                for (((name, layout), [rows, cols]), (plain, got)) in
                    ["rowwise", "columnwise"].into_iter().zip(layouts).zip(shapes).zip(plain.iter().zip(&got))
                {
                    let expected = match layout {
                        Plain => plain.packed.scales.clone(),
                        Swizzled128x4 => tiles(&plain.packed.scales, rows, cols),
                    };
                    let len = [expected.len()];
                    bytes(&format!("{name} scales, {layout:?}"), &len, &expected, &got.packed.scales)?;
                    let len = [plain.packed.codes.len()];
                    bytes(&format!("{name} packed codes"), &len, &plain.packed.codes, &got.packed.codes)?;
                }
            }
            Ok(())
        };
        case().in_case(format!("splits {splits:?} of {rows} rows, {cols} columns"))?;
    }
    Ok(())
}

/// BF16 values are `code · scale`, alone and beside codes in either layout; those are the same with values and without.
pub(super) fn unpacked<B: Backend>(b: &B) -> Outcome {
    let stochastic = Rounding::Stochastic(RandomStream { seed: u64::MAX - 5, stream: 1 << 63 });
    for (seed, (splits, rows, cols)) in SHAPES.into_iter().enumerate() {
        for (kind, rounding) in
            Kind::ALL.into_iter().flat_map(|kind| [(kind, Rounding::Nearest), (kind, stochastic)])
        {
            let case = || -> Outcome {
                let groups = Groups::new(splits, rows).expect("fits");
                let live = groups.live_rows();
                let mut x = data::tensor(kind, rows * cols, 320 + seed as u64);
                x[live * cols..].fill(bf16::MAX);
                if live > 1 && kind == Kind::Ties {
                    x[cols + 3] = bf16::INFINITY;
                }
                let tensor = (&x[..], cols, &groups);
                let plain = both(b, tensor, rounding, PLAIN, [PACKED; 2])?;
                if live > 0 && kind != Kind::Zeros {
                    alive("codes", &plain[0].packed.codes)?;
                }
                let shapes = [[rows, cols], [cols, groups.padded_rows()]];
                use ScaleLayout::{Plain, Swizzled128x4};
                for (layout, forms) in [
                    (Plain, [BOTH; 2]),
                    (Swizzled128x4, [BOTH; 2]),
                    (Plain, [VALUES; 2]),
                    (Plain, [VALUES, PACKED]),
                    (Plain, [PACKED, VALUES]),
                ] {
                    let got = both(b, tensor, rounding, [layout; 2], forms)?;
                    for (((name, shape), form), (plain, got)) in ["rowwise", "columnwise"]
                        .into_iter()
                        .zip(shapes)
                        .zip(forms)
                        .zip(plain.iter().zip(&got))
                    {
                        let (plain, what) = (&plain.packed, format!("of {forms:?}, {layout:?}"));
                        if form.unpacked {
                            let expected = values(&plain.codes, &plain.scales)?;
                            let got_values = got.unpacked.as_deref().unwrap_or_default();
                            bf16_bits(&format!("{name} unpacked {what}"), &shape, &expected, got_values)?;
                        }
                        if form.packed {
                            let len = [plain.codes.len()];
                            bytes(&format!("{name} codes {what}"), &len, &plain.codes, &got.packed.codes)?;
                        }
                    }
                }
                Ok(())
            };
            case().in_case(format!("{kind:?}, splits {splits:?} of {rows} rows, {cols} columns"))?;
        }
    }
    Ok(())
}

/// The same for weights.
pub(super) fn unpacked_weights<B: Backend>(b: &B) -> Outcome {
    for (experts, n, k) in [(1, 16, 16), (3, 48, 272), (2, 144, 32)] {
        let shape = WeightShape { n, k };
        for (seed, kind) in Kind::ALL.into_iter().enumerate() {
            let mut w = data::tensor(kind, experts * n * k, 340 + seed as u64);
            // Not in the only tile: nothing would be left to see.
            if n * k > BLOCK * BLOCK {
                w[n * k / 2] = bf16::NAN;
            }
            let apart: Vec<&[bf16]> = w.chunks(n * k).collect();
            let plain = quantize_weights_apart(b, &apart, shape, false)?.packed;
            let got = quantize_weights_apart(b, &apart, shape, true)?;
            let expected = values(&plain.codes, &plain.scales)?;
            let got_values = got.unpacked.as_deref().unwrap_or_default();
            if kind != Kind::Zeros {
                alive("codes", &plain.codes)?;
            }
            bf16_bits("unpacked", &[experts, n, k], &expected, got_values).in_case(format!("{kind:?}"))?;
            bytes("packed codes", &[experts, n, k / 2], &plain.codes, &got.packed.codes)?;
            bytes("scales", &[experts, n, k / BLOCK], &plain.scales, &got.packed.scales)?;
        }
    }
    Ok(())
}
