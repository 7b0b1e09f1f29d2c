//! DLPack capsules: a tensor handed over with its memory. Source of the layout: the DLPack specification, `dlpack.h`
//! of version 0.8, whose structures every later reader of unversioned capsules accepts.
//!
//! The receiver calls the deleter when it no longer needs the memory; a capsule that nobody received does so itself.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;

use crate::torch::Handed;

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct ManagedTensor {
    tensor: Tensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
}

/// What a capsule keeps alive. It is the allocation that `manager` points to.
struct Owner {
    managed: ManagedTensor,
    shape: Vec<i64>,
    _memory: Box<dyn Any + Send>,
}

const FRESH: &CStr = c"dltensor";
/// The device type of host memory.
pub(crate) const CPU: (i32, i32) = (1, 0);

/// A capsule for `shape` elements of `T` at `data`, which `memory` owns.
///
/// # Safety
/// `data` is the start of as many elements as `shape` says on `device`, valid and not aliased while `memory` lives.
pub(crate) unsafe fn capsule<'py, T: Handed>(
    py: Python<'py>,
    data: *mut c_void,
    shape: &[usize],
    device: (i32, i32),
    memory: Box<dyn Any + Send>,
) -> PyResult<Bound<'py, PyAny>> {
    let shape: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
    let (code, bits) = T::CODE;
    let tensor = Tensor {
        data,
        device_type: device.0,
        device_id: device.1,
        ndim: shape.len() as i32,
        code,
        bits,
        lanes: 1,
        shape: ptr::null_mut(),
        strides: ptr::null_mut(), // row-major
        byte_offset: 0,
    };
    let managed = ManagedTensor { tensor, manager: ptr::null_mut(), deleter: Some(delete) };
    let owner = Box::into_raw(Box::new(Owner { managed, shape, _memory: memory }));
    // SAFETY: `owner` was just allocated; the shape's elements do not move with the vector that holds them. The
    // managed tensor lives inside the owner, which only `delete` frees.
    unsafe {
        (*owner).managed.tensor.shape = (*owner).shape.as_mut_ptr();
        (*owner).managed.manager = owner.cast();
        let managed = &raw mut (*owner).managed;
        let capsule = ffi::PyCapsule_New(managed.cast(), FRESH.as_ptr(), Some(drop_unread));
        if capsule.is_null() {
            delete(managed);
        }
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

/// Frees the tensor, from any thread.
///
/// # Safety
/// `managed` comes from [`capsule`] and is not used again.
unsafe extern "C" fn delete(managed: *mut ManagedTensor) {
    // SAFETY: by the contract, `manager` is the owner's allocation and this is its last use.
    drop(unsafe { Box::from_raw((*managed).manager.cast::<Owner>()) });
}

/// The capsule's own end: who received the tensor has renamed the capsule.
///
/// # Safety
/// Called by Python for a capsule of [`capsule`].
unsafe extern "C" fn drop_unread(capsule: *mut ffi::PyObject) {
    // SAFETY: the capsule is alive; its pointer is asked for only under the name that it was made with.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, FRESH.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, FRESH.as_ptr()).cast());
        }
    }
}
