//! Mistakes in permutation and in the bias's gradient.

use super::Fault;
use half::bf16;
use moe4::kernels::contract::*;
use moe4::kernels::{Backend, Error, Host};

pub(super) fn permute<B: Backend<Memory = Host>>(
    fault: Fault,
    inner: &B,
    pass: Permute<'_, Host>,
) -> Result<(), Error> {
    let Permute { x, cols, source, out } = pass;
    let stale = out.to_vec();
    inner.permute(Permute { x, cols, source, out: &mut *out })?;
    match fault {
        Fault::AbsentRowStale => {
            for (slot, _) in source.iter().enumerate().filter(|(_, source)| **source == NO_ROW) {
                let at = slot * cols..(slot + 1) * cols;
                out[at.clone()].copy_from_slice(&stale[at]);
            }
        }
        Fault::ZeroedEverything => out.fill(bf16::ZERO),
        _ => {}
    }
    Ok(())
}

pub(super) fn unpermute<B: Backend<Memory = Host>>(
    fault: Fault,
    inner: &B,
    pass: Unpermute<'_, Host>,
) -> Result<(), Error> {
    let Unpermute { y, cols, slot, top_k, mut weights, out } = pass;
    if fault == Fault::WeightsOfUnpermuteIgnored {
        weights = None;
    }
    inner.unpermute(Unpermute { y, cols, slot, top_k, weights, out: &mut *out })?;
    if fault == Fault::ZeroedEverything {
        out.fill(bf16::ZERO);
    }
    Ok(())
}

pub(super) fn bias_grad<B: Backend<Memory = Host>>(
    fault: Fault,
    inner: &B,
    pass: GroupedBiasGrad<'_, Host>,
) -> Result<(), Error> {
    let GroupedBiasGrad { dy, hidden, b2, prob, groups, dprob, mut db2 } = pass;
    if fault == Fault::ProbabilityGradientOverwritten {
        dprob.fill(0.0);
    }
    let again = db2.as_deref_mut();
    inner.grouped_bias_grad(GroupedBiasGrad {
        dy,
        hidden,
        b2,
        prob,
        groups,
        dprob: &mut *dprob,
        db2: again,
    })?;
    if fault == Fault::ZeroedEverything {
        dprob.fill(0.0);
        db2.into_iter().for_each(|db2| db2.fill(0.0));
    }
    Ok(())
}
