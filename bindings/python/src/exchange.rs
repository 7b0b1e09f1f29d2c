//! Views of torch's tensors, for each kind of memory. The way back, a buffer that becomes a tensor, is
//! [`Place::hand_over`](crate::place::Place::hand_over).

use moe4::kernels::{Buffer, Element, Host, Memory, View, ViewMut};
use moe4_cuda::{DeviceBuffer, DeviceMemory, DeviceView, DeviceViewMut};

use crate::tensor::Device;

/// A kind of memory that torch's tensors can be in.
pub(crate) trait Exchange: Memory {
    /// Whether a tensor on `device` is in this memory.
    fn is_of(device: Device) -> bool;

    /// `len` elements at `address`.
    ///
    /// # Safety
    /// They are there, aligned, of this memory, hold values of `T`, live for `'a` and are written by nobody meanwhile.
    unsafe fn borrow<'a, T: Element>(address: usize, len: usize) -> View<'a, Self, T>;

    /// `len` elements at `address`, for writing.
    ///
    /// # Safety
    /// Those of [`Exchange::borrow`], and nobody else reads them.
    unsafe fn borrow_mut<'a, T: Element>(address: usize, len: usize) -> ViewMut<'a, Self, T>;

    /// A buffer with room for any splits, of `len` elements: the host fills it up with zeros, a device made it so.
    ///
    /// # Panics
    /// If a device did not.
    fn resize<T: Element>(buffer: &mut Buffer<Self, T>, len: usize);
}

impl Exchange for Host {
    fn is_of(device: Device) -> bool {
        device == Device::Cpu
    }

    unsafe fn borrow<'a, T: Element>(address: usize, len: usize) -> &'a [T] {
        if len == 0 {
            return &[]; // torch's address of an empty tensor is null
        }
        // SAFETY: by the contract.
        unsafe { std::slice::from_raw_parts(address as *const T, len) }
    }

    unsafe fn borrow_mut<'a, T: Element>(address: usize, len: usize) -> &'a mut [T] {
        if len == 0 {
            return &mut [];
        }
        // SAFETY: by the contract.
        unsafe { std::slice::from_raw_parts_mut(address as *mut T, len) }
    }

    fn resize<T: Element>(buffer: &mut Vec<T>, len: usize) {
        buffer.resize(len, T::default());
    }
}

impl Exchange for DeviceMemory {
    fn is_of(device: Device) -> bool {
        matches!(device, Device::Cuda(_))
    }

    unsafe fn borrow<'a, T: Element>(address: usize, len: usize) -> DeviceView<'a, T> {
        // SAFETY: by the contract.
        unsafe { DeviceView::from_raw(address as u64, len) }
    }

    unsafe fn borrow_mut<'a, T: Element>(address: usize, len: usize) -> DeviceViewMut<'a, T> {
        // SAFETY: by the contract.
        unsafe { DeviceViewMut::from_raw(address as u64, len) }
    }

    fn resize<T: Element>(buffer: &mut DeviceBuffer<T>, len: usize) {
        assert_eq!(buffer.view().len(), len, "room for any splits");
    }
}
