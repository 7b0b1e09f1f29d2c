//! A small byte-level mixture-of-experts language model, trained on a CPU: the subject of `moe4 train`.
//!
//! Attention, norms, embedding and AdamW come from burn; the experts are moe4's grouped MLP, a differentiable
//! operation of its own. The same model is trained on the same data from the same seed in BF16 and in NVFP4, so
//! that the two loss curves can be compared.
#![forbid(unsafe_code)]

mod checkpoint;
mod config;
mod data;
mod error;
mod files;
mod metrics;
mod model;
mod operator;
mod ops;
mod plot;
mod rng;
mod run;
mod trainer;

pub use config::{DataConfig, ModelConfig, Precision, RunConfig, Stash, TrainingConfig, VOCABULARY};
pub use data::{Batch, Corpus, SHIPPED_NAME};
pub use error::Error;
pub use metrics::{Metrics, MetricsRow};
pub use run::{ModelSummary, Observer, Outcome, Run, Summary};
pub use trainer::{StepLosses, Trainer};
