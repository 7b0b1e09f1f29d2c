//! `moe4 train`: settings that are refused before a folder is made. Training itself is tested in `moe4-lm`.

use crate::common::Workspace;

#[test]
fn a_model_that_is_too_large_is_refused_with_its_size() {
    let space = Workspace::new();
    let fails = |options: &[&str], got: &str| {
        let parts = ["expected a model of at most ", got, "make --hidden"];
        space.moe4(&[&["train", "--steps", "1"], options].concat()).fails_with(&parts);
        assert!(space.files().is_empty());
    };
    // Attention 4 H², experts 48 H, router and norms 3 H, embeddings 513 H.
    let small = ["--layers", "1", "--heads", "1", "--experts", "1", "--top-k", "1", "--ffn", "16"];
    fails(&[&["--hidden", "1000000"], &small[..]].concat(), " parameters, got 4000564000000:");
    fails(&["--hidden", "18446744073709551615", "--heads", "1"], "got more than 18446744073709551615:");
}
