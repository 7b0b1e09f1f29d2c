//! Shapes and layouts: tokens grouped by expert, packed 4-bit operands, block-scale layouts.
//!
//! Nothing here computes; it says where things lie.
#![forbid(unsafe_code)]

mod groups;
mod nvfp4;
pub mod scale_layout;

pub use groups::{Groups, GroupsError, RowBlock};
pub use nvfp4::{Nvfp4, OperandShape, Quantized, Tile};
pub use scale_layout::ScaleLayout;
