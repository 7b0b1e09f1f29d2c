//! Saved tensors in pages of host memory.
//!
//! Only rows of experts are copied, without the rows past `sum(splits)`; all tensors of one forward follow each other
//! in its pages, so that only the last page is partly empty.

use super::page_table::{PageId, PageTable, PageTableStats};
use super::{Refused, Stash, StashFull};
use crate::kernels::{Error, Host, Misuse};
use crate::mlp::saved::{Packed, Saved, SavedTensor};
use crate::tensor::Nvfp4;
use half::bf16;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A pool of pages in host memory. Clones share it.
#[derive(Clone, Debug)]
pub struct PagedStash {
    pool: Arc<Pool>,
}

#[derive(Debug)]
struct Pool {
    page_bytes: usize,
    table: Mutex<Table>,
    /// One lock a page: layers copy side by side, and a page has one owner at a time anyway.
    pages: Vec<Mutex<Box<[u8]>>>,
}

#[derive(Debug)]
struct Table {
    pages: PageTable,
    /// Bytes of tensors in owned pages.
    live: usize,
}

/// How full the pool is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedStashStats {
    /// Pages owned now, at most, and in all.
    pub pages: PageTableStats,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Bytes in owned pages that hold nothing.
    pub waste: usize,
}

/// Saved tensors in pages. Dropping it frees them.
#[derive(Debug)]
pub struct PagedSaved {
    owned: OwnedPages,
    /// The forward's saved tensors without their contents, whose lengths are kept.
    shell: Saved<Host>,
    lengths: Vec<usize>,
}

/// Pages with `bytes` of tensors in them, given back on drop.
#[derive(Debug)]
struct OwnedPages {
    pool: Arc<Pool>,
    pages: Vec<PageId>,
    bytes: usize,
}

impl PagedStash {
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
        let table = Mutex::new(Table { pages: PageTable::new(pages), live: 0 });
        Ok(Self { pool: Arc::new(Pool { page_bytes, table, pages: all }) })
    }

    /// How full the pool is.
    pub fn stats(&self) -> PagedStashStats {
        let table = self.pool.table();
        let pages = table.pages.stats();
        let page_bytes = self.pool.page_bytes;
        PagedStashStats { pages, page_bytes, waste: pages.used * page_bytes - table.live }
    }
}

impl PagedSaved {
    /// Bytes copied into pages.
    pub fn bytes(&self) -> usize {
        self.owned.bytes
    }

    /// The tensors again; the pages are free afterwards.
    pub fn restore(self) -> Saved<Host> {
        let PagedSaved { owned, shell: mut saved, lengths } = self;
        give_contents(&mut saved, &lengths);
        owned.pool.read(&owned.pages, &mut live_parts(&mut saved));
        saved
    }
}

impl Pool {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn page(&self, id: PageId) -> MutexGuard<'_, Box<[u8]>> {
        self.pages[id as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies `parts` one after the other into `pages`.
    fn write(&self, pages: &[PageId], parts: &[&mut [u8]]) {
        let mut at = 0;
        for part in parts {
            let mut rest = &part[..];
            while !rest.is_empty() {
                let offset = at % self.page_bytes;
                let (now, later) = rest.split_at(rest.len().min(self.page_bytes - offset));
                self.page(pages[at / self.page_bytes])[offset..offset + now.len()].copy_from_slice(now);
                at += now.len();
                rest = later;
            }
        }
    }

    /// The inverse of [`Pool::write`].
    fn read(&self, pages: &[PageId], parts: &mut [&mut [u8]]) {
        let mut at = 0;
        for part in parts {
            let mut filled = 0;
            while filled < part.len() {
                let offset = at % self.page_bytes;
                let n = (part.len() - filled).min(self.page_bytes - offset);
                part[filled..filled + n]
                    .copy_from_slice(&self.page(pages[at / self.page_bytes])[offset..offset + n]);
                at += n;
                filled += n;
            }
        }
    }
}

impl Drop for OwnedPages {
    fn drop(&mut self) {
        let mut table = self.pool.table();
        table.live -= self.bytes;
        table.pages.release(std::mem::take(&mut self.pages));
    }
}

impl Stash<Host> for PagedStash {
    type Stored = PagedSaved;

    fn store(&self, mut saved: Saved<Host>) -> Result<PagedSaved, Box<Refused<Host>>> {
        let parts = live_parts(&mut saved);
        let bytes: usize = parts.iter().map(|p| p.len()).sum();
        let needed = bytes.div_ceil(self.pool.page_bytes);
        let pages = {
            let mut table = self.pool.table();
            match table.pages.allocate(needed) {
                Some(pages) => {
                    table.live += bytes;
                    pages
                }
                None => {
                    let (free, total) = (table.pages.free(), table.pages.stats().total);
                    let reason = StashFull { needed, free, total, page_bytes: self.pool.page_bytes };
                    return Err(Box::new(Refused { saved, reason }));
                }
            }
        };
        self.pool.write(&pages, &parts);
        let owned = OwnedPages { pool: Arc::clone(&self.pool), pages, bytes };
        let lengths = take_contents(&mut saved);
        Ok(PagedSaved { owned, shell: saved, lengths })
    }

    fn restore(&self, stored: PagedSaved) -> Result<Saved<Host>, Error> {
        Ok(stored.restore())
    }
}

/// Every tensor of `saved` as bytes, in a fixed order, without rows of no expert.
fn live_parts(saved: &mut Saved<Host>) -> Vec<&mut [u8]> {
    let config = &saved.plan.config;
    let live = saved.groups.live_rows();
    let (hidden, ffn, n1) = (config.hidden, config.ffn, config.fc1_rows());
    let mut parts = vec![];
    if let Some((c, prob)) = &mut saved.c {
        parts.push(bytemuck::cast_slice_mut(&mut c[..live * n1]));
        parts.push(bytemuck::cast_slice_mut(&mut prob[..live]));
    }
    for (tensor, cols) in [(&mut saved.x, hidden), (&mut saved.h, ffn)] {
        match tensor {
            SavedTensor::Nothing => {}
            SavedTensor::Columnwise(Packed(Nvfp4 { codes, scales, amax })) => {
                parts.extend([&mut codes[..], &mut scales[..], bytemuck::cast_slice_mut(amax)]);
            }
            SavedTensor::Amax(amax) => parts.push(bytemuck::cast_slice_mut(amax)),
            SavedTensor::Bf16(x) => parts.push(bytemuck::cast_slice_mut(&mut x[..live * cols])),
        }
    }
    parts
}

/// A vector of any saved tensor.
enum AnyVec<'a> {
    U8(&'a mut Vec<u8>),
    F32(&'a mut Vec<f32>),
    Bf16(&'a mut Vec<bf16>),
}

fn all_vectors(saved: &mut Saved<Host>) -> Vec<AnyVec<'_>> {
    let mut all = vec![];
    if let Some((c, prob)) = &mut saved.c {
        all.extend([AnyVec::Bf16(c), AnyVec::F32(prob)]);
    }
    for tensor in [&mut saved.x, &mut saved.h] {
        match tensor {
            SavedTensor::Nothing => {}
            SavedTensor::Columnwise(Packed(Nvfp4 { codes, scales, amax })) => {
                all.extend([AnyVec::U8(codes), AnyVec::U8(scales), AnyVec::F32(amax)]);
            }
            SavedTensor::Amax(amax) => all.push(AnyVec::F32(amax)),
            SavedTensor::Bf16(x) => all.push(AnyVec::Bf16(x)),
        }
    }
    all
}

/// Frees every tensor; returns their lengths.
fn take_contents(saved: &mut Saved<Host>) -> Vec<usize> {
    let take = |v: AnyVec<'_>| match v {
        AnyVec::U8(v) => std::mem::take(v).len(),
        AnyVec::F32(v) => std::mem::take(v).len(),
        AnyVec::Bf16(v) => std::mem::take(v).len(),
    };
    all_vectors(saved).into_iter().map(take).collect()
}

/// Allocates every tensor again, zero.
fn give_contents(saved: &mut Saved<Host>, lengths: &[usize]) {
    for (v, &len) in all_vectors(saved).into_iter().zip(lengths) {
        match v {
            AnyVec::U8(v) => *v = bytemuck::allocation::zeroed_vec(len),
            AnyVec::F32(v) => *v = bytemuck::allocation::zeroed_vec(len),
            AnyVec::Bf16(v) => *v = bytemuck::allocation::zeroed_vec(len),
        }
    }
}
