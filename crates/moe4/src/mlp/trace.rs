//! Intermediate tensors copied out of a run, for finding which one went wrong.

use crate::kernels::{Backend, Element, Error, Memory, View};
use half::bf16;

/// Tensors in the order in which the operator made them. Names are those of the golden operator data: `x_fp4`,
/// `x_scale_col`, `c`, `dh` and so on.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The tensors.
    pub tensors: Vec<TracedTensor>,
}

/// One tensor in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct TracedTensor {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its elements.
    pub data: TracedData,
}

/// Elements by type.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the variants are the element types")]
pub enum TracedData {
    U8(Vec<u8>),
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

/// Element types that a trace holds.
pub(super) trait Traceable: Element {
    fn wrap(data: Vec<Self>) -> TracedData;
}
impl Traceable for u8 {
    fn wrap(data: Vec<u8>) -> TracedData {
        TracedData::U8(data)
    }
}
impl Traceable for f32 {
    fn wrap(data: Vec<f32>) -> TracedData {
        TracedData::F32(data)
    }
}
impl Traceable for bf16 {
    fn wrap(data: Vec<bf16>) -> TracedData {
        TracedData::Bf16(data)
    }
}

impl Trace {
    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&TracedTensor> {
        self.tensors.iter().find(|t| t.name == name)
    }

    pub(super) fn add<B: Backend, T: Traceable>(
        &mut self,
        backend: &B,
        name: impl Into<String>,
        shape: &[usize],
        view: View<'_, B::Memory, T>,
    ) -> Result<(), Error> {
        debug_assert_eq!(shape.iter().product::<usize>(), B::Memory::len(&view));
        let data = T::wrap(backend.download(view)?);
        self.tensors.push(TracedTensor { name: name.into(), shape: shape.to_vec(), data });
        Ok(())
    }
}
