//! Option values that several commands share.

use std::str::FromStr;

use clap::ValueEnum;
use moe4::numerics::hadamard::SignMask;

/// Rounding of elements to E2M1.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(crate) enum RoundingArg {
    Nearest,
    Stochastic,
}

/// `off` or a sign mask of the random Hadamard transform.
#[derive(Clone, Copy)]
pub(crate) struct RhtArg(pub(crate) Option<SignMask>);

impl FromStr for RhtArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "off" {
            return Ok(Self(None));
        }
        text.parse().map(|mask| Self(Some(mask))).map_err(|error| format!("{error}, or 'off'"))
    }
}
