//! Comparisons that say tensor, index, expected and got.

use crate::report::{Failure, Outcome};
use half::bf16;
use moe4::numerics::{bf16 as bf, e2m1};
use std::fmt::Debug;

/// `[row, column]`-style position of a flat index.
pub fn position(shape: &[usize], flat: usize) -> String {
    let mut rest = flat;
    let mut at: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&size| {
            let i = rest % size.max(1);
            rest /= size.max(1);
            i
        })
        .collect();
    at.reverse();
    format!("{at:?}")
}

fn same_length(tensor: &str, shape: &[usize], expected: usize, got: usize) -> Outcome {
    let elements: usize = shape.iter().product();
    if expected == elements && got == elements {
        return Ok(());
    }
    Err(Failure::new(format!(
        "{tensor} of shape {shape:?}: {elements} elements wanted, expected data has {expected}, got {got}"
    )))
}

fn first_difference<T: Copy>(
    tensor: &str,
    shape: &[usize],
    (expected, got): (&[T], &[T]),
    same: impl Fn(T, T) -> bool,
    show: impl Fn(T) -> String,
) -> Outcome {
    same_length(tensor, shape, expected.len(), got.len())?;
    let differ: Vec<usize> = (0..got.len()).filter(|&i| !same(expected[i], got[i])).collect();
    let Some(&first) = differ.first() else { return Ok(()) };
    Err(Failure::new(format!(
        "{tensor}{}: expected {}, got {} ({} of {} differ)",
        position(shape, first),
        show(expected[first]),
        show(got[first]),
        differ.len(),
        got.len(),
    )))
}

/// Equal values of any plain type.
pub fn equal<T: Copy + PartialEq + Debug>(
    tensor: &str,
    shape: &[usize],
    expected: &[T],
    got: &[T],
) -> Outcome {
    first_difference(tensor, shape, (expected, got), |a, b| a == b, |v| format!("{v:?}"))
}

/// Equal bytes.
pub fn bytes(tensor: &str, shape: &[usize], expected: &[u8], got: &[u8]) -> Outcome {
    first_difference(tensor, shape, (expected, got), |a, b| a == b, |v| format!("{v:#04x}"))
}

/// Equal bits, so that -0 is not 0 and a NaN is itself.
pub fn f32_bits(tensor: &str, shape: &[usize], expected: &[f32], got: &[f32]) -> Outcome {
    let show = |v: f32| format!("{v:e} ({:#010x})", v.to_bits());
    first_difference(tensor, shape, (expected, got), |a, b| a.to_bits() == b.to_bits(), show)
}

/// Equal bits, so that -0 is not 0 and a NaN is itself.
pub fn bf16_bits(tensor: &str, shape: &[usize], expected: &[bf16], got: &[bf16]) -> Outcome {
    let show = |v: bf16| format!("{v:e} ({:#06x})", v.to_bits());
    first_difference(tensor, shape, (expected, got), |a, b| a.to_bits() == b.to_bits(), show)
}

/// The 4-bit codes of packed bytes, in element order.
pub fn unpack(packed: &[u8]) -> Vec<u8> {
    let pair = |&byte: &u8| {
        let (even, odd) = e2m1::unpack(byte);
        [even, odd]
    };
    packed.iter().flat_map(pair).collect()
}

/// Equal codes of a packed `[rows, k/2]` operand; the index is that of the element.
pub fn codes(tensor: &str, (rows, k): (usize, usize), expected: &[u8], got: &[u8]) -> Outcome {
    let shape = [rows, k / 2 * 2];
    let show = |v: u8| format!("code {v} ({})", e2m1::decode(v));
    first_difference(tensor, &shape, (&unpack(expected), &unpack(got)), |a, b| a == b, show)
}

/// An expected value and how far a correct result may lie from it.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    /// The exact value; NaN where only NaN is right.
    pub value: f64,
    /// The largest difference that the formats and the order of summation explain.
    pub bound: f64,
}

impl Expected {
    /// No difference allowed.
    pub fn exactly(value: f64) -> Self {
        Self { value, bound: 0.0 }
    }

    fn holds(self, got: f64) -> bool {
        if self.value.is_nan() {
            got.is_nan()
        } else {
            self.value == got || (got - self.value).abs() <= self.bound
        }
    }
}

/// Every element within its own bound.
pub fn within(tensor: &str, shape: &[usize], expected: &[Expected], got: &[f64]) -> Outcome {
    same_length(tensor, shape, expected.len(), got.len())?;
    let wrong: Vec<usize> = (0..got.len()).filter(|&i| !expected[i].holds(got[i])).collect();
    let Some(&first) = wrong.first() else { return Ok(()) };
    let Expected { value, bound } = expected[first];
    Err(Failure::new(format!(
        "{tensor}{}: expected {value:e} ± {bound:.1e}, got {:e} ({} of {} beyond their bounds)",
        position(shape, first),
        got[first],
        wrong.len(),
        got.len(),
    )))
}

/// A BF16 tensor as exact `f64`.
pub fn widen(x: &[bf16]) -> Vec<f64> {
    x.iter().map(|&v| bf::to_f32(v) as f64).collect()
}

/// An FP32 tensor as exact `f64`.
pub fn widen_f32(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&v| v as f64).collect()
}

/// Every bit of every element zero.
pub fn all_zero<T: Copy + bytemuck::Pod + Debug>(tensor: &str, first: usize, got: &[T]) -> Outcome {
    let nonzero = got.iter().position(|v| bytemuck::bytes_of(v).iter().any(|&b| b != 0));
    match nonzero {
        None => Ok(()),
        Some(i) => {
            Err(Failure::new(format!("{tensor}, flat index {}: expected 0, got {:?}", first + i, got[i])))
        }
    }
}

/// Some element is not zero: an output that is all zero is equal to any other such, and wrong.
pub fn alive<T: Copy + Default + PartialEq>(tensor: &str, x: &[T]) -> Outcome {
    ensure(x.iter().any(|v| *v != T::default()), || format!("{tensor} is all zero"))
}

/// `condition`, or the message.
pub fn ensure(condition: bool, message: impl FnOnce() -> String) -> Outcome {
    if condition { Ok(()) } else { Err(Failure::new(message())) }
}
