//! Tokens sorted by expert: how many rows each expert has and where they start.
//!
//! `T` rows in all, of which the first `sum(splits)` belong to experts and the rest to nobody. Columnwise operands
//! contract over an expert's tokens in tiles of 16, so there each expert's token count is rounded up to a multiple
//! of 16 and the tail is zero.

use crate::numerics::BLOCK;
use std::ops::Range;

const _: () =
    assert!(usize::BITS == 64, "moe4 needs a 64-bit target: tensors of more than 2^31 elements are usual");

/// The rows of each expert in a `[T, ·]` tensor sorted by expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups {
    rows: usize,
    offsets: Vec<usize>,
    padded_offsets: Vec<usize>,
}

/// Splits that do not fit the tensor they describe.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupsError {
    /// More rows are claimed by experts than exist.
    #[error(
        "splits: expected a sum of at most {rows} (the rows of the tensor), got {sum} over {experts} experts; \
         pass the number of rows of each expert, in order"
    )]
    TooManyRows {
        /// Rows of the tensor.
        rows: usize,
        /// Sum of the splits.
        sum: u128,
        /// Number of splits.
        experts: usize,
    },
    /// More rows than any memory holds, beyond which offsets would overflow.
    #[error("rows of the tensor: expected at most 2^48, got {rows}")]
    TooLarge {
        /// Rows of the tensor.
        rows: usize,
    },
    /// No experts at all.
    #[error("splits: expected one entry for each expert, got none")]
    NoExperts,
    /// A negative entry, which signed index types allow.
    #[error("splits[{expert}]: expected a row count of 0 or more, got {got}")]
    Negative {
        /// The expert.
        expert: usize,
        /// Its claimed row count.
        got: i64,
    },
}

impl Groups {
    /// `splits[e]` rows belong to expert `e`; any size, 0 included; the sum is at most `rows`.
    pub fn new(splits: &[usize], rows: usize) -> Result<Self, GroupsError> {
        if splits.is_empty() {
            return Err(GroupsError::NoExperts);
        }
        if rows > 1 << 48 {
            return Err(GroupsError::TooLarge { rows });
        }
        let sum = splits.iter().map(|&s| s as u128).sum::<u128>();
        if sum > rows as u128 {
            return Err(GroupsError::TooManyRows { rows, sum, experts: splits.len() });
        }
        let prefix = |size: &dyn Fn(usize) -> usize| {
            let mut total = 0;
            let ends = splits.iter().map(|&s| {
                total += size(s);
                total
            });
            std::iter::once(0).chain(ends).collect()
        };
        let offsets = prefix(&|s| s);
        let padded_offsets = prefix(&|s| s.next_multiple_of(BLOCK));
        Ok(Self { rows, offsets, padded_offsets })
    }

    /// From signed counts, as index tensors hold them.
    pub fn from_i64(splits: &[i64], rows: usize) -> Result<Self, GroupsError> {
        let checked = splits
            .iter()
            .enumerate()
            .map(|(expert, &s)| usize::try_from(s).map_err(|_| GroupsError::Negative { expert, got: s }));
        Self::new(&checked.collect::<Result<Vec<_>, _>>()?, rows)
    }

    /// One group that owns all rows.
    pub fn single(rows: usize) -> Self {
        Self { rows, offsets: vec![0, rows], padded_offsets: vec![0, rows.next_multiple_of(BLOCK)] }
    }

    /// Number of experts `E`.
    pub fn experts(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Rows of the tensor `T`, including those past `sum(splits)`.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// `sum(splits)`.
    pub fn live_rows(&self) -> usize {
        self.offsets[self.experts()]
    }

    /// Token positions of a columnwise operand: the sum of the splits, each rounded up to 16.
    pub fn padded_rows(&self) -> usize {
        self.padded_offsets[self.experts()]
    }

    /// Token positions that hold any splits of `rows` over `experts`: each expert wastes at most 15.
    pub fn most_padded_rows(experts: usize, rows: usize) -> usize {
        (rows + (BLOCK - 1) * experts) / BLOCK * BLOCK
    }

    /// The rows of `expert`.
    pub fn range(&self, expert: usize) -> Range<usize> {
        self.offsets[expert]..self.offsets[expert + 1]
    }

    /// The token positions of `expert` in a columnwise operand.
    pub fn padded_range(&self, expert: usize) -> Range<usize> {
        self.padded_offsets[expert]..self.padded_offsets[expert + 1]
    }

    /// The number of rows of each expert.
    pub fn splits(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        (0..self.experts()).map(|e| self.range(e).len())
    }

    /// Cuts each expert's rows into runs of at most `block` rows, the first of each starting at the expert's first
    /// row. Empty experts give none.
    pub fn row_blocks(&self, block: usize) -> Vec<RowBlock> {
        let of_expert = |expert| {
            let range: Range<usize> = self.range(expert);
            let end = range.end;
            let start = range.start;
            range.step_by(block).map(move |first| RowBlock {
                expert,
                rows: first..end.min(first + block),
                token: first - start,
            })
        };
        (0..self.experts()).flat_map(of_expert).collect()
    }
}

/// A run of rows of one expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowBlock {
    /// The expert.
    pub expert: usize,
    /// Its rows in the tensor.
    pub rows: Range<usize>,
    /// The first row's position within the expert.
    pub token: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_and_padding() {
        let g = Groups::new(&[37, 0, 1, 64, 15], 120).unwrap();
        assert_eq!((g.experts(), g.rows(), g.live_rows(), g.padded_rows()), (5, 120, 117, 48 + 16 + 64 + 16));
        assert_eq!((g.range(1), g.range(3)), (37..37, 38..102));
        assert_eq!((g.padded_range(1), g.padded_range(2)), (48..48, 48..64));
        assert_eq!(g.splits().collect::<Vec<_>>(), [37, 0, 1, 64, 15]);
    }

    #[test]
    fn the_bound_on_padding_holds_and_is_reached() {
        for splits in [vec![1; 5], vec![17, 1, 33], vec![0, 16, 1], vec![0]] {
            let rows = splits.iter().sum();
            let padded = Groups::new(&splits, rows).unwrap().padded_rows();
            assert!(padded <= Groups::most_padded_rows(splits.len(), rows), "{splits:?}");
        }
        assert_eq!(Groups::most_padded_rows(5, 5), 80);
    }

    #[test]
    fn row_blocks_never_straddle_an_expert() {
        let g = Groups::new(&[5, 0, 4], 9).unwrap();
        let blocks: Vec<_> = g.row_blocks(4).into_iter().map(|b| (b.expert, b.rows, b.token)).collect();
        assert_eq!(blocks, [(0, 0..4, 0), (0, 4..5, 4), (2, 5..9, 0)]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert_eq!(Groups::new(&[3, 4], 6), Err(GroupsError::TooManyRows { rows: 6, sum: 7, experts: 2 }));
        assert!(matches!(Groups::new(&[usize::MAX, 2], 6), Err(GroupsError::TooManyRows { .. })));
        assert_eq!(Groups::new(&[], 6), Err(GroupsError::NoExperts));
        assert_eq!(Groups::new(&[usize::MAX], usize::MAX), Err(GroupsError::TooLarge { rows: usize::MAX }));
        assert_eq!(Groups::from_i64(&[1, -2], 6), Err(GroupsError::Negative { expert: 1, got: -2 }));
    }

    #[test]
    fn offsets_past_32_bits() {
        let g = Groups::new(&[3 << 30, 3 << 30], 6 << 30).unwrap();
        assert_eq!(g.range(1), 3 << 30..6 << 30);
        assert_eq!(g.padded_rows(), 6 << 30);
    }
}
