//! Where tensors live: owned buffers, borrowed views, and group offsets, for host and device memory alike.
#![forbid(unsafe_code)]

use crate::tensor::Groups;
use half::bf16;
use std::fmt::Debug;

/// Element types that kernels read and write.
pub trait Element: bytemuck::Pod + Debug + Default + PartialEq + Send + Sync + sealed::Sealed {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for u8 {}
    impl Sealed for u32 {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
}

impl Element for u8 {}
impl Element for u32 {}
impl Element for f32 {}
impl Element for bf16 {}

/// A kind of memory. Views borrow from buffers or from a caller's own storage, so that nothing is copied.
pub trait Memory: Debug + Send + Sync + Sized + 'static {
    /// Owned storage.
    type Buffer<T: Element>: Debug + Send + Sync;
    /// Borrowed, read only.
    type View<'a, T: Element>: Copy + Send + Sync;
    /// Borrowed, for writing.
    type ViewMut<'a, T: Element>: Send;
    /// Rows of each expert, where this memory's kernels can read them.
    type Groups: Extent + Clone + Debug + Send + Sync;

    /// The whole buffer.
    fn view<T: Element>(buffer: &Self::Buffer<T>) -> Self::View<'_, T>;
    /// The whole buffer, for writing.
    fn view_mut<T: Element>(buffer: &mut Self::Buffer<T>) -> Self::ViewMut<'_, T>;
    /// Number of elements.
    fn len<T: Element>(view: &Self::View<'_, T>) -> usize;
    /// Number of elements.
    fn len_mut<T: Element>(view: &Self::ViewMut<'_, T>) -> usize;
    /// The same view under a shorter borrow. (Views of a memory not named are invariant in their lifetime.)
    fn shorten<'short, 'long: 'short, T: Element>(view: Self::View<'long, T>) -> Self::View<'short, T>;
    /// A shorter borrow of a mutable view.
    fn reborrow<'a, T: Element>(view: &'a mut Self::ViewMut<'_, T>) -> Self::ViewMut<'a, T>;
    /// Cuts a view into `parts` of equal length, such as `[E, N, K]` into experts.
    fn split<'a, T: Element>(view: Self::View<'a, T>, parts: usize) -> Vec<Self::View<'a, T>>;
    /// [`Memory::split`] for writing.
    fn split_mut<'a, T: Element>(view: Self::ViewMut<'a, T>, parts: usize) -> Vec<Self::ViewMut<'a, T>>;
}

/// What the host knows of groups without reading splits.
pub trait Extent {
    /// Number of experts `E`.
    fn experts(&self) -> usize;
    /// Rows `T`.
    fn rows(&self) -> usize;
    /// Token positions that a columnwise operand is allocated for.
    fn padded_rows(&self) -> usize;
}

impl Extent for Groups {
    fn experts(&self) -> usize {
        Groups::experts(self)
    }
    fn rows(&self) -> usize {
        Groups::rows(self)
    }
    fn padded_rows(&self) -> usize {
        Groups::padded_rows(self)
    }
}

/// Ordinary memory: `Vec` and slices.
#[derive(Debug, Clone, Copy)]
pub struct Host;

impl Memory for Host {
    type Buffer<T: Element> = Vec<T>;
    type View<'a, T: Element> = &'a [T];
    type ViewMut<'a, T: Element> = &'a mut [T];
    type Groups = Groups;

    fn view<T: Element>(buffer: &Vec<T>) -> &[T] {
        buffer
    }
    fn view_mut<T: Element>(buffer: &mut Vec<T>) -> &mut [T] {
        buffer
    }
    fn len<T: Element>(view: &&[T]) -> usize {
        view.len()
    }
    fn len_mut<T: Element>(view: &&mut [T]) -> usize {
        view.len()
    }
    fn shorten<'short, 'long: 'short, T: Element>(view: Self::View<'long, T>) -> Self::View<'short, T> {
        view
    }
    fn reborrow<'a, T: Element>(view: &'a mut &mut [T]) -> &'a mut [T] {
        view
    }
    fn split<'a, T: Element>(view: Self::View<'a, T>, parts: usize) -> Vec<Self::View<'a, T>> {
        let each = view.len() / parts;
        (0..parts).map(|p| &view[p * each..(p + 1) * each]).collect()
    }
    fn split_mut<'a, T: Element>(view: Self::ViewMut<'a, T>, parts: usize) -> Vec<Self::ViewMut<'a, T>> {
        let each = view.len() / parts;
        let mut rest = view;
        let mut out = Vec::with_capacity(parts);
        for _ in 0..parts {
            let (part, tail) = rest.split_at_mut(each);
            out.push(part);
            rest = tail;
        }
        out
    }
}

/// Owned storage of memory `M`.
pub type Buffer<M, T> = <M as Memory>::Buffer<T>;
/// A borrowed tensor of memory `M`.
pub type View<'a, M, T> = <M as Memory>::View<'a, T>;
/// A borrowed tensor of memory `M`, for writing.
pub type ViewMut<'a, M, T> = <M as Memory>::ViewMut<'a, T>;
