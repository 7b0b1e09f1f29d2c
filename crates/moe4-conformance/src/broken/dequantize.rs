//! Mistakes in the way back to f32.

use super::Fault;
use moe4::kernels::contract::{Dequantize, Direction};
use moe4::kernels::{Backend, Error, Host};
use moe4::numerics::{BLOCK, e2m1, e4m3};
use moe4::tensor::ScaleLayout;

pub(super) fn dequantize<B: Backend<Memory = Host>>(
    fault: Fault,
    inner: &B,
    pass: Dequantize<'_, Host>,
) -> Result<(), Error> {
    let Dequantize { codes, scales, amax, cols, groups, direction, layout, out } = pass;
    let [_, k] = direction.shape(groups, cols);
    inner.dequantize(Dequantize { codes, scales, amax, cols, groups, direction, layout, out: &mut *out })?;
    let code = |row: usize, i: usize| {
        let (even, odd) = e2m1::unpack(codes[row * (k / 2) + i / 2]);
        if i.is_multiple_of(2) { even } else { odd }
    };
    let scale = |layout: ScaleLayout, row: usize, i: usize| scales[layout.offset(row, i / BLOCK, k / BLOCK)];
    let value = |code: u8, scale: u8, amax: f32| match fault {
        Fault::DequantizedInAnotherOrder => (e2m1::decode(code) * e4m3::decode(scale)) * (amax / 2688.0),
        _ => moe4::numerics::scale::dequantize(code, scale, amax),
    };
    let last = groups.experts() - 1;
    let owner = |row: usize, i: usize| match (direction, fault) {
        (Direction::Rowwise, Fault::DequantizedNobody) => {
            Some((0..last).find(|&e| groups.range(e).contains(&row)).unwrap_or(last))
        }
        (Direction::Rowwise, _) => (0..=last).find(|&e| groups.range(e).contains(&row)),
        (_, Fault::DequantizedWithoutPadding) => (0..=last).find(|&e| groups.range(e).contains(&i)),
        _ => (0..=last).find(|&e| groups.padded_range(e).contains(&i)),
    };
    let layout = if fault == Fault::DequantizedByPlainScales { ScaleLayout::Plain } else { layout };
    match fault {
        Fault::ZeroedEverything => out.fill(0.0),
        Fault::DequantizedNanOfHardware => {
            out.iter_mut().filter(|v| v.is_nan()).for_each(|v| *v = f32::from_bits(0x7FFF_FFFF));
        }
        _ => {}
    }
    let recomputed = [
        Fault::DequantizedInAnotherOrder,
        Fault::DequantizedByPlainScales,
        Fault::DequantizedWithoutPadding,
        Fault::DequantizedNobody,
    ];
    if fault.is(&recomputed) {
        for (at, out) in out.iter_mut().enumerate() {
            let (row, i) = (at / k, at % k);
            *out = owner(row, i).map_or(0.0, |e| value(code(row, i), scale(layout, row, i), amax[e]));
        }
    }
    Ok(())
}
