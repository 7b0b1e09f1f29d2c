//! Outputs on their way to a check: filled with junk before a run, downloaded after it, compared.

use std::hash::{DefaultHasher, Hasher};

use anyhow::{Result, bail, ensure};
use half::bf16;
use moe4::kernels::{Backend, Buffer, Element, Memory};

/// One tensor that a pass or a step wrote.
#[derive(Debug)]
pub(super) struct Output {
    name: &'static str,
    bytes: Vec<u8>,
    element: ElementKind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ElementKind {
    U8,
    Bf16,
    F32,
}

/// A buffer of `len` elements whose every byte is `byte`.
pub(super) fn poisoned<T: Element, B: Backend>(
    backend: &B,
    len: usize,
    byte: u8,
) -> Result<Buffer<B::Memory, T>> {
    let mut host = vec![T::default(); len];
    bytemuck::cast_slice_mut::<T, u8>(&mut host).fill(byte);
    Ok(backend.upload(&host)?)
}

pub(super) fn download<B: Backend, T: Element>(
    backend: &B,
    name: &'static str,
    buffer: &Buffer<B::Memory, T>,
) -> Result<Output> {
    let host = backend.download::<T>(B::Memory::view(buffer))?;
    let element = match size_of::<T>() {
        1 => ElementKind::U8,
        2 => ElementKind::Bf16,
        _ => ElementKind::F32,
    };
    Ok(Output { name, bytes: bytemuck::cast_slice(&host).to_vec(), element })
}

impl Output {
    /// Adds the bytes to a hash of all outputs.
    pub(super) fn hash(&self, hasher: &mut DefaultHasher) {
        hasher.write_usize(self.bytes.len());
        hasher.write(&self.bytes);
    }

    pub(super) fn is_amax(&self) -> bool {
        self.name.starts_with("amax")
    }

    /// The same bytes as the reference, or an error that says where they differ first.
    pub(super) fn expect_same(&self, reference: &Self) -> Result<()> {
        let Self { name, bytes, .. } = self;
        let expected = reference.bytes.len();
        ensure!(bytes.len() == expected, "{name}: expected {expected} bytes, got {}", bytes.len());
        match bytes.iter().zip(&reference.bytes).position(|(ours, theirs)| ours != theirs) {
            None => Ok(()),
            Some(at) => {
                let (ours, theirs) = (bytes[at], reference.bytes[at]);
                bail!("{name}: byte {at} of {expected}: expected {theirs:#04x}, got {ours:#04x}")
            }
        }
    }

    /// Within `tolerance` of the reference in the Euclidean norm, relative to it.
    pub(super) fn expect_near(&self, reference: &Self, tolerance: f64) -> Result<()> {
        let (ours, theirs) = (self.values(), reference.values());
        let (name, expected) = (self.name, theirs.len());
        ensure!(ours.len() == expected, "{name}: expected {expected} values, got {}", ours.len());
        let square = |difference: f64| difference * difference;
        let difference: f64 = ours.iter().zip(&theirs).map(|(a, b)| square(a - b)).sum();
        let norm: f64 = theirs.iter().map(|b| square(*b)).sum();
        let distance = (difference / norm).sqrt();
        // Not written the other way round: a distance that is no number is wrong as well.
        if distance <= tolerance {
            return Ok(());
        }
        bail!("{name}: expected a relative distance of at most {tolerance}, got {distance:.2e}")
    }

    fn values(&self) -> Vec<f64> {
        match self.element {
            ElementKind::U8 => self.bytes.iter().map(|&byte| f64::from(byte)).collect(),
            ElementKind::Bf16 => {
                self.bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect()
            }
            ElementKind::F32 => {
                let value = |b: &[u8]| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                self.bytes.chunks_exact(4).map(value).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use moe4::kernels::reference::Reference;

    use super::*;

    fn output(values: &[f32]) -> Output {
        download(&Reference, "y", &values.to_vec()).expect("host memory")
    }

    #[test]
    fn zeros_and_broken_numbers_are_never_near() {
        let reference = output(&[1.0, -2.0]);
        assert!(output(&[1.0, -2.001]).expect_near(&reference, 1e-2).is_ok());
        for wrong in [&[0.0, 0.0][..], &[f32::NAN, -2.0], &[1.0]] {
            assert!(output(wrong).expect_near(&reference, 1e-2).is_err(), "{wrong:?}");
        }
        assert!(output(&[0.0, 0.0]).expect_near(&output(&[0.0, 0.0]), 1e-2).is_err(), "a zero reference");
    }

    #[test]
    fn the_first_different_byte_is_named() {
        let error = output(&[1.0, 2.0]).expect_same(&output(&[1.0, 3.0])).expect_err("different");
        assert_eq!(error.to_string(), "y: byte 6 of 8: expected 0x40, got 0x00");
    }
}
