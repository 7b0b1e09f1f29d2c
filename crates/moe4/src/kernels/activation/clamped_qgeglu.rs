//! The clamped quick-GELU gate of GPT-OSS: `(clamp(u, -limit, limit) + offset) · m·σ(alpha·m)`, `m = min(g, limit)`.
//!
//! Strictly beyond a clamp the gradient is zero; at exactly the limit it passes.

use super::{ActivationFn, Evaluated};
use crate::numerics::math::Real;

/// `(clamp(u, -limit, limit) + offset) · m·σ(alpha·m)`, `m = min(g, limit)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClampedQgeglu {
    /// Upper bound of the gate, bound of the up projection on both sides.
    pub limit: f32,
    /// Slope of the quick GELU.
    pub alpha: f32,
    /// Added to the up projection.
    pub offset: f32,
}

impl Default for ClampedQgeglu {
    fn default() -> Self {
        Self { limit: 7.0, alpha: 1.702, offset: 1.0 }
    }
}

impl ActivationFn for ClampedQgeglu {
    const GATED: bool = true;

    #[inline(always)]
    fn evaluate<R: Real>(self, g: R, u: R) -> Evaluated<R> {
        let zero = R::from_f32(0.0);
        let (limit, alpha) = (R::from_f32(self.limit), R::from_f32(self.alpha));
        let low = zero - limit;
        let m = g.at_most(limit);
        let up = u.at_most(limit).at_least(low) + R::from_f32(self.offset);
        let (s, ds) = (alpha * m).sigmoid();
        let gate = m * s;
        let dgate = s + alpha * m * ds;
        Evaluated {
            value: up * gate,
            dg: limit.if_less(g, zero, up * dgate),
            du: limit.if_less(u, zero, u.if_less(low, zero, gate)),
        }
    }
}
