//! A torch tensor as an argument: checked once, then a name, a shape and an address.

use moe4::kernels::{Element, View, ViewMut};
use moe4::tensor::Groups;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;

use crate::error::bad_splits;
use crate::exchange::Exchange;
use crate::torch::{Dtype, Torch};

/// A contiguous tensor in host memory. It keeps the torch tensor alive.
pub(crate) struct Tensor {
    name: String,
    address: usize,
    shape: Vec<usize>,
    dtype: Dtype,
    _alive: Py<PyAny>,
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
    pub(crate) fn new(name: impl Into<String>, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (py, name) = (object.py(), name.into());
        let torch = Torch::get(py)?;
        if !object.is_instance(torch.tensor.bind(py))? {
            let got = object.get_type().name()?;
            return Err(PyTypeError::new_err(format!("{name}: expected a torch.Tensor, got {got}")));
        }
        let device = object.getattr(intern!(py, "device"))?;
        let kind: String = device.getattr(intern!(py, "type"))?.extract()?;
        if kind != "cpu" {
            return Err(PyValueError::new_err(format!(
                "{name}: expected a tensor on cpu, got one on {device}; move it with .to('cpu')"
            )));
        }
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
        Ok(Self { name, address, shape, dtype, _alive: object.clone().unbind() })
    }

    /// One for each object of a list.
    pub(crate) fn list(name: &str, objects: &[Bound<'_, PyAny>]) -> PyResult<Vec<Self>> {
        objects.iter().enumerate().map(|(at, object)| Self::new(format!("{name}[{at}]"), object)).collect()
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
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

    fn check<T: Viewed>(&self) -> PyResult<()> {
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
        self.check::<T>()?;
        assert!(len <= self.len(), "{} of {} elements of {}", len, self.len(), self.name);
        // SAFETY: torch vouches for a contiguous tensor of this shape and dtype at its address, which `check` found
        // aligned; `_alive` keeps it. All bit patterns are values of the types viewed. That no other thread writes it
        // meanwhile is asked of users, as torch asks it for its own operations.
        Ok(unsafe { M::borrow(self.address, len) })
    }

    /// Its elements, for writing.
    pub(crate) fn view_mut<M: Exchange, T: Viewed>(&mut self) -> PyResult<ViewMut<'_, M, T>> {
        self.check::<T>()?;
        // SAFETY: as for `prefix`; whoever writes several tensors calls `expect_disjoint` first.
        Ok(unsafe { M::borrow_mut(self.address, self.len()) })
    }

    fn bytes(&self) -> usize {
        let size = match self.dtype {
            Dtype::Bf16 => 2,
            Dtype::F32 => 4,
            Dtype::I64 => 8,
            Dtype::U8 | Dtype::E4m3 => 1,
        };
        size * self.len()
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
    let (mut any, mut written) = ((0, ""), (0, ""));
    for (tensor, is_written) in all {
        let before = if is_written { any } else { written };
        if tensor.address < before.0 {
            return Err(PyValueError::new_err(format!(
                "{} and {} share memory, but one of them is written; pass separate tensors",
                before.1, tensor.name
            )));
        }
        let end = (tensor.address + tensor.bytes(), &tensor.name[..]);
        any = any.max(end);
        if is_written {
            written = written.max(end);
        }
    }
    Ok(())
}

/// The rows of each expert, `[E]` int64, of a tensor of `rows`; without splits, one group of all.
pub(crate) fn groups(splits: Option<&Bound<'_, PyAny>>, rows: usize) -> PyResult<Groups> {
    let Some(splits) = splits else { return Ok(Groups::single(rows)) };
    let splits = Tensor::new("splits", splits)?;
    let [experts] = splits.dims()?;
    if splits.dtype != Dtype::I64 {
        return Err(wrong_dtype("splits", &[Dtype::I64], splits.dtype.name()));
    }
    // SAFETY: torch vouches for this many contiguous int64 values, at least one; torch aligns what it allocates to
    // more than 8 bytes and views to whole elements, so `read_unaligned` is only a precaution.
    let value = |at: usize| unsafe { (splits.address as *const i64).add(at).read_unaligned() };
    let splits: Vec<i64> = (0..experts).map(value).collect();
    Groups::from_i64(&splits, rows).map_err(bad_splits)
}

fn wrong_dtype(name: &str, expected: &[Dtype], got: &str) -> PyErr {
    let fix = expected.first().map(|d| format!("; convert it with .to({})", d.name())).unwrap_or_default();
    let expected = match expected {
        [] => "a dtype that moe4 uses (bfloat16, float32, uint8, float8_e4m3fn, int64)".into(),
        some => some.iter().map(|d| d.name()).collect::<Vec<_>>().join(" or "),
    };
    PyTypeError::new_err(format!("{name}: expected dtype {expected}, got {got}{fix}"))
}
