//! Products by vector instructions: packed panels in, accumulators out.
//!
//! ```text
//! for each panel of B, NR columns wide:            stays in L1, with the accumulators of this panel nearby
//!   for each panel of A, MR rows high:             streams from L2
//!     MR x NR accumulators in registers += outer products along k
//! ```

use super::isa::{Isa, Kind};
use super::simd::{Portable, Vector};
use std::ops::Range;

/// The register tile of an instruction set: `mr` rows by `nr` columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub(super) mr: usize,
    pub(super) nr: usize,
}

/// Contraction indices handled at a time: of B (192 x 32 x 4 bytes) they stay in L1 beside those of a panel of A. See
/// `docs/attempts.md`.
pub(super) const KC: usize = 192;

// 32 registers hold 14 x 2 accumulators, 2 vectors of B and a broadcast; 16 registers hold 6 x 2 or 4 x 2.
#[cfg(target_arch = "x86_64")]
const AVX512: Geometry = Geometry { mr: 14, nr: 32 };
#[cfg(target_arch = "x86_64")]
const AVX2: Geometry = Geometry { mr: 6, nr: 16 };
const PORTABLE: Geometry = Geometry { mr: 4, nr: 8 };

impl Geometry {
    pub(super) fn of(isa: Isa) -> Self {
        match isa.kind() {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx | Kind::Avx512 => AVX512,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => AVX2,
            Kind::Portable => PORTABLE,
        }
    }
}

/// One stretch of the contraction for one run of rows.
pub(super) struct Panels<'a> {
    /// `[rows/mr][k][mr]`.
    pub(super) a: &'a [f32],
    /// `[columns/nr][stretch][nr]`.
    pub(super) b: &'a [f32],
    /// Length of the contraction.
    pub(super) k: usize,
    /// What of it is added now.
    pub(super) stretch: Range<usize>,
}

/// `acc [rows, ld] += A · B`, or `=` for the first stretch; `ld` columns, a multiple of `nr`.
pub(super) fn accumulate(isa: Isa, panels: Panels<'_>, acc: &mut [f32], ld: usize) {
    match isa.kind() {
        // SAFETY: this kind exists only where detection found AVX-512.
        #[cfg(target_arch = "x86_64")]
        Kind::Amx | Kind::Avx512 => unsafe { avx512(panels, acc, ld) },
        // SAFETY: this kind exists only where detection found AVX2 and FMA.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => unsafe { avx2(panels, acc, ld) },
        // SAFETY: this instance uses no special instructions.
        Kind::Portable => unsafe { block::<Portable, { PORTABLE.mr }, 2>(panels, acc, ld) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn avx512(panels: Panels<'_>, acc: &mut [f32], ld: usize) {
    // SAFETY: the features are enabled here.
    unsafe { block::<std::arch::x86_64::__m512, { AVX512.mr }, 2>(panels, acc, ld) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2(panels: Panels<'_>, acc: &mut [f32], ld: usize) {
    // SAFETY: the features are enabled here.
    unsafe { block::<std::arch::x86_64::__m256, { AVX2.mr }, 2>(panels, acc, ld) }
}

/// # Safety
/// The instructions of `V` are available.
#[inline(always)]
unsafe fn block<V: Vector, const MR: usize, const NV: usize>(p: Panels<'_>, acc: &mut [f32], ld: usize) {
    let nr = NV * V::LANES;
    for (j, b) in p.b.chunks_exact(p.stretch.len() * nr).enumerate() {
        for (i, a) in p.a.chunks_exact(p.k * MR).enumerate() {
            let acc = &mut acc[i * MR * ld + j * nr..];
            // SAFETY: the caller's promise.
            unsafe {
                tile::<V, MR, NV>(
                    &a[p.stretch.start * MR..p.stretch.end * MR],
                    b,
                    acc,
                    ld,
                    p.stretch.start == 0,
                );
            }
        }
    }
}

/// # Safety
/// The instructions of `V` are available.
#[inline(always)]
unsafe fn tile<V: Vector, const MR: usize, const NV: usize>(
    a: &[f32],
    b: &[f32],
    acc: &mut [f32],
    ld: usize,
    first: bool,
) {
    let nr = NV * V::LANES;
    assert!(acc.len() >= (MR - 1) * ld + nr, "{MR} rows of {nr} accumulators");
    // SAFETY: the caller's promise covers the instructions. Accesses to `acc` end at `(MR-1)·ld + nr`, which the
    // assertion covers; accesses to `b` stay in chunks of `nr`.
    unsafe {
        let mut c = [[V::zero(); NV]; MR];
        if !first {
            for (i, c) in c.iter_mut().enumerate() {
                for (j, c) in c.iter_mut().enumerate() {
                    *c = V::load(acc.as_ptr().add(i * ld + j * V::LANES));
                }
            }
        }
        for (a, b) in a.chunks_exact(MR).zip(b.chunks_exact(nr)) {
            let mut row = [V::zero(); NV];
            for (j, v) in row.iter_mut().enumerate() {
                *v = V::load(b.as_ptr().add(j * V::LANES));
            }
            for (i, c) in c.iter_mut().enumerate() {
                let a = V::splat(a[i]);
                for (c, &b) in c.iter_mut().zip(&row) {
                    *c = a.mul_add(b, *c);
                }
            }
        }
        for (i, c) in c.iter().enumerate() {
            for (j, c) in c.iter().enumerate() {
                c.store(acc.as_mut_ptr().add(i * ld + j * V::LANES));
            }
        }
    }
}
