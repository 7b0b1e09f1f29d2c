//! The few vector operations of a product's register tile, and their instances.

/// A vector of `f32`.
///
/// # Safety
/// Every method may use instructions that the machine has to have: call them only inside a function compiled for
/// them and reached through [`super::isa::multiversion`] or a match on [`super::isa::Kind`].
pub(super) unsafe trait Vector: Copy {
    /// Elements.
    const LANES: usize;
    /// All lanes 0.
    unsafe fn zero() -> Self;
    /// All lanes `v`.
    unsafe fn splat(v: f32) -> Self;
    /// `LANES` elements from `p`, which must be readable; no alignment needed.
    unsafe fn load(p: *const f32) -> Self;
    /// `LANES` elements to `p`, which must be writable; no alignment needed.
    unsafe fn store(self, p: *mut f32);
    /// `self · b + acc`. Whether it is fused makes no difference for the products here, whose terms are exact.
    unsafe fn mul_add(self, b: Self, acc: Self) -> Self;
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use super::Vector;
    use std::arch::x86_64::*;

    // SAFETY: methods forward to AVX-512F instructions under the trait's contract.
    unsafe impl Vector for __m512 {
        const LANES: usize = 16;
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the trait's contract.
            unsafe { _mm512_setzero_ps() }
        }
        #[inline(always)]
        unsafe fn splat(v: f32) -> Self {
            // SAFETY: the trait's contract.
            unsafe { _mm512_set1_ps(v) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            // SAFETY: the trait's contract; the caller vouches for `p`.
            unsafe { _mm512_loadu_ps(p) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: the trait's contract; the caller vouches for `p`.
            unsafe { _mm512_storeu_ps(p, self) }
        }
        #[inline(always)]
        unsafe fn mul_add(self, b: Self, acc: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { _mm512_fmadd_ps(self, b, acc) }
        }
    }

    // SAFETY: methods forward to AVX and FMA instructions under the trait's contract.
    unsafe impl Vector for __m256 {
        const LANES: usize = 8;
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the trait's contract.
            unsafe { _mm256_setzero_ps() }
        }
        #[inline(always)]
        unsafe fn splat(v: f32) -> Self {
            // SAFETY: the trait's contract.
            unsafe { _mm256_set1_ps(v) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            // SAFETY: the trait's contract; the caller vouches for `p`.
            unsafe { _mm256_loadu_ps(p) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: the trait's contract; the caller vouches for `p`.
            unsafe { _mm256_storeu_ps(p, self) }
        }
        #[inline(always)]
        unsafe fn mul_add(self, b: Self, acc: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { _mm256_fmadd_ps(self, b, acc) }
        }
    }
}

/// Four lanes that the compiler maps to whatever its target has.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 4]);

// SAFETY: no special instructions; loads and stores are ordinary unaligned accesses.
unsafe impl Vector for Portable {
    const LANES: usize = 4;
    #[inline(always)]
    unsafe fn zero() -> Self {
        Portable([0.0; 4])
    }
    #[inline(always)]
    unsafe fn splat(v: f32) -> Self {
        Portable([v; 4])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller vouches for four readable elements.
        Portable(unsafe { p.cast::<[f32; 4]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller vouches for four writable elements.
        unsafe { p.cast::<[f32; 4]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, acc: Self) -> Self {
        Portable(std::array::from_fn(|i| self.0[i] * b.0[i] + acc.0[i]))
    }
}
