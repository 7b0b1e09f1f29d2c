//! Paging keeps every byte, whatever the order in which forwards come and go.

use super::*;
use crate::kernels::Host;
use crate::kernels::reference::Reference;
use crate::mlp::tests::{bf16s, values};
use crate::mlp::*;
use crate::tensor::Groups;
use half::bf16;
use proptest::prelude::*;
use std::sync::Arc;

const EXPERTS: usize = 3;

struct Layer {
    mlp: GroupedMlp,
    weights: Arc<PreparedWeights<Host>>,
}

impl Layer {
    fn new(precision: Precision, recompute: bool) -> Self {
        let config = GroupedMlpConfig {
            precision,
            recompute_activation: recompute,
            ..GroupedMlpConfig::new(EXPERTS, 32, 16)
        };
        let mlp = GroupedMlp::new(config).unwrap();
        let (w1, w2) = (bf16s(1, EXPERTS * 32 * 32, 0.5), bf16s(2, EXPERTS * 32 * 16, 0.5));
        let weights = mlp.prepare_weights(
            &Reference,
            WeightSource::Packed(&w1[..]),
            WeightSource::Packed(&w2[..]),
            None,
        );
        Self { weights: Arc::new(weights.unwrap()), mlp }
    }

    /// A forward over these splits and five rows of nobody.
    fn forward(&self, splits: &[usize], seed: u64) -> Saved<Host> {
        let rows = splits.iter().sum::<usize>() + 5;
        let groups = Groups::new(splits, rows).unwrap();
        let (x, prob) = (bf16s(seed, rows * 32, 1.0), values(seed + 1, rows, 1.0));
        let args = ForwardArgs {
            x: &x[..],
            prob: &prob[..],
            groups: &groups,
            weights: &self.weights,
            needs: Needs::ALL,
            trace: None,
        };
        self.mlp.forward(&Reference, args).unwrap().saved
    }

    /// All gradients as bits.
    fn backward(&self, saved: &Saved<Host>) -> Vec<u32> {
        let rows = saved.groups.rows();
        let dy = bf16s(9, rows * 32, 1.0);
        let (mut dw1, mut dw2) = (vec![0f32; EXPERTS * 32 * 32], vec![0f32; EXPERTS * 32 * 16]);
        let dw = WeightGrads::<Host> {
            dw1: WeightGrad::packed_f32(&mut dw1[..], EXPERTS, GradMode::Overwrite),
            dw2: WeightGrad::packed_f32(&mut dw2[..], EXPERTS, GradMode::Overwrite),
        };
        let args = BackwardArgs { dy: &dy[..], random: RandomSeed::default(), dw: Some(dw), trace: None };
        let grads = self.mlp.backward(&Reference, saved, args).unwrap();
        let floats = dw1.iter().chain(&dw2).chain(&grads.dprob).map(|v| v.to_bits());
        floats.chain(grads.dx.unwrap().iter().map(|v| v.to_bits() as u32)).collect()
    }
}

#[test]
fn gradients_after_paging_have_the_same_bits() {
    for precision in [Precision::Nvfp4, Precision::Bf16] {
        for recompute in [false, true] {
            let layer = Layer::new(precision, recompute);
            for splits in [[5, 0, 18], [0, 0, 0], [0, 33, 0]] {
                for page_bytes in [1, 7, 64, 1 << 20] {
                    let plain = layer.backward(&layer.forward(&splits, 3));
                    let stash =
                        PagedStash::new(page_bytes, if page_bytes > 1000 { 1 } else { 20_000 }).unwrap();
                    let stored = stash.store(layer.forward(&splits, 3)).unwrap();
                    let stats = stash.stats();
                    assert_eq!(stats.pages.used, stored.bytes().div_ceil(page_bytes));
                    assert_eq!(stats.waste, stats.pages.used * page_bytes - stored.bytes());
                    let restored = stash.restore(stored).unwrap();
                    assert_eq!(stash.stats().pages.used, 0);
                    assert_eq!(
                        layer.backward(&restored),
                        plain,
                        "{precision} {recompute} {splits:?} {page_bytes}"
                    );
                    let (c, _) = restored.c.as_ref().unwrap();
                    let n1 = layer.mlp.config().fc1_rows();
                    let dead = &c[restored.groups.live_rows() * n1..];
                    assert!(
                        dead.len() == 5 * n1 && dead.iter().all(|v| v.to_bits() == 0),
                        "rows of nobody are zero"
                    );
                }
            }
        }
    }
}

#[test]
fn rows_of_no_expert_take_no_pages() {
    let layer = Layer::new(Precision::Nvfp4, true);
    let stash = PagedStash::new(64, 1000).unwrap();
    let saved = layer.forward(&[16, 0, 16], 3);
    let owned = saved.bytes();
    let dead = 5 * (32 * size_of::<bf16>() + size_of::<f32>()); // c and prob; columnwise x has no such rows
    assert_eq!(stash.store(saved).unwrap().bytes(), owned - dead);
}

#[test]
fn a_full_pool_loses_nothing() {
    let layer = Layer::new(Precision::Nvfp4, false);
    let expected = layer.backward(&layer.forward(&[9, 9, 9], 3));
    let stash = PagedStash::new(256, 20).unwrap();
    let first = stash.store(layer.forward(&[9, 9, 9], 3)).unwrap();
    let refused = stash.store(layer.forward(&[9, 9, 9], 3)).unwrap_err();
    let Refusal::Full(full) = refused.reason else { panic!("{}", refused.reason) };
    assert_eq!((full.total, full.page_bytes), (20, 256));
    assert!(refused.reason.to_string().contains("paged stash is full"));
    assert_eq!(layer.backward(&refused.saved), expected, "the operator goes on in place");
    assert_eq!(layer.backward(&stash.restore(first).unwrap()), expected, "what was stored is untouched");
    assert_eq!(stash.stats().pages.used, 0);
}

#[test]
fn impossible_pools_are_refused() {
    assert!(PagedStash::new(0, 4).unwrap_err().to_string().contains("page size: expected at least 1 byte"));
    assert!(PagedStash::new(usize::MAX, 4).unwrap_err().to_string().contains("pool: expected a size"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Layers and micro-batches in flight, released in any order, some dropped without a backward.
    #[test]
    fn any_order_of_release(
        steps in prop::collection::vec((0usize..3, 0usize..30, 0usize..30, 0usize..30, 0usize..8), 1..24),
        page_bytes in 1usize..600,
    ) {
        let layer = Layer::new(Precision::Nvfp4, true);
        let stash = PagedStash::new(page_bytes, (30_000 / page_bytes) as u32).unwrap();
        let mut flying: Vec<(PagedSaved, Vec<u32>)> = vec![];
        for (seed, (what, a, b, c, pick)) in steps.into_iter().enumerate() {
            if what == 0 || flying.is_empty() {
                let saved = layer.forward(&[a, b, c], seed as u64);
                let expected = layer.backward(&saved);
                match stash.store(saved) {
                    Ok(stored) => flying.push((stored, expected)),
                    Err(refused) => prop_assert_eq!(layer.backward(&refused.saved), expected),
                }
            } else {
                let (stored, expected) = flying.swap_remove(pick % flying.len());
                if what == 1 {
                    prop_assert_eq!(layer.backward(&stash.restore(stored).unwrap()), expected);
                }
            }
            let used: usize = flying.iter().map(|(s, _)| s.bytes().div_ceil(page_bytes)).sum();
            prop_assert_eq!(stash.stats().pages.used, used);
        }
    }
}
