//! A gated unit with both factors softly bounded: `β1·tanh(g/β1)·σ(g) · β2·tanh(u/β2)`.

use super::{ActivationFn, Evaluated};
use crate::numerics::math::Real;

/// `β1·tanh(g/β1)·σ(g) · β2·tanh(u/β2)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SituGlu {
    /// Bound of the gate.
    pub beta1: f32,
    /// Bound of the up projection.
    pub beta2: f32,
}

impl Default for SituGlu {
    fn default() -> Self {
        Self { beta1: 4.0, beta2: 25.0 }
    }
}

impl ActivationFn for SituGlu {
    const GATED: bool = true;

    #[inline(always)]
    fn evaluate<R: Real>(self, g: R, u: R) -> Evaluated<R> {
        let (beta1, beta2) = (R::from_f32(self.beta1), R::from_f32(self.beta2));
        let (t, dt) = (g / beta1).tanh();
        let (s, ds) = g.sigmoid();
        let (v, dv) = (u / beta2).tanh();
        let gate = beta1 * t * s;
        let up = beta2 * v;
        Evaluated { value: gate * up, dg: (dt * s + beta1 * t * ds) * up, du: gate * dv }
    }
}
