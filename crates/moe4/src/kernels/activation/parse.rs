//! Activations as text: `swiglu`, `srelu`, `tanh_srelu:s=16`, `situ_glu:beta1=4,beta2=25`,
//! `clamped_qgeglu:limit=7,alpha=1.702,offset=1`. Parameters left out take their defaults; `tanh_srelu` has none.

use super::{Activation, ClampedQgeglu, SituGlu, TanhSrelu};
use std::fmt;
use std::str::FromStr;

/// Text that names no activation, or one with bad parameters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseActivationError {
    /// The name is unknown.
    #[error("unknown activation '{0}'; expected swiglu, srelu, tanh_srelu, situ_glu or clamped_qgeglu")]
    Name(String),
    /// The activation has no such parameter.
    #[error("activation {activation} has no parameter '{got}'; it takes {expected}")]
    Parameter {
        /// The activation.
        activation: &'static str,
        /// The parameter found.
        got: String,
        /// The parameters that exist.
        expected: String,
    },
    /// A parameter given twice.
    #[error("activation {activation}: parameter {parameter} is given twice")]
    Repeated {
        /// The activation.
        activation: &'static str,
        /// The parameter.
        parameter: String,
    },
    /// A required parameter is missing.
    #[error("activation {activation} needs parameter {parameter}, for example {example}")]
    Missing {
        /// The activation.
        activation: &'static str,
        /// The parameter.
        parameter: &'static str,
        /// A valid text.
        example: &'static str,
    },
    /// A parameter's value is no number, or out of range.
    #[error("{0}")]
    Value(String),
}

impl Activation {
    /// The name without parameters.
    pub fn name(&self) -> &'static str {
        match self {
            Activation::SwiGlu(_) => "swiglu",
            Activation::Srelu(_) => "srelu",
            Activation::TanhSrelu(_) => "tanh_srelu",
            Activation::SituGlu(_) => "situ_glu",
            Activation::ClampedQgeglu(_) => "clamped_qgeglu",
        }
    }

    /// The parameters by name.
    pub fn parameters(&self) -> Vec<(&'static str, f32)> {
        match *self {
            Activation::SwiGlu(_) | Activation::Srelu(_) => vec![],
            Activation::TanhSrelu(TanhSrelu { s }) => vec![("s", s)],
            Activation::SituGlu(SituGlu { beta1, beta2 }) => vec![("beta1", beta1), ("beta2", beta2)],
            Activation::ClampedQgeglu(ClampedQgeglu { limit, alpha, offset }) => {
                vec![("limit", limit), ("alpha", alpha), ("offset", offset)]
            }
        }
    }

    fn parameter_mut(&mut self, name: &str) -> Option<&mut f32> {
        match (self, name) {
            (Activation::TanhSrelu(p), "s") => Some(&mut p.s),
            (Activation::SituGlu(p), "beta1") => Some(&mut p.beta1),
            (Activation::SituGlu(p), "beta2") => Some(&mut p.beta2),
            (Activation::ClampedQgeglu(p), "limit") => Some(&mut p.limit),
            (Activation::ClampedQgeglu(p), "alpha") => Some(&mut p.alpha),
            (Activation::ClampedQgeglu(p), "offset") => Some(&mut p.offset),
            _ => None,
        }
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        for (i, (name, value)) in self.parameters().into_iter().enumerate() {
            write!(f, "{}{name}={value}", if i == 0 { ':' } else { ',' })?;
        }
        Ok(())
    }
}

impl FromStr for Activation {
    type Err = ParseActivationError;

    fn from_str(text: &str) -> Result<Self, ParseActivationError> {
        let (name, parameters) = text.split_once(':').unwrap_or((text, ""));
        let mut activation = match name {
            "swiglu" => Activation::SWIGLU,
            "srelu" => Activation::SRELU,
            // Not a usable value: shows below whether the parameter was given.
            "tanh_srelu" => Activation::TanhSrelu(TanhSrelu { s: f32::NAN }),
            "situ_glu" => Activation::SituGlu(SituGlu::default()),
            "clamped_qgeglu" => Activation::ClampedQgeglu(ClampedQgeglu::default()),
            _ => return Err(ParseActivationError::Name(name.to_owned())),
        };
        let mut seen = Vec::new();
        let listed = if text.contains(':') { parameters.split(',').collect() } else { vec![] };
        for item in listed {
            let (key, value) = item.split_once('=').unwrap_or((item, ""));
            if seen.contains(&key) {
                return Err(ParseActivationError::Repeated {
                    activation: activation.name(),
                    parameter: key.into(),
                });
            }
            seen.push(key);
            let known: Vec<_> = activation.parameters().into_iter().map(|(name, _)| name).collect();
            let activation_name = activation.name();
            let slot = activation.parameter_mut(key).ok_or_else(|| ParseActivationError::Parameter {
                activation: activation_name,
                got: key.to_owned(),
                expected: if known.is_empty() { "none".into() } else { known.join(", ") },
            })?;
            *slot = value.parse().map_err(|_| {
                ParseActivationError::Value(format!(
                    "activation {activation_name}: parameter {key}: expected a number, got '{value}'"
                ))
            })?;
        }
        if matches!(activation, Activation::TanhSrelu(_)) && seen.is_empty() {
            return Err(ParseActivationError::Missing {
                activation: "tanh_srelu",
                parameter: "s",
                example: "tanh_srelu:s=16",
            });
        }
        activation.check().map_err(|e| ParseActivationError::Value(e.to_string()))?;
        Ok(activation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        for a in Activation::all() {
            assert_eq!(a.to_string().parse(), Ok(a));
        }
        assert_eq!("situ_glu:beta2=8".parse(), Ok(Activation::SituGlu(SituGlu { beta1: 4.0, beta2: 8.0 })));
        assert_eq!("clamped_qgeglu".parse(), Ok(Activation::ClampedQgeglu(ClampedQgeglu::default())));
    }

    #[test]
    fn bad_text_is_refused() {
        for bad in [
            "",
            "gelu",
            "swiglu:",
            "swiglu:s=1",
            "srelu:s=1",
            "tanh_srelu",
            "tanh_srelu:",
            "tanh_srelu:s",
            "tanh_srelu:s=",
            "tanh_srelu:s=0",
            "tanh_srelu:s=nan",
            "tanh_srelu:s=inf",
            "tanh_srelu:s=-2",
            "tanh_srelu:s=1,s=2",
            "situ_glu:beta3=1",
            "clamped_qgeglu:limit=7,",
            "SWIGLU",
            " swiglu",
        ] {
            assert!(bad.parse::<Activation>().is_err(), "'{bad}'");
        }
    }
}
