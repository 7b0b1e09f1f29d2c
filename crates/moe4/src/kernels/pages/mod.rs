//! Pages of memory, and copies of tensors into them and out of them.
//!
//! A [`PagePool`] is memory cut into pages of one size, in host memory ([`HostPages`]), on a device, or in host memory that
//! a device reaches. It copies the tensors of one forward into a list of pages, where they follow each other, and gives
//! them back with the same bytes. Which pages are free is not its business: `mlp` keeps that list.
//!
//! Rows of no expert are not copied; on return they are zero. How many rows are alive may be known on the device alone: the
//! host then reserves pages for the most that there can be, and copies what there is.
#![forbid(unsafe_code)]

mod host;

pub use host::HostPages;

use super::error::Error;
use super::memory::{Buffer, Memory};
use half::bf16;
use std::fmt::Debug;

/// The number of a page.
pub type PageId = u32;

/// A pool of pages of memory, for tensors in [`PagePool::Memory`].
///
/// Copies may be under way when a call returns. Those of one pool happen in the order of the calls, so that pages may be
/// given to another owner as soon as the call that read them is back.
pub trait PagePool: Debug + Send + Sync {
    /// Where the tensors live.
    type Memory: Memory;
    /// A copy into pages that may be under way. Dropped, it lets later work on the tensors' memory wait for the copy.
    type Writing: Debug + Send;
    /// Tensors that are being copied out of pages.
    type Reading: Debug + Send;

    /// Bytes of a page.
    fn page_bytes(&self) -> usize;
    /// Pages of the pool.
    fn pages(&self) -> PageId;

    /// Bytes of pages that tensors of these shapes take at most: exactly as many, where the host knows the splits.
    fn bytes(&self, groups: &<Self::Memory as Memory>::Groups, shapes: &[PartShape]) -> usize;

    /// Copies tensors into pages and frees them behind the copy. On failure the tensors come back unchanged.
    fn write(
        &self,
        groups: &<Self::Memory as Memory>::Groups,
        pages: &[PageId],
        parts: Vec<Part<Self::Memory>>,
    ) -> Result<Self::Writing, NotWritten<Self::Memory>>;

    /// Begins to copy tensors of these shapes out of the pages that [`PagePool::write`] put them into.
    fn read(
        &self,
        groups: &<Self::Memory as Memory>::Groups,
        pages: &[PageId],
        shapes: &[PartShape],
    ) -> Result<Self::Reading, Error>;

    /// The tensors; work that uses them from now on comes behind the copy.
    fn finish(&self, reading: Self::Reading) -> Result<Vec<Part<Self::Memory>>, Error>;
}

/// What a failed [`PagePool::write`] gives back.
#[derive(Debug)]
pub struct NotWritten<M: Memory> {
    /// What went wrong.
    pub error: Error,
    /// The tensors.
    pub parts: Vec<Part<M>>,
}

/// A tensor of any element type, with the rows in it that belong to experts.
#[derive(Debug)]
pub struct Part<M: Memory> {
    /// The tensor.
    pub buffer: AnyBuffer<M>,
    /// Its live elements.
    pub live: Live,
}

/// Owned storage of any element type.
#[derive(Debug)]
pub enum AnyBuffer<M: Memory> {
    /// Codes and scales.
    U8(Buffer<M, u8>),
    /// Amaxes and probabilities.
    F32(Buffer<M, f32>),
    /// Unquantized tensors.
    Bf16(Buffer<M, bf16>),
}

/// Type and length of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartShape {
    /// Its element type.
    pub element: ElementType,
    /// Number of elements.
    pub len: usize,
    /// Its live elements.
    pub live: Live,
}

/// The element types of [`AnyBuffer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the variants are the element types")]
pub enum ElementType {
    U8,
    F32,
    Bf16,
}

/// Which elements of a tensor belong to experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Live {
    /// All.
    All,
    /// The first rows of `[T, cols]`, as many as the splits sum up to.
    Rows {
        /// Elements of a row.
        cols: usize,
    },
    /// The first token positions of each line of `[lines, Tp / per]`, as many as the padded splits sum up to.
    Positions {
        /// Token positions that an element holds: 2 for codes, 16 for scales.
        per: usize,
    },
}

impl ElementType {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            ElementType::U8 => 1,
            ElementType::Bf16 => 2,
            ElementType::F32 => 4,
        }
    }
}

impl PartShape {
    /// Bytes of the tensor.
    pub fn bytes(self) -> usize {
        self.len * self.element.bytes()
    }
}

impl<M: Memory> Part<M> {
    /// Type and length.
    pub fn shape(&self) -> PartShape {
        let (element, len) = match &self.buffer {
            AnyBuffer::U8(b) => (ElementType::U8, M::len(&M::view(b))),
            AnyBuffer::F32(b) => (ElementType::F32, M::len(&M::view(b))),
            AnyBuffer::Bf16(b) => (ElementType::Bf16, M::len(&M::view(b))),
        };
        PartShape { element, len, live: self.live }
    }
}
