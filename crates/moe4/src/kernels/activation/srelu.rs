//! Squared ReLU: `relu(c)²`. So et al., "Primer", 2021.

use super::{ActivationFn, Evaluated};
use crate::numerics::math::Real;

/// `relu(c)²`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Srelu;

impl ActivationFn for Srelu {
    const GATED: bool = false;

    #[inline(always)]
    fn evaluate<R: Real>(self, c: R, _: R) -> Evaluated<R> {
        let zero = R::from_f32(0.0);
        let r = c.at_least(zero);
        Evaluated { value: r * r, dg: r + r, du: zero }
    }
}
