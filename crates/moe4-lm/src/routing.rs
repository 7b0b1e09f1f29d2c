//! Which experts each token goes to, and the order that puts an expert's tokens next to each other.

/// The top-k assignment of a batch of tokens, and its expert order.
///
/// An assignment is a pair (token, choice), numbered `token * top_k + choice`. Expert order sorts the
/// assignments by expert and keeps the tokens' order within an expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Routing {
    /// `[tokens * top_k]`: the expert of each assignment.
    pub(crate) experts: Vec<usize>,
    /// `[tokens * top_k]`: the assignment at each row of expert order.
    pub(crate) order: Vec<usize>,
    /// `[experts]`: rows of each expert.
    pub(crate) splits: Vec<usize>,
    /// Experts a token.
    pub(crate) top_k: usize,
}

impl Routing {
    /// Takes the `top_k` largest of each token's `experts` probabilities; of equals, the lower index.
    pub(crate) fn top_k(probabilities: &[f32], experts: usize, top_k: usize) -> Self {
        let mut chosen = Vec::with_capacity(probabilities.len() / experts * top_k);
        let mut ranking: Vec<usize> = Vec::with_capacity(experts);
        for row in probabilities.chunks_exact(experts) {
            ranking.clear();
            ranking.extend(0..experts);
            // Stable, so equals stay in index order.
            ranking.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
            chosen.extend_from_slice(&ranking[..top_k]);
        }
        let mut splits = vec![0; experts];
        for &expert in &chosen {
            splits[expert] += 1;
        }
        let mut order: Vec<usize> = (0..chosen.len()).collect();
        order.sort_by_key(|&assignment| chosen[assignment]);
        Self { experts: chosen, order, splits, top_k }
    }
}
