//! Quantized copies back to f32.

use super::{Packed, host, poisoned};
use moe4::kernels::contract::{self, Direction};
use moe4::kernels::{Backend, Error, Memory};
use moe4::tensor::{Groups, ScaleLayout};

/// `dequantize`.
#[derive(Clone, Copy, Debug)]
pub struct Dequantize<'a> {
    /// The copy.
    pub copy: &'a Packed,
    /// Columns of the tensor.
    pub cols: usize,
    /// Rows of each expert.
    pub groups: &'a Groups,
    /// Which copy this is.
    pub direction: Direction,
    /// Of the copy's scales.
    pub layout: ScaleLayout,
}

impl Dequantize<'_> {
    /// `[rows, k]`.
    pub fn run<B: Backend>(&self, b: &B) -> Result<Vec<f32>, Error> {
        let Dequantize { copy, cols, groups, direction, layout } = *self;
        let (codes, scales) = (b.upload(&copy.codes)?, b.upload(&copy.scales)?);
        let (amax, on_device) = (b.upload(&copy.amax)?, b.groups(groups)?);
        let [rows, k] = direction.shape(groups, cols);
        let mut out = poisoned::<B, f32>(b, rows * k)?;
        b.dequantize(contract::Dequantize {
            codes: B::Memory::view(&codes),
            scales: B::Memory::view(&scales),
            amax: B::Memory::view(&amax),
            cols,
            groups: &on_device,
            direction,
            layout,
            out: B::Memory::view_mut(&mut out),
        })?;
        host(b, &out)
    }
}
