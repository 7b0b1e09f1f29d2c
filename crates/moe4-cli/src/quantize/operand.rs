//! The matrix that is quantized: transposed if columnwise, padded with zeros, transformed if there is an RHT.
//!
//! Whatever the axis, blocks then lie along its rows.

use std::path::Path;

use moe4::checkpoint::printable;
use moe4::numerics::BLOCK;
use moe4::numerics::hadamard::{SignMask, rht};
use rayon::prelude::*;

use super::plan::output_dims;
use super::{Axis, Settings};

/// A row-major `f32` matrix `[rows, cols]`, `cols` a multiple of 16, all values finite.
pub(super) struct Operand {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) values: Vec<f32>,
}

/// Why a matrix cannot be quantized.
#[derive(Debug)]
pub(super) enum Fault {
    /// The element at this index of the input is a NaN or an infinity.
    NotFinite { index: usize, value: f32 },
    /// The sums of the transform exceed the range of BF16.
    RhtOverflow,
}

impl Operand {
    /// From the elements of `[rows, cols]` in the file.
    pub(super) fn new(
        elements: &[f32],
        rows: usize,
        cols: usize,
        settings: &Settings,
    ) -> Result<Self, Fault> {
        if let Some(index) = elements.iter().position(|value| !value.is_finite()) {
            return Err(Fault::NotFinite { index, value: elements[index] });
        }
        let mut values = match settings.axis {
            Axis::Rowwise => elements.to_vec(),
            Axis::Columnwise => transpose(elements, rows, cols),
        };
        if let Some(mask) = settings.rht {
            transform(&mut values, mask)?;
        }
        let (rows, cols) = output_dims(rows, cols, settings.axis);
        Ok(Self { rows, cols, values })
    }
}

impl Fault {
    /// The message, with the element's `(row, column)` in the tensor.
    pub(super) fn describe(
        self,
        name: &str,
        path: &Path,
        place: impl Fn(usize) -> (usize, usize),
    ) -> anyhow::Error {
        let (name, path) = (printable(name), path.display());
        match self {
            Fault::NotFinite { index, value } => {
                let (row, column) = place(index);
                anyhow::anyhow!(
                    "tensor '{name}' in {path}: element [{row}, {column}] is {value}; expected finite values, \
                     as E2M1 has no infinity and no NaN"
                )
            }
            Fault::RhtOverflow => anyhow::anyhow!(
                "tensor '{name}' in {path}: its Hadamard transform exceeds the range of BF16; pass --rht off, or \
                 scale the tensor down"
            ),
        }
    }
}

/// `[cols, rows rounded up to 16]`, zeros at the end of each row.
fn transpose(elements: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    let padded = rows.next_multiple_of(BLOCK);
    let mut out = vec![0.0; cols * padded];
    if out.is_empty() {
        return out;
    }
    // A band of 16 output rows reads whole cache lines of the input.
    out.par_chunks_mut(BLOCK * padded).enumerate().for_each(|(band, out)| {
        let first = band * BLOCK;
        for (row, line) in elements.chunks_exact(cols).enumerate() {
            let width = out.len() / padded;
            for (offset, value) in line[first..first + width].iter().enumerate() {
                out[offset * padded + row] = *value;
            }
        }
    });
    out
}

fn transform(values: &mut [f32], mask: SignMask) -> Result<(), Fault> {
    let (blocks, _) = values.as_chunks_mut::<BLOCK>();
    let overflow = blocks
        .par_iter_mut()
        .map(|block| {
            *block = rht(*block, mask);
            block.iter().any(|value| !value.is_finite())
        })
        .reduce(|| false, |a, b| a || b);
    if overflow { Err(Fault::RhtOverflow) } else { Ok(()) }
}
