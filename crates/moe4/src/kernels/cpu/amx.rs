//! Tiles of a product on AMX: BF16 pairs in, FP32 sums out, four 16 x 16 blocks of accumulators at a time.
//!
//! ```text
//! A tile   16 rows, 32 contraction indices each             one line a row
//! B tile   16 pairs of indices, 16 columns each             one line a pair: the transpose of an A tile, pair by pair
//! C tile  += for each pair: even products to one sum, odd products to another; then both to C
//! ```
//!
//! Tiles lie one after the other and on lines of the cache: a row across two lines halves the rate (`docs/attempts.md`).
//! The unit rounds every sum to nearest even, reads subnormal operands as 0, and turns subnormal sums into 0. Rust's
//! intrinsics for it are unstable, so the few instructions are written out.

use super::isa::Isa;
use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

/// Rows of a tile, and columns of accumulators.
pub(super) const LANES: usize = 16;
/// Contraction indices of a tile.
pub(super) const DEPTH: usize = 32;
/// Two values each.
pub(super) const PAIRS: usize = LANES * DEPTH / 2;

/// A tile of BF16 pairs, the lower index in the lower half.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Tile(pub(super) [u32; PAIRS]);

/// Whether the processor has the unit and the system lets this process use it; asks once.
pub(super) fn available() -> bool {
    static AVAILABLE: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *AVAILABLE.get_or_init(|| has_instructions() && has_state() && permitted())
}

fn has_instructions() -> bool {
    const BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & BF16_AND_TILE == BF16_AND_TILE
}

/// The system saves tile configuration and tile data.
fn has_state() -> bool {
    const TILE_STATE: u64 = 0b11 << 17;
    // SAFETY: detection found the instruction, and bit 27 of leaf 1 says that the system has enabled it.
    std::is_x86_feature_detected!("xsave")
        && __cpuid(1).ecx >> 27 & 1 == 1
        && unsafe { _xgetbv(0) } & TILE_STATE == TILE_STATE
}

/// Linux gives a process the 8 KiB of tile data on request only.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_TILE_DATA: libc::c_long = 18;
    // SAFETY: the call reads its two arguments and changes nothing but the process's permission.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// Proof that this thread's tiles are configured; they are given back when it is dropped.
pub(super) struct Configured(std::marker::PhantomData<*const ()>);

impl Configured {
    /// All eight tiles at their full size, if `isa` has them.
    pub(super) fn new(isa: Isa) -> Option<Self> {
        #[repr(C, align(64))]
        struct Config([u8; 64]);
        if !isa.has_tiles() {
            return None;
        }
        let mut config = Config([0; 64]);
        config.0[0] = 1; // palette
        for tile in 0..8 {
            config.0[16 + 2 * tile] = 64; // bytes of a row, as a u16
            config.0[48 + tile] = LANES as u8;
        }
        // SAFETY: `isa` says that the unit is there and permitted; the configuration is 64 readable bytes of palette 1.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly, preserves_flags));
        }
        Some(Self(std::marker::PhantomData))
    }

    /// `acc [16 or 32 rows, ld] (+)= A · B` of 32 columns: `a` one or two tiles for each 32 indices, `b` two.
    pub(super) fn multiply(&self, a: &[Tile], b: &[Tile], acc: &mut [f32], ld: usize, first: bool) {
        let steps = b.len() / 2;
        let tall = a.len() == 2 * steps;
        let rows = if tall { 2 * LANES } else { LANES };
        assert!(steps > 0 && a.len() * 2 * LANES == rows * b.len(), "{} and {} tiles", a.len(), b.len());
        assert!(ld >= 2 * LANES && acc.len() >= (rows - 1) * ld + 2 * LANES, "{rows} rows, {ld} apart");
        // SAFETY: the tiles are configured for as long as `self` is there. Loads read `steps` steps of `a` and `b`, and
        // loads and stores of accumulators touch 32 columns of `rows` rows, which the assertions cover.
        unsafe {
            match tall {
                true => self.multiply_32(a, b, steps, acc, ld, first),
                false => self.multiply_16(a, b, steps, acc, ld, first),
            }
        }
    }

    unsafe fn multiply_32(
        &self,
        a: &[Tile],
        b: &[Tile],
        steps: usize,
        acc: &mut [f32],
        ld: usize,
        first: bool,
    ) {
        let stride = ld * size_of::<f32>();
        let (high, low) = (acc.as_mut_ptr(), acc.as_mut_ptr().wrapping_add(LANES * ld));
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "test {first:l}, {first:l}",
                "jnz 3f",
                "tileloadd tmm0, [{high} + 1*{stride}]",
                "tileloadd tmm1, [{high} + 1*{stride} + 64]",
                "tileloadd tmm2, [{low} + 1*{stride}]",
                "tileloadd tmm3, [{low} + 1*{stride} + 64]",
                "jmp 2f",
                "3:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{a} + 1*{line}]",
                "tileloadd tmm6, [{b} + 1*{line}]",
                "tileloadd tmm7, [{b} + 1*{line} + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{a} + 1*{line} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 2048",
                "add {b}, 2048",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{high} + 1*{stride}], tmm0",
                "tilestored [{high} + 1*{stride} + 64], tmm1",
                "tilestored [{low} + 1*{stride}], tmm2",
                "tilestored [{low} + 1*{stride} + 64], tmm3",
                first = in(reg) first as u64,
                a = inout(reg) a.as_ptr() => _,
                b = inout(reg) b.as_ptr() => _,
                steps = inout(reg) steps => _,
                high = in(reg) high,
                low = in(reg) low,
                stride = in(reg) stride,
                line = in(reg) 64usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    unsafe fn multiply_16(
        &self,
        a: &[Tile],
        b: &[Tile],
        steps: usize,
        acc: &mut [f32],
        ld: usize,
        first: bool,
    ) {
        let stride = ld * size_of::<f32>();
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "test {first:l}, {first:l}",
                "jnz 3f",
                "tileloadd tmm0, [{acc} + 1*{stride}]",
                "tileloadd tmm1, [{acc} + 1*{stride} + 64]",
                "jmp 2f",
                "3:",
                "tilezero tmm0",
                "tilezero tmm1",
                "2:",
                "tileloadd tmm4, [{a} + 1*{line}]",
                "tileloadd tmm6, [{b} + 1*{line}]",
                "tileloadd tmm7, [{b} + 1*{line} + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "add {a}, 1024",
                "add {b}, 2048",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{acc} + 1*{stride}], tmm0",
                "tilestored [{acc} + 1*{stride} + 64], tmm1",
                first = in(reg) first as u64,
                a = inout(reg) a.as_ptr() => _,
                b = inout(reg) b.as_ptr() => _,
                steps = inout(reg) steps => _,
                acc = in(reg) acc.as_mut_ptr(),
                stride = in(reg) stride,
                line = in(reg) 64usize,
                out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        // SAFETY: the unit is there, since the tiles were configured; nothing uses them any more.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
    }
}
