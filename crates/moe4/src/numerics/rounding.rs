//! How elements are rounded to E2M1, and where stochastic rounding takes its random bits from.
//!
//! One Philox draw gives 16 bytes, one for each element of a block: byte `i` (little-endian over the four words)
//! serves element `i`. The counter is the block's position within its expert's operand:
//!
//! ```text
//! rowwise     token · (cols/16) + block of columns
//! columnwise  (token/16) · cols + column
//! ```
//!
//! Both are independent of how many tokens the expert has, of its neighbours, and of launch shape, thread count
//! and device. Key: the seed. Upper counter words: the stream, one for each use of a tensor in a step.

use super::philox::philox4x32;

/// Rounding of elements to E2M1. Block scales are always rounded to nearest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To nearest, ties to even.
    #[default]
    Nearest,
    /// Up or down at random, in proportion to the distances.
    Stochastic(RandomStream),
}

/// An independent sequence of random blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RandomStream {
    /// The Philox key.
    pub seed: u64,
    /// Which sequence under that key. Two uses that must not share numbers need different values.
    pub stream: u64,
}

impl RandomStream {
    /// The 16 random bytes of the block at `position`.
    #[inline(always)]
    pub fn block(self, position: u64) -> [u8; 16] {
        let words = philox4x32(self.seed, self.stream, position);
        std::array::from_fn(|i| (words[i / 4] >> (8 * (i % 4))) as u8)
    }
}

/// The position of a rowwise block: `token` within the expert, `block` of 16 columns, `blocks` of them in a row.
#[inline(always)]
pub fn rowwise_position(token: usize, block: usize, blocks: usize) -> u64 {
    token as u64 * blocks as u64 + block as u64
}

/// The position of a columnwise block: `token_block` of 16 tokens within the expert, one of `cols` columns.
#[inline(always)]
pub fn columnwise_position(token_block: usize, column: usize, cols: usize) -> u64 {
    token_block as u64 * cols as u64 + column as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_taken_from_the_words_low_first() {
        let words = philox4x32(1, 2, 3);
        let bytes = RandomStream { seed: 1, stream: 2 }.block(3);
        assert_eq!(bytes[0], words[0] as u8);
        assert_eq!(bytes[7], (words[1] >> 24) as u8);
        assert_eq!(bytes[12], words[3] as u8);
    }

    #[test]
    fn positions_use_64_bits() {
        assert_eq!(rowwise_position(1 << 30, 7, 1 << 8), (1 << 38) + 7);
        assert_eq!(columnwise_position(1 << 30, 7, 1 << 14), (1 << 44) + 7);
    }

    #[test]
    fn seeds_streams_and_positions_give_different_bytes() {
        let base = RandomStream { seed: 5, stream: 9 };
        let mut seen = std::collections::HashSet::new();
        for position in 0..64 {
            assert!(seen.insert(base.block(position)));
            assert!(seen.insert(RandomStream { seed: 6, ..base }.block(position)));
            assert!(seen.insert(RandomStream { stream: 10, ..base }.block(position)));
        }
    }
}
