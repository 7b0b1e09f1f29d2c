//! Mistakes in amax and quantize passes.

use super::Fault;
use super::forms::{self, Stale};
use crate::exact;
use half::bf16;
use moe4::kernels::contract::*;
use moe4::kernels::{Backend, Error, Host};
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::{RandomStream, Rounding};
use moe4::numerics::{BLOCK, bf16 as bf, e2m1, e4m3};
use moe4::tensor::{Groups, ScaleLayout};
use std::sync::atomic::{AtomicUsize, Ordering};

fn spoil_amax(fault: Fault, x: &[bf16], cols: usize, groups: &Groups, stale: &[f32], amax: &mut [f32]) {
    match fault {
        Fault::AmaxOfNeighbours => amax.fill(amax.iter().copied().fold(0.0, f32::max)),
        Fault::AmaxOfNobody => {
            let last = groups.experts() - 1;
            let all = exact::amax(
                &x[groups.range(last).start * cols..],
                1,
                &Groups::single(x.len() - groups.range(last).start * cols),
            );
            amax[last] = amax[last].max(all[0]);
        }
        Fault::AmaxOfEmptyExpertStale => {
            for e in (0..groups.experts()).filter(|&e| groups.range(e).is_empty()) {
                amax[e] = stale[e];
            }
        }
        Fault::ExpertsPast256Ignored => amax.iter_mut().skip(256).for_each(|amax| *amax = 0.0),
        Fault::ZeroedEverything => amax.fill(0.0),
        _ => {}
    }
}

pub(super) fn group_amax<B: Backend<Memory = Host>>(
    fault: Fault,
    inner: &B,
    pass: GroupAmax<'_, Host>,
) -> Result<(), Error> {
    let GroupAmax { x, cols, groups, amax } = pass;
    let stale = amax.to_vec();
    inner.group_amax(GroupAmax { x, cols, groups, amax })?;
    spoil_amax(fault, x, cols, groups, &stale, amax);
    Ok(())
}

pub(super) fn group_hadamard_amax<B: Backend<Memory = Host>>(
    fault: Fault,
    inner: &B,
    pass: GroupHadamardAmax<'_, Host>,
) -> Result<(), Error> {
    let GroupHadamardAmax { x, cols, groups, sign_mask, amax, amax_rht } = pass;
    let unsigned = fault.is(&[Fault::SignsDropped, Fault::UnsignedAmax]);
    let sign_mask = if unsigned { SignMask::NONE } else { sign_mask };
    let (stale, stale_rht) = (amax.to_vec(), amax_rht.to_vec());
    inner.group_hadamard_amax(GroupHadamardAmax { x, cols, groups, sign_mask, amax, amax_rht })?;
    spoil_amax(fault, x, cols, groups, &stale, amax);
    spoil_amax(fault, x, cols, groups, &stale_rht, amax_rht);
    if fault == Fault::ReversedButterfly {
        for (e, amax) in amax_rht.iter_mut().enumerate() {
            *amax = reversed_amax(x, cols, groups, e, sign_mask);
        }
    }
    Ok(())
}

fn reversed_amax(x: &[bf16], cols: usize, groups: &Groups, e: usize, mask: SignMask) -> f32 {
    let rows = groups.range(e);
    let mut largest = 0f32;
    for first in rows.clone().step_by(BLOCK) {
        for col in 0..cols {
            let at = |i: usize| {
                let t = first + i;
                if t < rows.end { bf::to_f32(x[t * cols + col]) * mask.sign(i) } else { 0.0 }
            };
            let mut v: [f32; BLOCK] = std::array::from_fn(at);
            for stride in [8, 4, 2, 1] {
                let old = v;
                for (i, v) in v.iter_mut().enumerate() {
                    *v = if i & stride == 0 { old[i] + old[i + stride] } else { old[i - stride] - old[i] };
                }
            }
            let finite = v.map(|v| bf::round(v * 0.25).abs()).into_iter().filter(|v| v.is_finite());
            largest = finite.fold(largest, f32::max);
        }
    }
    largest
}

fn spoil_rounding(fault: Fault, rounding: Rounding, groups: &Groups, calls: &AtomicUsize) -> Rounding {
    let Rounding::Stochastic(RandomStream { seed, stream }) = rounding else { return rounding };
    let other = |change: u64| Rounding::Stochastic(RandomStream { seed: seed ^ change, stream });
    match fault {
        Fault::StreamOfLaunch => other(groups.rows() as u64),
        Fault::StreamUnsteady => other(calls.fetch_add(1, Ordering::Relaxed) as u64 + 1),
        Fault::NearestForStochastic => Rounding::Nearest,
        Fault::StreamTruncated => {
            let low = |v: u64| v & u64::from(u32::MAX);
            Rounding::Stochastic(RandomStream { seed: low(seed), stream: low(stream) })
        }
        _ => rounding,
    }
}

fn spoil_copy(fault: Fault, rounding: Rounding, codes: &mut [u8], scales: &mut [u8]) {
    match fault {
        Fault::NonFiniteIgnored => {
            scales.iter_mut().filter(|s| **s == e4m3::NAN).for_each(|s| *s = 0x7E);
        }
        Fault::SignOfZeroDropped => {
            let positive = |code: u8| if code == 8 { 0 } else { code };
            for byte in codes {
                let (even, odd) = e2m1::unpack(*byte);
                *byte = e2m1::pack(positive(even), positive(odd));
            }
        }
        Fault::ZerosForStochastic if rounding != Rounding::Nearest => codes.fill(0),
        Fault::ZeroedQuantize | Fault::ZeroedEverything => {
            codes.fill(0);
            scales.fill(0);
        }
        _ => {}
    }
}

/// Scale and multiplier of a block by a shortcut.
fn shortcut(fault: Fault, amax: f32, top: f32) -> (u8, f32) {
    let s_enc = match fault {
        Fault::ReciprocalOfAmax => 2688.0 * (1.0 / amax),
        _ => 2688.0 / amax,
    };
    let d = (top * (s_enc * (1.0 / 6.0))).min(448.0);
    let mut s = e4m3::encode(d);
    if fault == Fault::ScaleTiesAway && s < 0x7E && (e4m3::decode(s) + e4m3::decode(s + 1)) * 0.5 == d {
        s += 1;
    }
    let e = match fault {
        Fault::ReciprocalOfScale => s_enc / e4m3::decode(s),
        _ => 1.0 / (e4m3::decode(s) * (1.0 / s_enc)),
    };
    (s, e.min(f32::MAX))
}

fn requantize_rows(
    fault: Fault,
    x: &[bf16],
    cols: usize,
    groups: &Groups,
    amax: &[f32],
    out: (&mut [u8], &mut [u8]),
) {
    for (e, &amax) in amax.iter().enumerate().filter(|(_, amax)| **amax > 0.0) {
        let rows = groups.range(e);
        for block in rows.start * cols / BLOCK..rows.end * cols / BLOCK {
            let v = &x[block * BLOCK..][..BLOCK];
            if v.iter().any(|v| !v.is_finite()) {
                continue;
            }
            let v: Vec<f32> = v.iter().map(|&v| bf::to_f32(v)).collect();
            let (scale, multiplier) = shortcut(fault, amax, v.iter().fold(0.0, |a, v| a.max(v.abs())));
            out.1[block] = scale;
            let code = |i: usize| e2m1::encode(v[i] * multiplier);
            for i in 0..BLOCK / 2 {
                out.0[block * BLOCK / 2 + i] = e2m1::pack(code(2 * i), code(2 * i + 1));
            }
        }
    }
}

pub(super) fn group_quantize<B: Backend<Memory = Host>>(
    fault: Fault,
    calls: &AtomicUsize,
    inner: &B,
    pass: GroupQuantize<'_, Host>,
) -> Result<(), Error> {
    let GroupQuantize { x, cols, groups, mut rowwise, mut columnwise } = pass;
    let stale_rows = rowwise.as_ref().map(Stale::of);
    let stale_columns = columnwise.as_ref().map(|c| Stale::of(&c.cast));
    if let Some(copy) = &mut columnwise {
        if fault == Fault::SignsDropped {
            copy.rht = copy.rht.map(|_| SignMask::NONE);
        }
        if let (Fault::StreamShared, Some(row)) = (fault, &rowwise) {
            copy.cast.rounding = row.rounding;
        }
    }
    let casts = rowwise.iter_mut().chain(columnwise.as_mut().map(|c| &mut c.cast));
    casts.for_each(|cast| cast.rounding = spoil_rounding(fault, cast.rounding, groups, calls));

    fn again<'a>(cast: &'a mut Cast<'_, Host>) -> Cast<'a, Host> {
        Cast {
            amax: cast.amax,
            rounding: cast.rounding,
            packed: cast.packed.as_mut().map(|out| PackedOut {
                codes: &mut *out.codes,
                scales: &mut *out.scales,
                layout: out.layout,
            }),
            unpacked: cast.unpacked.as_deref_mut(),
        }
    }
    inner.group_quantize(GroupQuantize {
        x,
        cols,
        groups,
        rowwise: rowwise.as_mut().map(again),
        columnwise: columnwise.as_mut().map(|c| ColumnwiseCast { rht: c.rht, cast: again(&mut c.cast) }),
    })?;

    if let Some((cast, stale)) = rowwise.as_mut().zip(stale_rows) {
        if let Some(PackedOut { codes, scales, layout }) = &mut cast.packed {
            let plain = *layout == ScaleLayout::Plain;
            let shortcuts = [Fault::ReciprocalOfScale, Fault::ReciprocalOfAmax, Fault::ScaleTiesAway];
            if fault.is(&shortcuts) && cast.rounding == Rounding::Nearest && plain {
                requantize_rows(fault, x, cols, groups, cast.amax, (&mut *codes, &mut *scales));
            }
            if fault == Fault::StalePadding {
                let (first, first_scale) = (groups.live_rows() * cols / 2, groups.live_rows() * cols / BLOCK);
                codes[first..].copy_from_slice(&stale.codes[first..]);
                if plain {
                    scales[first_scale..].copy_from_slice(&stale.scales[first_scale..]);
                }
            }
            let whole = cols / 128 * 128;
            if fault == Fault::LastColumnTileDropped && whole > 0 {
                codes.chunks_mut(cols / 2).for_each(|row| row[whole / 2..].fill(0));
            }
            if fault == Fault::QuantizedFirstBatchOnly {
                let first =
                    match calls.compare_exchange(0, groups.rows(), Ordering::Relaxed, Ordering::Relaxed) {
                        Ok(_) => groups.rows(),
                        Err(rows) => rows.min(groups.rows()),
                    };
                codes[first * cols / 2..].fill(0);
            }
        }
        forms::spoil(fault, cast, [groups.rows(), cols], groups.live_rows(), &stale);
        if let Some(out) = &mut cast.packed {
            spoil_copy(fault, cast.rounding, out.codes, out.scales);
        }
    }
    if let Some((ColumnwiseCast { cast, .. }, stale)) = columnwise.as_mut().zip(stale_columns) {
        if let (Fault::StalePadding, Some(out)) = (fault, &mut cast.packed) {
            let width = groups.padded_rows() / 2;
            for e in (0..groups.experts()).filter(|&e| groups.range(e).len() % BLOCK < BLOCK - 1) {
                let last = groups.padded_range(e).end / 2;
                if !groups.range(e).len().is_multiple_of(BLOCK) {
                    (0..cols)
                        .for_each(|c| out.codes[c * width + last - 1] = stale.codes[c * width + last - 1]);
                }
            }
        }
        forms::spoil(fault, cast, [cols, groups.padded_rows()], cols, &stale);
        if let Some(out) = &mut cast.packed {
            spoil_copy(fault, cast.rounding, out.codes, out.scales);
        }
    }
    Ok(())
}

pub(super) fn quantize_weights<B: Backend<Memory = Host>>(
    fault: Fault,
    inner: &B,
    pass: QuantizeWeights<'_, Host>,
) -> Result<(), Error> {
    let QuantizeWeights { w, shape, codes, scales, mut unpacked, amax } = pass;
    let adjacent = w.windows(2).all(|pair| pair[0].as_ptr_range().end == pair[1].as_ptr());
    let read = match (fault, w.first()) {
        // What lies behind the first weight is anybody's guess; here it is that weight once more.
        (Fault::WeightsAssumedAdjacent, Some(&first)) if !adjacent => vec![first; w.len()],
        _ => w.clone(),
    };
    inner.quantize_weights(QuantizeWeights {
        w: read,
        shape,
        codes: &mut *codes,
        scales: &mut *scales,
        unpacked: unpacked.as_deref_mut(),
        amax: &mut *amax,
    })?;
    if let Some(values) = unpacked {
        if fault == Fault::WeightsUnpackedOfFirstExpert {
            values[shape.n * shape.k..].fill(bf16::ZERO);
        }
        forms::spoil_values(fault, values);
    }
    if fault == Fault::WeightsByRow {
        let slab = shape.n * shape.k;
        for (e, w) in w.into_iter().enumerate() {
            let out =
                (&mut codes[e * slab / 2..][..slab / 2], &mut scales[e * slab / BLOCK..][..slab / BLOCK]);
            requantize_rows(fault, w, shape.k, &Groups::single(shape.n), &amax[e..=e], out);
        }
    }
    if fault == Fault::ZeroedEverything {
        amax.fill(0.0);
    }
    spoil_copy(fault, Rounding::Nearest, codes, scales);
    Ok(())
}
