//! SwiGLU: `silu(g) · u`, `silu(g) = g · σ(g)`. Shazeer, "GLU Variants Improve Transformer", 2020.

use super::{ActivationFn, Evaluated};
use crate::numerics::math::Real;

/// `silu(g) · u`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SwiGlu;

impl ActivationFn for SwiGlu {
    const GATED: bool = true;

    #[inline(always)]
    fn evaluate<R: Real>(self, g: R, u: R) -> Evaluated<R> {
        let (s, ds) = g.sigmoid();
        let silu = g * s;
        Evaluated { value: silu * u, dg: (s + g * ds) * u, du: silu }
    }
}
