//! Pages in host memory, for tensors in host memory: copied when the call returns, one tensor right behind the other.
#![forbid(unsafe_code)]

use super::{AnyBuffer, ElementType, Live, NotWritten, PageId, PagePool, Part, PartShape};
use crate::kernels::{Error, Host, Misuse};
use crate::tensor::Groups;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A pool of pages in host memory.
#[derive(Debug)]
pub struct HostPages {
    page_bytes: usize,
    /// One lock a page: layers copy side by side, and a page has one owner at a time anyway.
    pages: Vec<Mutex<Box<[u8]>>>,
}

impl HostPages {
    /// Allocates `pages` pages of `page_bytes` each.
    ///
    /// Errors: a page size of 0, a pool beyond what a `usize` counts, memory that the system does not give.
    pub fn new(page_bytes: usize, pages: PageId) -> Result<Self, Error> {
        let refuse = |what: &str, expected, got: String| {
            Error::Misuse(Misuse::Value { what: format!("paged stash: {what}"), expected, got })
        };
        if page_bytes == 0 {
            return Err(refuse("page size", "at least 1 byte", "0".into()));
        }
        let too_large = || {
            refuse(
                "pool",
                "a size that this machine has memory for",
                format!("{pages} pages of {page_bytes} bytes"),
            )
        };
        let mut all = Vec::new();
        all.try_reserve_exact(pages as usize).map_err(|_| too_large())?;
        for _ in 0..pages {
            let mut page = Vec::new();
            page.try_reserve_exact(page_bytes).map_err(|_| too_large())?;
            page.resize(page_bytes, 0);
            all.push(Mutex::new(page.into_boxed_slice()));
        }
        Ok(Self { page_bytes, pages: all })
    }

    fn page(&self, id: PageId) -> MutexGuard<'_, Box<[u8]>> {
        self.pages[id as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `copy` with each piece of a page that holds a piece of `part`, which begins `at` bytes behind the first
    /// page's begin.
    fn pieces(
        &self,
        pages: &[PageId],
        at: usize,
        len: usize,
        mut copy: impl FnMut(&mut [u8], std::ops::Range<usize>),
    ) {
        let mut done = 0;
        while done < len {
            let (page, offset) = ((at + done) / self.page_bytes, (at + done) % self.page_bytes);
            let n = (len - done).min(self.page_bytes - offset);
            copy(&mut self.page(pages[page])[offset..offset + n], done..done + n);
            done += n;
        }
    }
}

/// Live bytes. Host groups are exact: a columnwise tensor has no positions of nobody.
fn live_bytes(groups: &Groups, shape: PartShape) -> usize {
    match shape.live {
        Live::All | Live::Positions { .. } => shape.bytes(),
        Live::Rows { cols } => groups.live_rows() * cols * shape.element.bytes(),
    }
}

fn bytes_of(buffer: &mut AnyBuffer<Host>) -> &mut [u8] {
    match buffer {
        AnyBuffer::U8(v) => v,
        AnyBuffer::F32(v) => bytemuck::cast_slice_mut(v),
        AnyBuffer::Bf16(v) => bytemuck::cast_slice_mut(v),
    }
}

fn zeroed(shape: PartShape) -> Part<Host> {
    use bytemuck::allocation::zeroed_vec;
    let buffer = match shape.element {
        ElementType::U8 => AnyBuffer::U8(zeroed_vec(shape.len)),
        ElementType::F32 => AnyBuffer::F32(zeroed_vec(shape.len)),
        ElementType::Bf16 => AnyBuffer::Bf16(zeroed_vec(shape.len)),
    };
    Part { buffer, live: shape.live }
}

impl PagePool for HostPages {
    type Memory = Host;
    type Writing = ();
    type Reading = Vec<Part<Host>>;

    fn page_bytes(&self) -> usize {
        self.page_bytes
    }
    fn pages(&self) -> PageId {
        self.pages.len() as PageId
    }
    fn bytes(&self, groups: &Groups, shapes: &[PartShape]) -> usize {
        shapes.iter().map(|&shape| live_bytes(groups, shape)).sum()
    }

    fn write(
        &self,
        groups: &Groups,
        pages: &[PageId],
        mut parts: Vec<Part<Host>>,
    ) -> Result<(), NotWritten<Host>> {
        let mut at = 0;
        for part in &mut parts {
            let len = live_bytes(groups, part.shape());
            let bytes = bytes_of(&mut part.buffer);
            self.pieces(pages, at, len, |page, piece| page.copy_from_slice(&bytes[piece]));
            at += len;
        }
        Ok(())
    }

    fn read(
        &self,
        groups: &Groups,
        pages: &[PageId],
        shapes: &[PartShape],
    ) -> Result<Vec<Part<Host>>, Error> {
        let mut at = 0;
        let read = |&shape: &PartShape| {
            let (mut part, len) = (zeroed(shape), live_bytes(groups, shape));
            let bytes = bytes_of(&mut part.buffer);
            self.pieces(pages, at, len, |page, piece| bytes[piece].copy_from_slice(page));
            at += len;
            part
        };
        Ok(shapes.iter().map(read).collect())
    }

    fn finish(&self, reading: Vec<Part<Host>>) -> Result<Vec<Part<Host>>, Error> {
        Ok(reading)
    }
}
