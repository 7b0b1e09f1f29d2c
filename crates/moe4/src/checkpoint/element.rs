//! The element types that tensors are read as and written from.

use bytemuck::Pod;
use half::{bf16, f16};
use safetensors::Dtype;

/// A plain element of a tensor in memory, with the file dtypes that hold it.
///
/// `u8` stands for raw bytes: it reads and writes `U8` and `F8_E4M3` (the encoded byte, not its value).
pub trait Element: Pod + sealed::Sealed {
    /// The dtypes whose bytes are values of this type.
    const DTYPES: &'static [Dtype];
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! element {
    ($($type:ty => [$($dtype:ident),+]),+ $(,)?) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPES: &'static [Dtype] = &[$(Dtype::$dtype),+];
        }
    )+};
}

element! {
    f32 => [F32],
    f64 => [F64],
    f16 => [F16],
    bf16 => [BF16],
    i64 => [I64],
    u8 => [U8, F8_E4M3],
}
