//! Descriptions of tensors for the copies that Hopper's kernels start.
#![forbid(unsafe_code)]

use super::error::CallError;
use super::raw;
use bytemuck::{Pod, Zeroable};

/// `TensorMap` of `kernels/wgmma.cuh`: a BF16 tensor and the box of it that one copy brings, in lines of 64 values.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
pub(crate) struct TensorMap([u64; 16]);

/// Values of a line of a box.
const LINE: u32 = 64;

impl TensorMap {
    /// Of `[rows, cols]` at `address`, boxes of `box_rows` lines.
    pub(crate) fn matrix(address: u64, [rows, cols]: [usize; 2], box_rows: u32) -> Result<Self, CallError> {
        Self::new(address, &[cols as u64, rows as u64], &[bytes(cols as u64)], &[LINE, box_rows])
    }

    /// Of `[rows, cols]` for each expert, `stride` elements apart, the first at `address`; boxes of `box_rows` lines of
    /// one expert.
    pub(crate) fn of_experts(
        address: u64,
        [experts, rows, cols]: [usize; 3],
        stride: u64,
        box_rows: u32,
    ) -> Result<Self, CallError> {
        let dims = [cols, rows, experts].map(|d| d as u64);
        // Of one expert there is no distance.
        let stride = if experts == 1 { dims[0] * dims[1] } else { stride };
        Self::new(address, &dims, &[bytes(dims[0]), bytes(stride)], &[LINE, box_rows, 1])
    }

    fn new(address: u64, dims: &[u64], strides: &[u64], lines: &[u32]) -> Result<Self, CallError> {
        let map = raw::encode_tensor_map(address, dims, strides, lines)
            .map_err(|e| e.of(format!("a BF16 tensor {dims:?} (innermost first) at {address:#x}")))?;
        Ok(Self(map))
    }
}

fn bytes(elements: u64) -> u64 {
    elements * size_of::<half::bf16>() as u64
}
