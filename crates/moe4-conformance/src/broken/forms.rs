//! Mistakes in the forms of a copy: swizzled scales and BF16 values.

use super::Fault;
use half::bf16;
use moe4::kernels::Host;
use moe4::kernels::contract::{Cast, PackedOut};
use moe4::numerics::BLOCK;
use moe4::tensor::ScaleLayout;

/// What the outputs of a cast held before the pass.
pub(super) struct Stale {
    pub(super) codes: Vec<u8>,
    pub(super) scales: Vec<u8>,
    unpacked: Vec<bf16>,
}

impl Stale {
    pub(super) fn of(cast: &Cast<'_, Host>) -> Self {
        Self {
            codes: cast.packed.as_ref().map(|out| out.codes.to_vec()).unwrap_or_default(),
            scales: cast.packed.as_ref().map(|out| out.scales.to_vec()).unwrap_or_default(),
            unpacked: cast.unpacked.as_deref().map(<[bf16]>::to_vec).unwrap_or_default(),
        }
    }
}

/// Where a mistaken layout puts the scale of `(row, col)` of `[rows, cols]`.
fn misplaced(fault: Fault, row: usize, col: usize, rows: usize, cols: usize) -> usize {
    match fault {
        Fault::SwizzledTilesDownColumns => {
            let tile = (col / 4) * rows.div_ceil(128) + row / 128;
            tile * 512 + (row % 32) * 16 + row % 128 / 32 * 4 + col % 4
        }
        _ => ((row / 128) * cols.div_ceil(4) + col / 4) * 512 + row % 128 * 4 + col % 4,
    }
}

/// Spoils a copy `[rows, k]` of which the first `live` rows belong to experts.
pub(super) fn spoil(
    fault: Fault,
    cast: &mut Cast<'_, Host>,
    [rows, k]: [usize; 2],
    live: usize,
    stale: &Stale,
) {
    let alone = cast.packed.is_none();
    if let Some(PackedOut { scales, layout: ScaleLayout::Swizzled128x4, .. }) = &mut cast.packed {
        spoil_swizzled(fault, scales, rows, k / BLOCK, stale);
    }
    let Some(values) = &mut cast.unpacked else { return };
    match fault {
        Fault::UnpackedAloneLeftOut if alone => values.copy_from_slice(&stale.unpacked),
        Fault::UnpackedNobodyStale => values[live * k..].copy_from_slice(&stale.unpacked[live * k..]),
        _ => spoil_values(fault, values),
    }
}

fn spoil_swizzled(fault: Fault, scales: &mut [u8], rows: usize, cols: usize, stale: &Stale) {
    let layout = ScaleLayout::Swizzled128x4;
    let positions = || (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col)));
    match fault {
        Fault::SwizzledTilesDownColumns | Fault::SwizzledTileByRows => {
            let right = scales.to_vec();
            scales.fill(0);
            for (row, col) in positions() {
                scales[misplaced(fault, row, col, rows, cols)] = right[layout.offset(row, col, cols)];
            }
        }
        Fault::SwizzledPaddingStale => {
            let mut dirty = stale.scales.clone();
            for (row, col) in positions() {
                let at = layout.offset(row, col, cols);
                dirty[at] = scales[at];
            }
            scales.copy_from_slice(&dirty);
        }
        _ => {}
    }
}

/// Mistakes of single BF16 values.
pub(super) fn spoil_values(fault: Fault, values: &mut [bf16]) {
    match fault {
        Fault::UnpackedZeroPositive => {
            values.iter_mut().filter(|v| v.to_bits() == 0x8000).for_each(|v| *v = bf16::ZERO);
        }
        Fault::UnpackedNanAsZero => values.iter_mut().filter(|v| v.is_nan()).for_each(|v| *v = bf16::ZERO),
        Fault::UnpackedNanOfHardware => {
            values.iter_mut().filter(|v| v.is_nan()).for_each(|v| *v = bf16::from_bits(0x7FFF));
        }
        Fault::ZeroedQuantize | Fault::ZeroedEverything => values.fill(bf16::ZERO),
        _ => {}
    }
}
