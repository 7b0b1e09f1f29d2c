//! Host data from a seed, in the kinds that break quantizers.

use half::bf16;
use moe4::numerics::bf16 as bf;
use proptest::prelude::*;

/// SplitMix64: tiny, and the same on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 24) as f32
    }

    /// Bell-shaped, variance 1.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }

    /// Below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }
}

/// What the values of a tensor look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Bell-shaped.
    Normal,
    /// Every exponent of BF16 from 2^-130 to 2^30.
    Wide,
    /// Bell-shaped with a few elements 1000 times as large.
    Outlier,
    /// Multiples of 1/4 up to 6: ties of E2M1 and exact zeros of both signs.
    Ties,
    /// Mostly zeros, whole blocks of them.
    Sparse,
    /// All zero.
    Zeros,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 6] =
        [Kind::Normal, Kind::Wide, Kind::Outlier, Kind::Ties, Kind::Sparse, Kind::Zeros];

    fn value(self, random: &mut Random, i: usize) -> f32 {
        match self {
            Kind::Normal => random.normal(),
            Kind::Wide => random.normal() * ((random.below(160) as f32) - 130.0).exp2(),
            Kind::Outlier => random.normal() * if random.below(97) == 0 { 1000.0 } else { 1.0 },
            Kind::Ties => (random.below(49) as f32 - 24.0) * if random.below(2) == 0 { 0.25 } else { -0.25 },
            Kind::Sparse => {
                if (i / 16).is_multiple_of(3) && random.below(4) == 0 {
                    random.normal() * 3.0
                } else {
                    0.0
                }
            }
            Kind::Zeros => 0.0,
        }
    }
}

/// `len` BF16 values of a kind.
pub fn tensor(kind: Kind, len: usize, seed: u64) -> Vec<bf16> {
    let mut random = Random::new(seed);
    (0..len).map(|i| bf::from_f32(kind.value(&mut random, i))).collect()
}

/// `len` bell-shaped values times `scale`.
pub fn normal(len: usize, scale: f32, seed: u64) -> Vec<bf16> {
    let mut random = Random::new(seed);
    (0..len).map(|_| bf::from_f32(random.normal() * scale)).collect()
}

/// `len` FP32 values, bell-shaped.
pub fn normal_f32(len: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.normal()).collect()
}

/// `len` routing probabilities: most in (0, 1), some exactly 0.
pub fn probabilities(len: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| if random.below(19) == 0 { 0.0 } else { random.unit() }).collect()
}

/// A kind of values, for property checks.
pub fn any_kind() -> impl Strategy<Value = Kind> {
    proptest::sample::select(&Kind::ALL[..])
}

/// Splits with empty, ragged and aligned experts, and rows past their end.
pub fn any_splits() -> impl Strategy<Value = (Vec<usize>, usize)> {
    let size = prop_oneof![Just(0usize), Just(1), Just(15), Just(16), Just(17), Just(32), 0usize..50];
    (proptest::collection::vec(size, 1..6), 0usize..20)
}
