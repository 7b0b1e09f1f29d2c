//! What is measured: passes by the names that `--pass` takes, on the tensors that the operator runs them on.

use std::fmt;

use anyhow::{Result, bail};
use moe4::mlp::Precision;

use super::shapes::Shape;

/// A single pass, or a whole training step of the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    GroupAmax,
    GroupHadamardAmax,
    /// With given amaxes; columnwise after the RHT.
    GroupQuantize(Quantize),
    QuantizeWeights,
    Permute,
    Unpermute,
    /// One product of a step, NVFP4.
    Product(Product),
    /// All passes over `h` of one step but its products, NVFP4.
    H(HPasses),
    /// With prepared weights, and nothing kept for a backward.
    Forward(Precision),
    /// Quantization of the weights (NVFP4 only), forward and backward with all gradients.
    Step(Precision),
}

/// Copies that one read makes, and how their elements are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quantize {
    Rowwise,
    Columnwise,
    Both,
    BothStochastic,
}

/// The products of a training step; `products.rs` says what each reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Product {
    Fc1,
    Fc2,
    Dact,
    /// Writes `h` again as well.
    DactRecompute,
    Dx,
    Dw1,
    Dw2,
}

/// Three ways to get `h`'s two copies, the columnwise one for the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HPasses {
    /// Amaxes by a pass, then both copies.
    Separate,
    /// Both copies, with the amaxes of FC1's epilogue.
    Reuse,
    /// The rowwise copy in the forward, and the columnwise one, of `h` built again, in the backward.
    Recompute,
}

/// The tensor that a pass runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tensor {
    /// `[T, H]`, as are `y`, `dy` and `dx`.
    X,
    /// `[T, F]`.
    H,
    /// `[T, N1]`.
    Dc,
    /// `[E, N1, H]`.
    W1,
    /// `[E, H, F]`.
    W2,
    /// Several, or the one in the pass's name.
    All,
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) pass: Pass,
    pub(super) tensor: Tensor,
}

const fn case(pass: Pass, tensor: Tensor) -> Case {
    Case { pass, tensor }
}

/// All rows. What the operator never does is not measured, such as rounding of `h` at random.
pub(super) const CASES: [Case; 29] = [
    case(Pass::GroupAmax, Tensor::X),
    case(Pass::GroupHadamardAmax, Tensor::X),
    case(Pass::GroupHadamardAmax, Tensor::Dc),
    case(Pass::GroupQuantize(Quantize::Rowwise), Tensor::X),
    case(Pass::GroupQuantize(Quantize::Rowwise), Tensor::H),
    case(Pass::GroupQuantize(Quantize::Columnwise), Tensor::X),
    case(Pass::GroupQuantize(Quantize::Columnwise), Tensor::H),
    case(Pass::GroupQuantize(Quantize::Both), Tensor::X),
    case(Pass::GroupQuantize(Quantize::Both), Tensor::H),
    // `dy` has the sizes of `x`.
    case(Pass::GroupQuantize(Quantize::BothStochastic), Tensor::X),
    case(Pass::GroupQuantize(Quantize::BothStochastic), Tensor::Dc),
    case(Pass::QuantizeWeights, Tensor::W1),
    case(Pass::QuantizeWeights, Tensor::W2),
    case(Pass::Permute, Tensor::X),
    case(Pass::Unpermute, Tensor::X),
    case(Pass::H(HPasses::Separate), Tensor::All),
    case(Pass::H(HPasses::Reuse), Tensor::All),
    case(Pass::H(HPasses::Recompute), Tensor::All),
    case(Pass::Product(Product::Fc1), Tensor::All),
    case(Pass::Product(Product::Fc2), Tensor::All),
    case(Pass::Product(Product::Dact), Tensor::All),
    case(Pass::Product(Product::DactRecompute), Tensor::All),
    case(Pass::Product(Product::Dx), Tensor::All),
    case(Pass::Product(Product::Dw1), Tensor::All),
    case(Pass::Product(Product::Dw2), Tensor::All),
    case(Pass::Forward(Precision::Bf16), Tensor::All),
    case(Pass::Forward(Precision::Nvfp4), Tensor::All),
    case(Pass::Step(Precision::Bf16), Tensor::All),
    case(Pass::Step(Precision::Nvfp4), Tensor::All),
];

impl Pass {
    fn name(self) -> &'static str {
        match self {
            Pass::GroupAmax => "group_amax",
            Pass::GroupHadamardAmax => "group_hadamard_amax",
            Pass::GroupQuantize(Quantize::Rowwise) => "group_quantize_rowwise",
            Pass::GroupQuantize(Quantize::Columnwise) => "group_quantize_columnwise",
            Pass::GroupQuantize(Quantize::Both) => "group_quantize_both",
            Pass::GroupQuantize(Quantize::BothStochastic) => "group_quantize_both_stochastic",
            Pass::QuantizeWeights => "quantize_weights",
            Pass::Permute => "permute",
            Pass::Unpermute => "unpermute",
            Pass::Product(Product::Fc1) => "grouped_gemm_act",
            Pass::Product(Product::Fc2) => "grouped_gemm fc2",
            Pass::Product(Product::Dact) => "grouped_gemm_dact",
            Pass::Product(Product::DactRecompute) => "grouped_gemm_dact recompute",
            Pass::Product(Product::Dx) => "grouped_gemm dx",
            Pass::Product(Product::Dw1) => "grouped_wgrad dw1",
            Pass::Product(Product::Dw2) => "grouped_wgrad dw2",
            Pass::H(HPasses::Separate) => "h_separate",
            Pass::H(HPasses::Reuse) => "h_reuse",
            Pass::H(HPasses::Recompute) => "h_recompute",
            Pass::Forward(Precision::Bf16) => "forward_bf16",
            Pass::Forward(Precision::Nvfp4) => "forward_nvfp4",
            Pass::Step(Precision::Bf16) => "step_bf16",
            Pass::Step(Precision::Nvfp4) => "step_nvfp4",
        }
    }
}

impl Tensor {
    /// Columns of a tensor of grouped rows, or those of one expert's weight.
    pub(super) fn cols(self, shape: &Shape) -> usize {
        match self {
            Tensor::X | Tensor::W1 | Tensor::All => shape.hidden,
            Tensor::H | Tensor::W2 => shape.ffn,
            Tensor::Dc => shape.config().fc1_rows(),
        }
    }
}

/// `group_quantize_both x`, `step_nvfp4`: by this name records and peers are joined.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensor = match self.tensor {
            Tensor::X => " x",
            Tensor::H => " h",
            Tensor::Dc => " dc",
            Tensor::W1 => " w1",
            Tensor::W2 => " w2",
            Tensor::All => "",
        };
        write!(f, "{}{tensor}", self.pass.name())
    }
}

/// The cases whose names start with one of `wanted`; all of them if nothing is wanted in particular.
pub(super) fn select(wanted: &[String]) -> Result<Vec<Case>> {
    let starts = |case: &Case, start: &String| !start.is_empty() && case.to_string().starts_with(start);
    if let Some(unknown) = wanted.iter().find(|start| !CASES.iter().any(|case| starts(case, start))) {
        let mut names: Vec<_> = CASES.iter().map(|case| case.pass.name()).collect();
        names.dedup();
        bail!(
            "--pass: expected the name of a pass or its start, got '{unknown}'; passes: {}",
            names.join(", ")
        );
    }
    let chosen = |case: &&Case| wanted.is_empty() || wanted.iter().any(|start| starts(case, start));
    Ok(CASES.iter().filter(chosen).copied().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_select_by_their_start() -> Result<()> {
        let all: Vec<_> = CASES.iter().map(Case::to_string).collect();
        assert!(all.iter().enumerate().all(|(index, name)| !all[..index].contains(name)), "{all:?}");
        let chosen = |name: &str| -> Result<Vec<String>> {
            Ok(select(&[name.into()])?.iter().map(Case::to_string).collect())
        };
        assert_eq!(chosen("step")?, ["step_bf16", "step_nvfp4"]);
        assert_eq!(chosen("group_quantize_both h")?, ["group_quantize_both h"]);
        assert_eq!(chosen("grouped_gemm ")?, ["grouped_gemm fc2", "grouped_gemm dx"]);
        assert_eq!(chosen("h_")?, ["h_separate", "h_reuse", "h_recompute"]);
        assert_eq!(select(&[])?.len(), CASES.len());
        assert!(chosen("").is_err());
        assert!(chosen("gemm").is_err());
        Ok(())
    }
}
