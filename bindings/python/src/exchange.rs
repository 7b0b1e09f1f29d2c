//! Memory that torch and moe4 share: views of torch's tensors on the way in, buffers handed over on the way out.
//!
//! One implementation for each kind of memory; the functions are written against [`Exchange`] alone.

use moe4::kernels::{Buffer, Element, Host, Memory, View, ViewMut};
use pyo3::prelude::*;

use crate::dlpack;
use crate::torch::{Handed, Torch};

/// A kind of memory that torch's tensors can be in.
pub(crate) trait Exchange: Memory {
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

    /// A torch tensor that owns the buffer from now on.
    ///
    /// # Panics
    /// If `shape` has not as many elements as the buffer.
    fn hand_over<'py, T: Handed>(
        py: Python<'py>,
        buffer: Buffer<Self, T>,
        shape: &[usize],
    ) -> PyResult<Bound<'py, PyAny>>;

    /// A buffer of `len` elements or more, cut or filled up with zeros.
    fn resize<T: Element>(buffer: &mut Buffer<Self, T>, len: usize);
}

impl Exchange for Host {
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

    fn hand_over<'py, T: Handed>(
        py: Python<'py>,
        mut buffer: Vec<T>,
        shape: &[usize],
    ) -> PyResult<Bound<'py, PyAny>> {
        assert_eq!(buffer.len(), shape.iter().product::<usize>(), "a buffer of shape {shape:?}");
        let data = buffer.as_mut_ptr().cast();
        // SAFETY: the elements of a vector stay where they are when the vector moves into its box, which owns them
        // alone from now on; the length was checked.
        let capsule = unsafe { dlpack::capsule::<T>(py, data, shape, dlpack::CPU, Box::new(buffer))? };
        Torch::get(py)?.unpack(capsule)
    }

    fn resize<T: Element>(buffer: &mut Vec<T>, len: usize) {
        buffer.resize(len, T::default());
    }
}
