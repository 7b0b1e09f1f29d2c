//! Sixteen `f32` of an epilogue: a register of AVX-512, or an array whose loops the compiler turns into what there is.
//!
//! The array's loops are short enough to vectorize one operation at a time; a whole activation in one loop is not.

use crate::kernels::activation::{ActivationFn, Evaluated};
use crate::numerics::{BLOCK, bf16 as bf};
use half::bf16;

/// Sixteen values.
pub(super) trait Wide: Copy {
    /// All the same.
    fn splat(v: f32) -> Self;
    /// The first sixteen of `v`.
    fn load(v: &[f32]) -> Self;
    /// To the first sixteen of `out`.
    fn store(self, out: &mut [f32]);
    /// The same for what is not read soon: past the caches, if `out` starts with a line. [`Wide::finish`] comes after the last.
    fn stream(self, out: &mut [f32]) {
        self.store(out);
    }
    /// Makes what was streamed visible to other threads as usual.
    fn finish() {}
    /// The first sixteen of `v`.
    fn widen(v: &[bf16]) -> Self;
    /// To the first sixteen of `out`, ties to even.
    fn narrow(self, out: &mut [bf16]);
    /// Product.
    fn times(self, b: Self) -> Self;
    /// Sum.
    fn plus(self, b: Self) -> Self;
    /// The activation of each.
    fn evaluate<A: ActivationFn>(f: A, g: Self, u: Self) -> Evaluated<Self>;
}

/// One after the other.
#[derive(Clone, Copy)]
pub(super) struct Array([f32; BLOCK]);

impl Wide for Array {
    #[inline(always)]
    fn splat(v: f32) -> Self {
        Array([v; BLOCK])
    }
    #[inline(always)]
    fn load(v: &[f32]) -> Self {
        Array(std::array::from_fn(|i| v[..BLOCK][i]))
    }
    #[inline(always)]
    fn store(self, out: &mut [f32]) {
        out[..BLOCK].copy_from_slice(&self.0);
    }
    #[inline(always)]
    fn widen(v: &[bf16]) -> Self {
        Array(std::array::from_fn(|i| bf::to_f32(v[..BLOCK][i])))
    }
    #[inline(always)]
    fn narrow(self, out: &mut [bf16]) {
        for (out, v) in out[..BLOCK].iter_mut().zip(self.0) {
            *out = bf::from_f32(v);
        }
    }
    #[inline(always)]
    fn times(self, b: Self) -> Self {
        Array(std::array::from_fn(|i| self.0[i] * b.0[i]))
    }
    #[inline(always)]
    fn plus(self, b: Self) -> Self {
        Array(std::array::from_fn(|i| self.0[i] + b.0[i]))
    }
    #[inline(always)]
    fn evaluate<A: ActivationFn>(f: A, g: Self, u: Self) -> Evaluated<Self> {
        let (mut value, mut dg, mut du) = ([0.0; BLOCK], [0.0; BLOCK], [0.0; BLOCK]);
        for i in 0..BLOCK {
            let at = f.evaluate(g.0[i], u.0[i]);
            (value[i], dg[i], du[i]) = (at.value, at.dg, at.du);
        }
        Evaluated { value: Array(value), dg: Array(dg), du: Array(du) }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::Register;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{ActivationFn, BLOCK, Evaluated, Wide, bf16};
    use crate::numerics::math::{self, ROUND, Real, Single};
    use std::arch::x86_64::*;
    use std::ops::{Add, Div, Mul, Sub};

    /// Sixteen lanes of AVX-512: for code inside of functions that are compiled for it, and reached through a match on
    /// [`Kind`](crate::kernels::cpu::isa::Kind). That is what every `unsafe` below relies on.
    #[derive(Clone, Copy)]
    pub(in crate::kernels::cpu) struct Register(__m512);

    /// A bit pattern in every lane.
    #[inline(always)]
    fn bits(v: u32) -> __m512i {
        // SAFETY: see `Register`.
        unsafe { _mm512_set1_epi32(v as i32) }
    }

    const SIGN: u32 = 0x8000_0000;

    impl Register {
        #[inline(always)]
        fn to_bits(self) -> __m512i {
            // SAFETY: see `Register`.
            unsafe { _mm512_castps_si512(self.0) }
        }
        #[inline(always)]
        fn from_bits(v: __m512i) -> Self {
            // SAFETY: see `Register`.
            Register(unsafe { _mm512_castsi512_ps(v) })
        }
    }

    impl Add for Register {
        type Output = Self;
        #[inline(always)]
        fn add(self, b: Self) -> Self {
            // SAFETY: see `Register`.
            Register(unsafe { _mm512_add_ps(self.0, b.0) })
        }
    }
    impl Sub for Register {
        type Output = Self;
        #[inline(always)]
        fn sub(self, b: Self) -> Self {
            // SAFETY: see `Register`.
            Register(unsafe { _mm512_sub_ps(self.0, b.0) })
        }
    }
    impl Mul for Register {
        type Output = Self;
        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            // SAFETY: see `Register`.
            Register(unsafe { _mm512_mul_ps(self.0, b.0) })
        }
    }
    impl Div for Register {
        type Output = Self;
        #[inline(always)]
        fn div(self, b: Self) -> Self {
            // SAFETY: see `Register`.
            Register(unsafe { _mm512_div_ps(self.0, b.0) })
        }
    }

    impl Real for Register {
        #[inline(always)]
        fn from_f32(v: f32) -> Self {
            // SAFETY: see `Register`.
            Register(unsafe { _mm512_set1_ps(v) })
        }
        #[inline(always)]
        fn at_most(self, limit: Self) -> Self {
            // SAFETY: see `Register`. Of a NaN and a number the instruction returns its second operand.
            Register(unsafe { _mm512_min_ps(limit.0, self.0) })
        }
        #[inline(always)]
        fn at_least(self, limit: Self) -> Self {
            // SAFETY: see `Register`. Of a NaN and a number the instruction returns its second operand.
            Register(unsafe { _mm512_max_ps(limit.0, self.0) })
        }
        #[inline(always)]
        fn if_less(self, other: Self, then: Self, otherwise: Self) -> Self {
            // SAFETY: see `Register`.
            Register(unsafe {
                let less = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, other.0);
                _mm512_mask_mov_ps(otherwise.0, less, then.0)
            })
        }
        #[inline(always)]
        fn sigmoid(self) -> (Self, Self) {
            math::sigmoid(self)
        }
        #[inline(always)]
        fn tanh(self) -> (Self, Self) {
            math::tanh(self)
        }
    }

    impl Single for Register {
        #[inline(always)]
        fn magnitude(self) -> Self {
            // SAFETY: see `Register`.
            Self::from_bits(unsafe { _mm512_and_si512(self.to_bits(), bits(!SIGN)) })
        }
        #[inline(always)]
        fn with_sign_of(self, other: Self) -> Self {
            // SAFETY: see `Register`. Bits of the first operand choose between the others.
            Self::from_bits(unsafe {
                _mm512_ternarylogic_epi32::<0xCA>(bits(SIGN), other.to_bits(), self.to_bits())
            })
        }
        #[inline(always)]
        fn times_power(self, shifted: Self) -> Self {
            // SAFETY: see `Register`.
            unsafe {
                let n = _mm512_sub_epi32(shifted.to_bits(), bits(ROUND.to_bits()));
                let half = _mm512_srai_epi32::<1>(n);
                let one = bits(127);
                let first = _mm512_slli_epi32::<23>(_mm512_add_epi32(half, one));
                let rest = _mm512_slli_epi32::<23>(_mm512_add_epi32(_mm512_sub_epi32(n, half), one));
                (self * Self::from_bits(first)) * Self::from_bits(rest)
            }
        }
    }

    impl Wide for Register {
        #[inline(always)]
        fn splat(v: f32) -> Self {
            Self::from_f32(v)
        }
        #[inline(always)]
        fn load(v: &[f32]) -> Self {
            let v = &v[..BLOCK];
            // SAFETY: see `Register`; sixteen elements.
            Register(unsafe { _mm512_loadu_ps(v.as_ptr()) })
        }
        #[inline(always)]
        fn store(self, out: &mut [f32]) {
            let out = &mut out[..BLOCK];
            // SAFETY: see `Register`; sixteen elements.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), self.0) }
        }
        #[inline(always)]
        fn stream(self, out: &mut [f32]) {
            let out = &mut out[..BLOCK];
            match out.as_ptr().addr().is_multiple_of(64) {
                // SAFETY: see `Register`; sixteen elements, aligned. The caller calls `finish`.
                true => unsafe { _mm512_stream_ps(out.as_mut_ptr(), self.0) },
                false => self.store(out),
            }
        }
        #[inline(always)]
        fn finish() {
            // SAFETY: every x86-64 processor has the instruction.
            unsafe { _mm_sfence() }
        }
        #[inline(always)]
        fn widen(v: &[bf16]) -> Self {
            let v = &v[..BLOCK];
            // SAFETY: see `Register`; sixteen elements.
            Self::from_bits(unsafe {
                _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(v.as_ptr().cast())))
            })
        }
        #[inline(always)]
        fn narrow(self, out: &mut [bf16]) {
            let out = &mut out[..BLOCK];
            // SAFETY: see `Register`; sixteen elements.
            unsafe {
                let b = self.to_bits();
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(b), bits(1));
                let nearest = _mm512_add_epi32(_mm512_add_epi32(b, bits(0x7FFF)), odd);
                let quiet = _mm512_or_si512(b, bits(0x0040_0000));
                let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
                let rounded = _mm512_srli_epi32::<16>(_mm512_mask_mov_epi32(nearest, nan, quiet));
                _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(rounded));
            }
        }
        #[inline(always)]
        fn times(self, b: Self) -> Self {
            self * b
        }
        #[inline(always)]
        fn plus(self, b: Self) -> Self {
            self + b
        }
        #[inline(always)]
        fn evaluate<A: ActivationFn>(f: A, g: Self, u: Self) -> Evaluated<Self> {
            f.evaluate(g, u)
        }
    }
}
