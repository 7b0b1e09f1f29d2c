//! The passes of the operator as plain descriptors: what each reads, what it writes, and in which shape.
//!
//! Every output is written completely by its pass, whatever it held before: rows past `sum(splits)`, padding and
//! the amax of an empty expert become zero. Symbols: `T` rows, `E` experts, `H` hidden, `F` ffn, `N1` FC1 outputs,
//! `Tp` padded token positions.
#![forbid(unsafe_code)]

mod operands;
mod products;
mod quantize;
mod rows;

pub use operands::*;
pub use products::*;
pub use quantize::*;
pub use rows::*;

use super::error::Misuse;
use crate::numerics::BLOCK;

type Checked = Result<(), Misuse>;

fn multiple_of_block(what: &'static str, got: usize) -> Checked {
    if got > 0 && got.is_multiple_of(BLOCK) {
        return Ok(());
    }
    Err(Misuse::Multiple { what, multiple: BLOCK, got, fix: "pad the dimension with zeros" })
}
