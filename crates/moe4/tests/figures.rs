//! The pictures in `docs/` show what the plan says today.

#[path = "../examples/figures.rs"]
mod figures;

#[test]
fn the_pictures_in_docs_are_up_to_date() {
    for (name, svg) in figures::figures() {
        let path = figures::folder().join(name);
        let kept = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(kept == svg, "{name} differs from the plan; run: cargo run -p moe4 --example figures");
    }
}
