//! Passes over whole rows: permutation and the gradient of FC2's bias.

use crate::kernels::contract::{GroupedBiasGrad, NO_ROW, Permute, Unpermute};
use crate::kernels::memory::Host;
use crate::kernels::{Error, Misuse};
use crate::numerics::bf16 as bf;
use half::bf16;

/// Every index names one of `rows` rows, or none.
pub(in crate::kernels) fn check_indices(
    what: &'static str,
    indices: &[u32],
    rows: usize,
) -> Result<(), Misuse> {
    match indices.iter().position(|&i| i != NO_ROW && i as usize >= rows) {
        None => Ok(()),
        Some(at) => Err(Misuse::Value {
            what: format!("{what}[{at}]"),
            expected: "the index of a row, or u32::MAX for none",
            got: format!("{} of {rows} rows", indices[at]),
        }),
    }
}

/// A sum that starts from +0: `Iterator::sum` of nothing is -0.
pub(super) fn total(terms: impl Iterator<Item = f64>) -> f64 {
    terms.fold(0.0, |sum, term| sum + term)
}

pub(super) fn permute(pass: Permute<'_, Host>) -> Result<(), Error> {
    let Permute { x, cols, source, out } = pass;
    check_indices("permute: source", source, x.len() / cols)?;
    for (&source, out) in source.iter().zip(out.chunks_exact_mut(cols)) {
        match source {
            NO_ROW => out.fill(bf16::ZERO),
            row => out.copy_from_slice(&x[row as usize * cols..][..cols]),
        }
    }
    Ok(())
}

pub(super) fn unpermute(pass: Unpermute<'_, Host>) -> Result<(), Error> {
    let Unpermute { y, cols, slot, top_k, weights, out } = pass;
    check_indices("unpermute: slot", slot, y.len() / cols)?;
    for (t, out) in out.chunks_exact_mut(cols).enumerate() {
        for (j, out) in out.iter_mut().enumerate() {
            let mut sum = 0f32;
            for choice in t * top_k..(t + 1) * top_k {
                if slot[choice] != NO_ROW {
                    let weight = weights.map_or(1.0, |w| w[choice]);
                    sum += weight * bf::to_f32(y[slot[choice] as usize * cols + j]);
                }
            }
            *out = bf::from_f32(sum);
        }
    }
    Ok(())
}

pub(super) fn grouped_bias_grad(pass: GroupedBiasGrad<'_, Host>) {
    let GroupedBiasGrad { dy, hidden, b2, prob, groups, dprob, mut db2 } = pass;
    for e in 0..groups.experts() {
        let rows = groups.range(e);
        if let Some(db2) = &mut db2 {
            for j in 0..hidden {
                let sum = total(rows.clone().map(|t| prob[t] as f64 * dy[t * hidden + j].to_f64()));
                db2[e * hidden + j] = sum as f32;
            }
        }
        for t in rows {
            let sum = total((0..hidden).map(|j| b2[e * hidden + j] as f64 * dy[t * hidden + j].to_f64()));
            dprob[t] = (dprob[t] as f64 + sum) as f32;
        }
    }
}
