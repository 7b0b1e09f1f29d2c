//! Saved tensors in pages of a pool.
//!
//! Only rows of experts are copied, without the rows past `sum(splits)`; all tensors of one forward follow each other
//! in its pages, so that only the last page is partly empty. The pool says where the pages are and copies; the list of
//! free pages is kept here.

use super::page_table::{PageTable, PageTableStats};
use super::{Refusal, Refused, Stash, StashFull};
use crate::kernels::pages::{HostPages, NotWritten, PageId, PagePool, PartShape};
use crate::kernels::{Error, Host};
use crate::mlp::saved::{Saved, SavedShell};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Saved tensors in the pages of a pool: in host memory, or wherever else a backend has one. Clones share it.
#[derive(Debug)]
pub struct PagedStash<P: PagePool = HostPages> {
    shared: Arc<Shared<P>>,
}

impl<P: PagePool> Clone for PagedStash<P> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

#[derive(Debug)]
struct Shared<P> {
    pool: P,
    table: Mutex<Table>,
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
pub struct PagedSaved<P: PagePool = HostPages> {
    /// Goes first: the memory of `shell` may be read by a copy that is under way.
    writing: P::Writing,
    owned: OwnedPages<P>,
    shell: SavedShell<P::Memory>,
    shapes: Vec<PartShape>,
}

/// Saved tensors on their way back from a pool.
#[derive(Debug)]
pub struct Arriving<P: PagePool = HostPages> {
    reading: P::Reading,
    shared: Arc<Shared<P>>,
    shell: SavedShell<P::Memory>,
}

/// Pages with `bytes` of tensors in them, given back on drop.
#[derive(Debug)]
struct OwnedPages<P: PagePool> {
    shared: Arc<Shared<P>>,
    pages: Vec<PageId>,
    bytes: usize,
}

impl PagedStash {
    /// Allocates `pages` pages of `page_bytes` each in host memory.
    ///
    /// Errors: a page size of 0, a pool beyond what a `usize` counts, memory that the system does not give.
    pub fn new(page_bytes: usize, pages: PageId) -> Result<Self, Error> {
        HostPages::new(page_bytes, pages).map(Self::over)
    }
}

impl<P: PagePool> PagedStash<P> {
    /// In the pages of `pool`, all of them free.
    pub fn over(pool: P) -> Self {
        let table = Mutex::new(Table { pages: PageTable::new(pool.pages()), live: 0 });
        Self { shared: Arc::new(Shared { pool, table }) }
    }

    /// The pool.
    pub fn pool(&self) -> &P {
        &self.shared.pool
    }

    /// How full the pool is.
    pub fn stats(&self) -> PagedStashStats {
        let table = self.shared.table();
        let pages = table.pages.stats();
        let page_bytes = self.shared.pool.page_bytes();
        PagedStashStats { pages, page_bytes, waste: pages.used * page_bytes - table.live }
    }
}

impl<P: PagePool> PagedSaved<P> {
    /// Bytes in pages.
    pub fn bytes(&self) -> usize {
        self.owned.bytes
    }

    /// Begins to copy the tensors back, beside other work of a device; the pages are free from now on. Call it before the
    /// backward of the layer behind this one is enqueued, and [`Arriving::wait`] after.
    pub fn prefetch(self) -> Result<Arriving<P>, Error> {
        let PagedSaved { writing, owned, shell, shapes } = self;
        let reading = owned.shared.pool.read(&shell.groups, &owned.pages, &shapes)?;
        drop(writing);
        Ok(Arriving { reading, shared: Arc::clone(&owned.shared), shell })
    }

    /// The tensors again; the pages are free afterwards.
    pub fn restore(self) -> Result<Saved<P::Memory>, Error> {
        self.prefetch()?.wait()
    }
}

impl<P: PagePool> Arriving<P> {
    /// The tensors; work that uses them from now on comes behind the copy. The host does not wait.
    pub fn wait(self) -> Result<Saved<P::Memory>, Error> {
        let parts = self.shared.pool.finish(self.reading)?;
        Ok(self.shell.fill(parts))
    }
}

impl<P> Shared<P> {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P: PagePool> Drop for OwnedPages<P> {
    fn drop(&mut self) {
        let mut table = self.shared.table();
        table.live -= self.bytes;
        table.pages.release(std::mem::take(&mut self.pages));
    }
}

impl<P: PagePool> PagedStash<P> {
    /// Pages for `bytes`, if as many are free.
    fn allocate(&self, bytes: usize) -> Result<OwnedPages<P>, StashFull> {
        let page_bytes = self.shared.pool.page_bytes();
        let needed = bytes.div_ceil(page_bytes);
        let mut table = self.shared.table();
        match table.pages.allocate(needed) {
            Some(pages) => {
                table.live += bytes;
                Ok(OwnedPages { shared: Arc::clone(&self.shared), pages, bytes })
            }
            None => {
                let (free, total) = (table.pages.free(), table.pages.stats().total);
                Err(StashFull { needed, free, total, page_bytes })
            }
        }
    }
}

impl<P: PagePool> Stash<P::Memory> for PagedStash<P> {
    type Stored = PagedSaved<P>;

    fn store(&self, saved: Saved<P::Memory>) -> Result<PagedSaved<P>, Box<Refused<P::Memory>>> {
        let refused = |saved, reason| Box::new(Refused { saved, reason });
        let (shell, parts) = match saved.dismantle() {
            Ok(dismantled) => dismantled,
            Err(shared) => {
                let (saved, error) = *shared;
                return Err(refused(saved, Refusal::Failed(error)));
            }
        };
        let shapes: Vec<PartShape> = parts.iter().map(|part| part.shape()).collect();
        let owned = match self.allocate(self.shared.pool.bytes(&shell.groups, &shapes)) {
            Ok(owned) => owned,
            Err(full) => return Err(refused(shell.fill(parts), Refusal::Full(full))),
        };
        match self.shared.pool.write(&shell.groups, &owned.pages, parts) {
            Ok(writing) => Ok(PagedSaved { writing, owned, shell, shapes }),
            Err(NotWritten { error, parts }) => Err(refused(shell.fill(parts), Refusal::Failed(error))),
        }
    }

    fn restore(&self, stored: PagedSaved<P>) -> Result<Saved<P::Memory>, Error> {
        stored.restore()
    }
}

// What goes into pages may be sent to another thread, whose backward takes it out again.
const _: () = {
    const fn send<T: Send>() {}
    send::<PagedSaved>();
    send::<PagedStash>();
    send::<Saved<Host>>();
};
