//! Options of the operator.

use crate::kernels::Misuse;
use crate::kernels::activation::{Activation, GluLayout};
use crate::numerics::hadamard::SignMask;
use std::fmt;

/// Shape and options of a grouped MLP. [`GroupedMlpConfig::new`] gives the defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedMlpConfig {
    /// Experts `E`.
    pub experts: usize,
    /// Hidden size `H`, a multiple of 16.
    pub hidden: usize,
    /// Width of an expert `F`, a multiple of 16 (of 32 for interleaved gate and up rows).
    pub ffn: usize,
    /// Default: SwiGLU.
    pub activation: Activation,
    /// Order of gate and up rows in `W1`. Default: gate rows first.
    pub glu_layout: GluLayout,
    /// Whether FC1 and FC2 have biases. Default: no.
    pub bias: bool,
    /// Default: NVFP4.
    pub precision: Precision,
    /// Rebuild `h` from `c` in the backward instead of saving it. Outputs and gradients are bitwise the same either
    /// way. Default: off.
    pub recompute_activation: bool,
    /// RHT along tokens of `x` and `dc`, the operands of dW1; `None` for no transform. Default: mask 0xD7E8.
    pub fc1_rht: Option<SignMask>,
    /// RHT along tokens of `h` and `dy`, the operands of dW2; `None` for no transform. Default: mask 0xD7E8.
    pub fc2_rht: Option<SignMask>,
    /// Rounding of `dy` and `dc`. Default: stochastic.
    pub gradient_rounding: GradientRounding,
    /// Where the amaxes of `dc` come from. Default: the `dact` epilogue.
    pub dc_amax: DcAmax,
}

/// What the products' operands are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// 4-bit codes with two levels of scales.
    #[default]
    Nvfp4,
    /// Unquantized: the baseline.
    Bf16,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Precision::Nvfp4 => "nvfp4",
            Precision::Bf16 => "bf16",
        })
    }
}

/// How gradients are rounded to E2M1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GradientRounding {
    /// To nearest, ties to even.
    Nearest,
    /// At random in proportion to the distances: unbiased.
    #[default]
    Stochastic,
}

/// Where the amaxes of `dc` come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DcAmax {
    /// The `dact` epilogue computes them while `dc` is at hand.
    #[default]
    Exact,
    /// The epilogue computes the amax before the RHT and takes 4 times it for the one after, which is never smaller:
    /// less work in the epilogue, a coarser columnwise copy and so a slightly noisier dW1. Nothing else changes.
    Bound,
    /// A pass of its own over `dc`, for comparison: the same bits as `Exact`.
    SeparatePass,
}

/// Which gradients the backward is to give. What is not needed is not quantized, not computed and not saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Needs {
    /// `dx`.
    pub input: bool,
    /// `dW1`, `dW2` and the biases' gradients.
    pub weights: bool,
}

impl Needs {
    /// Every gradient.
    pub const ALL: Self = Self { input: true, weights: true };
    /// Frozen experts.
    pub const INPUT: Self = Self { input: true, weights: false };
    /// The first layer of a model.
    pub const WEIGHTS: Self = Self { input: false, weights: true };
    /// Inference: nothing is saved and there is no backward.
    pub const NONE: Self = Self { input: false, weights: false };

    /// Whether there is a backward at all. It always gives `dprob`.
    pub fn backward(self) -> bool {
        self.input || self.weights
    }
}

impl GroupedMlpConfig {
    /// The default options for a shape.
    pub fn new(experts: usize, hidden: usize, ffn: usize) -> Self {
        Self {
            experts,
            hidden,
            ffn,
            activation: Activation::default(),
            glu_layout: GluLayout::default(),
            bias: false,
            precision: Precision::default(),
            recompute_activation: false,
            fc1_rht: Some(SignMask::DEFAULT),
            fc2_rht: Some(SignMask::DEFAULT),
            gradient_rounding: GradientRounding::default(),
            dc_amax: DcAmax::default(),
        }
    }

    /// `N1`, the outputs of FC1.
    pub fn fc1_rows(&self) -> usize {
        self.activation.fc1_rows(self.ffn)
    }

    /// Every option within its range, and together.
    pub fn check(&self) -> Result<(), Misuse> {
        if self.experts == 0 {
            return Err(Misuse::Value { what: "experts".into(), expected: "at least 1", got: "0".into() });
        }
        if self.hidden == 0 || !self.hidden.is_multiple_of(16) {
            let fix = "pad the hidden size with zeros";
            return Err(Misuse::Multiple { what: "hidden", multiple: 16, got: self.hidden, fix });
        }
        self.activation.check()?;
        self.glu_layout.check(&self.activation, self.ffn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::activation::TanhSrelu;

    #[test]
    fn bad_configurations_are_named() {
        let good = GroupedMlpConfig::new(2, 32, 48);
        assert!(good.check().is_ok());
        let bad = [
            (GroupedMlpConfig { experts: 0, ..good.clone() }, "experts"),
            (GroupedMlpConfig { hidden: 24, ..good.clone() }, "hidden"),
            (GroupedMlpConfig { hidden: 0, ..good.clone() }, "hidden"),
            (GroupedMlpConfig { ffn: 8, ..good.clone() }, "ffn"),
            (
                GroupedMlpConfig { glu_layout: GluLayout::Interleaved32, ..good.clone() },
                "multiple of 32, got 48",
            ),
            (
                GroupedMlpConfig { activation: Activation::TanhSrelu(TanhSrelu { s: 0.0 }), ..good.clone() },
                "parameter s",
            ),
        ];
        for (config, part) in bad {
            let message = config.check().unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
    }
}
