//! The order of gate and up rows in `W1`, and so of the columns of `c` and `dc`.

use super::Activation;
use crate::kernels::error::Misuse;
use std::fmt;
use std::str::FromStr;

/// Where the gate and the up row of a feature lie. Of no effect for an activation without an up projection.
///
/// `W1` and `c` are quantized in the stored order, so `Elementwise` has scales of its own and is no permutation of
/// the other two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GluLayout {
    /// All gate rows, then all up rows.
    #[default]
    Halves,
    /// Blocks of 32 gate rows and 32 up rows.
    Interleaved32,
    /// Gate rows even, up rows odd.
    Elementwise,
}

/// Sixteen features in memory: feature `i` of the run has its gate at `gate + i·stride`, its up at `up + i·stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureRun {
    /// Column of the first gate.
    pub gate: usize,
    /// Column of the first up.
    pub up: usize,
    /// Distance between neighbouring features.
    pub stride: usize,
}

impl GluLayout {
    /// Every layout.
    pub const ALL: [Self; 3] = [Self::Halves, Self::Interleaved32, Self::Elementwise];

    /// The columns of features `first..first + 16`; `first` a multiple of 16.
    #[inline]
    pub fn run(self, gated: bool, first: usize, ffn: usize) -> FeatureRun {
        if !gated {
            return FeatureRun { gate: first, up: first, stride: 1 };
        }
        match self {
            GluLayout::Halves => FeatureRun { gate: first, up: ffn + first, stride: 1 },
            GluLayout::Interleaved32 => {
                let gate = 64 * (first / 32) + first % 32;
                FeatureRun { gate, up: gate + 32, stride: 1 }
            }
            GluLayout::Elementwise => FeatureRun { gate: 2 * first, up: 2 * first + 1, stride: 2 },
        }
    }

    /// Whether this layout fits `ffn`.
    pub fn check(self, activation: &Activation, ffn: usize) -> Result<(), Misuse> {
        let multiple = if activation.is_gated() && self == GluLayout::Interleaved32 { 32 } else { 16 };
        if ffn > 0 && ffn.is_multiple_of(multiple) {
            return Ok(());
        }
        Err(Misuse::Multiple { what: "ffn", multiple, got: ffn, fix: "pad the experts with zero rows" })
    }

    fn name(self) -> &'static str {
        match self {
            GluLayout::Halves => "halves",
            GluLayout::Interleaved32 => "interleaved32",
            GluLayout::Elementwise => "elementwise",
        }
    }
}

impl fmt::Display for GluLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for GluLayout {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|layout| layout.name() == s);
        found.ok_or_else(|| format!("expected halves, interleaved32 or elementwise, got '{s}'"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layout_covers_every_column_once() {
        for layout in GluLayout::ALL {
            let ffn = 96;
            let mut seen = vec![0; 2 * ffn];
            for first in (0..ffn).step_by(16) {
                let run = layout.run(true, first, ffn);
                for i in 0..16 {
                    seen[run.gate + i * run.stride] += 1;
                    seen[run.up + i * run.stride] += 1;
                }
            }
            assert!(seen.iter().all(|&n| n == 1), "{layout}");
            assert_eq!(layout.to_string().parse(), Ok(layout));
        }
    }

    #[test]
    fn interleaving_needs_a_multiple_of_32_only_when_gated() {
        assert!(GluLayout::Interleaved32.check(&Activation::SWIGLU, 48).is_err());
        assert!(GluLayout::Interleaved32.check(&Activation::SRELU, 48).is_ok());
        assert!(GluLayout::Halves.check(&Activation::SWIGLU, 48).is_ok());
        assert!(GluLayout::Halves.check(&Activation::SWIGLU, 0).is_err());
    }
}
