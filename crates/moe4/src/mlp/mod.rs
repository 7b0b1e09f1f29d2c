//! The fused grouped MLP: FC1, activation scaled by the routing probability, FC2; forward and backward.
//!
//! ```text
//! forward    x [T,H] ──FC1──> c [T,N1] ──act · prob──> h [T,F] ──FC2──> y [T,H]
//! backward   dy ──FC2 dgrad──> dh ──act'──> dc, dprob (, h again) ──FC1 dgrad──> dx
//!            dW2 = dyᵀ·h      dW1 = dcᵀ·x      (contraction over each expert's tokens)
//! ```
//!
//! [`GroupedMlp::plan`] decides from the configuration and from which gradients are wanted what is quantized, where
//! each amax comes from and what is saved. Forward and backward follow that plan on any
//! [`Backend`](crate::kernels::Backend).
#![forbid(unsafe_code)]

mod backward;
mod config;
mod delayed;
mod forward;
mod plan;
mod plan_display;
mod plan_memory;
mod plan_work;
mod quantize;
mod saved;
mod stash;
mod trace;
mod weight_cache;
mod weights;

pub use crate::kernels::activation::{
    Activation, ClampedQgeglu, GluLayout, SituGlu, Srelu, SwiGlu, TanhSrelu,
};
pub use crate::kernels::contract::{GradBuffers, GradMode, WeightGrad, WeightShape};
pub use backward::{BackwardArgs, DelayedBackward, Gradients, RandomSeed, WeightGrads};
pub use config::{DcAmax, GradientRounding, GroupedMlpConfig, Needs, Precision};
pub use delayed::{BackwardTensors, DelayedWeightGrads, WgradParts, WgradTensors};
pub use forward::{Forward, ForwardArgs, ForwardTensors, ForwardViewArgs};
pub use plan::{AmaxSource, CopyPlan, OperandPlan, Phase, Plan, PlannedPass, SavedAs};

pub use plan_memory::PeakBytes;
pub use plan_work::SavedBytes;
pub use saved::{Packed, Saved, SavedParts, SavedTensor, SavedTensorView, SavedView};
pub use stash::{
    Arriving, InPlace, PageId, PageTable, PageTableStats, PagedSaved, PagedStash, PagedStashStats, Refusal,
    Refused, Stash, StashFull,
};
pub use trace::{Trace, TracedData, TracedTensor};
pub use weight_cache::{StaleWeights, WeightCache};
pub use weights::{Biases, Nvfp4Weights, PackedView, PreparedWeights, WeightSource, WeightsView};

use crate::kernels::Error;

/// The operator for one configuration. It holds no tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedMlp {
    config: GroupedMlpConfig,
}

impl GroupedMlp {
    /// Validates the configuration, once.
    pub fn new(config: GroupedMlpConfig) -> Result<Self, Error> {
        config.check()?;
        Ok(Self { config })
    }

    /// The configuration.
    pub fn config(&self) -> &GroupedMlpConfig {
        &self.config
    }

    /// What a forward and backward with these needs will do.
    pub fn plan(&self, needs: Needs) -> Plan {
        Plan::new(&self.config, needs)
    }
}

#[cfg(test)]
mod tests;
