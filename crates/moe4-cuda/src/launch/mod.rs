//! The launches: one file a pass, of the base name of its kernel.
//!
//! Each takes a pass of the contract whose lengths are checked, turns it into grid and arguments, and says what it cannot
//! check: that views name memory of this GPU, which their makers promise. Grids follow from shapes, never from splits.

mod addresses;
mod column_sums;
mod copy_pages;
mod dequantize;
mod group_amax;
mod group_hadamard_amax;
mod group_offsets;
mod group_quantize;
mod grouped_bias_grad;
mod grouped_gemm;
mod grouped_gemm_act;
mod grouped_gemm_dact;
mod grouped_wgrad;
pub(crate) mod hopper;
mod packed;
mod permute;
mod products;
mod quantize_cached_weights;
mod quantize_weights;
mod row_product;
mod unpack;
mod unpermute;

pub(crate) use addresses::addresses;
pub(crate) use column_sums::variant as column_sums_variant;
pub(crate) use copy_pages::{
    MOST_PARTS, PAGE_LIMIT, PartArgument, Store, WORD, copy_pages, variant as copy_pages_variant,
};
pub(crate) use dequantize::{dequantize, variant as dequantize_variant};
pub(crate) use group_amax::group_amax;
pub(crate) use group_hadamard_amax::{group_hadamard_amax, variant as group_hadamard_amax_variant};
pub(crate) use group_offsets::group_offsets;
pub(crate) use group_quantize::{Copy, group_quantize, variant as group_quantize_variant};
pub(crate) use grouped_bias_grad::grouped_bias_grad;
pub(crate) use grouped_gemm::{grouped_gemm, variant as grouped_gemm_variant};
pub(crate) use grouped_gemm_act::{grouped_gemm_act, variant as grouped_gemm_act_variant};
pub(crate) use grouped_gemm_dact::{grouped_gemm_dact, variant as grouped_gemm_dact_variant};
pub(crate) use grouped_wgrad::{grouped_wgrad, variant as grouped_wgrad_variant};
pub(crate) use packed::every_rows as every_packed_rows;
pub(crate) use permute::{permute, variant as permute_variant};
pub(crate) use products::{EpilogueAmax, EpilogueChoice, MainLoop};
pub(crate) use quantize_cached_weights::variant as quantize_cached_weights_variant;
pub(crate) use quantize_weights::{quantize_weights, variant as quantize_weights_variant};
pub(crate) use unpermute::{unpermute, variant as unpermute_variant};

use crate::variant::Variant;
use bytemuck::{Pod, Zeroable};
use moe4::kernels::Misuse;
use moe4::kernels::contract::NO_ROW;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::RandomStream;

/// Threads of a block, where a file says nothing else.
const THREADS: u32 = 256;

/// A variant without choices.
pub(crate) fn plain(kernel: &'static str) -> Variant {
    Variant { kernel, defines: Vec::new() }
}

/// The address of a tensor that is read or written in words of `bytes`.
fn aligned(kernel: &'static str, tensor: &'static str, address: u64, bytes: u64) -> Result<u64, Misuse> {
    if address.is_multiple_of(bytes) {
        return Ok(address);
    }
    Err(Misuse::Conflict {
        what: kernel,
        conflict: format!("{tensor}: expected an address that is a multiple of {bytes}, got {address:#x}"),
        fix: "copy the tensor to memory of its own",
    })
}

/// A dimension as a kernel takes it. A few times as much still fits 32 bits.
fn narrow(what: &'static str, value: usize) -> Result<u32, Misuse> {
    match u32::try_from(value) {
        Ok(narrow) if narrow < 1 << 28 => Ok(narrow),
        _ => Err(Misuse::Value { what: what.into(), expected: "less than 2^28", got: value.to_string() }),
    }
}

/// Rows that indices can name: less than the index of no row.
fn indexed_rows(what: &'static str, rows: usize) -> Result<u64, Misuse> {
    match u32::try_from(rows) {
        Ok(rows) if rows < NO_ROW => Ok(u64::from(rows)),
        _ => Err(Misuse::Value { what: what.into(), expected: "less than 2^32 - 1", got: rows.to_string() }),
    }
}

/// Thread blocks for `work` items, `each` of them in a block; at most `most`, which then loop.
fn blocks(work: usize, each: usize, most: u32) -> u32 {
    work.div_ceil(each).min(most as usize) as u32
}

/// The compile-time choice that stands for a sign mask given at launch; `kernels/numerics.cuh`.
pub(crate) const MASK_AT_LAUNCH: u32 = 0x10000;

/// The sign mask as a kernel's compile-time choice. The usual ones are worth a variant of their own; all others share
/// one that gets the mask at launch.
fn mask_choice(mask: SignMask) -> u32 {
    if [SignMask::DEFAULT, SignMask::NONE].contains(&mask) { u32::from(mask.0) } else { MASK_AT_LAUNCH }
}

/// `RandomStream` of `kernels/numerics.cuh`: Philox's round keys, and the stream.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RandomArgument {
    keys: [u32; 20],
    stream: u64,
    /// The address of what is added to the stream, or 0.
    shift: u64,
}

impl RandomArgument {
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

    fn new(random: RandomStream, shift: u64) -> Self {
        let key = [random.seed as u32, (random.seed >> 32) as u32];
        let round_key = |i: usize| key[i % 2].wrapping_add(Self::WEYL[i % 2].wrapping_mul(i as u32 / 2));
        Self { keys: std::array::from_fn(round_key), stream: random.stream, shift }
    }
}

/// `Out` of `kernels/output.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct OutArgument {
    /// Each is 0 if the variant does not write it.
    codes: u64,
    scales: u64,
    unpacked: u64,
}
