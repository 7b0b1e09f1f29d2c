//! Rows of each expert in device memory, where kernels read them and the host does not.
//!
//! Offsets, padded offsets and a list of tiles in one buffer; `kernels/groups.cuh` says what they hold. The host knows the number of
//! experts, the rows of the tensor, and for how many token positions columnwise operands are allocated. From these follows
//! the largest number of tiles that any splits can need, which is what is launched.
#![forbid(unsafe_code)]

use crate::memory::DeviceBuffer;
use bytemuck::{Pod, Zeroable};
use moe4::kernels::Extent;
use moe4::tensor::Groups;
use std::sync::Arc;

/// Rows of a tile; `TILE_ROWS` of `kernels/groups.cuh`.
pub(crate) const TILE_ROWS: usize = 128;

/// Rows of each expert. Clones share the arrays.
#[derive(Clone, Debug)]
pub struct DeviceGroups {
    arrays: Arc<DeviceBuffer<u64>>,
    extent: GroupsExtent,
    /// Rows that experts own, if the host knows the splits.
    live_rows: Option<usize>,
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
        Self { experts, rows, padded_rows: Groups::most_padded_rows(experts, rows) }
    }

    /// Where the parts of the buffer begin, in elements of `u64`: offsets, padded offsets, the first tile of each expert
    /// (half as large; scratch of `group_offsets`), tiles; and its length.
    pub(crate) fn layout(self) -> [usize; 5] {
        let (array, scratch) = (self.experts + 2, (self.experts + 2).div_ceil(2));
        // Tiles are read in words of 16 bytes.
        let tiles = (2 * array + scratch).next_multiple_of(2);
        [0, array, 2 * array, tiles, tiles + self.most_tiles() * TILE_LEN]
    }

    /// Tiles that any splits need at most, those of nobody's rows included.
    pub(crate) fn most_tiles(self) -> usize {
        self.rows.max(self.padded_rows) / TILE_ROWS + self.experts.min(self.rows) + 2
    }
}

/// Elements of `u64` of a tile in the list.
const TILE_LEN: usize = 4;
/// The expert of an entry that no tile needs.
const NO_TILE: u64 = u32::MAX as u64;

/// `Groups` of `kernels/groups.cuh`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct GroupsArgument {
    pub(crate) offsets: u64,
    pub(crate) padded: u64,
    pub(crate) tiles: u64,
    pub(crate) experts: u32,
    pub(crate) most_tiles: u32,
}

impl DeviceGroups {
    pub(crate) fn new(arrays: DeviceBuffer<u64>, extent: GroupsExtent) -> Self {
        Self { arrays: Arc::new(arrays), extent, live_rows: None }
    }

    /// The same groups, of splits that the host knows.
    pub(crate) fn of_live_rows(self, live_rows: usize) -> Self {
        Self { live_rows: Some(live_rows), ..self }
    }

    /// From now on only the device knows the splits.
    pub(crate) fn forget_live_rows(&mut self) {
        self.live_rows = None;
    }

    /// Rows that experts own, if the host knows the splits; all token positions are then alive.
    pub(crate) fn known_live_rows(&self) -> Option<usize> {
        self.live_rows
    }

    /// Where the device finds the numbers of live rows and of live token positions, `u64` each.
    pub(crate) fn live_counts(&self) -> [u64; 2] {
        let [offsets, padded, ..] = self.parts();
        [offsets, padded].map(|array| array + (self.extent.experts * size_of::<u64>()) as u64)
    }

    /// Addresses of the parts of the buffer.
    pub(crate) fn parts(&self) -> [u64; 4] {
        let [offsets, padded, first_tiles, tiles, _] = self.extent.layout();
        let address = self.arrays.view().address();
        [offsets, padded, first_tiles, tiles].map(|at| address + (at * size_of::<u64>()) as u64)
    }

    pub(crate) fn argument(&self) -> GroupsArgument {
        let [offsets, padded, _, tiles] = self.parts();
        let (experts, most_tiles) = (self.extent.experts as u32, self.extent.most_tiles() as u32);
        GroupsArgument { offsets, padded, tiles, experts, most_tiles }
    }

    /// A grid with `x` thread blocks for each tile.
    pub(crate) fn grid(&self, x: u32) -> [u32; 3] {
        const LIMIT: u32 = 65535;
        let tiles = self.extent.most_tiles() as u32;
        [x, tiles.min(LIMIT), tiles.div_ceil(LIMIT)]
    }

    pub(crate) fn extent(&self) -> GroupsExtent {
        self.extent
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

/// The buffer's contents for splits that the host knows, as `group_offsets` computes them on the device.
pub(crate) fn host_arrays(groups: &Groups) -> (GroupsExtent, Vec<u64>) {
    let experts = groups.experts();
    let extent = GroupsExtent { experts, rows: groups.rows(), padded_rows: groups.padded_rows() };
    let [_, padded, first_tiles, tiles, len] = extent.layout();
    let mut arrays = vec![0; len];
    for e in 0..experts {
        arrays[e] = groups.range(e).start as u64;
        arrays[padded + e] = groups.padded_range(e).start as u64;
    }
    arrays[experts..experts + 2].copy_from_slice(&[groups.live_rows() as u64, groups.rows() as u64]);
    arrays[padded + experts..first_tiles].fill(groups.padded_rows() as u64);
    let mut list = arrays[tiles..].chunks_exact_mut(TILE_LEN);
    for e in 0..=experts {
        // Behind the last expert come the rows of nobody.
        let (rows, positions) = if e < experts {
            (groups.range(e), groups.padded_range(e))
        } else {
            (groups.live_rows()..groups.rows(), groups.padded_rows()..groups.padded_rows())
        };
        for token in (0..rows.len()).step_by(TILE_ROWS) {
            let left = |count: usize| count.saturating_sub(token).min(TILE_ROWS) as u64;
            let sizes = left(rows.len()) | left(positions.len()) << 16;
            let entry = [rows.start + token, positions.start + token, token].map(|v| v as u64);
            let tile = list.next().expect("the bound holds");
            tile[..3].copy_from_slice(&entry);
            tile[3] = e as u64 | sizes << 32;
        }
    }
    list.for_each(|tile| tile[3] = NO_TILE);
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
        let [_, padded, _, tiles, len] = extent.layout();
        assert_eq!((arrays.len(), tiles % 2), (len, 0));
        assert_eq!(arrays[..5], [0, 130, 130, 135, 300]);
        assert_eq!(arrays[padded..padded + 5], [0, 144, 144, 160, 160]);
        let tile = |i: usize| {
            let v = &arrays[tiles + i * TILE_LEN..][..TILE_LEN];
            (v[0], v[1], v[2], v[3] as u32, v[3] >> 32 & 0xFFFF, v[3] >> 48)
        };
        let expected = [
            (0, 0, 0, 0, 128, 128),
            (128, 128, 128, 0, 2, 16),
            (130, 144, 0, 2, 5, 16),
            (135, 160, 0, 3, 128, 0),
            (263, 288, 128, 3, 37, 0),
        ];
        for (i, expected) in expected.into_iter().enumerate() {
            assert_eq!(tile(i), expected, "tile {i}");
        }
        for unused in expected.len()..extent.most_tiles() {
            assert_eq!(tile(unused).3, u32::MAX);
        }
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
