//! `moe4 bench`. No test looks at how long anything took.

use std::fs;

use serde_json::Value;

use crate::common::Workspace;

const TINY: &str = r#"
[[shape]]
name = "tiny"
backend = "cpu"
experts = 3
top_k = 2
rows = 44
hidden = 64
ffn = 32
activation = "swiglu"
splits = [21, 5, 18]

[[shape]]
name = "square"
backend = "cpu"
experts = 2
top_k = 1
rows = 40
hidden = 32
ffn = 32
activation = "srelu"
splits = [0, 40]
"#;

fn workspace() -> Workspace {
    let space = Workspace::new();
    fs::write(space.path("tiny.toml"), TINY).expect("a writable file");
    space
}

/// Arguments after `bench --shapes tiny.toml --runs 2`.
fn arguments<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["bench", "--shapes", "tiny.toml", "--runs", "2"], more].concat()
}

/// The only record under `folder`.
fn record(space: &Workspace, folder: &str) -> Value {
    let mut files: Vec<_> = fs::read_dir(space.path(folder)).expect("a folder").flatten().collect();
    assert_eq!(files.len(), 1, "{files:?}");
    let text = fs::read_to_string(files.remove(0).path()).expect("a record");
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn every_row_is_in_the_table_and_in_the_record() {
    let space = workspace();
    let twice = ["--shape", "tiny", "--shape", "square", "--shape", "tiny"];
    let arguments = arguments(&[&["--record", "kept", "--machine", "here"], &twice[..]].concat());
    let text = space.moe4(&arguments).succeeds().stdout;
    let record = record(&space, "kept/here");
    let rows = record["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 2 * 29, "{text}");
    for row in rows {
        let (name, shape) = (row["name"].as_str().expect("a name"), &row["shape"]);
        let shape_name = shape["name"].as_str().expect("a name");
        assert!(text.lines().any(|line| line.contains(name) && line.contains(shape_name)), "{name}: {text}");
        assert!(["E", "T", "H", "F"].iter().all(|size| shape[*size].is_u64()), "{row}");
        assert!(row["backend"].as_str().is_some_and(|backend| backend.starts_with("cpu")), "{row}");
        let [min, median, max] =
            ["min_ms", "median_ms", "max_ms"].map(|field| row[field].as_f64().expect("a time"));
        assert!(min <= median && median <= max, "{row}");
        assert_eq!(row["runs"], 2);
        assert!(row["bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{row}");
        let products = ["step", "forward", "grouped_"].iter().any(|start| name.starts_with(start));
        assert_eq!(row["flops"].as_u64().is_some_and(|flops| flops > 0), products, "{row}");
        assert_eq!(row["floor_ms"].is_null(), products, "{row}");
        assert_eq!(row["saved_h_bytes"].is_u64(), name.starts_with("h_"), "{row}");
        assert_eq!(row["passes"].is_array(), name.starts_with("h_"), "{row}");
        assert!(row.get("peers").is_none(), "{row}");
    }
    assert!(record["date"].is_string() && record["moe4"].is_string(), "{record}");
    assert!(record["machine"]["cores"].as_u64().is_some_and(|cores| cores > 0), "{record}");
}

#[test]
fn passes_of_a_step_are_shown_one_by_one() {
    let space = workspace();
    let more = ["--shape", "tiny", "--pass", "step", "--pass", "forward", "--per-pass", "--record", "kept"];
    let text = space.moe4(&arguments(&[&more[..], &["--machine", "m"]].concat())).succeeds().stdout;
    assert!(text.contains("step_nvfp4 on tiny, pass by pass"), "{text}");
    let record = record(&space, "kept/m");
    let passes = |index: usize| -> Vec<String> {
        let passes = record["rows"][index]["passes"].as_array().expect("passes");
        let told = |pass: &Value, field: &str| pass[field].as_str().expect("text").to_owned();
        passes
            .iter()
            .map(|pass| ["phase", "pass", "tensor"].map(|field| told(pass, field)).join(" "))
            .collect()
    };
    assert_eq!(passes(0), ["forward grouped_gemm_act c, h", "forward grouped_gemm y"]);
    let step = passes(3);
    assert_eq!(step[0], "weights quantize_weights w1");
    assert_eq!(step.last().map(String::as_str), Some("backward grouped_gemm dx"));
    assert_eq!(step.iter().filter(|pass| pass.contains("grouped_")).count(), 6, "{step:?}");
    for row in record["rows"].as_array().expect("rows") {
        let sum = |field: &str| -> u64 {
            row["passes"].as_array().expect("passes").iter().filter_map(|pass| pass[field].as_u64()).sum()
        };
        assert_eq!((row["bytes"].as_u64(), row["flops"].as_u64()), (Some(sum("bytes")), Some(sum("flops"))));
    }
}

#[test]
fn ways_to_the_copies_of_h_are_compared() {
    let space = workspace();
    let more = ["--shape", "tiny", "--pass", "h_", "--record", "kept", "--machine", "m"];
    let text = space.moe4(&arguments(&more)).succeeds().stdout;
    assert!(text.contains("passes over h") && text.contains("h_recompute"), "{text}");
    let record = record(&space, "kept/m");
    let of = |field: &str| [0, 1, 2].map(|index| record["rows"][index][field].clone());
    assert_eq!(of("name"), ["h_separate", "h_reuse", "h_recompute"]);
    // 32 columns of 32 + 16 + 32 positions in 4.5 bits, and three amaxes; then the amaxes alone.
    let packed = 32 * (32 + 16 + 32) * 9 / 16 + 12;
    assert_eq!(of("saved_h_bytes"), [packed, packed, 12]);
    let launches = of("passes").map(|passes| passes.as_array().expect("passes").len());
    assert_eq!(launches, [2, 1, 2]);
}

#[test]
fn bytes_are_those_of_the_pass() {
    let space = workspace();
    let arguments = arguments(&["--shape", "tiny", "--pass", "group_quantize_rowwise x", "--record", "."]);
    let text = space.moe4(&arguments).succeeds().stdout;
    assert!(text.contains("recorded in ./"), "{text}");
    let folder = space.files().into_iter().find(|name| name != "tiny.toml").expect("a machine");
    // 44 rows of 64: BF16 and three amaxes in, 4.5 bits an element out.
    assert_eq!(record(&space, &folder)["rows"][0]["bytes"], 44 * 64 * 2 + 3 * 4 + 44 * 64 * 9 / 16);
}

#[test]
fn rows_measured_again_replace_the_older_ones() {
    let space = workspace();
    let run = |pass: &str, runs: &str| {
        let common =
            ["bench", "--shapes", "tiny.toml", "--shape", "tiny", "--record", "kept", "--machine", "m"];
        space.moe4(&[&common[..], &["--pass", pass, "--runs", runs]].concat()).succeeds();
        let file = fs::read_dir(space.path("kept/m")).expect("a folder").flatten().next().expect("a file");
        file.path()
    };
    run("permute", "1");
    let path = run("group_amax", "1");
    let mut text = fs::read_to_string(&path).expect("a record");
    text = text.replacen('{', "{ \"training\": { \"steps\": 200 },", 1);
    fs::write(&path, text).expect("a writable file");
    run("permute", "3");
    let record = record(&space, "kept/m");
    let rows: Vec<_> = record["rows"]
        .as_array()
        .expect("rows")
        .iter()
        .map(|row| (row["name"].as_str().expect("a name"), row["runs"].as_u64().expect("a number")))
        .collect();
    assert_eq!(rows, [("group_amax x", 1), ("permute x", 3)]);
    assert_eq!(record["training"]["steps"], 200);
}

#[test]
fn what_cannot_be_measured_is_refused_in_one_line() {
    let space = workspace();
    let fails = |more: &[&str], parts: &[&str]| {
        space.moe4(&arguments(more)).fails_with(parts);
    };
    fails(&["--shape", "huge"], &["--shape", "tiny, square", "'huge'"]);
    fails(&["--pass", "gemm"], &["--pass", "'gemm'", "group_quantize_both"]);
    fails(&["--machine", "m"], &["--record"]);
    fails(&["--peer-timeout", "5"], &["--peers"]);
    fails(&["--record", "kept", "--machine", "../m"], &["--machine", "'../m'"]);
    fails(&["--record", "tiny.toml", "--machine", "m"], &["--record", "tiny.toml"]);
    fails(&["--peers", "no-such-python"], &["--peers", "no-such-python"]);
    space.moe4(&["bench", "--runs", "0"]).fails_with(&["--runs", "0"]);
    space.moe4(&["bench", "--shapes", "missing.toml"]).fails_with(&["missing.toml"]);
    fs::write(space.path("broken.toml"), "[[shape]]\nname = 3\n").expect("a writable file");
    space.moe4(&["bench", "--shapes", "broken.toml"]).fails_with(&["broken.toml", "line 2"]);
    assert_eq!(space.files(), ["broken.toml", "tiny.toml"], "nothing was left behind");
}

/// With a GPU a row is measured on it; without, the reason is one line.
#[test]
fn the_cuda_backend_runs_or_says_why_not() {
    let space = workspace();
    let run = space.moe4(&arguments(&["--backend", "cuda", "--shape", "tiny", "--pass", "group_amax"]));
    if run.code == Some(0) {
        let text = run.stdout;
        assert!(text.contains("group_amax x") && text.contains("cuda: ") && text.contains("GB/s"), "{text}");
    } else {
        run.fails_with(&["--backend cuda: "]);
    }
    assert_eq!(space.files(), ["tiny.toml"], "nothing was left behind");
}

#[test]
fn a_damaged_record_is_refused_before_anything_is_measured() {
    let space = workspace();
    let run = || space.moe4(&arguments(&["--pass", "permute", "--record", "kept", "--machine", "m"]));
    run().succeeds();
    let file = fs::read_dir(space.path("kept/m")).expect("a folder").flatten().next().expect("a file").path();
    for damaged in ["{", "[]", "{\"rows\": 3}"] {
        fs::write(&file, damaged).expect("a writable file");
        run().fails_with(&["--record", "kept/m"]);
        assert_eq!(fs::read_to_string(&file).expect("a file"), damaged);
    }
}

#[test]
fn a_shape_that_does_not_fit_is_left_out_with_what_it_needs() {
    let space = Workspace::new();
    let huge = TINY.replace("rows = 44", "rows = 60000000").replace("[21, 5, 18]", "[0, 0, 60000000]");
    let huge = huge.replacen("hidden = 64", "hidden = 65536", 1);
    fs::write(space.path("tiny.toml"), huge).expect("a writable file");
    let text = space.moe4(&arguments(&["--pass", "permute"])).succeeds().stdout;
    assert!(text.contains("left out: permute x on tiny: needs") && text.contains("GiB"), "{text}");
    assert!(text.lines().any(|line| line.contains("permute x") && line.contains("square")), "{text}");
    space.moe4(&arguments(&["--pass", "permute", "--shape", "tiny"])).fails_with(&["nothing", "GiB"]);
}

/// Interpreters that are shell scripts.
#[cfg(unix)]
mod peers {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A workspace with an interpreter that prints facts for common.py, and `lines` for quantize.py.
    fn with_python(lines: &str) -> Workspace {
        let space = workspace();
        let script = format!(
            "#!/bin/sh\necho \"$@\" >> asked\ncase \"$1\" in\n*common.py) echo '{{\"torch\": \"0.0\", \
             \"threads\": 7}}';;\n*quantize.py) {lines} ;;\nesac\n"
        );
        fs::write(space.path("python"), script).expect("a writable file");
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(space.path("python"), executable).expect("a file of ours");
        space
    }

    fn run(space: &Workspace) -> crate::common::Run {
        let more = ["--shape", "tiny", "--pass", "group_amax", "--pass", "permute", "--record", "kept"];
        let peers = ["--machine", "m", "--peers", "./python"];
        space.moe4(&arguments(&[&more[..], &peers].concat()))
    }

    #[test]
    fn their_times_join_rows_by_name_and_shape() {
        let space = with_python(
            "echo '{\"peer\": \"slow\", \"name\": \"group_amax x\", \"shape\": \"tiny\", \"median_ms\": 1e9}'
             echo '{\"peer\": \"lost\", \"name\": \"permute x\", \"shape\": \"tiny\", \"error\": \"no memory\"}'",
        );
        let text = run(&space).succeeds().stdout;
        assert!(text.lines().any(|line| line.contains("group_amax x") && line.contains("slow")), "{text}");
        assert!(text.contains("left out: lost: permute x on tiny: no memory"), "{text}");
        let record = record(&space, "kept/m");
        let peer = &record["rows"][0]["peers"][0];
        assert_eq!((&peer["peer"], &peer["peer_ms"]), (&"slow".into(), &1e9.into()));
        assert!(peer["ratio"].as_f64().is_some_and(|ratio| ratio < 1.0), "{peer}");
        assert_eq!(record["rows"][0]["peer"], "slow", "the fastest one stands in the row: {record}");
        assert!(record["rows"][1].get("peers").is_none(), "{record}");
        assert!(
            record["machine"]["peers"].as_str().is_some_and(|facts| facts.contains("torch 0.0")),
            "{record}"
        );
        let asked = fs::read_to_string(space.path("asked")).expect("a file");
        assert!(asked.contains("--shape tiny --runs 2 --row group_amax x --row permute x"), "{asked}");
    }

    #[test]
    fn a_script_that_fails_costs_its_own_rows_only() {
        let space = with_python(
            "echo '{\"peer\": \"early\", \"name\": \"permute x\", \"shape\": \"tiny\", \"median_ms\": 1}'
             echo first >&2; echo self-check: wrong >&2; exit 3",
        );
        let text = run(&space).succeeds().stdout;
        let told = |line: &str| line.starts_with("left out: peers on tiny: quantize.py ended with");
        assert!(text.lines().any(|line| told(line) && line.contains("self-check: wrong")), "{text}");
        let record = record(&space, "kept/m");
        assert_eq!(record["rows"].as_array().map(Vec::len), Some(2), "{record}");
        assert_eq!(record["rows"][1]["peers"][0]["peer"], "early");
        let asked = fs::read_to_string(space.path("asked")).expect("a file");
        assert!(asked.contains("grouped_mlp.py"), "the other script has its turn: {asked}");
    }

    #[test]
    fn a_script_that_hangs_is_ended() {
        let space = with_python(
            "echo '{\"peer\": \"early\", \"name\": \"permute x\", \"shape\": \"tiny\", \"median_ms\": 1}'
             exec sleep 600",
        );
        let more = ["--shape", "tiny", "--pass", "permute", "--record", "kept", "--machine", "m"];
        let peers = ["--peers", "./python", "--peer-timeout", "1"];
        let text = space.moe4(&arguments(&[&more[..], &peers].concat())).succeeds().stdout;
        assert!(
            text.contains("left out: peers on tiny: quantize.py took more than 1 s and was ended"),
            "{text}"
        );
        assert_eq!(record(&space, "kept/m")["rows"][0]["peers"][0]["peer"], "early");
        let hangs = fs::read_to_string(space.path("python"))
            .expect("a file")
            .replace("common.py)", "*) exec sleep 600;;\n*common.py)");
        fs::write(space.path("python"), hangs).expect("a writable file");
        space.moe4(&arguments(&peers)).fails_with(&["--peers", "common.py took more than 1 s"]);
    }

    #[test]
    fn their_mistakes_are_told_and_cost_their_own_rows_only() {
        for (lines, part) in [
            ("echo no JSON", "expected a line of JSON, got 'no JSON'"),
            (
                "echo '{\"peer\": \"p\", \"name\": \"group_amax x\", \"shape\": \"other\", \"median_ms\": 1}'",
                "other",
            ),
            (
                "echo '{\"peer\": \"p\", \"name\": \"permute x\", \"shape\": \"tiny\", \"median_ms\": -1}'",
                "positive",
            ),
            (
                "echo '{\"peer\": \"p\", \"name\": \"permute x\", \"shape\": \"tiny\"}'",
                "either a time or an error",
            ),
        ] {
            let space = with_python(lines);
            let text = run(&space).succeeds().stdout;
            assert!(text.lines().any(|line| line.starts_with("left out:") && line.contains(part)), "{text}");
            let record = record(&space, "kept/m");
            assert_eq!(record["rows"].as_array().map(Vec::len), Some(2), "{record}");
            assert!(record["rows"][0].get("peers").is_none(), "{record}");
        }
    }
}
