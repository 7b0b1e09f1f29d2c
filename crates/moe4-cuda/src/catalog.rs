//! Every variant that the backend launches: what is compiled at run time, and what `cargo xtask kernels` checks.
#![forbid(unsafe_code)]

use crate::variant::Variant;

/// A variant, and what is asked of its compiled code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogEntry {
    /// The kernel with its choices.
    pub variant: Variant,
    /// Whether the check fails if registers are spilled to memory, on any architecture.
    pub no_spills: bool,
}

/// All variants, each once.
pub fn catalog() -> Vec<CatalogEntry> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::catalog;
    use crate::sources::SOURCES;

    #[test]
    fn variants_differ_and_have_a_source() {
        let entries = catalog();
        let distinct: BTreeSet<_> = entries.iter().map(|entry| &entry.variant).collect();
        assert_eq!(distinct.len(), entries.len());
        let kernels: BTreeSet<_> = entries.iter().map(|entry| entry.variant.kernel).collect();
        let sources: BTreeSet<_> = SOURCES.iter().map(|(name, _)| *name).collect();
        assert_eq!(kernels, sources, "kernels of the catalog and sources");
    }
}
