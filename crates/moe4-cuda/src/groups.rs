//! Rows of each expert in device memory, where kernels read them and the host does not.
//!
//! Three arrays of `E + 2` entries in one buffer; `kernels/groups.cuh` says what they hold. The host knows the number of
//! experts, the rows of the tensor, and for how many token positions columnwise operands are allocated. From these follows
//! the largest number of tiles that any splits can need, which is what is launched.
#![forbid(unsafe_code)]

use crate::memory::DeviceBuffer;
use bytemuck::{Pod, Zeroable};
use moe4::kernels::Extent;
use moe4::numerics::BLOCK;
use moe4::tensor::Groups;
use std::sync::Arc;

/// Rows of a tile; `TILE_ROWS` of `kernels/groups.cuh`.
pub(crate) const TILE_ROWS: usize = 128;

/// Rows of each expert. Clones share the arrays.
#[derive(Clone, Debug)]
pub struct DeviceGroups {
    arrays: Arc<DeviceBuffer<u64>>,
    extent: GroupsExtent,
}

/// What the host knows of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupsExtent {
    pub(crate) experts: usize,
    pub(crate) rows: usize,
    pub(crate) padded_rows: usize,
}

impl GroupsExtent {
    /// For splits that only the device knows: token positions for the worst of them.
    pub(crate) fn for_any_splits(experts: usize, rows: usize) -> Self {
        // Each expert that has rows wastes at most 15 positions.
        let padding = (BLOCK - 1) * experts.min(rows);
        Self { experts, rows, padded_rows: (rows + padding).next_multiple_of(BLOCK) }
    }

    /// Elements of `u64` that the arrays take; tiles are half as large.
    pub(crate) fn array_len(self) -> usize {
        2 * (self.experts + 2) + (self.experts + 2).div_ceil(2)
    }

    /// Tiles that any splits need at most, those of nobody's rows included.
    pub(crate) fn most_tiles(self) -> usize {
        self.rows.max(self.padded_rows) / TILE_ROWS + self.experts.min(self.rows) + 2
    }
}

/// `Groups` of `kernels/groups.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct GroupsArgument {
    pub(crate) offsets: u64,
    pub(crate) padded: u64,
    pub(crate) tiles: u64,
    pub(crate) experts: u32,
    unused: u32,
}

impl GroupsArgument {
    pub(crate) fn at(address: u64, extent: GroupsExtent) -> Self {
        let array = ((extent.experts + 2) * size_of::<u64>()) as u64;
        Self {
            offsets: address,
            padded: address + array,
            tiles: address + 2 * array,
            experts: extent.experts as u32,
            unused: 0,
        }
    }
}

impl DeviceGroups {
    pub(crate) fn new(arrays: DeviceBuffer<u64>, extent: GroupsExtent) -> Self {
        Self { arrays: Arc::new(arrays), extent }
    }

    pub(crate) fn argument(&self) -> GroupsArgument {
        GroupsArgument::at(self.arrays.view().address(), self.extent)
    }

    pub(crate) fn extent(&self) -> GroupsExtent {
        self.extent
    }

    /// Thread blocks along the rows.
    pub(crate) fn most_tiles(&self) -> u32 {
        self.extent.most_tiles() as u32
    }
}

impl Extent for DeviceGroups {
    fn experts(&self) -> usize {
        self.extent.experts
    }
    fn rows(&self) -> usize {
        self.extent.rows
    }
    fn padded_rows(&self) -> usize {
        self.extent.padded_rows
    }
}

/// The three arrays for splits that the host knows, as `group_offsets` computes them on the device.
pub(crate) fn host_arrays(groups: &Groups) -> (GroupsExtent, Vec<u64>) {
    let experts = groups.experts();
    let extent = GroupsExtent { experts, rows: groups.rows(), padded_rows: groups.padded_rows() };
    let starts = |end: fn(&Groups, usize) -> usize| (0..experts).map(move |e| end(groups, e) as u64);
    let mut arrays: Vec<u64> = starts(|g, e| g.range(e).start).collect();
    arrays.extend([groups.live_rows() as u64, groups.rows() as u64]);
    arrays.extend(starts(|g, e| g.padded_range(e).start));
    arrays.extend([groups.padded_rows() as u64; 2]);
    let mut tiles = vec![0u32];
    let nobody = groups.rows() - groups.live_rows();
    for rows in groups.splits().chain([nobody]) {
        tiles.push(tiles[tiles.len() - 1] + rows.div_ceil(TILE_ROWS) as u32);
    }
    tiles.resize(tiles.len().next_multiple_of(2), 0);
    arrays.extend(tiles.chunks_exact(2).map(|pair| u64::from(pair[0]) | u64::from(pair[1]) << 32));
    (extent, arrays)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_of_known_splits() {
        let groups = Groups::new(&[130, 0, 5], 300).unwrap();
        let (extent, arrays) = host_arrays(&groups);
        assert_eq!(extent, GroupsExtent { experts: 3, rows: 300, padded_rows: 144 + 16 });
        assert_eq!(arrays.len(), extent.array_len());
        assert_eq!(arrays[..5], [0, 130, 130, 135, 300]);
        assert_eq!(arrays[5..10], [0, 144, 144, 160, 160]);
        let tiles: Vec<u32> = arrays[10..].iter().flat_map(|&v| [v as u32, (v >> 32) as u32]).collect();
        assert_eq!(tiles, [0, 2, 2, 3, 5, 0]);
        assert!(tiles[4] as usize <= extent.most_tiles());
    }

    #[test]
    fn the_bound_holds_for_the_worst_splits() {
        for (experts, rows) in [(1, 0), (1, 1), (4, 3), (128, 128), (300, 1000), (8, 1 << 20)] {
            let extent = GroupsExtent::for_any_splits(experts, rows);
            // One row each, what is left to the last.
            let mut splits: Vec<usize> = (0..experts).map(|e| usize::from(e < rows)).collect();
            splits[experts - 1] += rows - splits.iter().sum::<usize>();
            for live in [rows, rows / 2] {
                let mut left = live;
                for split in &mut splits {
                    *split = (*split).min(left);
                    left -= *split;
                }
                let groups = Groups::new(&splits, rows).unwrap();
                assert!(groups.padded_rows() <= extent.padded_rows, "{experts} {rows}");
                let nobody = (rows - groups.live_rows()).max(extent.padded_rows - groups.padded_rows());
                let tiles: usize = groups.splits().chain([nobody]).map(|s| s.div_ceil(TILE_ROWS)).sum();
                assert!(tiles <= extent.most_tiles(), "{experts} {rows}: {tiles} of {}", extent.most_tiles());
            }
        }
    }
}
