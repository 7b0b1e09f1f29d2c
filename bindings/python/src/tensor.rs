//! A torch tensor as an argument: checked once, then a name, a shape and an address.

use std::borrow::Cow;
use std::fmt;

use moe4::kernels::{Element, View, ViewMut};
use moe4_cuda::DeviceView;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::exchange::Exchange;
use crate::torch::{Dtype, Torch};

/// A contiguous tensor. It keeps the torch tensor alive.
pub(crate) struct Tensor {
    name: Name,
    address: usize,
    shape: Vec<usize>,
    dtype: Dtype,
    device: Device,
    _alive: Py<PyAny>,
}

/// What an argument is called: `x`, or `w1[3]` of a list.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Name(Cow<'static, str>, Option<usize>);

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            Some(at) => write!(f, "{}[{at}]", self.0),
            None => f.write_str(&self.0),
        }
    }
}

/// Where a tensor is, named as torch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    Cpu,
    Cuda(usize),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// The one device of the tensors of a call, the first of which says which.
pub(crate) fn common_device<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> PyResult<Device> {
    let mut tensors = tensors.into_iter();
    let Some(first) = tensors.next() else { return Ok(Device::Cpu) };
    for tensor in tensors {
        if tensor.device != first.device {
            let (name, got, expected) = (&tensor.name, tensor.device, first.device);
            return Err(PyValueError::new_err(format!(
                "{name}: expected a tensor on {expected}, as {} is, got one on {got}; move it with .to('{expected}')",
                first.name
            )));
        }
    }
    Ok(first.device)
}

/// Types of elements that a tensor can be viewed as.
pub(crate) trait Viewed: Element {
    const DTYPES: &'static [Dtype];
}
impl Viewed for half::bf16 {
    const DTYPES: &'static [Dtype] = &[Dtype::Bf16];
}
impl Viewed for f32 {
    const DTYPES: &'static [Dtype] = &[Dtype::F32];
}
impl Viewed for u8 {
    const DTYPES: &'static [Dtype] = &[Dtype::U8, Dtype::E4m3];
}

impl Tensor {
    /// Checks everything that does not depend on what the tensor is for.
    pub(crate) fn new(name: impl Into<Cow<'static, str>>, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::named(Name(name.into(), None), object)
    }

    fn named(name: Name, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let torch = Torch::get(py)?;
        if !object.is_instance(torch.tensor.bind(py))? {
            let got = object.get_type().name()?;
            return Err(PyTypeError::new_err(format!("{name}: expected a torch.Tensor, got {got}")));
        }
        let flag = |name: &Bound<'_, PyString>| object.getattr(name)?.extract::<bool>();
        let device = if flag(intern!(py, "is_cpu"))? {
            Device::Cpu
        } else if flag(intern!(py, "is_cuda"))? {
            Device::Cuda(object.call_method0(intern!(py, "get_device"))?.extract()?)
        } else {
            let device = object.getattr(intern!(py, "device"))?;
            return Err(PyValueError::new_err(format!(
                "{name}: expected a tensor on cpu or cuda, got one on {device}; move it with .to('cpu')"
            )));
        };
        if !torch.is_strided(&object.getattr(intern!(py, "layout"))?) {
            let layout = object.getattr(intern!(py, "layout"))?;
            return Err(PyTypeError::new_err(format!(
                "{name}: expected a dense tensor, got layout {layout}; call .to_dense()"
            )));
        }
        let shape: Vec<usize> = object.getattr(intern!(py, "shape"))?.extract()?;
        let dtype = object.getattr(intern!(py, "dtype"))?;
        let dtype = torch.dtype(&dtype).ok_or_else(|| wrong_dtype(&name, &[], &dtype.to_string()))?;
        if !object.call_method0(intern!(py, "is_contiguous"))?.extract::<bool>()? {
            return Err(PyValueError::new_err(format!(
                "{name}: expected a contiguous tensor, got strides {}; call .contiguous()",
                object.call_method0(intern!(py, "stride"))?
            )));
        }
        let address: usize = object.call_method0(intern!(py, "data_ptr"))?.extract()?;
        Ok(Self { name, address, shape, dtype, device, _alive: object.clone().unbind() })
    }

    /// One for each object of a list.
    pub(crate) fn list(name: &'static str, objects: &[Bound<'_, PyAny>]) -> PyResult<Vec<Self>> {
        objects
            .iter()
            .enumerate()
            .map(|(at, object)| Self::named(Name(name.into(), Some(at)), object))
            .collect()
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The sizes, of which there must be `N`.
    pub(crate) fn dims<const N: usize>(&self) -> PyResult<[usize; N]> {
        <[usize; N]>::try_from(&self.shape[..]).map_err(|_| {
            PyValueError::new_err(format!(
                "{}: expected {N} dimensions, got shape {:?}",
                self.name, self.shape
            ))
        })
    }

    /// Exactly this shape.
    pub(crate) fn expect(&self, shape: &[usize]) -> PyResult<()> {
        if self.shape == shape {
            return Ok(());
        }
        Err(PyValueError::new_err(format!("{}: expected shape {shape:?}, got {:?}", self.name, self.shape)))
    }

    fn check<M: Exchange, T: Viewed>(&self) -> PyResult<()> {
        if !M::is_of(self.device) {
            let message = format!("{}: a tensor on {} among those of another device", self.name, self.device);
            return Err(PyValueError::new_err(message));
        }
        if !T::DTYPES.contains(&self.dtype) {
            return Err(wrong_dtype(&self.name, T::DTYPES, self.dtype.name()));
        }
        if self.address.is_multiple_of(align_of::<T>()) {
            return Ok(());
        }
        let name = &self.name;
        Err(PyValueError::new_err(format!(
            "{name}: its memory is not aligned to its elements; call .clone()"
        )))
    }

    /// Its elements.
    pub(crate) fn view<M: Exchange, T: Viewed>(&self) -> PyResult<View<'_, M, T>> {
        self.prefix::<M, T>(self.len())
    }

    /// Its first `len` elements.
    ///
    /// # Panics
    /// If there are not as many.
    pub(crate) fn prefix<M: Exchange, T: Viewed>(&self, len: usize) -> PyResult<View<'_, M, T>> {
        self.check::<M, T>()?;
        assert!(len <= self.len(), "{} of {} elements of {}", len, self.len(), self.name);
        // SAFETY: torch vouches for a contiguous tensor of this shape and dtype at its address, which `check` found
        // aligned; `_alive` keeps it. All bit patterns are values of the types viewed. That no other thread writes it
        // meanwhile is asked of users, as torch asks it for its own operations.
        Ok(unsafe { M::borrow(self.address, len) })
    }

    /// Its elements, for writing.
    pub(crate) fn view_mut<M: Exchange, T: Viewed>(&mut self) -> PyResult<ViewMut<'_, M, T>> {
        self.check::<M, T>()?;
        // SAFETY: as for `prefix`; whoever writes several tensors calls `expect_disjoint` first.
        Ok(unsafe { M::borrow_mut(self.address, self.len()) })
    }

    /// The values of an int64 tensor in host memory.
    ///
    /// # Panics
    /// If it is another tensor.
    pub(crate) fn host_i64(&self) -> Vec<i64> {
        assert_eq!((self.device, self.dtype), (Device::Cpu, Dtype::I64));
        // SAFETY: torch vouches for this many contiguous values; it aligns what it allocates to more than 8 bytes and
        // views to whole elements, so `read_unaligned` is only a precaution.
        (0..self.len()).map(|at| unsafe { (self.address as *const i64).add(at).read_unaligned() }).collect()
    }

    /// The values of an int64 tensor on a GPU.
    ///
    /// # Panics
    /// If it is another tensor.
    pub(crate) fn device_i64(&self) -> DeviceView<'_, i64> {
        assert!(self.device != Device::Cpu && self.dtype == Dtype::I64);
        // SAFETY: torch vouches for this many contiguous values, and `_alive` keeps them; for writes meanwhile as in
        // `prefix`.
        unsafe { DeviceView::from_raw(self.address as u64, self.len()) }
    }

    /// The value of an int64 tensor of one element on a GPU, modulo 2^64.
    ///
    /// # Panics
    /// If it is another tensor.
    pub(crate) fn device_word(&self) -> DeviceView<'_, u64> {
        assert!(self.device != Device::Cpu && self.dtype == Dtype::I64 && self.len() == 1);
        // SAFETY: as for `device_i64`; any bits are a value.
        unsafe { DeviceView::from_raw(self.address as u64, 1) }
    }

    fn bytes(&self) -> usize {
        self.dtype.bytes() * self.len()
    }
}

/// Tensors that are written share no memory with each other or with those that are read.
pub(crate) fn expect_disjoint<'a>(
    written: &[&'a Tensor],
    read: impl IntoIterator<Item = &'a Tensor>,
) -> PyResult<()> {
    let mut all: Vec<(&Tensor, bool)> = written.iter().map(|t| (*t, true)).collect();
    all.extend(read.into_iter().map(|t| (t, false)));
    all.retain(|(t, _)| t.bytes() > 0);
    all.sort_by_key(|(t, _)| t.address);
    // The end of what came before, and of what is written of it.
    let none = Name(Cow::Borrowed(""), None);
    let (mut any, mut written) = ((0, &none), (0, &none));
    for (tensor, is_written) in all {
        let before = if is_written { any } else { written };
        if tensor.address < before.0 {
            return Err(PyValueError::new_err(format!(
                "{} and {} share memory, but one of them is written; pass separate tensors",
                before.1, tensor.name
            )));
        }
        let end = (tensor.address + tensor.bytes(), &tensor.name);
        any = any.max(end);
        if is_written {
            written = written.max(end);
        }
    }
    Ok(())
}

/// The error for a tensor that may be where the others are, on `expected`, or on the host.
pub(crate) fn misplaced(name: &str, got: Device, expected: Device) -> PyErr {
    let or_host = if expected == Device::Cpu { "" } else { " or cpu" };
    PyValueError::new_err(format!(
        "{name}: expected a tensor on {expected}{or_host}, got one on {got}; move it with .to('{expected}')"
    ))
}

pub(crate) fn wrong_dtype(name: impl fmt::Display, expected: &[Dtype], got: &str) -> PyErr {
    let fix = expected.first().map(|d| format!("; convert it with .to({})", d.name())).unwrap_or_default();
    let expected = match expected {
        [] => "a dtype that moe4 uses (bfloat16, float32, uint8, float8_e4m3fn, int64)".into(),
        some => some.iter().map(|d| d.name()).collect::<Vec<_>>().join(" or "),
    };
    PyTypeError::new_err(format!("{name}: expected dtype {expected}, got {got}{fix}"))
}
