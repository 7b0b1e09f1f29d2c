//! GPU architectures by compute capability, and their names for the compiler.
//!
//! From compute capability 9.0 on, the instructions that these kernels are for (FP4 conversions, block-scaled matrix
//! products) exist only in the architecture-specific target, whose name ends in `a` and whose code runs on exactly
//! that capability. So 10.3 gets code of its own: a cubin for sm_100a does not load there. The FP4 conversions do not
//! compile for sm_110 and sm_121, but for sm_110a and sm_121a.
#![forbid(unsafe_code)]

use std::fmt;

/// The oldest capability that kernels are compiled for: the first with BF16 arithmetic.
const OLDEST: u32 = 8;
/// The oldest capability whose target is architecture specific.
const SPECIFIC: u32 = 90;

/// A compute capability that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    major: u32,
    minor: u32,
}

/// A compute capability that is too old, or none at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "compute capability {major}.{minor}: expected 8.0 or above, with one digit after the point; use a GPU of the \
     Ampere generation or a later one"
)]
pub struct ArchError {
    /// Major capability that was given.
    pub major: u32,
    /// Minor capability that was given.
    pub minor: u32,
}

impl Arch {
    /// The architectures that every kernel is checked on: Hopper, Blackwell, Blackwell Ultra, Blackwell RTX, and those
    /// before them, Ampere and Ada.
    pub const CHECKED: [Self; 6] = [
        Self { major: 9, minor: 0 },
        Self { major: 10, minor: 0 },
        Self { major: 10, minor: 3 },
        Self { major: 12, minor: 0 },
        Self { major: 8, minor: 0 },
        Self { major: 8, minor: 9 },
    ];

    /// The architecture of a GPU, from its compute capability.
    ///
    /// # Errors
    ///
    /// [`ArchError`] below 8.0, or if `minor` has two digits.
    pub fn new(major: u32, minor: u32) -> Result<Self, ArchError> {
        // Bounded so that `number` neither overflows nor gives two capabilities one name.
        if !(OLDEST..1000).contains(&major) || minor > 9 {
            return Err(ArchError { major, minor });
        }
        Ok(Self { major, minor })
    }

    /// The capability as one number: 103 for 10.3.
    pub fn number(self) -> u32 {
        self.major * 10 + self.minor
    }

    /// Whether its matrix unit takes operands from shared memory and knows no FP4 (Hopper): BF16 values that lie in memory
    /// go there by a copy engine, packed codes through registers.
    pub fn has_wgmma(self) -> bool {
        self.number() == 90
    }
}

impl fmt::Display for Arch {
    /// As the compiler names it: `sm_80`, `sm_90a`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = if self.number() >= SPECIFIC { "a" } else { "" };
        write!(f, "sm_{}{suffix}", self.number())
    }
}

#[cfg(test)]
mod tests {
    use super::Arch;

    #[test]
    fn names_are_those_of_the_compiler() {
        let name = |major, minor| Arch::new(major, minor).unwrap().to_string();
        assert_eq!(name(8, 0), "sm_80");
        assert_eq!(name(8, 9), "sm_89");
        assert_eq!(name(9, 0), "sm_90a");
        assert_eq!(name(10, 0), "sm_100a");
        assert_eq!(name(10, 3), "sm_103a");
        assert_eq!(name(11, 0), "sm_110a");
        assert_eq!(name(12, 0), "sm_120a");
        assert_eq!(name(12, 1), "sm_121a");
    }

    #[test]
    fn every_checked_architecture_has_one_name() {
        assert_eq!(
            Arch::CHECKED.map(|arch| arch.to_string()),
            ["sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_80", "sm_89"]
        );
    }

    #[test]
    fn old_and_impossible_capabilities_are_refused() {
        for (major, minor) in [(7, 5), (0, 0), (8, 10), (u32::MAX, 0), (9, u32::MAX)] {
            let message = Arch::new(major, minor).unwrap_err().to_string();
            assert!(message.contains(&format!("{major}.{minor}: expected 8.0")), "{message}");
        }
    }
}
