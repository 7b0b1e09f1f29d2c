//! Launches `kernels/copy_pages.cu`, on the side stream of a pool.

use super::{THREADS, blocks};
use crate::driver::{Arguments, CallError, Grid, Kernel, Stream};
use crate::variant::Variant;
use bytemuck::{Pod, Zeroable};

/// Tensors of one copy, at most; `MOST_PARTS` of the kernel.
pub(crate) const MOST_PARTS: usize = 8;
/// Pages of one launch; `MOST_PAGES` of the kernel.
const MOST_PAGES: usize = 256;
/// Bytes of a word.
pub(crate) const WORD: usize = 16;
/// Pages are smaller: the words of a launch fit 32 bits.
pub(crate) const PAGE_LIMIT: usize = 1 << 28;

pub(crate) fn variant(restore: bool) -> Variant {
    Variant { kernel: "copy_pages", defines: vec![("RESTORE", u32::from(restore))] }
}

/// `Part` of the kernel.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct PartArgument {
    pub(crate) tensor: u64,
    pub(crate) bytes: u64,
    pub(crate) line: u64,
    /// Where it begins in the store, a multiple of [`WORD`].
    pub(crate) at: u64,
    /// 0 if all of a line is alive.
    pub(crate) count: u64,
    pub(crate) per: u32,
    pub(crate) shift: u32,
}

/// `Window` of the kernel.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct WindowArgument {
    pool: u64,
    first: u64,
    words: u32,
    words_per_page: u32,
    parts: u32,
    unused: u32,
    part: [PartArgument; MOST_PARTS],
    page: [u32; MOST_PAGES],
}

/// A store: `bytes` bytes in `pages` of a pool at `pool`, with `parts` in them.
pub(crate) struct Store<'a> {
    pub(crate) pool: u64,
    pub(crate) page_bytes: usize,
    pub(crate) pages: &'a [u32],
    pub(crate) parts: &'a [PartArgument],
    pub(crate) bytes: usize,
    /// Thread blocks at most.
    pub(crate) most_blocks: u32,
}

/// Enqueues the copy, as many launches as the pages need.
///
/// # Safety
/// The tensors are memory of the stream's GPU of their sizes; `pages` are pages of the pool that nobody else uses, enough
/// for `bytes`; counts are addresses of a `u64` on the GPU, or 0. All of that holds until the stream has done the copy.
pub(crate) unsafe fn copy_pages(kernel: &Kernel, stream: &Stream, store: Store<'_>) -> Result<(), CallError> {
    let Store { pool, page_bytes, pages, parts, bytes, most_blocks } = store;
    assert!(parts.len() <= MOST_PARTS && bytes <= pages.len() * page_bytes);
    let mut part = [PartArgument::zeroed(); MOST_PARTS];
    part[..parts.len()].copy_from_slice(parts);
    let of_window = MOST_PAGES * page_bytes;
    for (i, ids) in pages.chunks(MOST_PAGES).enumerate() {
        let first = i * of_window;
        let words = bytes.saturating_sub(first).min(of_window).div_ceil(WORD);
        let mut page = [0; MOST_PAGES];
        page[..ids.len()].copy_from_slice(ids);
        let window = WindowArgument {
            pool,
            first: first as u64,
            words: words as u32,
            words_per_page: (page_bytes / WORD) as u32,
            parts: parts.len() as u32,
            unused: 0,
            part,
            page,
        };
        let grid = Grid::new([blocks(words, THREADS as usize, most_blocks), 1, 1], THREADS);
        let arguments = Arguments::of("[bytes, page, parts]", [bytes, page_bytes, parts.len()]).with(&window);
        // SAFETY: as required; a window's words lie in the pages that it lists.
        unsafe { kernel.launch(stream, grid, arguments) }?;
    }
    Ok(())
}
