//! Device memory as the contract sees it: owned buffers, views by address, and groups that the host cannot read.
//!
//! Work on a buffer is ordered by the stream that it was made on. A view is an address and a length, and does not know its
//! stream: it belongs to passes of the backend that made it. Another backend of the same GPU may have it once the first
//! one was synchronized, and while the buffer is kept. Views of another framework's tensors are made by
//! [`DeviceView::from_raw`]. Nothing here reads or writes memory.

use crate::driver::{DeviceBytes, Owner};
use crate::groups::DeviceGroups;
use moe4::kernels::{Element, Memory};
use std::marker::PhantomData;
use std::ops::Range;

/// The memory of one GPU.
#[derive(Debug, Clone, Copy)]
pub struct DeviceMemory;

/// Owned device memory for `len` elements.
#[derive(Debug)]
pub struct DeviceBuffer<T> {
    pub(crate) bytes: DeviceBytes,
    len: usize,
    element: PhantomData<T>,
}

impl<T> DeviceBuffer<T> {
    pub(crate) fn new(bytes: DeviceBytes, len: usize) -> Self {
        Self { bytes, len, element: PhantomData }
    }

    /// All of it.
    pub fn view(&self) -> DeviceView<'_, T> {
        DeviceView { address: self.bytes.address(), len: self.len, borrowed: PhantomData }
    }

    /// All of it, for writing.
    pub fn view_mut(&mut self) -> DeviceViewMut<'_, T> {
        DeviceViewMut { address: self.bytes.address(), len: self.len, borrowed: PhantomData }
    }

    /// Hands the memory over to the framework that it came from: what its allocator made, which frees it when dropped.
    /// `None` if the buffer is empty, or is the driver's own, to whose pool it goes back.
    pub fn into_owner(self) -> Option<Owner> {
        self.bytes.into_owner()
    }
}

/// Device memory that is read.
#[derive(Debug)]
pub struct DeviceView<'a, T> {
    address: u64,
    len: usize,
    borrowed: PhantomData<&'a T>,
}

impl<T> Clone for DeviceView<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for DeviceView<'_, T> {}

impl<'a, T> DeviceView<'a, T> {
    /// A tensor of another framework: `len` contiguous elements at `address`.
    ///
    /// # Safety
    /// They are memory of the GPU that the view is used on; they hold values of `T` and are written by nobody until the
    /// work that reads them is done, for which the caller keeps them alive.
    pub unsafe fn from_raw(address: u64, len: usize) -> Self {
        Self { address, len, borrowed: PhantomData }
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements of `range`.
    ///
    /// # Panics
    /// If the range ends before it begins, or beyond the view; as slices do.
    pub fn slice(self, range: Range<usize>) -> Self {
        let Range { start, end } = range;
        assert!(start <= end && end <= self.len, "range {start}..{end} of a view of {} elements", self.len);
        let address = self.address + (start * size_of::<T>()) as u64;
        Self { address, len: end - start, borrowed: PhantomData }
    }
}

/// Device memory that is written.
#[derive(Debug)]
pub struct DeviceViewMut<'a, T> {
    address: u64,
    len: usize,
    borrowed: PhantomData<&'a mut T>,
}

impl<'a, T> DeviceViewMut<'a, T> {
    /// A tensor of another framework: `len` contiguous elements at `address`.
    ///
    /// # Safety
    /// They are memory of the GPU that the view is used on, and nobody else reads or writes them until the work that
    /// writes them is done, for which the caller keeps them alive.
    pub unsafe fn from_raw(address: u64, len: usize) -> Self {
        Self { address, len, borrowed: PhantomData }
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// The address of part `p` of `parts` equal ones, and their length.
fn part<T>(address: u64, len: usize, parts: usize, p: usize) -> (u64, usize) {
    let each = len / parts;
    (address + (p * each * size_of::<T>()) as u64, each)
}

impl Memory for DeviceMemory {
    type Buffer<T: Element> = DeviceBuffer<T>;
    type View<'a, T: Element> = DeviceView<'a, T>;
    type ViewMut<'a, T: Element> = DeviceViewMut<'a, T>;
    type Groups = DeviceGroups;

    fn view<T: Element>(buffer: &DeviceBuffer<T>) -> DeviceView<'_, T> {
        buffer.view()
    }
    fn view_mut<T: Element>(buffer: &mut DeviceBuffer<T>) -> DeviceViewMut<'_, T> {
        buffer.view_mut()
    }
    fn len<T: Element>(view: &DeviceView<'_, T>) -> usize {
        view.len
    }
    fn len_mut<T: Element>(view: &DeviceViewMut<'_, T>) -> usize {
        view.len
    }
    fn shorten<'short, 'long: 'short, T: Element>(view: DeviceView<'long, T>) -> DeviceView<'short, T> {
        view
    }
    fn reborrow<'a, T: Element>(view: &'a mut DeviceViewMut<'_, T>) -> DeviceViewMut<'a, T> {
        DeviceViewMut { address: view.address, len: view.len, borrowed: PhantomData }
    }
    fn split<'a, T: Element>(view: Self::View<'a, T>, parts: usize) -> Vec<Self::View<'a, T>> {
        let of = |p| part::<T>(view.address, view.len, parts, p);
        (0..parts).map(of).map(|(address, len)| DeviceView { address, len, borrowed: PhantomData }).collect()
    }
    fn split_mut<'a, T: Element>(view: Self::ViewMut<'a, T>, parts: usize) -> Vec<Self::ViewMut<'a, T>> {
        let of = |p| part::<T>(view.address, view.len, parts, p);
        (0..parts)
            .map(of)
            .map(|(address, len)| DeviceViewMut { address, len, borrowed: PhantomData })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_lie_within_their_view() {
        // SAFETY: the view is never used on a GPU.
        let view: DeviceView<'_, f32> = unsafe { DeviceView::from_raw(1 << 40, 6 << 30) };
        let slice = view.slice(5 << 30..(5 << 30) + 3);
        assert_eq!((slice.address(), slice.len()), ((1 << 40) + (20 << 30), 3));
        assert_eq!(slice.slice(1..3).address(), slice.address() + 4);
        assert!(view.slice(0..0).is_empty() && view.slice(6 << 30..6 << 30).is_empty());
    }

    #[test]
    #[should_panic(expected = "range 2..5 of a view of 4 elements")]
    fn slices_beyond_the_end_are_refused() {
        // SAFETY: the view is never used on a GPU.
        let view: DeviceView<'_, u8> = unsafe { DeviceView::from_raw(64, 4) };
        view.slice(2..5);
    }
}
