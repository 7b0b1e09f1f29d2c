//! Permutation to expert order and back.

use crate::compare::{Expected, bf16_bits, ensure, equal, widen, within};
use crate::data::{self, Random};
use crate::drive::{permute, unpermute};
use crate::exact::{Sum, rounded};
use crate::report::{Failure, Outcome};
use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::Memory;
use moe4::kernels::contract::NO_ROW;
use moe4::numerics::bf16 as bf;
use moe4::routing::Permutation;

/// A random order of `n` slots.
fn shuffled(n: usize, seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    let mut order: Vec<u32> = (0..n as u32).collect();
    for i in (1..n).rev() {
        order.swap(i, random.below(i + 1));
    }
    order
}

/// There and back is the identity; rows of no source are zero; a bad index is refused by its place.
pub(super) fn round_trip<B: Backend>(b: &B) -> Outcome {
    for (tokens, cols) in [(1, 1), (37, 48), (64, 17), (0, 16)] {
        let x = data::normal(tokens * cols, 1.0, 260 + tokens as u64);
        let source = shuffled(tokens, 261);
        let moved = permute(b, &x, cols, &source)?;
        let expected: Vec<bf16> =
            source.iter().flat_map(|&s| x[s as usize * cols..][..cols].to_vec()).collect();
        bf16_bits("permuted", &[tokens, cols], &expected, &moved)?;
        let mut slot = vec![0; tokens];
        source.iter().enumerate().for_each(|(s, &t)| slot[t as usize] = s as u32);
        bf16_bits("back", &[tokens, cols], &x, &unpermute(b, &moved, cols, (&slot, 1), None)?)?;
    }
    let x = data::normal(4 * 16, 1.0, 262);
    let padded = permute(b, &x, 16, &[3, NO_ROW, 0])?;
    bf16_bits("a slot of no row", &[16], &[bf16::ZERO; 16], &padded[16..32])?;
    bf16_bits("a slot after it", &[16], &x[..16], &padded[32..])?;
    let refused = permute(b, &x, 16, &[0, 4]).err().map(|e| e.to_string()).unwrap_or_default();
    ensure(refused.contains("[1]"), || format!("index 4 of 4 rows: got '{refused}'"))?;
    let refused = unpermute(b, &x, 16, (&[0, 9], 1), None).err().map(|e| e.to_string()).unwrap_or_default();
    ensure(refused.contains("[1]"), || format!("index 9 of 4 rows: got '{refused}'"))
}

/// Top-k with weights and dropped choices: each token is the weighted sum of its rows.
pub(super) fn weighted<B: Backend>(b: &B) -> Outcome {
    let (tokens, top_k, cols) = (29, 3, 33);
    let y = data::normal(tokens * top_k * cols, 1.0, 270);
    let mut slot = shuffled(tokens * top_k, 271);
    let weights = data::normal_f32(tokens * top_k, 272);
    slot.iter_mut().step_by(7).for_each(|s| *s = NO_ROW);
    slot[3..6].fill(NO_ROW); // a token with no choice left
    for weights in [Some(&weights[..]), None] {
        let out = unpermute(b, &y, cols, (&slot, top_k), weights)?;
        let element = |i: usize| -> Expected {
            let (t, c) = (i / cols, i % cols);
            let chosen = (t * top_k..(t + 1) * top_k).filter(|&j| slot[j] != NO_ROW);
            let term = |j: usize| {
                let row = bf::to_f32(y[slot[j] as usize * cols + c]) as f64;
                weights.map_or(1.0, |w| w[j] as f64) * row
            };
            rounded(chosen.map(term).collect::<Sum>().f32())
        };
        let expected: Vec<_> = (0..tokens * cols).map(element).collect();
        within("out", &[tokens, cols], &expected, &widen(&out))?;
        bf16_bits("a token with no choice left", &[cols], &vec![bf16::ZERO; cols], &out[cols..2 * cols])?;
    }
    Ok(())
}

/// Tokens to their experts by `moe4::routing`: slots sorted by expert, then by token; back is the adjoint.
pub(super) fn routing<B: Backend>(b: &B) -> Outcome {
    let (tokens, experts, top_k, cols) = (41, 5, 2, 32);
    let mut random = Random::new(280);
    // Expert 3 is chosen by nobody.
    let chosen: Vec<u32> = (0..tokens * top_k).map(|_| [0, 1, 2, 4][random.below(4)]).collect();
    let permutation = Permutation::new(&chosen, experts, top_k).map_err(|e| Failure::new(e.to_string()))?;
    equal("sum of splits", &[1], &[tokens * top_k], &[permutation.splits.iter().sum()])?;
    equal("split of an expert chosen by nobody", &[1], &[0], &permutation.splits[3..4])?;
    let mut slots: Vec<(u32, u32)> =
        chosen.iter().enumerate().map(|(choice, &e)| (e, (choice / top_k) as u32)).collect();
    slots.sort();
    let order: Vec<u32> = slots.into_iter().map(|(_, token)| token).collect();
    equal("token of each slot", &[order.len()], &order, &permutation.token)?;

    let (x, y) = (data::normal(tokens * cols, 1.0, 281), data::normal(tokens * top_k * cols, 1.0, 282));
    let (on_device_x, on_device_y) = (b.upload(&x)?, b.upload(&y)?);
    let moved = permutation.permute(b, B::Memory::view(&on_device_x), cols)?;
    let back = permutation.unpermute(b, B::Memory::view(&on_device_y), cols)?;
    let (moved, back) = (b.download(B::Memory::view(&moved))?, b.download(B::Memory::view(&back))?);
    let expected: Vec<bf16> = order.iter().flat_map(|&t| x[t as usize * cols..][..cols].to_vec()).collect();
    bf16_bits("permuted", &[tokens * top_k, cols], &expected, &moved)?;
    let dot = |a: &[bf16], b: &[bf16]| -> f64 { widen(a).iter().zip(widen(b)).map(|(a, b)| a * b).sum() };
    let (one, other) = (dot(&moved, &y), dot(&x, &back));
    // Each sum over choices is rounded to BF16 once.
    let bound = widen(&x).iter().zip(widen(&back)).map(|(a, b)| (a * b).abs()).sum::<f64>() / 256.0;
    ensure((one - other).abs() <= bound, || format!("<P x, y> = {one}, <x, P* y> = {other}"))
}
