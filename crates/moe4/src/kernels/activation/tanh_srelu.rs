//! Squared ReLU with a soft bound: `(s · tanh(relu(c)/s))²`, at most `s²`.

use super::{ActivationFn, Evaluated};
use crate::numerics::math::Real;

/// `(s · tanh(relu(c)/s))²`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TanhSrelu {
    /// The bound of the square root.
    pub s: f32,
}

impl ActivationFn for TanhSrelu {
    const GATED: bool = false;

    #[inline(always)]
    fn evaluate<R: Real>(self, c: R, _: R) -> Evaluated<R> {
        let (zero, s) = (R::from_f32(0.0), R::from_f32(self.s));
        let (t, dt) = (c.at_least(zero) / s).tanh();
        let v = s * t;
        // d(s·tanh(r/s))/dr = tanh'(r/s); v is 0 wherever relu is flat.
        Evaluated { value: v * v, dg: (v + v) * dt, du: zero }
    }
}
