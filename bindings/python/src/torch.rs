//! The objects of torch that this module needs, looked up once.

use moe4::kernels::Element;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// Element types that tensors are taken and given in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dtype {
    Bf16,
    F32,
    U8,
    I64,
    /// Read and written as bytes.
    E4m3,
}

impl Dtype {
    /// As torch prints it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "torch.bfloat16",
            Dtype::F32 => "torch.float32",
            Dtype::U8 => "torch.uint8",
            Dtype::I64 => "torch.int64",
            Dtype::E4m3 => "torch.float8_e4m3fn",
        }
    }

    /// Bytes of an element.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Dtype::Bf16 => 2,
            Dtype::F32 => 4,
            Dtype::I64 => 8,
            Dtype::U8 | Dtype::E4m3 => 1,
        }
    }
}

/// Elements whose tensors can be handed over.
pub(crate) trait Handed: Element {
    /// DLPack's type code and bits.
    const CODE: (u8, u8);
    /// torch's.
    const DTYPE: Dtype;
}
impl Handed for u8 {
    const CODE: (u8, u8) = (1, 8);
    const DTYPE: Dtype = Dtype::U8;
}
impl Handed for f32 {
    const CODE: (u8, u8) = (2, 32);
    const DTYPE: Dtype = Dtype::F32;
}
impl Handed for half::bf16 {
    const CODE: (u8, u8) = (4, 16);
    const DTYPE: Dtype = Dtype::Bf16;
}

/// What is looked up.
pub(crate) struct Torch {
    pub(crate) tensor: Py<PyAny>,
    strided: Py<PyAny>,
    dtypes: [(Dtype, Py<PyAny>); 5],
    from_dlpack: Py<PyAny>,
    get_num_threads: Py<PyAny>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

impl Torch {
    pub(crate) fn get(py: Python<'_>) -> PyResult<&Torch> {
        TORCH.get_or_try_init(py, || {
            let torch = py.import("torch")?;
            let find = |name| Ok::<_, PyErr>(torch.getattr(name)?.unbind());
            Ok(Torch {
                tensor: find("Tensor")?,
                strided: find("strided")?,
                dtypes: [
                    (Dtype::Bf16, find("bfloat16")?),
                    (Dtype::F32, find("float32")?),
                    (Dtype::U8, find("uint8")?),
                    (Dtype::I64, find("int64")?),
                    (Dtype::E4m3, find("float8_e4m3fn")?),
                ],
                // The one that takes a capsule; torch.utils.dlpack looks for what else an argument may be first.
                from_dlpack: torch.getattr("_C")?.getattr("_from_dlpack")?.unbind(),
                get_num_threads: find("get_num_threads")?,
            })
        })
    }

    /// Which of the known dtypes an object is.
    pub(crate) fn dtype(&self, dtype: &Bound<'_, PyAny>) -> Option<Dtype> {
        self.dtypes.iter().find(|(_, known)| known.is(dtype)).map(|(dtype, _)| *dtype)
    }

    /// torch's object for a dtype.
    pub(crate) fn object(&self, dtype: Dtype) -> &Py<PyAny> {
        let [bf16, f32, u8, i64, e4m3] = &self.dtypes;
        let (_, object) = match dtype {
            Dtype::Bf16 => bf16,
            Dtype::F32 => f32,
            Dtype::U8 => u8,
            Dtype::I64 => i64,
            Dtype::E4m3 => e4m3,
        };
        object
    }

    pub(crate) fn is_strided(&self, layout: &Bound<'_, PyAny>) -> bool {
        self.strided.is(layout)
    }

    /// The tensor in a capsule.
    pub(crate) fn unpack<'py>(&self, capsule: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.from_dlpack.bind(capsule.py()).call1((capsule,))
    }

    /// How many threads the user lets torch have.
    pub(crate) fn threads(&self, py: Python<'_>) -> PyResult<usize> {
        self.get_num_threads.bind(py).call0()?.extract()
    }
}
