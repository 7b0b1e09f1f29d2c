//! From router logits to tokens in expert order, and back.
//!
//! ```text
//! logits [T,E] ──softmax, top-k──> Routing ──sort by expert──> Permutation
//! x [T,H] ──permute──> [S,H] ──(all-to-all)──> experts ──(all-to-all)──> [S,H] ──unpermute──> [T,H]
//! ```
//!
//! `S = T · top_k` slots. They are sorted by expert, then by token, so the slots of a range of experts are
//! contiguous: with expert parallelism each rank sends one run of rows to every other rank, and [`regroup`] sorts
//! what it received. The probability multiplies inside the experts (see [`crate::mlp`]), so `unpermute` is a plain
//! sum over a token's choices; every step has its gradient beside it.
#![forbid(unsafe_code)]

use crate::kernels::contract::{Permute, Unpermute};
use crate::kernels::{Backend, Buffer, Error, Memory, Misuse, View};
use crate::numerics::math::exp;
use half::bf16;

/// How tokens choose experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterConfig {
    /// Experts `E`.
    pub experts: usize,
    /// Choices of each token.
    pub top_k: usize,
    /// Whether a token's probabilities are scaled to sum to 1 over its choices.
    pub normalize: bool,
}

/// The choices of every token.
#[derive(Clone, Debug, PartialEq)]
pub struct Routing {
    config: RouterConfig,
    /// `[T, top_k]`, best first.
    pub experts: Vec<u32>,
    /// `[T, top_k]`, the probability of each choice.
    pub prob: Vec<f32>,
    /// `[T, E]`, the softmax of the logits.
    pub softmax: Vec<f32>,
}

impl Routing {
    /// Softmax over `logits [T, E]`, then the `top_k` largest; among equals the expert of the lower index.
    ///
    /// Errors: `top_k` outside `1..=E`, a length that is no multiple of `E`, a logit that is not finite.
    pub fn new(logits: &[f32], config: RouterConfig) -> Result<Self, Misuse> {
        let RouterConfig { experts, top_k, normalize } = config;
        if top_k == 0 || top_k > experts {
            let got = format!("{top_k} with {experts} experts");
            return Err(Misuse::Value { what: "top_k".into(), expected: "1 to the number of experts", got });
        }
        if !logits.len().is_multiple_of(experts) {
            let fix = "pass logits of shape [tokens, experts]";
            return Err(Misuse::Multiple {
                what: "length of logits",
                multiple: experts,
                got: logits.len(),
                fix,
            });
        }
        if let Some(at) = logits.iter().position(|v| !v.is_finite()) {
            return Err(Misuse::Value {
                what: format!("logit of token {}, expert {}", at / experts, at % experts),
                expected: "a finite number",
                got: logits[at].to_string(),
            });
        }
        let tokens = logits.len() / experts;
        let mut routing = Self {
            config,
            experts: vec![],
            prob: Vec::with_capacity(tokens * top_k),
            softmax: logits.to_vec(),
        };
        let mut order: Vec<u32> = Vec::with_capacity(experts);
        for p in routing.softmax.chunks_exact_mut(experts) {
            softmax(p);
            order.clear();
            order.extend(0..experts as u32);
            order.sort_by(|&a, &b| p[b as usize].total_cmp(&p[a as usize])); // stable: ties keep their order
            let chosen = &order[..top_k];
            let sum: f32 = chosen.iter().map(|&e| p[e as usize]).sum();
            let scale = if normalize { 1.0 / sum } else { 1.0 };
            routing.prob.extend(chosen.iter().map(|&e| p[e as usize] * scale));
            routing.experts.extend(chosen);
        }
        Ok(routing)
    }

    /// Tokens `T`.
    pub fn tokens(&self) -> usize {
        self.softmax.len() / self.config.experts
    }

    /// Gradient of the logits `[T, E]` from that of the choices' probabilities `[T, top_k]`, plus `aux_scale` times
    /// the gradient of [`Routing::load_balance_loss`].
    pub fn backward(&self, dprob: &[f32], aux_scale: f32) -> Result<Vec<f32>, Misuse> {
        let RouterConfig { experts, top_k, normalize } = self.config;
        crate::kernels::expect_len("routing backward", "dprob", &[self.tokens(), top_k], dprob.len())?;
        let fractions = self.fractions();
        let aux = aux_scale * experts as f32 / self.tokens().max(1) as f32;
        let mut dlogits = vec![0.0; self.softmax.len()];
        let rows = self.softmax.chunks_exact(experts).zip(dlogits.chunks_exact_mut(experts));
        let choices = self.experts.chunks_exact(top_k).zip(dprob.chunks_exact(top_k));
        for ((p, d), (chosen, dprob)) in rows.zip(choices) {
            for (d, f) in d.iter_mut().zip(&fractions) {
                *d = aux * f;
            }
            // Normalized: q_j = p_j / s, so dp_j = (dq_j - Σ_i q_i dq_i) / s over the choices.
            let (scale, mean) = if normalize {
                let sum: f32 = chosen.iter().map(|&e| p[e as usize]).sum();
                let dot: f32 = chosen.iter().zip(dprob).map(|(&e, d)| p[e as usize] * d).sum();
                (1.0 / sum, dot / sum)
            } else {
                (1.0, 0.0)
            };
            for (&e, dq) in chosen.iter().zip(dprob) {
                d[e as usize] += (dq - mean) * scale;
            }
            let dot: f32 = d.iter().zip(p).map(|(d, p)| d * p).sum();
            for (d, p) in d.iter_mut().zip(p) {
                *d = p * (*d - dot);
            }
        }
        Ok(dlogits)
    }

    /// `E · Σ_e f_e · P_e`: `f_e` the share of choices that fell on expert `e`, `P_e` its mean probability; 1 when
    /// balanced. Fedus, Zoph, Shazeer, "Switch Transformers", 2021, equation 4. `f` is taken as a constant.
    pub fn load_balance_loss(&self) -> f32 {
        let experts = self.config.experts;
        let mut mean = vec![0.0; experts];
        for p in self.softmax.chunks_exact(experts) {
            mean.iter_mut().zip(p).for_each(|(m, p)| *m += p);
        }
        let dot: f32 = self.fractions().iter().zip(&mean).map(|(f, m)| f * m).sum();
        experts as f32 * dot / self.tokens().max(1) as f32
    }

    fn fractions(&self) -> Vec<f32> {
        let mut counts = vec![0usize; self.config.experts];
        for &e in &self.experts {
            counts[e as usize] += 1;
        }
        counts.into_iter().map(|n| n as f32 / self.experts.len().max(1) as f32).collect()
    }

    /// Slots sorted by expert, then by token.
    pub fn permutation(&self) -> Result<Permutation, Misuse> {
        Permutation::new(&self.experts, self.config.experts, self.config.top_k)
    }
}

fn softmax(p: &mut [f32]) {
    let max = p.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for v in p.iter_mut() {
        *v = exp(*v - max);
        sum += *v;
    }
    p.iter_mut().for_each(|v| *v /= sum);
}

/// Tokens in expert order: which token each slot holds, and where each choice went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permutation {
    top_k: usize,
    /// Slots of each expert, `[E]`.
    pub splits: Vec<usize>,
    /// `[S]`: the token in each slot.
    pub token: Vec<u32>,
    /// `[T, top_k]`: the slot of each choice.
    pub slot: Vec<u32>,
}

impl Permutation {
    /// Sorts choices `[T, top_k]` by expert; the order of tokens is kept within an expert.
    ///
    /// Errors: an expert out of range, more slots than 32-bit indices can name.
    pub fn new(chosen: &[u32], experts: usize, top_k: usize) -> Result<Self, Misuse> {
        if top_k == 0 || !chosen.len().is_multiple_of(top_k) {
            let fix = "pass choices of shape [tokens, top_k]";
            return Err(Misuse::Multiple {
                what: "number of choices",
                multiple: top_k,
                got: chosen.len(),
                fix,
            });
        }
        if chosen.len() >= u32::MAX as usize {
            let got = chosen.len().to_string();
            return Err(Misuse::Value {
                what: "tokens · top_k".into(), expected: "less than 2^32 - 1", got
            });
        }
        let mut splits = vec![0usize; experts];
        for (at, &e) in chosen.iter().enumerate() {
            let Some(count) = splits.get_mut(e as usize) else {
                let what = format!("expert of token {}, choice {}", at / top_k, at % top_k);
                return Err(Misuse::Value {
                    what,
                    expected: "an index below the number of experts",
                    got: e.to_string(),
                });
            };
            *count += 1;
        }
        let mut next: Vec<usize> = splits
            .iter()
            .scan(0, |total, &n| {
                *total += n;
                Some(*total - n)
            })
            .collect();
        let (mut token, mut slot) = (vec![0; chosen.len()], vec![0; chosen.len()]);
        for (choice, &e) in chosen.iter().enumerate() {
            let at = next[e as usize];
            next[e as usize] += 1;
            token[at] = (choice / top_k) as u32;
            slot[choice] = at as u32;
        }
        Ok(Self { top_k, splits, token, slot })
    }

    /// Rows of `x [T, cols]` in slot order, `[S, cols]`; also the gradient of [`Permutation::unpermute`].
    pub fn permute<B: Backend>(
        &self,
        backend: &B,
        x: View<'_, B::Memory, bf16>,
        cols: usize,
    ) -> Result<Buffer<B::Memory, bf16>, Error> {
        let source = backend.upload(&self.token)?;
        let mut out = backend.empty(self.token.len() * cols)?;
        let (x, source, out_view) =
            (B::Memory::shorten(x), B::Memory::view(&source), B::Memory::view_mut(&mut out));
        backend.permute(Permute { x, cols, source, out: out_view })?;
        Ok(out)
    }

    /// Sums of each token's slots of `y [S, cols]`, `[T, cols]`; also the gradient of [`Permutation::permute`].
    pub fn unpermute<B: Backend>(
        &self,
        backend: &B,
        y: View<'_, B::Memory, bf16>,
        cols: usize,
    ) -> Result<Buffer<B::Memory, bf16>, Error> {
        let slot = backend.upload(&self.slot)?;
        let mut out = backend.empty(self.slot.len() / self.top_k * cols)?;
        let (y, slot, out_view) =
            (B::Memory::shorten(y), B::Memory::view(&slot), B::Memory::view_mut(&mut out));
        backend.unpermute(Unpermute { y, cols, slot, top_k: self.top_k, weights: None, out: out_view })?;
        Ok(out)
    }

    /// A value of each choice `[T, top_k]` in slot order, `[S]`: the probabilities that the experts multiply by.
    pub fn permute_choices(&self, values: &[f32]) -> Result<Vec<f32>, Misuse> {
        crate::kernels::expect_len("permute_choices", "values", &[self.slot.len()], values.len())?;
        let mut out = vec![0.0; values.len()];
        self.slot.iter().zip(values).for_each(|(&slot, &v)| out[slot as usize] = v);
        Ok(out)
    }

    /// The inverse and the gradient of [`Permutation::permute_choices`].
    pub fn unpermute_choices(&self, values: &[f32]) -> Result<Vec<f32>, Misuse> {
        crate::kernels::expect_len("unpermute_choices", "values", &[self.slot.len()], values.len())?;
        Ok(self.slot.iter().map(|&slot| values[slot as usize]).collect())
    }
}

/// Rows received from several ranks, each run sorted by the same local experts, in expert order.
///
/// `splits[rank][expert]` rows came from `rank` for `expert`, rank after rank. Returns the source row of each sorted
/// row, and the rows of each expert. Feed the sources to a [`Permute`] pass; their inverse takes results back.
pub fn regroup(splits: &[Vec<usize>]) -> (Vec<u32>, Vec<usize>) {
    let experts = splits.first().map_or(0, Vec::len);
    let mut starts = vec![];
    let mut total = 0;
    for rank in splits {
        for &n in rank {
            starts.push(total);
            total += n;
        }
    }
    let mut source = Vec::with_capacity(total);
    for e in 0..experts {
        for (rank, counts) in splits.iter().enumerate() {
            let start = starts[rank * experts + e];
            source.extend((start..start + counts[e]).map(|row| row as u32));
        }
    }
    (source, (0..experts).map(|e| splits.iter().map(|rank| rank[e]).sum()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::reference::Reference;
    use proptest::prelude::*;

    fn config(experts: usize, top_k: usize, normalize: bool) -> RouterConfig {
        RouterConfig { experts, top_k, normalize }
    }

    #[test]
    fn ties_go_to_the_lower_index() {
        let r = Routing::new(&[1.0, 3.0, 3.0, 1.0], config(4, 3, true)).unwrap();
        assert_eq!(r.experts, [1, 2, 0]);
        assert!((r.prob.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn a_balanced_router_has_loss_one() {
        let logits = [9.0, 0.0, 0.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0, 9.0];
        let loss = Routing::new(&logits, config(4, 1, false)).unwrap().load_balance_loss();
        assert!((loss - 1.0).abs() < 1e-5, "{loss}");
    }

    #[test]
    fn bad_input_is_named() {
        let message = |logits: &[f32], c| Routing::new(logits, c).unwrap_err().to_string();
        assert!(
            message(&[0.0; 8], config(4, 5, false)).contains("top_k: expected 1 to the number of experts")
        );
        assert!(message(&[0.0; 8], config(4, 0, false)).contains("top_k"));
        assert!(message(&[0.0; 7], config(4, 2, false)).contains("multiple of 4, got 7"));
        let nan = message(&[0.0, 0.0, 0.0, f32::NAN], config(2, 1, false));
        assert!(nan.contains("token 1, expert 1"), "{nan}");
        assert!(Permutation::new(&[0, 7], 4, 1).unwrap_err().to_string().contains("token 1, choice 0"));
    }

    proptest! {
        #[test]
        fn gradients_agree_with_finite_differences(
            logits in prop::collection::vec(-2f32..2.0, 3 * 5),
            dprob in prop::collection::vec(-1f32..1.0, 3 * 2),
            normalize: bool,
        ) {
            let c = config(5, 2, normalize);
            let routing = Routing::new(&logits, c).unwrap();
            let grad = routing.backward(&dprob, 0.7).unwrap();
            // The loss in f64, with the choices and the fractions held fixed.
            let loss = |logits: &[f64]| {
                let mut total = 0.0;
                for (t, l) in logits.chunks(5).enumerate() {
                    let sum: f64 = l.iter().map(|v| v.exp()).sum();
                    let p: Vec<f64> = l.iter().map(|v| v.exp() / sum).collect();
                    let chosen = &routing.experts[2 * t..2 * t + 2];
                    let s: f64 = if normalize { chosen.iter().map(|&e| p[e as usize]).sum() } else { 1.0 };
                    for (j, &e) in chosen.iter().enumerate() {
                        total += p[e as usize] / s * dprob[2 * t + j] as f64;
                    }
                    for (p, f) in p.iter().zip(routing.fractions()) {
                        total += 0.7 * 5.0 * f as f64 * p / 3.0;
                    }
                }
                total
            };
            for i in 0..logits.len() {
                let at = |step: f64| {
                    let mut l: Vec<f64> = logits.iter().map(|&v| v as f64).collect();
                    l[i] += step;
                    loss(&l)
                };
                let numeric = (at(1e-5) - at(-1e-5)) / 2e-5;
                prop_assert!((grad[i] as f64 - numeric).abs() < 1e-5, "{} {}", grad[i], numeric);
            }
        }

        #[test]
        fn permuting_there_and_back(chosen in prop::collection::vec(0u32..6, 0..40), top_k in 1usize..4) {
            let chosen = &chosen[..chosen.len() / top_k * top_k];
            let p = Permutation::new(chosen, 6, top_k).unwrap();
            // Slots are sorted by expert, and by token within an expert.
            let mut expert_of = vec![0; chosen.len()];
            p.slot.iter().zip(chosen).for_each(|(&s, &e)| expert_of[s as usize] = e);
            prop_assert!(expert_of.is_sorted());
            prop_assert!((1..p.token.len()).all(|i| expert_of[i - 1] < expert_of[i] || p.token[i - 1] <= p.token[i]));
            let x: Vec<bf16> = (0..chosen.len() / top_k * 3).map(|i| bf16::from_f32(i as f32)).collect();
            let there = p.permute(&Reference, &x[..], 3).unwrap();
            let back = p.unpermute(&Reference, &there[..], 3).unwrap();
            let expected: Vec<bf16> = x.iter().map(|v| bf16::from_f32(v.to_f32() * top_k as f32)).collect();
            prop_assert_eq!(back, expected);
            let values: Vec<f32> = (0..chosen.len()).map(|i| i as f32).collect();
            prop_assert_eq!(p.unpermute_choices(&p.permute_choices(&values).unwrap()).unwrap(), values);
        }

        #[test]
        fn an_all_to_all_between_ranks_changes_nothing(chosen in prop::collection::vec(0u32..4, 24)) {
            // Two ranks of 12 tokens with two experts each, against one rank with everything.
            let whole = Permutation::new(&chosen, 4, 1).unwrap();
            let ranks: Vec<_> = chosen.chunks(12).map(|c| Permutation::new(c, 4, 1).unwrap()).collect();
            for owner in 0..2 {
                let experts = 2 * owner..2 * owner + 2;
                let run = |r: &Permutation| {
                    let start: usize = r.splits[..experts.start].iter().sum();
                    start..start + r.splits[experts.clone()].iter().sum::<usize>()
                };
                let received: Vec<u32> =
                    (0..2).flat_map(|r| ranks[r].token[run(&ranks[r])].iter().map(move |t| t + 12 * r as u32)).collect();
                let (source, splits) = regroup(&ranks.iter().map(|r| r.splits[experts.clone()].to_vec()).collect::<Vec<_>>());
                let sorted: Vec<u32> = source.iter().map(|&s| received[s as usize]).collect();
                prop_assert_eq!(&sorted[..], &whole.token[run(&whole)]);
                prop_assert_eq!(&splits[..], &whole.splits[experts]);
            }
        }
    }
}
