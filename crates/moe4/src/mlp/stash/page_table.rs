//! Which pages of a pool are free.

use crate::kernels::pages::PageId;

/// A fixed set of pages, each free or owned by exactly one allocation.
#[derive(Debug)]
pub struct PageTable {
    free: Vec<PageId>,
    total: usize,
    peak: usize,
}

/// Occupancy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageTableStats {
    /// Pages in all.
    pub total: usize,
    /// Pages owned now.
    pub used: usize,
    /// The most pages owned at a time.
    pub peak: usize,
}

impl PageTable {
    /// `total` free pages.
    pub fn new(total: PageId) -> Self {
        Self { free: (0..total).rev().collect(), total: total as usize, peak: 0 }
    }

    /// `count` pages, or nothing at all if fewer are free.
    pub fn allocate(&mut self, count: usize) -> Option<Vec<PageId>> {
        let rest = self.free.len().checked_sub(count)?;
        let pages = self.free.split_off(rest);
        self.peak = self.peak.max(self.total - rest);
        Some(pages)
    }

    /// Takes pages back.
    pub fn release(&mut self, pages: Vec<PageId>) {
        self.free.extend(pages);
        debug_assert!(self.free.len() <= self.total, "a page was released twice");
    }

    /// Free pages.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Occupancy.
    pub fn stats(&self) -> PageTableStats {
        PageTableStats { total: self.total, used: self.total - self.free.len(), peak: self.peak }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        /// Random lifetimes against a model that keeps sets of pages.
        #[test]
        fn behaves_like_disjoint_sets(total in 0u32..40, steps in prop::collection::vec((any::<bool>(), 0usize..12), 0..200)) {
            let mut table = PageTable::new(total);
            let mut owned: Vec<Vec<PageId>> = vec![];
            let mut peak = 0;
            for (allocate, n) in steps {
                let used: usize = owned.iter().map(Vec::len).sum();
                if allocate {
                    match table.allocate(n) {
                        Some(pages) => {
                            prop_assert!(used + n <= total as usize);
                            prop_assert_eq!(pages.len(), n);
                            owned.push(pages);
                        }
                        None => prop_assert!(used + n > total as usize),
                    }
                } else if !owned.is_empty() {
                    table.release(owned.swap_remove(n % owned.len()));
                }
                let all: Vec<PageId> = owned.iter().flatten().copied().collect();
                let distinct: HashSet<PageId> = all.iter().copied().collect();
                prop_assert_eq!(distinct.len(), all.len(), "no page has two owners");
                prop_assert!(all.iter().all(|&p| p < total));
                peak = peak.max(all.len());
                prop_assert_eq!(table.stats(), PageTableStats { total: total as usize, used: all.len(), peak });
            }
        }
    }
}
