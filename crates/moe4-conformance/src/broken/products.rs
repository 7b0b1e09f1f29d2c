//! Mistakes in products and their epilogues.

use super::Fault;
use half::bf16;
use moe4::kernels::activation::{Activation, ClampedQgeglu, GluLayout, SituGlu, TanhSrelu};
use moe4::kernels::contract::*;
use moe4::kernels::{Backend, Error, Host, Memory};
use moe4::numerics::bf16 as bf;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::scale::RANGE;
use moe4::tensor::{Groups, Nvfp4};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The same weights under a shorter borrow, but for what the fault does to them.
fn spoil_weights<'short, 'long: 'short>(
    fault: Fault,
    w: WeightOperand<'long, Host>,
) -> WeightOperand<'short, Host> {
    match w {
        WeightOperand::Bf16(w) => WeightOperand::Bf16(w.into_iter().collect()),
        WeightOperand::Nvfp4 { packed, unpacked: Some(values) }
            if fault == Fault::UnpackedWeightScaleIgnored =>
        {
            WeightOperand::Bf16(Host::split(values, packed.amax.len()))
        }
        WeightOperand::Nvfp4 { packed: Nvfp4 { codes, scales, amax }, unpacked } => {
            WeightOperand::Nvfp4 { packed: Nvfp4 { codes, scales, amax }, unpacked }
        }
    }
}

/// The amaxes that a faulty product takes for those of its operand. One of [`RANGE`] has the scale 1.
fn spoil_unpacked(fault: Fault, operand: &Operand<'_, Host>) -> Vec<f32> {
    let amax = operand.amax().unwrap_or_default();
    match (operand, fault) {
        (Operand::Unpacked(_), Fault::UnpackedScaleIgnored) => vec![RANGE; amax.len()],
        _ => amax.to_vec(),
    }
}

/// The same operand with other amaxes.
fn with_amax<'short, 'long: 'short>(
    operand: Operand<'long, Host>,
    amax: &'short [f32],
) -> Operand<'short, Host> {
    match operand {
        Operand::Bf16(x) => Operand::Bf16(x),
        Operand::Nvfp4(Nvfp4 { codes, scales, .. }) => Operand::Nvfp4(Nvfp4 { codes, scales, amax }),
        Operand::Unpacked(Unpacked { values, .. }) => Operand::Unpacked(Unpacked { values, amax }),
    }
}

/// `v` times `factor`.
fn scaled(v: bf16, factor: f32) -> bf16 {
    bf::from_f32(bf::to_f32(v) * factor)
}

fn spoil_rows(fault: Fault, first_rows: usize, groups: &Groups, cols: usize, out: &mut [bf16]) {
    let live = groups.live_rows();
    match fault {
        Fault::ZeroedGemm | Fault::ZeroedEverything => out.fill(bf16::ZERO),
        Fault::ExpertZeroOnly => out[groups.range(0).end * cols..].fill(bf16::ZERO),
        Fault::NeighbourRowOverwritten => {
            // The last row of an expert is written once more, one row too far.
            for e in 0..groups.experts() {
                let rows = groups.range(e);
                if !rows.is_empty() && rows.end < live {
                    out.copy_within((rows.end - 1) * cols..rows.end * cols, rows.end * cols);
                }
            }
        }
        Fault::NobodysRowsComputed => out[live * cols..].fill(bf16::NAN),
        Fault::OneBadRow if live > 0 => {
            out[(live - 1) * cols..live * cols].iter_mut().for_each(|v| *v = scaled(*v, 1.02));
        }
        Fault::FirstBatchOnly => {
            let first = (first_rows * cols).min(out.len());
            out[first..].fill(bf16::ZERO);
        }
        _ => {}
    }
}

pub(super) fn gemm<B: Backend<Memory = Host>>(
    fault: Fault,
    calls: &AtomicUsize,
    inner: &B,
    pass: GroupedGemm<'_, Host>,
) -> Result<(), Error> {
    let GroupedGemm { a, w, shape, side, groups, bias, out } = pass;
    let cols = side.dims(shape).0;
    let bias = bias
        .filter(|_| fault != Fault::BiasIgnored)
        .map(|Bias { bias, prob }| Bias { bias, prob: prob.filter(|_| fault != Fault::BiasNotScaled) });
    let mut amax = spoil_unpacked(fault, &a);
    if let (Fault::FirstExpertsScale, Some(&first)) = (fault, amax.first()) {
        amax.fill(first);
    }
    let a = with_amax(a, &amax);
    let w = spoil_weights(fault, w);
    inner.grouped_gemm(GroupedGemm { a, w, shape, side, groups, bias, out: &mut *out })?;
    let first_rows = match calls.compare_exchange(0, groups.rows(), Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => groups.rows(),
        Err(rows) => rows,
    };
    spoil_rows(fault, first_rows, groups, cols, out);
    Ok(())
}

fn spoil_amax_out<'short, 'long: 'short>(
    fault: Fault,
    out: Option<AmaxOut<'long, Host>>,
) -> Option<AmaxOut<'short, Host>> {
    let unsigned = fault == Fault::UnsignedEpilogueAmax;
    out.map(|AmaxOut { amax, rht }| {
        let rht =
            rht.map(|(kind, amax)| (if unsigned { RhtAmax::Exact(SignMask::NONE) } else { kind }, amax));
        AmaxOut { amax, rht }
    })
}

fn spoil_layout(fault: Fault, layout: GluLayout) -> GluLayout {
    if fault == Fault::LayoutIgnored { GluLayout::Halves } else { layout }
}

pub(super) fn gemm_act<B: Backend<Memory = Host>>(
    fault: Fault,
    inner: &B,
    pass: GroupedGemmAct<'_, Host>,
) -> Result<(), Error> {
    let GroupedGemmAct { x, w1, b1, hidden, ffn, activation, layout, prob, groups, c, h, h_amax } = pass;
    let amax = spoil_unpacked(fault, &x);
    inner.grouped_gemm_act(GroupedGemmAct {
        x: with_amax(x, &amax),
        w1: spoil_weights(fault, w1),
        b1,
        hidden,
        ffn,
        activation,
        layout: spoil_layout(fault, layout),
        prob,
        groups,
        c: &mut *c,
        h: &mut *h,
        h_amax: spoil_amax_out(fault, h_amax),
    })?;
    if fault.is(&[Fault::ZeroedAct, Fault::ZeroedEverything]) {
        c.fill(bf16::ZERO);
        h.fill(bf16::ZERO);
    }
    Ok(())
}

fn spoil_activation(fault: Fault, activation: Activation) -> Activation {
    match (fault, activation) {
        (Fault::ClampGradientPasses, Activation::ClampedQgeglu(p)) => {
            Activation::ClampedQgeglu(ClampedQgeglu { limit: 1e30, ..p })
        }
        (Fault::DefaultParametersInBackward, Activation::ClampedQgeglu(_)) => {
            Activation::ClampedQgeglu(ClampedQgeglu::default())
        }
        (Fault::DefaultParametersInBackward, Activation::SituGlu(_)) => {
            Activation::SituGlu(SituGlu::default())
        }
        (Fault::DefaultParametersInBackward, Activation::TanhSrelu(_)) => {
            Activation::TanhSrelu(TanhSrelu { s: 16.0 })
        }
        (_, other) => other,
    }
}

pub(super) fn gemm_dact<B: Backend<Memory = Host>>(
    fault: Fault,
    inner: &B,
    pass: GroupedGemmDact<'_, Host>,
) -> Result<(), Error> {
    let GroupedGemmDact {
        dy,
        w2,
        hidden,
        ffn,
        activation,
        layout,
        c,
        prob,
        groups,
        dc,
        dprob,
        mut db1,
        dc_amax,
        mut h,
        dh,
    } = pass;
    let n1 = activation.fc1_rows(ffn);
    let amax = spoil_unpacked(fault, &dy);
    inner.grouped_gemm_dact(GroupedGemmDact {
        dy: with_amax(dy, &amax),
        w2: spoil_weights(fault, w2),
        hidden,
        ffn,
        activation: spoil_activation(fault, activation),
        layout: spoil_layout(fault, layout),
        c,
        prob,
        groups,
        dc: &mut *dc,
        dprob: &mut *dprob,
        db1: db1.as_deref_mut(),
        dc_amax: spoil_amax_out(fault, dc_amax),
        h: h.as_deref_mut(),
        dh,
    })?;
    match fault {
        Fault::ZeroedDact | Fault::ZeroedEverything => {
            dc.fill(bf16::ZERO);
            dprob.fill(0.0);
        }
        Fault::RebuiltActivationOff => {
            let nonzero = h.into_iter().flatten().find(|v| bf::to_f32(**v) != 0.0 && v.is_finite());
            if let Some(v) = nonzero {
                *v = bf16::from_bits(v.to_bits() ^ 1);
            }
        }
        Fault::ProbabilityGradientOfOneRow => {
            if let Some(t) = (0..groups.live_rows()).rev().find(|&t| prob[t] != 0.0) {
                dprob[t] *= 1.01;
            }
        }
        Fault::BiasGradientWithoutLastRow => {
            if let Some(db1) = db1 {
                for e in (0..groups.experts()).filter(|&e| !groups.range(e).is_empty()) {
                    let last = (groups.range(e).end - 1) * n1;
                    (0..n1).for_each(|j| db1[e * n1 + j] -= bf::to_f32(dc[last + j]));
                }
            }
        }
        _ => {}
    }
    Ok(())
}

/// Overwrites one expert's slab, and the others as the fault wants.
fn spoil_grads<T: Copy>(
    fault: Fault,
    mode: GradMode,
    groups: &Groups,
    zero: T,
    dw: &mut [&mut [T]],
    stale: &[Vec<T>],
) {
    for (e, dw) in dw.iter_mut().enumerate() {
        let empty = groups.range(e).is_empty();
        match (fault, mode) {
            (Fault::ZeroedWgrad | Fault::ZeroedEverything, _) => dw.fill(zero),
            (Fault::ExpertZeroOnly, _) if e > 0 => dw.fill(zero),
            (Fault::EmptyExpertLeftDirty, _) if empty => dw.copy_from_slice(&stale[e]),
            (Fault::EmptyExpertCleared, GradMode::Accumulate) if empty => dw.fill(zero),
            _ => {}
        }
    }
}

/// Codes of a columnwise operand without the tokens past each expert's last whole tile.
fn without_last_tile(codes: &[u8], groups: &Groups) -> Vec<u8> {
    let mut out = codes.to_vec();
    let width = groups.padded_rows() / 2;
    for e in (0..groups.experts()).filter(|&e| !groups.range(e).len().is_multiple_of(16)) {
        let end = groups.padded_range(e).end / 2;
        out.chunks_mut(width).for_each(|row| row[end - 8..end].fill(0));
    }
    out
}

pub(super) fn wgrad<B: Backend<Memory = Host>>(
    fault: Fault,
    inner: &B,
    pass: GroupedWgrad<'_, Host>,
) -> Result<(), Error> {
    let GroupedWgrad { a, b, shape, groups, dw: WeightGrad { buffers, mode } } = pass;
    let used = if fault == Fault::AccumulateIgnored { GradMode::Overwrite } else { mode };
    let codes = match &a {
        Operand::Nvfp4(q) if fault == Fault::LastTileIgnored => without_last_tile(q.codes, groups),
        Operand::Nvfp4(q) => q.codes.to_vec(),
        Operand::Bf16(_) | Operand::Unpacked(_) => vec![],
    };
    let amaxes = [spoil_unpacked(fault, &a), spoil_unpacked(fault, &b)];
    let a = match a {
        Operand::Nvfp4(Nvfp4 { scales, amax, .. }) => {
            Operand::Nvfp4(Nvfp4 { codes: &codes[..], scales, amax })
        }
        other => with_amax(other, &amaxes[0]),
    };
    let b = with_amax(b, &amaxes[1]);
    match buffers {
        GradBuffers::F32(mut dw) => {
            let stale: Vec<_> = dw.iter().map(|dw| dw.to_vec()).collect();
            let buffers = GradBuffers::F32(dw.iter_mut().map(|dw| &mut **dw).collect());
            inner.grouped_wgrad(GroupedWgrad {
                a,
                b,
                shape,
                groups,
                dw: WeightGrad { buffers, mode: used },
            })?;
            spoil_grads(fault, mode, groups, 0.0, &mut dw, &stale);
        }
        GradBuffers::Bf16(mut dw) => {
            let stale: Vec<_> = dw.iter().map(|dw| dw.to_vec()).collect();
            let buffers = GradBuffers::Bf16(dw.iter_mut().map(|dw| &mut **dw).collect());
            inner.grouped_wgrad(GroupedWgrad {
                a,
                b,
                shape,
                groups,
                dw: WeightGrad { buffers, mode: used },
            })?;
            spoil_grads(fault, mode, groups, bf16::ZERO, &mut dw, &stale);
        }
    }
    Ok(())
}
