//! `moe4 plan`.

use serde_json::Value;

use crate::common::Workspace;

fn json(arguments: &[&str]) -> Value {
    let mut all = vec!["plan", "--json"];
    all.extend(arguments);
    serde_json::from_str(&Workspace::new().moe4(&all).succeeds().stdout).expect("JSON")
}

const SMALL: [&str; 8] = ["--experts", "4", "--tokens", "128", "--hidden", "64", "--ffn", "32"];

fn small(more: &[&str]) -> Value {
    json(&[&SMALL[..], more].concat())
}

fn sum(list: &Value, field: &str) -> f64 {
    list.as_array().expect("a list").iter().map(|row| row[field].as_f64().expect("a number")).sum()
}

#[test]
fn recompute_keeps_an_amax_instead_of_h() {
    let saved = |report: &Value| {
        let rows = report["saved"].as_array().expect("a list").clone();
        rows.iter().find(|row| row["tensor"] == "h").map(|row| row["this_plan"].clone()).expect("h")
    };
    // 256 rows, 64 an expert: h is 32 columns at 4.5 bits and 4 amaxes.
    assert_eq!(saved(&small(&[])), 256 * 32 * 9 / 16 + 16);
    assert_eq!(saved(&small(&["--recompute", "on"])), 16);
    assert_eq!(saved(&small(&["--precision", "bf16"])), 256 * 32 * 2);
    assert_eq!(saved(&small(&["--needs", "input"])), 0);
}

#[test]
fn every_option_is_planned() {
    let passes = |more: &[&str]| small(more)["passes"].as_array().expect("a list").len();
    let base = passes(&[]);
    assert_eq!(passes(&["--dc-amax", "separate"]), base + 1);
    assert_eq!(passes(&["--dc-amax", "bound"]), base);
    assert_eq!(passes(&["--needs", "none"]), 5);
    assert_eq!(passes(&["--bias"]), base + 1);
    for activation in ["srelu", "tanh_srelu:s=16", "situ_glu", "clamped_qgeglu:limit=3"] {
        assert!(passes(&["--activation", activation]) > 0);
    }
}

#[test]
fn measuring_adds_a_time_to_every_pass() {
    let report = small(&["--measure"]);
    assert!(sum(&report["passes"], "ms") > 0.0);
    assert!(report["measured_on"].as_str().is_some_and(|machine| machine.starts_with("cpu")), "{report}");
    let text = Workspace::new().moe4(&[&["plan", "--measure"], &SMALL[..]].concat()).succeeds().stdout;
    assert!(text.contains("share") && text.contains("measured on cpu"), "{text}");
}

#[test]
fn impossible_shapes_are_refused() {
    let fails = |more: &[&str], parts: &[&str]| {
        Workspace::new().moe4(&[&["plan"], more].concat()).fails_with(parts);
    };
    fails(&["--hidden", "100"], &["hidden", "multiple of 16", "100"]);
    for option in ["--experts", "--hidden", "--ffn"] {
        fails(&[option, "0"], &[option, "expected 1 to 65536, got 0"]);
        fails(&[option, "65537"], &[option, "expected 1 to 65536, got 65537"]);
    }
    fails(&["--top-k", "9"], &["--top-k", "9 with 8 experts"]);
    fails(&["--top-k", "0"], &["--top-k"]);
    fails(&["--tokens", "18446744073709551615"], &["--tokens"]);
    fails(&["--hidden", "1152921504606846976"], &["--hidden"]);
    let huge = ["--measure", "--tokens", "8000000", "--hidden", "65536", "--ffn", "65536"];
    fails(&huge, &["--measure", "free memory"]);
    fails(&["--precision", "bf16", "--dc-amax", "bound"], &["--dc-amax", "nvfp4"]);
    fails(&["--activation", "gelu"], &["gelu"]);
    fails(&["--glu-layout", "interleaved32", "--ffn", "48"], &["multiple of 32"]);
}
