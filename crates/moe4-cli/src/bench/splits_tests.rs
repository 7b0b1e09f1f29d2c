//! Where the splits of `bench/shapes.toml` come from.
//!
//! They are written out in the file, so that both sides of a comparison read the same numbers; this generator made
//! them, and the test compares. For each expert a standard normal `z`, a weight `exp(s · z)`, and `s` such that the
//! largest weight is 2.1 times the mean: a router that has not been balanced yet. The rows are shared out in proportion
//! to the weights, and none of the splits is a multiple of 16.
//!
//! Shapes without a backend are small batches, whose splits are those of a router: each token takes the `top_k` experts
//! of the largest `s · z + g`, with a Gumbel-distributed `g` for each choice, which draws experts without replacement in
//! proportion to their weights. Many experts get nothing.

use moe4::numerics::philox::philox4x32;

use super::*;

/// Sum of twelve uniform numbers minus 6.
fn normal(seed: u64, index: usize) -> f64 {
    let words = (0..3).flat_map(|part| philox4x32(seed, part, index as u64));
    words.map(|word| f64::from(word) / (1_u64 << 32) as f64).sum::<f64>() - 6.0
}

/// `s` and `z` of each expert.
fn skew(seed: u64, experts: usize) -> (f64, Vec<f64>) {
    let z: Vec<f64> = (0..experts).map(|expert| normal(seed, expert)).collect();
    let weights = |s: f64| z.iter().map(|z| (s * z).exp()).collect::<Vec<_>>();
    let skew = |weights: &[f64]| {
        weights.iter().copied().fold(0.0, f64::max) * experts as f64 / weights.iter().sum::<f64>()
    };
    let (mut low, mut high) = (0.0, 4.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if skew(&weights(middle)) < 2.1 { low = middle } else { high = middle }
    }
    (low, z)
}

fn skewed_splits(seed: u64, experts: usize, rows: usize) -> Vec<usize> {
    let (s, z) = skew(seed, experts);
    let weights: Vec<f64> = z.iter().map(|z| (s * z).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let share = |weight: &f64| {
        let rows = (rows as f64 * weight / sum) as usize;
        if rows.is_multiple_of(16) { rows.saturating_sub(1) } else { rows }
    };
    let mut splits: Vec<usize> = weights.iter().map(share).collect();
    let mut left = rows - splits.iter().sum::<usize>();
    for expert in (0..experts).cycle() {
        if left == 0 {
            break;
        }
        if !(splits[expert] + 1).is_multiple_of(16) {
            splits[expert] += 1;
            left -= 1;
        }
    }
    splits
}

fn routed_splits(seed: u64, experts: usize, rows: usize, top_k: usize) -> Vec<usize> {
    let (s, z) = skew(seed, experts);
    let gumbel = |token: usize, expert: usize| {
        let word = philox4x32(seed, 3 + expert as u64, token as u64)[0];
        -(-((f64::from(word) + 0.5) / (1_u64 << 32) as f64).ln()).ln()
    };
    let mut splits = vec![0; experts];
    for token in 0..rows / top_k {
        let mut keys: Vec<_> =
            (0..experts).map(|expert| (s * z[expert] + gumbel(token, expert), expert)).collect();
        keys.sort_by(|a, b| b.0.total_cmp(&a.0));
        keys[..top_k].iter().for_each(|&(_, expert)| splits[expert] += 1);
    }
    splits
}

#[test]
fn shipped_splits_are_those_of_the_generator() {
    let shapes = Shapes::read(None).expect("the shipped shapes");
    assert_eq!(shapes.all.iter().filter(|shape| shape.backend == Some(BackendArg::Cuda)).count(), 4);
    assert_eq!(shapes.all.iter().filter(|shape| shape.backend == Some(BackendArg::Cpu)).count(), 3);
    for shape in &shapes.all {
        if shape.backend.is_none() {
            assert_eq!(
                shape.splits,
                routed_splits(1, shape.experts, shape.rows, shape.top_k),
                "{}",
                shape.name
            );
            continue;
        }
        assert_eq!(shape.splits, skewed_splits(1, shape.experts, shape.rows), "{}", shape.name);
        assert_eq!(shape.splits.iter().sum::<usize>(), shape.rows, "{}", shape.name);
        assert!(shape.splits.iter().all(|split| !split.is_multiple_of(16)), "{}", shape.name);
        let largest = shape.splits.iter().max().copied().unwrap_or(0) * shape.experts;
        assert!((shape.rows * 20 / 10..shape.rows * 22 / 10).contains(&largest), "{}: {largest}", shape.name);
    }
}

#[test]
fn shapes_that_do_not_fit_together_are_refused_in_one_line() {
    let good = "[[shape]]\nname = 'a'\nbackend = 'cpu'\nexperts = 2\ntop_k = 1\nrows = 8\nhidden = 32\nffn = 16\n\
                activation = 'swiglu'\nsplits = [5, 3]\n";
    assert!(Shapes::parse(good.into()).is_ok());
    let refused = |text: String, parts: &[&str]| {
        let error = Shapes::parse(text).err().map(|error| format!("{error:#}")).expect("an error");
        assert!(!error.contains('\n') && parts.iter().all(|part| error.contains(part)), "{error}");
    };
    refused(good.replace("[5, 3]", "[5, 4]"), &["'a'", "sum of 8", "got 9"]);
    refused(good.replace("[5, 3]", "[8]"), &["2 experts", "got 1"]);
    refused(good.replace("[5, 3]", "[9223372036854775807, 9223372036854775807]"), &["sum of 8"]);
    refused(good.replace("hidden = 32", "hidden = 33"), &["hidden", "16", "33"]);
    refused(good.replace("rows = 8", "rows = 80000000"), &["rows", "80000000"]);
    refused(good.replace("rows = 8", "rows = -8"), &["line 6"]);
    refused(good.replace("top_k = 1", "top_k = 3"), &["top_k", "1 to 2", "3"]);
    refused(good.replace("swiglu", "gelu"), &["gelu"]);
    refused(good.replace("ffn", "width"), &["width"]);
    refused(good.replace("'a'", "\"a\\u0007b\""), &["shape 1", "control", "\\u{7}"]);
    refused(good.replace("'a'", "''"), &["shape 1", "control"]);
    assert!(Shapes::parse(good.replace("backend = 'cpu'\n", "")).is_ok(), "measured only by name");
    refused(good.repeat(2), &["'a'", "twice"]);
}
