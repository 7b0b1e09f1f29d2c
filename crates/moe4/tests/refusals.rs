//! Descriptors whose lengths do not fit are refused by name and size, before anything is written.

use half::bf16;
use moe4::kernels::contract::*;
use moe4::kernels::reference::Reference;
use moe4::kernels::{Backend, Error, Host, Misuse};
use moe4::numerics::rounding::Rounding;
use moe4::tensor::{Groups, ScaleLayout};

const COLS: usize = 48;
const ROWS: usize = 20;

/// Lengths of one copy's outputs.
#[derive(Clone, Copy)]
struct Lengths {
    layout: ScaleLayout,
    codes: usize,
    scales: usize,
    unpacked: Option<usize>,
}

/// The refusal of a rowwise copy, or of a columnwise one, with outputs of these lengths.
fn quantize(lengths: Lengths, columnwise: bool) -> Option<Misuse> {
    let groups = Groups::new(&[17, 0], ROWS).unwrap();
    let x = vec![bf16::ONE; ROWS * COLS];
    let (mut codes, mut scales) = (vec![0xAA; lengths.codes], vec![0xAA; lengths.scales]);
    let mut unpacked = lengths.unpacked.map(|len| vec![bf16::MAX; len]);
    let cast = Cast::<Host> {
        amax: &[1.0, 0.0],
        rounding: Rounding::Nearest,
        packed: Some(PackedOut { codes: &mut codes, scales: &mut scales, layout: lengths.layout }),
        unpacked: unpacked.as_deref_mut(),
    };
    let (rowwise, columnwise) = match columnwise {
        true => (None, Some(ColumnwiseCast { rht: None, cast })),
        false => (Some(cast), None),
    };
    let pass = GroupQuantize { x: &x[..], cols: COLS, groups: &groups, rowwise, columnwise };
    let refused = misuse(Reference.group_quantize(pass));
    if refused.is_some() {
        assert!(codes.iter().chain(&scales).all(|&byte| byte == 0xAA), "a refused pass wrote something");
        assert!(unpacked.into_iter().flatten().all(|v| v == bf16::MAX), "a refused pass wrote something");
    }
    refused
}

fn misuse(outcome: Result<(), Error>) -> Option<Misuse> {
    match outcome {
        Ok(()) => None,
        Err(Error::Misuse(misuse)) => Some(misuse),
        Err(other) => panic!("{other}"),
    }
}

/// The tensor that a refusal names, its expected and its found length.
fn named(refused: Option<Misuse>) -> (&'static str, usize, usize) {
    match refused {
        Some(Misuse::Length { tensor, expected, got, .. }) => (tensor, expected, got),
        other => panic!("expected a wrong length, got {other:?}"),
    }
}

#[test]
fn scales_have_the_length_of_their_layout() {
    let (plain, swizzled) = (ScaleLayout::Plain, ScaleLayout::Swizzled128x4);
    let rowwise = |layout, scales| Lengths { layout, codes: ROWS * COLS / 2, scales, unpacked: None };
    assert_eq!(quantize(rowwise(plain, 60), false), None);
    assert_eq!(quantize(rowwise(swizzled, 512), false), None);
    assert_eq!(named(quantize(rowwise(plain, 512), false)), ("scales", 60, 512));
    let refused = quantize(rowwise(swizzled, 60), false).unwrap();
    assert_eq!(
        refused.to_string(),
        "group_quantize: scales, padded to tiles of 128x4, of shape [128, 4]: expected 512 elements, got 60"
    );
    // Columnwise: 48 rows of 32 token positions.
    let columnwise = |layout, scales| Lengths { layout, codes: 48 * 16, scales, unpacked: None };
    assert_eq!(quantize(columnwise(plain, 96), true), None);
    assert_eq!(quantize(columnwise(swizzled, 512), true), None);
    assert_eq!(named(quantize(columnwise(swizzled, 96), true)).1, 512);
}

#[test]
fn a_copy_has_a_form() {
    let groups = Groups::new(&[17, 0], ROWS).unwrap();
    let x = vec![bf16::ONE; ROWS * COLS];
    let quantize = |unpacked: Option<&mut [bf16]>| {
        let cast = Cast::<Host> { amax: &[1.0, 0.0], rounding: Rounding::Nearest, packed: None, unpacked };
        let (x, rowwise) = (&x[..], Some(cast));
        let pass = GroupQuantize { x, cols: COLS, groups: &groups, rowwise, columnwise: None };
        misuse(Reference.group_quantize(pass))
    };
    let refused = quantize(None).expect("nothing to write");
    assert!(refused.to_string().contains("got neither"), "{refused}");
    let mut values = vec![bf16::MAX; ROWS * COLS];
    assert_eq!(named(quantize(Some(&mut values[1..]))), ("unpacked", ROWS * COLS, ROWS * COLS - 1));
    assert_eq!(quantize(Some(&mut values[..])), None);
    assert!(values[17 * COLS..].iter().all(|v| v.to_bits() == 0), "rows of nobody");
    // A block of ones: codes of 6, a scale of 2688 / 6 = 448.
    assert!(values[..17 * COLS].iter().all(|v| v.to_f32() == 6.0 * 448.0), "values alone");
}

#[test]
fn unpacked_values_have_the_shape_of_the_copy() {
    let of = |codes, scales, unpacked| Lengths {
        layout: ScaleLayout::Plain,
        codes,
        scales,
        unpacked: Some(unpacked),
    };
    assert_eq!(quantize(of(480, 60, ROWS * COLS), false), None);
    assert_eq!(named(quantize(of(480, 60, 480), false)), ("unpacked", ROWS * COLS, 480));
    assert_eq!(quantize(of(48 * 16, 96, 48 * 32), true), None);
    assert_eq!(named(quantize(of(48 * 16, 96, ROWS * COLS), true)), ("unpacked", 48 * 32, ROWS * COLS));
}

#[test]
fn unpacked_weights_have_the_shape_of_the_weights() {
    let (w, shape) = (vec![bf16::ONE; 16 * 32], WeightShape { n: 16, k: 32 });
    let run = |len: usize| {
        let (mut codes, mut scales, mut amax) = (vec![0; 2 * 256], vec![0; 2 * 32], [0.0; 2]);
        let mut unpacked = vec![bf16::ZERO; len];
        misuse(Reference.quantize_weights(QuantizeWeights {
            w: vec![&w[..]; 2],
            shape,
            codes: &mut codes,
            scales: &mut scales,
            unpacked: Some(&mut unpacked),
            amax: &mut amax,
        }))
    };
    assert_eq!(run(2 * 16 * 32), None);
    assert_eq!(named(run(16 * 32)), ("unpacked", 1024, 512));
}

#[test]
fn a_dequantized_copy_has_the_shape_of_its_direction() {
    let groups = Groups::new(&[17, 0], ROWS).unwrap();
    let run = |direction, layout, codes: usize, scales: usize, experts: usize, out: usize, cols: usize| {
        let (codes, scales, amax) = (vec![0; codes], vec![0; scales], vec![1.0; experts]);
        let mut out = vec![0.0; out];
        misuse(Reference.dequantize(Dequantize {
            codes: &codes[..],
            scales: &scales,
            amax: &amax,
            cols,
            groups: &groups,
            direction,
            layout,
            out: &mut out,
        }))
    };
    use Direction::{Columnwise, Rowwise};
    use ScaleLayout::{Plain, Swizzled128x4};
    assert_eq!(run(Rowwise, Plain, 480, 60, 2, 960, COLS), None);
    assert_eq!(run(Columnwise, Swizzled128x4, 768, 512, 2, 1536, COLS), None);
    assert_eq!(named(run(Columnwise, Plain, 480, 60, 2, 960, COLS)), ("codes", 768, 480));
    assert_eq!(named(run(Rowwise, Swizzled128x4, 480, 60, 2, 960, COLS)).1, 512);
    assert_eq!(named(run(Rowwise, Plain, 480, 60, 1, 960, COLS)), ("amax", 2, 1));
    assert_eq!(named(run(Rowwise, Plain, 480, 60, 2, 961, COLS)), ("out", 960, 961));
    assert!(matches!(run(Rowwise, Plain, 0, 0, 2, 0, 24), Some(Misuse::Multiple { got: 24, .. })));
    assert!(matches!(run(Rowwise, Plain, 0, 0, 2, 0, 0), Some(Misuse::Multiple { got: 0, .. })));
}
