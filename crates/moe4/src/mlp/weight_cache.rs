//! Quantized weights kept over micro-batches, with a version so that old ones are never used by mistake.

use super::weights::PreparedWeights;
use crate::kernels::Memory;
use std::sync::Arc;

/// Holds the weights prepared last, under the version of the master weights that they were made from.
///
/// The version is any number that the caller changes with the master weights; the count of optimizer steps does.
#[derive(Debug)]
pub struct WeightCache<M: Memory> {
    held: Option<(u64, Arc<PreparedWeights<M>>)>,
}

/// The cache holds weights of another version than asked for, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StaleWeights {
    /// Made from other master weights.
    #[error(
        "weight cache: expected weights of version {wanted}, got version {held}; prepare them again after the optimizer step"
    )]
    Version {
        /// The version asked for.
        wanted: u64,
        /// The version held.
        held: u64,
    },
    /// Nothing was prepared yet.
    #[error("weight cache: expected weights of version {wanted}, got none; prepare them first")]
    Empty {
        /// The version asked for.
        wanted: u64,
    },
}

impl<M: Memory> Default for WeightCache<M> {
    fn default() -> Self {
        Self { held: None }
    }
}

impl<M: Memory> WeightCache<M> {
    /// The weights of `version`, or an error: never others.
    pub fn get(&self, version: u64) -> Result<Arc<PreparedWeights<M>>, StaleWeights> {
        match &self.held {
            Some((held, weights)) if *held == version => Ok(Arc::clone(weights)),
            Some((held, _)) => Err(StaleWeights::Version { wanted: version, held: *held }),
            None => Err(StaleWeights::Empty { wanted: version }),
        }
    }

    /// The weights of `version`, prepared now unless they are held. If that fails the cache is empty.
    pub fn get_or_prepare<E>(
        &mut self,
        version: u64,
        prepare: impl FnOnce() -> Result<PreparedWeights<M>, E>,
    ) -> Result<Arc<PreparedWeights<M>>, E> {
        if let Ok(weights) = self.get(version) {
            return Ok(weights);
        }
        self.held = None; // free the old ones before there are new ones
        let weights = Arc::new(prepare()?);
        self.held = Some((version, Arc::clone(&weights)));
        Ok(weights)
    }

    /// Forgets what is held.
    pub fn clear(&mut self) {
        self.held = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::reference::Reference;
    use crate::kernels::{Host, Ledger, PassName};
    use crate::mlp::{GroupedMlp, GroupedMlpConfig, WeightSource};
    use half::bf16;

    #[test]
    fn quantizes_once_a_version_and_refuses_others() {
        let mlp = GroupedMlp::new(GroupedMlpConfig::new(2, 16, 16)).unwrap();
        let backend = Ledger::new(&Reference);
        let mut w1 = vec![bf16::ONE; 2 * 32 * 16];
        let w2 = vec![bf16::ONE; 2 * 16 * 16];
        let prepare = |w1: &[bf16]| {
            mlp.prepare_weights(&backend, WeightSource::Packed(w1), WeightSource::Packed(&w2[..]), None)
        };
        let mut cache = WeightCache::<Host>::default();
        assert_eq!(cache.get(0).unwrap_err(), StaleWeights::Empty { wanted: 0 });
        let first = cache.get_or_prepare(0, || prepare(&w1)).unwrap();
        for _micro_batch in 0..3 {
            assert!(Arc::ptr_eq(&first, &cache.get_or_prepare(0, || prepare(&w1)).unwrap()));
        }
        assert_eq!(backend.take_names(), [PassName::QuantizeWeights; 2]);

        w1.fill(bf16::from_f32(2.0)); // an optimizer step
        assert_eq!(cache.get(1).unwrap_err(), StaleWeights::Version { wanted: 1, held: 0 });
        let second = cache.get_or_prepare(1, || prepare(&w1)).unwrap();
        assert_eq!(second.nvfp4().unwrap()[0].amax, [2.0, 2.0]);
        assert_eq!(first.nvfp4().unwrap()[0].amax, [1.0, 1.0], "a forward in flight keeps its weights");

        assert!(cache.get_or_prepare(2, || prepare(&w1[1..])).is_err());
        assert_eq!(cache.get(1).unwrap_err(), StaleWeights::Empty { wanted: 1 });
    }
}
