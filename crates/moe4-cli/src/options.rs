//! Option values that several commands share.

use std::str::FromStr;

use clap::ValueEnum;
use moe4::mlp::{DcAmax, Precision};
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

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(crate) enum PrecisionArg {
    Nvfp4,
    Bf16,
}

impl From<PrecisionArg> for Precision {
    fn from(precision: PrecisionArg) -> Self {
        match precision {
            PrecisionArg::Nvfp4 => Precision::Nvfp4,
            PrecisionArg::Bf16 => Precision::Bf16,
        }
    }
}

/// Where the amaxes of `dc` come from.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(crate) enum DcAmaxArg {
    /// The epilogue that writes dc.
    Exact,
    /// The epilogue for the rowwise one, 4 times it for the columnwise one.
    Bound,
    /// A pass of its own.
    Separate,
}

impl From<DcAmaxArg> for DcAmax {
    fn from(source: DcAmaxArg) -> Self {
        match source {
            DcAmaxArg::Exact => DcAmax::Exact,
            DcAmaxArg::Bound => DcAmax::Bound,
            DcAmaxArg::Separate => DcAmax::SeparatePass,
        }
    }
}
