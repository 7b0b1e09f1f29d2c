//! Cutting tensors into disjoint pieces that threads may write.
#![forbid(unsafe_code)]

use crate::kernels::Element;
use crate::tensor::{Groups, RowBlock};

/// Consecutive pieces of `data` with the given lengths, and what is left.
pub(super) fn carve<T>(
    mut data: &mut [T],
    lengths: impl Iterator<Item = usize>,
) -> (Vec<&mut [T]>, &mut [T]) {
    let mut pieces = Vec::with_capacity(lengths.size_hint().0);
    for len in lengths {
        let (piece, rest) = data.split_at_mut(len);
        pieces.push(piece);
        data = rest;
    }
    (pieces, data)
}

/// The rows of each block of a `[T, cols]` tensor. Rows of no expert are set to zero.
pub(super) fn carve_rows<'a, T: Element>(
    data: &'a mut [T],
    cols: usize,
    blocks: &[RowBlock],
) -> Vec<&'a mut [T]> {
    let (pieces, rest) = carve(data, blocks.iter().map(|b| b.rows.len() * cols));
    rest.fill(T::default());
    pieces
}

/// [`carve_rows`] of a tensor that may be absent: then every block has none.
pub(super) fn carve_optional<'a, T: Element>(
    data: Option<&'a mut [T]>,
    cols: usize,
    blocks: &[RowBlock],
) -> Vec<Option<&'a mut [T]>> {
    match data {
        Some(data) => carve_rows(data, cols, blocks).into_iter().map(Some).collect(),
        None => blocks.iter().map(|_| None).collect(),
    }
}

/// The maximum of each expert over its blocks; 0 for an expert without blocks.
pub(super) fn reduce_max(
    groups: &Groups,
    blocks: &[RowBlock],
    values: impl Iterator<Item = f32>,
    out: &mut [f32],
) {
    debug_assert_eq!(groups.experts(), out.len());
    out.fill(0.0);
    for (block, value) in blocks.iter().zip(values) {
        out[block.expert] = out[block.expert].max(value);
    }
}
