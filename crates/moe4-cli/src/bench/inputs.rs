//! Made-up inputs: never zeros, which hardware computes at a higher clock than anything else.

use half::bf16;
use moe4::kernels::contract::NO_ROW;
use moe4::numerics::philox::philox4x32;
use rayon::prelude::*;

use super::shapes::Shape;

const SEED: u64 = 1;
/// Standard deviation of the sum of four bytes.
const FOUR_BYTES: f32 = 147.8;

/// About normal values of standard deviation `scale`: sums of four random bytes. Streams are independent.
pub(super) fn normal(stream: u64, len: usize, scale: f32) -> Vec<bf16> {
    let value = |word: u32| {
        let sum: u32 = word.to_le_bytes().into_iter().map(u32::from).sum();
        bf16::from_f32((sum as f32 - 510.0) / FOUR_BYTES * scale)
    };
    let mut out = vec![bf16::ZERO; len];
    out.par_chunks_mut(4).enumerate().with_min_len(1 << 12).for_each(|(index, out)| {
        let words = philox4x32(SEED, stream, index as u64);
        for (out, word) in out.iter_mut().zip(words) {
            *out = value(word);
        }
    });
    out
}

/// Routing probabilities: uniform between 0.25 and 0.75.
pub(super) fn probabilities(stream: u64, len: usize) -> Vec<f32> {
    let unit = |index: usize| philox4x32(SEED, stream, index as u64)[0] as f32 / u32::MAX as f32;
    (0..len).map(|index| 0.25 + 0.5 * unit(index)).collect()
}

/// Which row of the expert order each choice of a token has, and the token of each row.
pub(super) struct Routing {
    /// `[T]`.
    pub(super) source: Vec<u32>,
    /// `[T / top_k, top_k]`.
    pub(super) slot: Vec<u32>,
}

/// Choices dealt to the experts at random; within an expert tokens ascend, as a router sorts them. Choices beyond
/// the sum of the splits are dropped.
pub(super) fn routing(shape: &Shape) -> Routing {
    let mut choices: Vec<u32> = (0..shape.rows as u32).collect();
    choices.sort_by_cached_key(|&choice| philox4x32(SEED, 100, u64::from(choice)));
    let mut routing = Routing { source: vec![NO_ROW; shape.rows], slot: vec![NO_ROW; shape.rows] };
    let mut row = 0;
    for &split in &shape.splits {
        let of_expert = &mut choices[row..row + split];
        of_expert.sort_unstable();
        for &choice in &*of_expert {
            routing.source[row] = choice / shape.top_k as u32;
            routing.slot[choice as usize] = row as u32;
            row += 1;
        }
    }
    routing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_look_normal_and_do_not_depend_on_the_length() {
        let values = normal(3, 40_000, 2.0);
        let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / 40_000.0;
        assert!(mean(&mut values.iter().map(|v| v.to_f64())).abs() < 0.05);
        let variance = mean(&mut values.iter().map(|v| v.to_f64().powi(2)));
        assert!((3.8..4.2).contains(&variance), "{variance}");
        assert_eq!(normal(3, 1001, 2.0), values[..1001]);
        assert_ne!(normal(4, 1001, 2.0), values[..1001]);
    }
}
