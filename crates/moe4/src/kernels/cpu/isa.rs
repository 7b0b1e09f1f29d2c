//! Which vector instructions run.
//!
//! A value of [`Isa`] is proof that the machine has the instructions it names: it is made by detection only. That
//! is what makes the `unsafe` calls in [`multiversion`] sound.

use std::fmt;

/// A set of vector instructions that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// AVX-512 everywhere but in products.
    #[cfg(target_arch = "x86_64")]
    Amx,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// What the compiler's target guarantees: SSE2 on x86-64, NEON on aarch64.
    Portable,
}

/// What this machine has beyond the compiler's target, the best first.
#[cfg(target_arch = "x86_64")]
fn extensions() -> Vec<Kind> {
    let mut found = vec![];
    let fma = is_x86_feature_detected!("fma");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    if fma && avx512 {
        if super::amx::available() {
            found.push(Kind::Amx);
        }
        found.push(Kind::Avx512);
    }
    if fma && is_x86_feature_detected!("avx2") {
        found.push(Kind::Avx2);
    }
    found
}

#[cfg(not(target_arch = "x86_64"))]
fn extensions() -> Vec<Kind> {
    vec![]
}

impl Isa {
    /// Everything that this machine can run, the best first.
    pub fn available() -> Vec<Self> {
        extensions().into_iter().chain([Kind::Portable]).map(Isa).collect()
    }

    /// The best of this machine, detected once.
    pub fn best() -> Self {
        static BEST: std::sync::OnceLock<Isa> = std::sync::OnceLock::new();
        *BEST.get_or_init(|| Isa::available()[0])
    }

    pub(super) fn kind(self) -> Kind {
        self.0
    }

    /// Whether products run on matrix tiles, whose sums have another order than those of vectors.
    pub fn has_tiles(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx => true,
            _ => false,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx => "AVX-512 and AMX",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "AVX-512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "AVX2",
            Kind::Portable => "portable",
        })
    }
}

/// Compiles one function for each instruction set and picks at run time by a leading `isa` argument.
///
/// The body, and everything it calls that should vectorize, must be inlined: mark helpers `#[inline(always)]`. A first
/// generic parameter `W: Wide` stands for the vector of the instruction set.
macro_rules! multiversion {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident <W: Wide $(, $generic:ident : $bound:path)*> ($($arg:ident : $ty:ty),+ $(,)?) $body:block
    ) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments, reason = "one more than the body has")]
        $vis fn $name <$($generic: $bound),*> (isa: $crate::kernels::cpu::isa::Isa, $($arg: $ty),+) {
            #[inline(always)]
            fn body <W: $crate::kernels::cpu::wide::Wide, $($generic: $bound),*> ($($arg: $ty),+) $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512 <$($generic: $bound),*> ($($arg: $ty),+) {
                body::<$crate::kernels::cpu::wide::Register, $($generic),*>($($arg),+)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2 <$($generic: $bound),*> ($($arg: $ty),+) {
                body::<$crate::kernels::cpu::wide::Array, $($generic),*>($($arg),+)
            }
            match isa.kind() {
                // SAFETY: this kind exists only where detection found the features.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::cpu::isa::Kind::Amx | $crate::kernels::cpu::isa::Kind::Avx512 => unsafe { avx512($($arg),+) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::cpu::isa::Kind::Avx2 => unsafe { avx2($($arg),+) },
                $crate::kernels::cpu::isa::Kind::Portable => {
                    body::<$crate::kernels::cpu::wide::Array, $($generic),*>($($arg),+)
                }
            }
        }
    };
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident $(<$($generic:ident : $bound:path),+>)? ($($arg:ident : $ty:ty),+ $(,)?) $(-> $ret:ty)? $body:block
    ) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments, reason = "one more than the body has")]
        $vis fn $name $(<$($generic: $bound),+>)? (isa: $crate::kernels::cpu::isa::Isa, $($arg: $ty),+) $(-> $ret)? {
            #[inline(always)]
            fn body $(<$($generic: $bound),+>)? ($($arg: $ty),+) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512 $(<$($generic: $bound),+>)? ($($arg: $ty),+) $(-> $ret)? { body($($arg),+) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2 $(<$($generic: $bound),+>)? ($($arg: $ty),+) $(-> $ret)? { body($($arg),+) }
            match isa.kind() {
                // SAFETY: this kind exists only where detection found the features.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::cpu::isa::Kind::Amx | $crate::kernels::cpu::isa::Kind::Avx512 => unsafe { avx512($($arg),+) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::cpu::isa::Kind::Avx2 => unsafe { avx2($($arg),+) },
                $crate::kernels::cpu::isa::Kind::Portable => body($($arg),+),
            }
        }
    };
}
pub(super) use multiversion;
