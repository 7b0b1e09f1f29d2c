//! Passes over whole rows: permutation and the gradient of FC2's bias.
#![forbid(unsafe_code)]

use super::parallel::carve;
use crate::kernels::Error;
use crate::kernels::contract::{GroupedBiasGrad, NO_ROW, Permute, Unpermute};
use crate::kernels::memory::Host;
use crate::kernels::reference::check_indices;
use crate::numerics::bf16 as bf;
use half::bf16;
use rayon::prelude::*;

/// Rows that one task moves.
const ROWS: usize = 32;

pub(super) fn permute(pass: Permute<'_, Host>) -> Result<(), Error> {
    let Permute { x, cols, source, out } = pass;
    check_indices("permute: source", source, x.len() / cols)?;
    out.par_chunks_mut(ROWS * cols).zip(source.par_chunks(ROWS)).for_each(|(out, source)| {
        for (out, &source) in out.chunks_exact_mut(cols).zip(source) {
            match source {
                NO_ROW => out.fill(bf16::ZERO),
                row => out.copy_from_slice(&x[row as usize * cols..][..cols]),
            }
        }
    });
    Ok(())
}

pub(super) fn unpermute(pass: Unpermute<'_, Host>) -> Result<(), Error> {
    let Unpermute { y, cols, slot, top_k, weights, out } = pass;
    check_indices("unpermute: slot", slot, y.len() / cols)?;
    out.par_chunks_mut(ROWS * cols).enumerate().for_each_init(
        || vec![0f32; cols],
        |sum, (chunk, out)| {
            for (i, out) in out.chunks_exact_mut(cols).enumerate() {
                sum.fill(0.0);
                let token = chunk * ROWS + i;
                for choice in token * top_k..(token + 1) * top_k {
                    if slot[choice] == NO_ROW {
                        continue;
                    }
                    let weight = weights.map_or(1.0, |w| w[choice]);
                    for (sum, &v) in sum.iter_mut().zip(&y[slot[choice] as usize * cols..][..cols]) {
                        *sum += weight * bf::to_f32(v);
                    }
                }
                for (out, &sum) in out.iter_mut().zip(&*sum) {
                    *out = bf::from_f32(sum);
                }
            }
        },
    );
    Ok(())
}

pub(super) fn grouped_bias_grad(pass: GroupedBiasGrad<'_, Host>) {
    let GroupedBiasGrad { dy, hidden, b2, prob, groups, dprob, db2 } = pass;
    let (dprob, _) = carve(dprob, groups.splits());
    dprob.into_par_iter().enumerate().for_each(|(e, dprob)| {
        let b2 = &b2[e * hidden..(e + 1) * hidden];
        for (t, dprob) in groups.range(e).zip(dprob) {
            let dy = &dy[t * hidden..(t + 1) * hidden];
            *dprob += dy.iter().zip(b2).map(|(&d, &b)| b * bf::to_f32(d)).sum::<f32>();
        }
    });
    let Some(db2) = db2 else { return };
    db2.par_chunks_mut(hidden).enumerate().for_each(|(e, db2)| {
        db2.fill(0.0);
        for t in groups.range(e) {
            for (sum, &d) in db2.iter_mut().zip(&dy[t * hidden..(t + 1) * hidden]) {
                *sum += prob[t] * bf::to_f32(d);
            }
        }
    });
}
