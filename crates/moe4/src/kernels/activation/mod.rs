//! Activations between FC1 and FC2, one file each with its derivative, and the order of gate and up columns.
//!
//! They belong to the contract and not to the operator, because the products' epilogues evaluate them.
#![forbid(unsafe_code)]

mod clamped_qgeglu;
mod layout;
mod parse;
mod situ_glu;
mod srelu;
mod swiglu;
mod tanh_srelu;

pub use clamped_qgeglu::ClampedQgeglu;
pub use layout::{FeatureRun, GluLayout};
pub use parse::ParseActivationError;
pub use situ_glu::SituGlu;
pub use srelu::Srelu;
pub use swiglu::SwiGlu;
pub use tanh_srelu::TanhSrelu;

use super::error::Misuse;
use crate::numerics::math::Real;

/// Value and partial derivatives at one point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluated<R> {
    /// `act(g, u)`.
    pub value: R,
    /// `∂act/∂g`.
    pub dg: R,
    /// `∂act/∂u`; 0 without an up projection.
    pub du: R,
}

/// An activation's formula. `g` is the gate (the only input of an ungated activation), `u` the up projection.
///
/// Forward and backward call the same function, so that a recomputed value has the same bits.
pub trait ActivationFn: Copy + Send + Sync {
    /// Whether there is an up projection.
    const GATED: bool;

    /// Value and derivatives, in the arithmetic of `R`.
    fn evaluate<R: Real>(self, g: R, u: R) -> Evaluated<R>;
}

/// Which activation, with its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `silu(g) · u`.
    SwiGlu(SwiGlu),
    /// `relu(c)²`.
    Srelu(Srelu),
    /// `(s · tanh(relu(c)/s))²`.
    TanhSrelu(TanhSrelu),
    /// `β1·tanh(g/β1)·σ(g) · β2·tanh(u/β2)`.
    SituGlu(SituGlu),
    /// `(clamp(u, -limit, limit) + offset) · m·σ(alpha·m)`, `m = min(g, limit)`.
    ClampedQgeglu(ClampedQgeglu),
}

impl Default for Activation {
    fn default() -> Self {
        Activation::SWIGLU
    }
}

/// Runs `$body` with `$f` bound to the activation's own type, so that the loop inside is compiled for it.
macro_rules! with_activation {
    ($activation:expr, $f:ident => $body:expr) => {
        match $activation {
            $crate::kernels::activation::Activation::SwiGlu($f) => $body,
            $crate::kernels::activation::Activation::Srelu($f) => $body,
            $crate::kernels::activation::Activation::TanhSrelu($f) => $body,
            $crate::kernels::activation::Activation::SituGlu($f) => $body,
            $crate::kernels::activation::Activation::ClampedQgeglu($f) => $body,
        }
    };
}
pub(crate) use with_activation;

impl Activation {
    /// `swiglu`.
    pub const SWIGLU: Self = Activation::SwiGlu(SwiGlu);
    /// `srelu`.
    pub const SRELU: Self = Activation::Srelu(Srelu);

    /// Every activation with its usual parameters.
    pub fn all() -> [Self; 5] {
        [
            Self::SWIGLU,
            Self::SRELU,
            Activation::TanhSrelu(TanhSrelu { s: 16.0 }),
            Activation::SituGlu(SituGlu::default()),
            Activation::ClampedQgeglu(ClampedQgeglu::default()),
        ]
    }

    /// Whether there is an up projection.
    pub fn is_gated(&self) -> bool {
        fn gated<A: ActivationFn>(_: &A) -> bool {
            A::GATED
        }
        with_activation!(self, f => gated(f))
    }

    /// `N1`, the outputs of FC1: `2F` with an up projection, else `F`.
    pub fn fc1_rows(&self, ffn: usize) -> usize {
        if self.is_gated() { 2 * ffn } else { ffn }
    }

    /// Parameters must be finite and positive.
    pub fn check(&self) -> Result<(), Misuse> {
        for (name, value) in self.parameters() {
            if !(value.is_finite() && value > 0.0) {
                return Err(Misuse::Value {
                    what: format!("activation {}: parameter {name}", self.name()),
                    expected: "a finite, positive number",
                    got: value.to_string(),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn evaluate<R: Real>(a: Activation, g: R, u: R) -> Evaluated<R> {
        with_activation!(a, f => f.evaluate(g, u))
    }

    fn any_activation() -> impl Strategy<Value = Activation> {
        (0..5usize, 0.3f32..20.0, 0.3f32..20.0, 0.3f32..3.0).prop_map(|(which, a, b, c)| match which {
            0 => Activation::SWIGLU,
            1 => Activation::SRELU,
            2 => Activation::TanhSrelu(TanhSrelu { s: a }),
            3 => Activation::SituGlu(SituGlu { beta1: a, beta2: b }),
            _ => Activation::ClampedQgeglu(ClampedQgeglu { limit: a, alpha: b.min(4.0), offset: c }),
        })
    }

    proptest! {
        #[test]
        fn derivatives_agree_with_finite_differences(a in any_activation(), g in -12f64..12.0, u in -12f64..12.0) {
            let step = 1e-5;
            if let Activation::ClampedQgeglu(p) = a {
                let near = |x: f64| (x.abs() - p.limit as f64).abs() < 2.0 * step;
                prop_assume!(!near(g) && !near(u));
            }
            prop_assume!(g.abs() > 2.0 * step);
            let at = evaluate(a, g, u);
            let dg = (evaluate(a, g + step, u).value - evaluate(a, g - step, u).value) / (2.0 * step);
            let du = (evaluate(a, g, u + step).value - evaluate(a, g, u - step).value) / (2.0 * step);
            let tolerance = 1e-6 * (1.0 + at.value.abs() + at.dg.abs() + at.du.abs());
            prop_assert!((at.dg - dg).abs() < tolerance, "dg {} {}", at.dg, dg);
            if a.is_gated() {
                prop_assert!((at.du - du).abs() < tolerance, "du {} {}", at.du, du);
            }
        }

        #[test]
        fn f32_follows_f64(a in any_activation(), g in -30f32..30.0, u in -30f32..30.0) {
            let (single, double) = (evaluate(a, g, u), evaluate(a, g as f64, u as f64));
            for (s, d) in [(single.value, double.value), (single.dg, double.dg), (single.du, double.du)] {
                // The terms of a derivative may cancel; none is larger than this product, whose factor 4 covers
                // the largest offset.
                let terms = (1.0 + g.abs() as f64) * (4.0 + u.abs() as f64);
                prop_assert!((s as f64 - d).abs() <= 4e-6 * d.abs() + 1e-6 * terms, "{} {}", s, d);
            }
        }
    }

    #[test]
    fn gradients_stop_beyond_a_clamp_and_pass_at_the_limit() {
        let a = Activation::ClampedQgeglu(ClampedQgeglu::default());
        let above = 7.0f32.next_up();
        assert_eq!(evaluate(a, above, 1.0f32).dg, 0.0);
        assert_ne!(evaluate(a, 7.0f32, 1.0).dg, 0.0);
        assert_ne!(evaluate(a, -100.0f32, 1.0).value.to_bits(), evaluate(a, 100.0f32, 1.0).value.to_bits());
        for sign in [-1.0, 1.0f32] {
            assert_eq!(evaluate(a, 2.0f32, sign * above).du, 0.0);
            assert_ne!(evaluate(a, 2.0f32, sign * 7.0).du, 0.0);
            assert_eq!(evaluate(a, 2.0f32, sign * 9.0).value, evaluate(a, 2.0f32, sign * 7.0).value);
        }
    }

    #[test]
    fn bad_parameters_are_named() {
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let message = Activation::TanhSrelu(TanhSrelu { s: bad }).check().unwrap_err().to_string();
            assert!(message.contains("tanh_srelu") && message.contains("parameter s"), "{message}");
            for a in [
                Activation::SituGlu(SituGlu { beta1: bad, beta2: 1.0 }),
                Activation::SituGlu(SituGlu { beta1: 1.0, beta2: bad }),
                Activation::ClampedQgeglu(ClampedQgeglu { limit: bad, ..Default::default() }),
                Activation::ClampedQgeglu(ClampedQgeglu { alpha: bad, ..Default::default() }),
                Activation::ClampedQgeglu(ClampedQgeglu { offset: bad, ..Default::default() }),
            ] {
                assert!(a.check().is_err(), "{a}");
            }
        }
        assert!(Activation::all().iter().all(|a| a.check().is_ok()));
    }
}
