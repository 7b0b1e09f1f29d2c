//! One seed, many independent streams.

use rand::SeedableRng;
use rand::rngs::StdRng;

/// What random numbers are drawn for; each use has a stream of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Stream {
    /// Initial parameters; the index is the parameter's.
    Parameters = 1,
    /// Training batches; the index is the step.
    Data = 2,
    /// Sampling of text; the index is unused.
    Sample = 3,
    /// Stochastic rounding; the index is the layer.
    Rounding = 4,
}

/// A 64-bit seed for (seed, stream, index), each bit depending on all of them (SplitMix64's finalizer).
pub(crate) fn derive(seed: u64, stream: Stream, index: u64) -> u64 {
    let mix = |mut z: u64| {
        z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    mix(mix(mix(seed) ^ stream as u64) ^ index)
}

/// A generator for (seed, stream, index).
pub(crate) fn rng(seed: u64, stream: Stream, index: u64) -> StdRng {
    StdRng::seed_from_u64(derive(seed, stream, index))
}
