//! Which experts each token goes to, and the order that puts an expert's tokens next to each other.

/// The top-k assignment of a batch of tokens, and its expert order.
///
/// An assignment is a pair (token, choice), numbered `token * top_k + choice`. Expert order sorts the
/// assignments by expert and keeps the tokens' order within an expert; a row is a place in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Routing {
    /// Choices of each token.
    pub(crate) top_k: usize,
    /// `[tokens * top_k]`: the expert of each assignment.
    pub(crate) experts: Vec<usize>,
    /// `[experts]`: rows of each expert.
    pub(crate) splits: Vec<usize>,
    /// `[tokens * top_k]`: the token of each row.
    pub(crate) source: Vec<u32>,
    /// `[tokens * top_k]`: the row of each assignment.
    pub(crate) slot: Vec<u32>,
    order: Vec<usize>,
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
        let source = order.iter().map(|assignment| (assignment / top_k) as u32).collect();
        let mut slot = vec![0; order.len()];
        for (row, &assignment) in order.iter().enumerate() {
            slot[assignment] = row as u32;
        }
        Self { top_k, experts: chosen, splits, source, slot, order }
    }

    /// The assignment of each row, in expert order.
    pub(crate) fn assignments(&self) -> impl Iterator<Item = usize> + '_ {
        self.order.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_probabilities_win_and_rows_are_sorted_by_expert() {
        let probabilities = [0.1, 0.6, 0.3, 0.5, 0.2, 0.3, 0.25, 0.5, 0.25];
        let routing = Routing::top_k(&probabilities, 3, 2);
        assert_eq!(routing.experts, [1, 2, 0, 2, 1, 0]);
        assert_eq!(routing.splits, [2, 2, 2]);
        assert_eq!(routing.assignments().collect::<Vec<_>>(), [2, 5, 0, 4, 1, 3]);
        assert_eq!(routing.source, [1, 2, 0, 2, 0, 1]);
        for (row, assignment) in routing.assignments().enumerate() {
            assert_eq!(routing.slot[assignment] as usize, row);
        }
    }

    #[test]
    fn an_expert_that_nobody_chose_has_no_rows() {
        let routing = Routing::top_k(&[0.9, 0.0, 0.1, 0.8, 0.0, 0.2], 3, 1);
        assert_eq!(routing.splits, [2, 0, 0]);
    }
}
