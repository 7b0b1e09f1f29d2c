//! The operator's kernels and this command give the same bytes.

use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::contract::{Cast, ColumnwiseCast, GroupQuantize, PackedOut};
use moe4::kernels::reference::Reference;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::{RandomStream, Rounding};
use moe4::tensor::{Groups, ScaleLayout, Tile};

use super::encode::{Encoded, encode};
use super::operand::Operand;
use super::{Axis, Settings};

const ROWS: usize = 37;
const COLS: usize = 48;

fn settings(axis: Axis, rht: Option<SignMask>) -> Settings {
    Settings { axis, tile: Tile::Row16, rht, seed: None, splits: None, dequant: false }
}

/// Values of both signs over a range of magnitudes.
fn sample() -> Vec<bf16> {
    let value = |index: usize| ((index * 2_654_435_761) % 4001) as f32 / 1000.0 - 2.0;
    (0..ROWS * COLS).map(|index| bf16::from_f32(value(index) * (1 << (index % 5)) as f32)).collect()
}

fn quantized(x: &[bf16], settings: &Settings, stream: Option<RandomStream>) -> Encoded {
    let values: Vec<f32> = x.iter().map(|value| value.to_f32()).collect();
    encode(&Operand::new(&values, ROWS, COLS, settings).unwrap(), settings, stream)
}

fn kernel(x: &[bf16], settings: &Settings, rounding: Rounding, amax: f32) -> (Vec<u8>, Vec<u8>) {
    let groups = Groups::single(ROWS);
    let (rows, cols) = super::plan::output_dims(ROWS, COLS, settings.axis);
    let (mut codes, mut scales) = (vec![0; rows * cols / 2], vec![0; rows * cols / 16]);
    let amax = [amax];
    let cast = Cast {
        amax: &amax[..],
        rounding,
        packed: Some(PackedOut {
            codes: &mut codes[..],
            scales: &mut scales[..],
            layout: ScaleLayout::Plain,
        }),
        unpacked: None,
    };
    let (rowwise, columnwise) = match settings.axis {
        Axis::Rowwise => (Some(cast), None),
        Axis::Columnwise => (None, Some(ColumnwiseCast { rht: settings.rht, cast })),
    };
    Reference.group_quantize(GroupQuantize { x, cols: COLS, groups: &groups, rowwise, columnwise }).unwrap();
    (codes, scales)
}

#[test]
fn bytes_are_those_of_the_reference_kernels() {
    let x = sample();
    let stream = RandomStream { seed: 7, stream: 11 };
    for (axis, rht) in
        [(Axis::Rowwise, None), (Axis::Columnwise, None), (Axis::Columnwise, Some(SignMask::DEFAULT))]
    {
        for random in [None, Some(stream)] {
            let settings = settings(axis, rht);
            let ours = quantized(&x, &settings, random);
            let rounding = random.map_or(Rounding::Nearest, Rounding::Stochastic);
            assert!((ours.codes, ours.scales) == kernel(&x, &settings, rounding, ours.amax));
        }
    }
}

#[test]
fn a_rowwise_transform_is_the_columnwise_one_of_the_transpose() {
    let x: Vec<f32> = sample().iter().map(|value| value.to_f32()).collect();
    let transposed: Vec<f32> = (0..COLS * ROWS).map(|index| x[index % ROWS * COLS + index / ROWS]).collect();
    let mask = Some(SignMask(0x1234));
    let columnwise = Operand::new(&transposed, COLS, ROWS, &settings(Axis::Columnwise, mask)).unwrap();
    let rowwise = Operand::new(&x, ROWS, COLS, &settings(Axis::Rowwise, mask)).unwrap();
    assert!(columnwise.values == rowwise.values);
}
