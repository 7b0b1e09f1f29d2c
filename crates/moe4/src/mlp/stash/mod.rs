//! Where saved tensors live between a forward and its backward.
//!
//! [`InPlace`] leaves them where the forward made them. [`PagedStash`] copies them into pages of a pool that is
//! allocated once, so that memory for activations neither grows nor fragments, whatever the splits of a step are. The pool
//! is host memory, or a backend's [`PagePool`](crate::kernels::pages::PagePool).

mod page_table;
mod paged;

pub use crate::kernels::pages::PageId;
pub use page_table::{PageTable, PageTableStats};
pub use paged::{Arriving, PagedSaved, PagedStash, PagedStashStats};

use super::saved::Saved;
use crate::kernels::{Error, Memory};

/// A place for saved tensors.
///
/// `store` may return before the copy is done, on a device whose copies run on a side stream; `restore` then waits
/// for it. Nothing is lost on the way: what cannot be stored comes back to the caller.
pub trait Stash<M: Memory>: Send + Sync {
    /// Saved tensors in this place. Dropping it gives their memory back.
    type Stored: Send;

    /// Takes saved tensors in.
    fn store(&self, saved: Saved<M>) -> Result<Self::Stored, Box<Refused<M>>>;

    /// Gives them back with the same bytes; rows of no expert are zero.
    fn restore(&self, stored: Self::Stored) -> Result<Saved<M>, Error>;
}

/// Saved tensors that a stash could not take, unchanged. The backward can go on with them in place.
#[derive(Debug)]
pub struct Refused<M: Memory> {
    /// The tensors.
    pub saved: Saved<M>,
    /// Why they were refused.
    pub reason: Refusal,
}

/// Why a stash did not take saved tensors.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// It is full.
    #[error(transparent)]
    Full(StashFull),
    /// The copy failed, or the tensors are [shared with delayed gradients](super::GroupedMlp::backward_delayed).
    #[error(transparent)]
    Failed(Error),
}

/// The pool has too few free pages. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "paged stash is full: expected {needed} free pages of {page_bytes} bytes, got {free} of {total}; \
     use a larger pool, save fewer layers at a time, or keep this one in place"
)]
pub struct StashFull {
    /// Pages that the tensors need.
    pub needed: usize,
    /// Free pages.
    pub free: usize,
    /// Pages of the pool.
    pub total: usize,
    /// Bytes of a page.
    pub page_bytes: usize,
}

/// Leaves saved tensors where they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct InPlace;

impl<M: Memory> Stash<M> for InPlace {
    type Stored = Saved<M>;

    fn store(&self, saved: Saved<M>) -> Result<Saved<M>, Box<Refused<M>>> {
        Ok(saved)
    }

    fn restore(&self, stored: Saved<M>) -> Result<Saved<M>, Error> {
        Ok(stored)
    }
}

#[cfg(test)]
mod tests;
