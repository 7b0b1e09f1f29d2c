//! The 128x4 layout in which tensor cores read block scales, and its conversion from and to plain rows.
//!
//! Scales `[rows, cols]` are padded with zeros to multiples of 128 and 4, then stored tile by tile. Within a tile
//! the byte of `(r, c)` lies at `(r % 32) · 16 + (r % 128)/32 · 4 + c % 4`; tiles follow each other along a row of
//! tiles first. Source: NVIDIA cuBLAS documentation, "1D block scaling factors layout".

use std::ops::Range;

/// How the block scales `[rows, cols]` of an operand lie in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScaleLayout {
    /// Row by row, no padding.
    #[default]
    Plain,
    /// Tiles of 128 x 4 of the whole matrix, as tensor cores read them; every byte of padding is zero.
    Swizzled128x4,
}

impl ScaleLayout {
    /// Rows and columns with their padding, whose product is the number of bytes.
    pub fn padded_shape(self, rows: usize, cols: usize) -> [usize; 2] {
        match self {
            Self::Plain => [rows, cols],
            Self::Swizzled128x4 => [rows.next_multiple_of(TILE_ROWS), cols.next_multiple_of(TILE_COLS)],
        }
    }

    /// Bytes of `[rows, cols]` scales, padding included.
    pub fn bytes(self, rows: usize, cols: usize) -> usize {
        self.padded_shape(rows, cols).iter().product()
    }

    /// Where the scale of `(row, col)` lies in a matrix with `cols` scale columns.
    #[inline]
    pub fn offset(self, row: usize, col: usize, cols: usize) -> usize {
        match self {
            Self::Plain => row * cols + col,
            Self::Swizzled128x4 => offset(row, col, cols),
        }
    }
}

const TILE_ROWS: usize = 128;
const TILE_COLS: usize = 4;
const TILE: usize = TILE_ROWS * TILE_COLS;

/// Bytes of the swizzled form of `[rows, cols]` scales, padding included.
pub fn swizzled_len(rows: usize, cols: usize) -> usize {
    ScaleLayout::Swizzled128x4.bytes(rows, cols)
}

/// Where the scale of `(row, col)` lies in the swizzled form of a matrix with `cols` scale columns.
#[inline]
pub fn offset(row: usize, col: usize, cols: usize) -> usize {
    let tile = (row / TILE_ROWS) * cols.div_ceil(TILE_COLS) + col / TILE_COLS;
    tile * TILE + (row % 32) * 16 + (row % TILE_ROWS) / 32 * TILE_COLS + col % TILE_COLS
}

/// Writes plain `[rows, cols]` scales to their swizzled places. Every byte of `out` is written, padding with 0.
///
/// # Panics
/// If a slice does not have the length that `rows` and `cols` imply.
pub fn swizzle(scales: &[u8], rows: usize, cols: usize, out: &mut [u8]) {
    check(scales, out, rows, cols);
    out.fill(0);
    for (row, col) in positions(0..rows, cols) {
        out[offset(row, col, cols)] = scales[row * cols + col];
    }
}

/// The inverse of [`swizzle`]; padding is ignored.
///
/// # Panics
/// If a slice does not have the length that `rows` and `cols` imply.
pub fn unswizzle(swizzled: &[u8], rows: usize, cols: usize, out: &mut [u8]) {
    check(out, swizzled, rows, cols);
    for (row, col) in positions(0..rows, cols) {
        out[row * cols + col] = swizzled[offset(row, col, cols)];
    }
}

fn positions(rows: Range<usize>, cols: usize) -> impl Iterator<Item = (usize, usize)> {
    rows.flat_map(move |row| (0..cols).map(move |col| (row, col)))
}

fn check(plain: &[u8], swizzled: &[u8], rows: usize, cols: usize) {
    assert_eq!(plain.len(), rows * cols, "plain scales of shape [{rows}, {cols}]");
    assert_eq!(swizzled.len(), swizzled_len(rows, cols), "swizzled scales of shape [{rows}, {cols}]");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn unswizzle_undoes_swizzle_and_padding_is_zero(rows in 0usize..300, cols in 0usize..20, seed: u64) {
            let plain: Vec<u8> = (0..rows * cols).map(|i| (seed.rotate_left(i as u32) as u8) | 1).collect();
            let mut swizzled = vec![0xAA; swizzled_len(rows, cols)];
            swizzle(&plain, rows, cols, &mut swizzled);
            prop_assert_eq!(swizzled.iter().filter(|&&b| b == 0).count(), swizzled.len() - plain.len());
            let mut back = vec![0x55; plain.len()];
            unswizzle(&swizzled, rows, cols, &mut back);
            prop_assert_eq!(back, plain);
        }
    }

    #[test]
    fn a_layout_knows_its_size_and_places() {
        let (plain, swizzled) = (ScaleLayout::default(), ScaleLayout::Swizzled128x4);
        assert_eq!((plain.bytes(130, 5), swizzled.bytes(130, 5)), (650, 256 * 8));
        assert_eq!((plain.offset(129, 4, 5), swizzled.offset(129, 4, 5)), (649, 3 * 512 + 16));
        assert_eq!((plain.bytes(0, 5), swizzled.bytes(0, 5), swizzled.bytes(5, 0)), (0, 0, 0));
    }

    #[test]
    fn offsets_past_32_bits() {
        // 2^27 rows of 64 scales: the last byte lies past 2^32.
        assert_eq!(offset((1 << 27) - 1, 63, 64), (1usize << 33) - 1);
    }
}
