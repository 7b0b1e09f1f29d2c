//! Tensors of a replay in host memory, of any of the dtypes that a capture holds.

use anyhow::{Result, bail};
use half::bf16;
use moe4::checkpoint::{Dtype, TensorFile, TensorSpec, TensorWriter};

/// A named tensor.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) data: Data,
}

/// Its elements, row-major.
#[derive(Debug)]
pub(super) enum Data {
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
    /// Packed codes, or raw E4M3 scales.
    Bytes(Vec<u8>),
    I64(Vec<i64>),
}

impl Tensor {
    pub(super) fn new(name: impl Into<String>, shape: &[usize], data: Data) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), data }
    }

    /// Reads a tensor of a file as the kind that its dtype asks for.
    pub(super) fn read(file: &mut TensorFile, name: &str) -> Result<Self> {
        let info = file.info(name)?.clone();
        let data = match info.dtype {
            Dtype::BF16 => Data::Bf16(file.read(name)?),
            Dtype::F32 => Data::F32(file.read(name)?),
            Dtype::U8 | Dtype::F8_E4M3 => Data::Bytes(file.read(name)?),
            Dtype::I64 => Data::I64(file.read(name)?),
            other => bail!(
                "tensor '{name}' in {}: expected dtype BF16, F32, U8, F8_E4M3 or I64, got {other}",
                file.path().display()
            ),
        };
        Ok(Self { name: name.into(), shape: info.shape, data })
    }

    pub(super) fn spec(&self) -> TensorSpec {
        TensorSpec::new(&self.name, self.data.dtype(), &self.shape)
    }

    pub(super) fn write(&self, writer: &mut TensorWriter) -> Result<()> {
        match &self.data {
            Data::Bf16(values) => writer.write(&self.name, values),
            Data::F32(values) => writer.write(&self.name, values),
            Data::Bytes(values) => writer.write(&self.name, values),
            Data::I64(values) => writer.write(&self.name, values),
        }
        .map_err(Into::into)
    }
}

impl Data {
    pub(super) fn dtype(&self) -> Dtype {
        match self {
            Data::Bf16(_) => Dtype::BF16,
            Data::F32(_) => Dtype::F32,
            Data::Bytes(_) => Dtype::U8,
            Data::I64(_) => Dtype::I64,
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Data::Bf16(values) => values.len(),
            Data::F32(values) => values.len(),
            Data::Bytes(values) => values.len(),
            Data::I64(values) => values.len(),
        }
    }

    /// The value of an element.
    pub(super) fn value(&self, index: usize) -> f64 {
        match self {
            Data::Bf16(values) => f64::from(values[index].to_f32()),
            Data::F32(values) => f64::from(values[index]),
            Data::Bytes(values) => f64::from(values[index]),
            Data::I64(values) => values[index] as f64,
        }
    }
}

/// `[row, column]` of a flat index.
pub(super) fn position(mut index: usize, shape: &[usize]) -> Vec<usize> {
    let mut reversed: Vec<usize> = Vec::with_capacity(shape.len());
    for dim in shape.iter().rev() {
        reversed.push(index % dim);
        index /= dim;
    }
    reversed.reverse();
    reversed
}
