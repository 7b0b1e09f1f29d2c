//! The plan: every decision of the operator, made before any kernel runs.
//!
//! It is plain data. Forward and backward read it and decide nothing themselves; tests compare the passes listed
//! here with the passes that a [`Ledger`](crate::kernels::Ledger) saw.

use super::config::{DcAmax, GradientRounding, GroupedMlpConfig, Needs, Precision};
use crate::kernels::{EpilogueAmax, PassName};
use crate::numerics::hadamard::SignMask;

/// What one forward and its backward do.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The configuration planned for.
    pub config: GroupedMlpConfig,
    /// The gradients planned for.
    pub needs: Needs,
    /// Copies of `x`.
    pub x: OperandPlan,
    /// Copies of `h`.
    pub h: OperandPlan,
    /// Copies of `dy`.
    pub dy: OperandPlan,
    /// Copies of `dc`.
    pub dc: OperandPlan,
    /// How `x` waits for the backward.
    pub saved_x: SavedAs,
    /// How `h` waits for the backward.
    pub saved_h: SavedAs,
    /// Whether `c` and `prob` wait for the backward.
    pub saved_c: bool,
    /// Whether the backward's `dact` kernel writes `h` again.
    pub rebuilds_h: bool,
    /// Passes of the forward, in order.
    pub forward: Vec<PlannedPass>,
    /// Passes of the backward, in order. Where weight gradients are
    /// [delayed](super::GroupedMlp::backward_delayed), `grouped_wgrad` comes behind all others.
    pub backward: Vec<PlannedPass>,
}

/// The quantized copies of one tensor; none of either in BF16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperandPlan {
    /// Blocks along the row, for fprop and dgrad.
    pub rowwise: Option<CopyPlan>,
    /// Blocks along tokens, for wgrad.
    pub columnwise: Option<CopyPlan>,
}

/// One quantized copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyPlan {
    /// When it is made.
    pub made: Phase,
    /// Where its amax comes from.
    pub amax: AmaxSource,
    /// Rounding of its elements.
    pub rounding: GradientRounding,
    /// Its transform.
    pub rht: Option<SignMask>,
}

/// The two halves of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// From `x` to `y`.
    Forward,
    /// From `dy` to `dx` and the weights' gradients.
    Backward,
}

/// Where an amax comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AmaxSource {
    /// A pass over the tensor.
    Pass,
    /// The epilogue of the product that wrote the tensor.
    Epilogue,
    /// The forward's epilogue, saved and used again.
    Reused,
    /// 4 times the amax before the RHT, from the epilogue of the product that wrote the tensor.
    Bound,
}

/// How a tensor waits for the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SavedAs {
    /// The backward does not need it.
    Nothing,
    /// Its packed columnwise copy.
    Columnwise,
    /// Only its columnwise amax: the tensor itself is rebuilt.
    Amax,
    /// Unquantized.
    Bf16,
}

/// A pass and the tensor that it works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedPass {
    /// The pass.
    pub name: PassName,
    /// The tensor it writes, or whose amax it takes.
    pub tensor: &'static str,
}

impl Plan {
    /// Decides everything for a valid configuration.
    pub fn new(config: &GroupedMlpConfig, needs: Needs) -> Self {
        let quantized = config.precision == Precision::Nvfp4;
        let backward = needs.backward();
        let recompute = needs.weights && config.recompute_activation;
        let copy = |wanted: bool, made, amax, rounding, rht| {
            (quantized && wanted).then_some(CopyPlan { made, amax, rounding, rht })
        };
        let (nearest, gradients) = (GradientRounding::Nearest, config.gradient_rounding);
        let (fc1, fc2) = (config.fc1_rht, config.fc2_rht);
        let (dc_source, dc_rht_source) = match config.dc_amax {
            DcAmax::Exact => (AmaxSource::Epilogue, AmaxSource::Epilogue),
            DcAmax::Bound if fc1.is_some() => (AmaxSource::Epilogue, AmaxSource::Bound),
            DcAmax::Bound => (AmaxSource::Epilogue, AmaxSource::Epilogue),
            DcAmax::SeparatePass => (AmaxSource::Pass, AmaxSource::Pass),
        };
        let (h_made, h_source) = if recompute {
            (Phase::Backward, AmaxSource::Reused)
        } else {
            (Phase::Forward, AmaxSource::Epilogue)
        };
        let mut plan = Self {
            config: config.clone(),
            needs,
            x: OperandPlan {
                rowwise: copy(true, Phase::Forward, AmaxSource::Pass, nearest, None),
                columnwise: copy(needs.weights, Phase::Forward, AmaxSource::Pass, nearest, fc1),
            },
            h: OperandPlan {
                rowwise: copy(true, Phase::Forward, AmaxSource::Epilogue, nearest, None),
                columnwise: copy(needs.weights, h_made, h_source, nearest, fc2),
            },
            dy: OperandPlan {
                rowwise: copy(backward, Phase::Backward, AmaxSource::Pass, gradients, None),
                columnwise: copy(needs.weights, Phase::Backward, AmaxSource::Pass, gradients, fc2),
            },
            dc: OperandPlan {
                rowwise: copy(needs.input, Phase::Backward, dc_source, gradients, None),
                columnwise: copy(needs.weights, Phase::Backward, dc_rht_source, gradients, fc1),
            },
            saved_x: match (needs.weights, quantized) {
                (false, _) => SavedAs::Nothing,
                (true, true) => SavedAs::Columnwise,
                (true, false) => SavedAs::Bf16,
            },
            saved_h: match (needs.weights, quantized, recompute) {
                (false, ..) => SavedAs::Nothing,
                (true, true, true) => SavedAs::Amax,
                (true, true, false) => SavedAs::Columnwise,
                (true, false, true) => SavedAs::Nothing,
                (true, false, false) => SavedAs::Bf16,
            },
            saved_c: backward,
            rebuilds_h: recompute,
            forward: vec![],
            backward: vec![],
        };
        plan.forward = plan.forward_passes();
        plan.backward = plan.backward_passes();
        plan
    }

    fn forward_passes(&self) -> Vec<PlannedPass> {
        let mut passes = vec![];
        passes.extend(self.x.amax_pass("x"));
        passes.extend(self.x.quantize_pass("x", Phase::Forward));
        let amax = self.h.epilogue_amax();
        passes.push(PlannedPass { name: PassName::GroupedGemmAct { amax }, tensor: "c, h" });
        passes.extend(self.h.quantize_pass("h", Phase::Forward));
        passes.push(PlannedPass { name: PassName::GroupedGemm, tensor: "y" });
        passes
    }

    fn backward_passes(&self) -> Vec<PlannedPass> {
        if !self.needs.backward() {
            return vec![];
        }
        let mut passes = vec![];
        passes.extend(self.dy.amax_pass("dy"));
        passes.extend(self.dy.quantize_pass("dy", Phase::Backward));
        let (amax, recompute) = (self.dc.epilogue_amax(), self.rebuilds_h);
        passes.push(PlannedPass { name: PassName::GroupedGemmDact { amax, recompute }, tensor: "dc" });
        if self.config.bias {
            passes.push(PlannedPass { name: PassName::GroupedBiasGrad, tensor: "db2" });
        }
        // Before the copies of `dc`, which are the largest: `h` itself is gone by then.
        passes.extend(self.h.quantize_pass("h", Phase::Backward));
        passes.extend(self.dc.amax_pass("dc"));
        passes.extend(self.dc.quantize_pass("dc", Phase::Backward));
        if self.needs.weights {
            passes.push(PlannedPass { name: PassName::GroupedWgrad, tensor: "dw2" });
            passes.push(PlannedPass { name: PassName::GroupedWgrad, tensor: "dw1" });
        }
        if self.needs.input {
            passes.push(PlannedPass { name: PassName::GroupedGemm, tensor: "dx" });
        }
        passes
    }
}

impl OperandPlan {
    fn copies(&self) -> impl Iterator<Item = CopyPlan> {
        self.rowwise.into_iter().chain(self.columnwise)
    }

    /// Whether the product that writes the tensor also takes its amaxes.
    pub fn needs_epilogue(&self) -> bool {
        self.copies().any(|c| c.amax != AmaxSource::Pass)
    }

    /// Which amaxes the product that writes the tensor leaves.
    pub fn epilogue_amax(&self) -> EpilogueAmax {
        match (self.needs_epilogue(), self.rht(), self.columnwise.map(|c| c.amax)) {
            (false, ..) => EpilogueAmax::None,
            (true, None, _) => EpilogueAmax::Rowwise,
            (true, Some(_), Some(AmaxSource::Bound)) => EpilogueAmax::Bound,
            (true, Some(_), _) => EpilogueAmax::Rht,
        }
    }

    /// Whether the tensor's amaxes take a pass over it.
    pub fn needs_pass(&self) -> bool {
        self.copies().any(|c| c.amax == AmaxSource::Pass)
    }

    /// The transform of the columnwise copy: the amax after it is taken together with the one before.
    pub fn rht(&self) -> Option<SignMask> {
        self.columnwise.and_then(|c| c.rht)
    }

    fn amax_pass(&self, tensor: &'static str) -> Option<PlannedPass> {
        let name = if self.rht().is_some() { PassName::GroupHadamardAmax } else { PassName::GroupAmax };
        self.needs_pass().then_some(PlannedPass { name, tensor })
    }

    fn quantize_pass(&self, tensor: &'static str, phase: Phase) -> Option<PlannedPass> {
        let made = |copy: Option<CopyPlan>| copy.is_some_and(|c| c.made == phase);
        let (rowwise, columnwise) = (made(self.rowwise), made(self.columnwise));
        let name = PassName::GroupQuantize { rowwise, columnwise };
        (rowwise || columnwise).then_some(PlannedPass { name, tensor })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(passes: &[PlannedPass]) -> Vec<String> {
        passes.iter().map(|p| format!("{} {}", p.name, p.tensor)).collect()
    }

    #[test]
    fn recompute_moves_the_columnwise_half_of_h_to_the_backward() {
        let off = GroupedMlpConfig::new(8, 128, 64);
        let on = GroupedMlpConfig { recompute_activation: true, ..off.clone() };
        let (off, on) = (Plan::new(&off, Needs::ALL), Plan::new(&on, Needs::ALL));
        assert_eq!(
            names(&on.forward),
            [
                "group_hadamard_amax x",
                "group_quantize (rowwise + columnwise) x",
                "grouped_gemm_act (amax + RHT amax) c, h",
                "group_quantize (rowwise) h",
                "grouped_gemm y"
            ]
        );
        assert!(names(&off.forward).contains(&"group_quantize (rowwise + columnwise) h".into()));
        assert!(names(&on.backward).contains(&"grouped_gemm_dact (amax + RHT amax + recompute h) dc".into()));
        assert!(names(&on.backward).contains(&"group_quantize (columnwise) h".into()));
        assert!(!names(&on.backward).iter().any(|p| p.contains("amax h")), "h's amaxes are reused");
        assert_eq!((off.saved_h, on.saved_h), (SavedAs::Columnwise, SavedAs::Amax));
    }

    #[test]
    fn what_is_not_needed_is_not_planned() {
        let config = GroupedMlpConfig::new(8, 128, 64);
        let input = Plan::new(&config, Needs::INPUT);
        assert_eq!((input.x.columnwise, input.h.columnwise, input.dc.columnwise), (None, None, None));
        assert_eq!(input.saved_x, SavedAs::Nothing);
        assert_eq!(input.forward[0].name, PassName::GroupAmax, "no transform, no transformed amax");
        let weights = Plan::new(&config, Needs::WEIGHTS);
        assert_eq!(weights.dc.rowwise, None);
        assert!(!names(&weights.backward).iter().any(|p| p.ends_with("dx")));
        let none = Plan::new(&config, Needs::NONE);
        assert!(none.backward.is_empty() && !none.saved_c);
    }

    #[test]
    fn bf16_quantizes_nothing() {
        let config = GroupedMlpConfig { precision: Precision::Bf16, ..GroupedMlpConfig::new(8, 128, 64) };
        let plan = Plan::new(&config, Needs::ALL);
        assert_eq!(names(&plan.forward), ["grouped_gemm_act c, h", "grouped_gemm y"]);
        assert_eq!(
            names(&plan.backward),
            ["grouped_gemm_dact dc", "grouped_wgrad dw2", "grouped_wgrad dw1", "grouped_gemm dx"]
        );
    }

    #[test]
    fn a_separate_pass_replaces_the_epilogue() {
        let config = GroupedMlpConfig { dc_amax: DcAmax::SeparatePass, ..GroupedMlpConfig::new(8, 128, 64) };
        let names = names(&Plan::new(&config, Needs::ALL).backward);
        assert!(
            names.contains(&"grouped_gemm_dact dc".into())
                && names.contains(&"group_hadamard_amax dc".into())
        );
    }
}
