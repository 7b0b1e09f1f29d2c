//! The operator's configuration as text: `key=value` separated by spaces, every key given.
//!
//! Custom operators of torch take numbers, strings and tensors. A line of text shows in graphs what is computed, and
//! stays the same in an exported program.

use moe4::mlp::{DcAmax, GradientRounding, GroupedMlp, GroupedMlpConfig, Needs, Precision};
use moe4::numerics::hadamard::SignMask;
use pyo3::PyErr;
use pyo3::PyResult;
use pyo3::exceptions::PyValueError;

use crate::error::raise;

/// The operator that `text` describes.
pub(crate) fn parse(text: &str) -> PyResult<GroupedMlp> {
    let mut config = GroupedMlpConfig::new(0, 0, 0);
    for item in text.split_ascii_whitespace() {
        let (key, value) = item.split_once('=').ok_or_else(|| bad(item, "key=value", item))?;
        let number = || value.parse().map_err(|_| bad(key, "a whole number", value));
        let switch = || match value {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(bad(key, "true or false", value)),
        };
        let mask = || match value {
            "off" => Ok(None),
            _ => {
                value.parse::<SignMask>().map(Some).map_err(|e| PyValueError::new_err(format!("{key}: {e}")))
            }
        };
        match key {
            "experts" => config.experts = number()?,
            "hidden" => config.hidden = number()?,
            "ffn" => config.ffn = number()?,
            "activation" => {
                config.activation =
                    value.parse().map_err(|e| PyValueError::new_err(format!("activation: {e}")))?
            }
            "glu_layout" => {
                config.glu_layout =
                    value.parse().map_err(|e| PyValueError::new_err(format!("glu_layout: {e}")))?
            }
            "bias" => config.bias = switch()?,
            "recompute" => config.recompute_activation = switch()?,
            "precision" => {
                config.precision = match value {
                    "nvfp4" => Precision::Nvfp4,
                    "bf16" => Precision::Bf16,
                    _ => return Err(bad(key, "nvfp4 or bf16", value)),
                }
            }
            "fc1_rht" => config.fc1_rht = mask()?,
            "fc2_rht" => config.fc2_rht = mask()?,
            "gradient_rounding" => {
                config.gradient_rounding = match value {
                    "nearest" => GradientRounding::Nearest,
                    "stochastic" => GradientRounding::Stochastic,
                    _ => return Err(bad(key, "nearest or stochastic", value)),
                }
            }
            "dc_amax" => {
                config.dc_amax = match value {
                    "exact" => DcAmax::Exact,
                    "bound" => DcAmax::Bound,
                    "separate" => DcAmax::SeparatePass,
                    _ => return Err(bad(key, "exact, bound or separate", value)),
                }
            }
            _ => return Err(bad("options", "a known option", key)),
        }
    }
    GroupedMlp::new(config).map_err(raise)
}

/// Which gradients are wanted, from two flags.
pub(crate) fn needs(input: bool, weights: bool) -> Needs {
    Needs { input, weights }
}

fn bad(what: &str, expected: &str, got: &str) -> PyErr {
    PyValueError::new_err(format!("{what}: expected {expected}, got '{got}'"))
}
