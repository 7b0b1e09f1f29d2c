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
        Self::new(address, &[cols, rows], &[LINE, box_rows])
    }

    /// Of `[experts, rows, cols]` at `address`, boxes of `box_rows` lines of one expert.
    pub(crate) fn of_experts(
        address: u64,
        [experts, rows, cols]: [usize; 3],
        box_rows: u32,
    ) -> Result<Self, CallError> {
        Self::new(address, &[cols, rows, experts], &[LINE, box_rows, 1])
    }

    fn new(address: u64, dims: &[usize], lines: &[u32]) -> Result<Self, CallError> {
        let dims: Vec<u64> = dims.iter().map(|&d| d as u64).collect();
        let mut stride = size_of::<half::bf16>() as u64;
        let strides: Vec<u64> = dims[..dims.len() - 1]
            .iter()
            .map(|d| {
                stride *= d;
                stride
            })
            .collect();
        let map = raw::encode_tensor_map(address, &dims, &strides, lines)
            .map_err(|e| e.of(format!("a BF16 tensor {dims:?} (innermost first) at {address:#x}")))?;
        Ok(Self(map))
    }
}
