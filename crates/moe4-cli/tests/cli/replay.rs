//! `moe4 replay`: the golden operator data end to end, equal bits whatever the settings, and bad input.

use std::fs;
use std::process::Command;

use half::bf16;
use moe4::checkpoint::{Dtype, TensorFile, TensorSpec, TensorWriter};

use crate::common::{Run, Workspace, golden};

/// Golden file, activation, layout of gate and up rows.
const GOLDEN: [(&str, &str, &str); 8] = [
    ("mlp__swiglu__halves__a", "swiglu", "halves"),
    ("mlp__swiglu__elementwise__b", "swiglu", "elementwise"),
    ("mlp__srelu__c", "srelu", "halves"),
    ("mlp__tanh_srelu16__d", "tanh_srelu:s=16", "halves"),
    ("mlp__tanh_srelu1p5__ragged__e", "tanh_srelu:s=1.5", "halves"),
    ("mlp__situ_glu_4_25__interleave32__f", "situ_glu:beta1=4,beta2=25", "interleaved32"),
    ("mlp__clamped_qgeglu_7__halves_saturating__g", "clamped_qgeglu:limit=7,alpha=1.702,offset=1", "halves"),
    ("mlp__situ_glu_2_8__elementwise_ragged__h", "situ_glu:beta1=2,beta2=8", "elementwise"),
];

const SOUND: &str = "no tensor is off by more than rounding";

/// Runs a golden file with these further options.
fn replay(
    space: &Workspace,
    (file, activation, layout): (&str, &str, &str),
    output: &str,
    options: &[&str],
) -> Run {
    let input = golden(&format!("{file}.safetensors"));
    let input = input.to_str().expect("a UTF-8 path");
    let base = ["replay", input, "-o", output, "--activation", activation, "--glu-layout", layout];
    space.moe4(&[&base[..], options].concat())
}

#[test]
fn golden_data_end_to_end_in_both_recompute_settings() {
    for case in GOLDEN {
        let expected = golden(&format!("{}.safetensors", case.0));
        let expected = expected.to_str().expect("a UTF-8 path");
        for (backend, recompute) in [("cpu", "off"), ("cpu", "on"), ("reference", "on")] {
            let space = Workspace::new();
            let options = ["--gradient-rounding", "nearest", "--intermediates", "--compare", expected];
            let settings = ["--backend", backend, "--recompute", recompute];
            let run = replay(&space, case, "out", &[&options[..], &settings].concat()).succeeds();
            assert!(run.stdout.ends_with(&format!("{SOUND}\n")), "{case:?}\n{}", run.stdout);
            // Every tensor of the golden file is there, and was compared if it is not an offset.
            let output = space.open("out");
            for name in TensorFile::open(expected).unwrap().names() {
                assert!(output.contains(name), "{case:?} has no {name}");
                let compared = run.stdout.lines().any(|line| line.split_whitespace().next() == Some(name));
                assert_eq!(compared, !name.ends_with("_off"), "{case:?} {name}\n{}", run.stdout);
            }
        }
    }
}

#[test]
fn recompute_and_threads_change_no_bit() {
    for case in GOLDEN {
        for rounding in ["nearest", "stochastic"] {
            let space = Workspace::new();
            let bytes = |name: &str, options: &[&str]| {
                let rounding = ["--gradient-rounding", rounding, "--intermediates"];
                replay(&space, case, name, &[&rounding[..], options].concat()).succeeds();
                fs::read(space.path(name)).unwrap()
            };
            let first = bytes("1", &["--recompute", "off", "--threads", "1"]);
            for (recompute, threads) in [("on", "1"), ("off", "2"), ("on", "2")] {
                let other = bytes("2", &["--recompute", recompute, "--threads", threads]);
                assert!(first == other, "{case:?} {rounding} recompute {recompute}, {threads} threads");
            }
        }
    }
}

#[test]
fn bf16_is_the_unquantized_operator() {
    // The golden data's own distances between quantized and unquantized dw1, in the order of `GOLDEN`.
    let distances = [0.21756, 0.36138, 0.22813, 0.30047, 0.38246, 0.67670, 0.53196, 0.59628];
    let norm =
        |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let space = Workspace::new();
    for (case, distance) in GOLDEN.into_iter().zip(distances) {
        replay(&space, case, "bf16", &["--precision", "bf16"]).succeeds();
        replay(&space, case, "again", &["--precision", "bf16", "--recompute", "on"]).succeeds();
        assert!(fs::read(space.path("bf16")).unwrap() == fs::read(space.path("again")).unwrap(), "{case:?}");
        let golden = golden(&format!("{}.safetensors", case.0));
        let quantized = TensorFile::open(golden).unwrap().read::<f32>("dw1").unwrap();
        let exact = space.open("bf16").read::<f32>("dw1").unwrap();
        let error =
            norm(&mut exact.iter().zip(&quantized).map(|(a, b)| a - b)) / norm(&mut exact.iter().copied());
        assert!((error / distance - 1.0).abs() < 0.005, "{case:?}: {error}");
    }
}

#[test]
fn seeds_and_masks_change_what_they_should() {
    let space = Workspace::new();
    let dw1 = |options: &[&str]| {
        replay(&space, GOLDEN[0], "out", options).succeeds();
        space.open("out").read::<f32>("dw1").unwrap()
    };
    let default = dw1(&[]);
    assert!(default == dw1(&["--seed", "0", "--rht", "0xD7E8", "--gradient-rounding", "stochastic"]));
    assert!(default != dw1(&["--seed", "1"]));
    assert!(default != dw1(&["--rht", "off"]));
    assert!(
        dw1(&["--rht", "off", "--gradient-rounding", "nearest"]) != dw1(&["--gradient-rounding", "nearest"])
    );
}

#[test]
fn without_intermediates_only_results_are_written() {
    let space = Workspace::new();
    replay(&space, GOLDEN[0], "out", &[]).succeeds();
    let mut names = space.open("out").names().to_vec();
    names.sort();
    assert_eq!(names, ["dprob", "dw1", "dw2", "dx", "y"]);
}

/// A small capture, to be spoiled: E = 2, T = 20, H = 16, F = 16, SReLU.
struct Capture {
    tensors: Vec<(TensorSpec, Values)>,
}

#[derive(Clone)]
enum Values {
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
    I64(Vec<i64>),
}

impl Capture {
    fn new() -> Self {
        let mut capture = Self { tensors: Vec::new() };
        let wave =
            |n: usize| (0..n).map(|index| bf16::from_f32((index as f32 * 0.7).sin())).collect::<Vec<_>>();
        capture.set("x", &[20, 16], Values::Bf16(wave(320)));
        capture.set("w1", &[2, 16, 16], Values::Bf16(wave(512)));
        capture.set("w2", &[2, 16, 16], Values::Bf16(wave(512)));
        capture.set("prob", &[20], Values::F32(vec![0.5; 20]));
        capture.set("splits", &[2], Values::I64(vec![7, 12]));
        capture.set("dy", &[20, 16], Values::Bf16(wave(320)));
        capture
    }

    fn set(&mut self, name: &str, shape: &[usize], values: Values) {
        let dtype = match values {
            Values::Bf16(_) => Dtype::BF16,
            Values::F32(_) => Dtype::F32,
            Values::I64(_) => Dtype::I64,
        };
        self.remove(name);
        self.tensors.push((TensorSpec::new(name, dtype, shape), values));
    }

    fn remove(&mut self, name: &str) {
        self.tensors.retain(|(spec, _)| spec.name != name);
    }

    /// One element of a BF16 tensor set to a value.
    fn poke(&mut self, name: &str, index: usize, value: f32) {
        let found = self.tensors.iter_mut().find(|(spec, _)| spec.name == name);
        match found {
            Some((_, Values::Bf16(values))) => values[index] = bf16::from_f32(value),
            Some((_, Values::F32(values))) => values[index] = value,
            _ => panic!("no float tensor {name}"),
        }
    }

    fn write(&self, space: &Workspace, file: &str) {
        let specs: Vec<_> = self.tensors.iter().map(|(spec, _)| spec.clone()).collect();
        let mut writer = TensorWriter::create(space.path(file), &specs, &[]).unwrap();
        for (spec, values) in &self.tensors {
            match values {
                Values::Bf16(values) => writer.write(&spec.name, values).unwrap(),
                Values::F32(values) => writer.write(&spec.name, values).unwrap(),
                Values::I64(values) => writer.write(&spec.name, values).unwrap(),
            }
        }
        writer.finish().unwrap();
    }

    /// Writes the capture and replays it.
    fn replay(&self, space: &Workspace, options: &[&str]) -> Run {
        self.write(space, "in");
        space.moe4(&[&["replay", "in", "-o", "out", "--activation", "srelu"], options].concat())
    }

    /// The replay fails, says these parts, and writes nothing.
    fn refused(&self, parts: &[&str]) {
        let space = Workspace::new();
        self.replay(&space, &[]).fails_with(parts);
        assert_eq!(space.files(), ["in"]);
    }
}

#[test]
fn a_capture_that_lacks_a_tensor_or_has_a_wrong_shape_is_refused() {
    for name in ["x", "w1", "w2", "prob", "splits", "dy"] {
        let mut capture = Capture::new();
        capture.remove(name);
        capture.refused(&[&format!("has no tensor '{name}'"), "it has: "]);
    }
    let refused = |name: &str, shape: &[usize], values: Values, parts: &[&str]| {
        let mut capture = Capture::new();
        capture.set(name, shape, values);
        capture.refused(parts);
    };
    let bf16s = |n| Values::Bf16(vec![bf16::ONE; n]);
    refused("x", &[320], bf16s(320), &["'x'", "expected shape [T, H], got [320]"]);
    refused("x", &[20, 32], bf16s(640), &["'x'", "expected shape [20, 16], got [20, 32]"]);
    refused("x", &[20, 16], Values::F32(vec![1.0; 320]), &["'x'", "expected dtype BF16, got F32"]);
    refused("dy", &[16, 20], bf16s(320), &["'dy'", "expected shape [20, 16], got [16, 20]"]);
    refused("w1", &[2, 32, 16], bf16s(1024), &["'w1'", "expected shape [2, 16, 16]", "N1 = F for srelu"]);
    refused("w2", &[16, 32], bf16s(512), &["'w2'", "expected shape [E, H, F], got [16, 32]"]);
    refused("w2", &[0, 16, 16], bf16s(0), &["'w1'", "[0, 16, 16]"]);
    refused("prob", &[19], Values::F32(vec![1.0; 19]), &["'prob'", "expected shape [20], got [19]"]);
    refused("splits", &[3], Values::I64(vec![1; 3]), &["'splits'", "expected shape [2], got [3]"]);
    refused("splits", &[2], Values::I64(vec![7, 14]), &["splits", "at most 20", "got 21"]);
    refused("splits", &[2], Values::I64(vec![7, -1]), &["splits[1]", "-1"]);
    refused("splits", &[2], Values::F32(vec![7.0, 12.0]), &["'splits'", "expected dtype I64, got F32"]);
    refused("b1", &[2, 16], Values::F32(vec![0.0; 32]), &["'b1' but not 'b2'"]);
}

#[test]
fn odd_sizes_are_refused() {
    let bf16s = |n| Values::Bf16(vec![bf16::ONE; n]);
    let mut hidden = Capture::new();
    for name in ["x", "dy"] {
        hidden.set(name, &[20, 24], bf16s(480));
    }
    hidden.set("w1", &[2, 16, 24], bf16s(768));
    hidden.set("w2", &[2, 24, 16], bf16s(768));
    hidden.refused(&["hidden", "multiple of 16, got 24"]);
    let mut ffn = Capture::new();
    ffn.set("w1", &[2, 8, 16], bf16s(256));
    ffn.set("w2", &[2, 16, 8], bf16s(256));
    ffn.refused(&["ffn", "multiple of 16, got 8"]);
    let mut none = Capture::new();
    none.set("w1", &[0, 16, 16], bf16s(0));
    none.set("w2", &[0, 16, 16], bf16s(0));
    none.set("splits", &[0], Values::I64(vec![]));
    none.refused(&["expert"]);
}

#[test]
fn values_that_are_not_finite_are_refused_where_they_are_read() {
    for (name, index, place) in [
        ("x", 17, "[1, 1]"),
        ("w1", 256, "[1, 0, 0]"),
        ("w2", 1, "[0, 0, 1]"),
        ("prob", 18, "[18]"),
        ("dy", 0, "[0, 0]"),
    ] {
        for value in [f32::NAN, f32::INFINITY] {
            let mut capture = Capture::new();
            capture.poke(name, index, value);
            capture.refused(&[&format!("'{name}'"), &format!("element {place} is not finite")]);
        }
    }
    // Row 19 is past the sum of the splits.
    let outputs = |capture: &Capture| {
        let space = Workspace::new();
        let notes = capture.replay(&space, &[]).succeeds().notes;
        let [note] = &notes[..] else { panic!("expected one note, got {notes:?}") };
        assert!(note.contains("splits sum to 19 of 20 rows; rows 19..20 belong to no expert"), "{note}");
        fs::read(space.path("out")).unwrap()
    };
    let mut capture = Capture::new();
    let before = outputs(&capture);
    for (name, index) in [("x", 19 * 16), ("dy", 319), ("prob", 19)] {
        capture.poke(name, index, f32::NAN);
    }
    assert!(outputs(&capture) == before);
}

#[test]
fn no_tokens_at_all_give_empty_outputs_and_zero_gradients() {
    let mut capture = Capture::new();
    for name in ["x", "dy"] {
        capture.set(name, &[0, 16], Values::Bf16(vec![]));
    }
    capture.set("prob", &[0], Values::F32(vec![]));
    capture.set("splits", &[2], Values::I64(vec![0, 0]));
    for precision in ["nvfp4", "bf16"] {
        let space = Workspace::new();
        capture.replay(&space, &["--intermediates", "--precision", precision]).succeeds();
        let mut output = space.open("out");
        assert!(output.read_shaped::<bf16>("y", &[0, 16]).unwrap().is_empty());
        assert!(output.read::<f32>("dw1").unwrap().iter().all(|value| *value == 0.0));
    }
}

#[test]
fn biases_have_gradients() {
    let mut capture = Capture::new();
    capture.set("b1", &[2, 16], Values::F32(vec![0.25; 32]));
    capture.set("b2", &[2, 16], Values::F32(vec![-0.5; 32]));
    let space = Workspace::new();
    capture.replay(&space, &["--precision", "bf16", "--intermediates"]).succeeds();
    let mut output = space.open("out");
    let db2 = output.read_shaped::<f32>("db2", &[2, 16]).unwrap();
    let (dy, prob) = (output.read::<bf16>("dy").unwrap(), output.read::<f32>("prob").unwrap());
    let expected: f32 = (0..7).map(|row| prob[row] * dy[row * 16].to_f32()).sum();
    assert!((db2[0] - expected).abs() < 1e-5, "{} {expected}", db2[0]);
    assert_eq!(output.info("db1").unwrap().shape, [2, 16]);
}

#[test]
fn bad_options_are_refused_in_one_line() {
    let space = Workspace::new();
    Capture::new().write(&space, "in");
    let refused = |options: &[&str], parts: &[&str]| {
        space.moe4(&[&["replay", "in", "-o", "out"], options].concat()).fails_with(parts);
        assert_eq!(space.files(), ["in"]);
    };
    refused(&[], &["--activation"]);
    refused(&["--activation", "gelu"], &["unknown activation 'gelu'", "swiglu"]);
    refused(&["--activation", "tanh_srelu"], &["needs parameter s"]);
    refused(&["--activation", "tanh_srelu:s=-1"], &["parameter s"]);
    refused(&["--activation", "situ_glu:beta3=1"], &["beta3"]);
    refused(&["--activation", "swiglu"], &["'w1'", "[2, 32, 16]", "N1 = 2F for swiglu"]);
    let srelu = |options: &[&'static str]| [&["--activation", "srelu"], options].concat();
    refused(&srelu(&["--glu-layout", "thirds"]), &["'thirds'", "halves"]);
    refused(&srelu(&["--threads", "0"]), &["--threads"]);
    refused(&srelu(&["--threads", "2", "--backend", "reference"]), &["--threads", "--backend cpu"]);
    refused(&srelu(&["--rht", "12345678"]), &["16-bit sign mask"]);
    refused(&srelu(&["--rht", "off", "--precision", "bf16"]), &["--rht", "nvfp4"]);
    refused(&srelu(&["--seed", "1", "--gradient-rounding", "nearest"]), &["--seed"]);
    refused(&srelu(&["--recompute", "maybe"]), &["'maybe'", "on, off"]);
    refused(&srelu(&["--backend", "cuda"]), &["'cuda'", "cpu, reference"]);
    refused(&srelu(&["--compare", "absent"]), &["cannot open absent"]);
}

#[test]
fn the_first_wrong_tensor_is_named() {
    let space = Workspace::new();
    let capture = Capture::new();
    capture.replay(&space, &["--intermediates", "--gradient-rounding", "nearest"]).succeeds();
    fs::rename(space.path("out"), space.path("good")).unwrap();
    let compare = |expected: &str| {
        space.moe4(&[
            "replay",
            "in",
            "-o",
            "out",
            "--activation",
            "srelu",
            "--gradient-rounding",
            "nearest",
            "--compare",
            expected,
        ])
    };
    assert!(compare("good").succeeds().stdout.ends_with(&format!("{SOUND}\n")));

    // What a job would have captured had its FC1 product been off in one element, and its dc too.
    let spoil = |names: &[(&str, usize)]| {
        let mut file = space.open("good");
        let mut spoiled = Capture { tensors: Vec::new() };
        for &(name, index) in names {
            let shape = file.info(name).unwrap().shape.clone();
            let mut values = file.read::<bf16>(name).unwrap();
            values[index] = bf16::from_f32(values[index].to_f32() + 1.0);
            spoiled.set(name, &shape, Values::Bf16(values));
        }
        spoiled.write(&space, "spoiled");
        compare("spoiled")
    };
    // The run fails, with its table printed and its output written.
    let fails = |names: &[(&str, usize)], parts: &[&str]| {
        fs::remove_file(space.path("out")).unwrap();
        let report = spoil(names).fails_with(parts).stdout;
        assert_eq!(space.open("out").names().len(), 5);
        report
    };
    let report = fails(
        &[("dc", 5), ("c", 33)],
        &["2 of 2 tensors", "spoiled", "first to go wrong: c, where 1 of 304 elements differ"],
    );
    assert!(report.contains("[2, 1]"), "{report}");
    assert!(report.ends_with("first to go wrong: c\n"), "{report}");
    let report = fails(&[("dx", 319 - 16), ("dc", 5)], &["first to go wrong: dc, "]);
    assert!(report.ends_with("first to go wrong: dc\n"), "{report}");
    // Row 19 belongs to no expert.
    assert!(spoil(&[("dx", 19 * 16)]).succeeds().stdout.ends_with(&format!("{SOUND}\n")));
}

#[test]
fn an_expected_file_that_does_not_fit_is_refused() {
    let space = Workspace::new();
    Capture::new().write(&space, "in");
    let refused = |parts: &[&str]| {
        let run =
            space.moe4(&["replay", "in", "-o", "out", "--activation", "srelu", "--compare", "expected"]);
        run.fails_with(parts);
        assert_eq!(space.files(), ["expected", "in"]);
    };
    let ones = [bf16::ONE; 16];
    space.write("expected", "z", Dtype::BF16, &[16], &ones);
    refused(&["no tensor to compare with; it has: z"]);
    space.write("expected", "y", Dtype::BF16, &[1, 16], &ones);
    refused(&["'y'", "expected shape [20, 16], got [1, 16]"]);
    space.write("expected", "y", Dtype::I64, &[20, 16], &[1_i64; 320]);
    refused(&["'y'", "expected dtype BF16, got I64"]);
}

#[test]
fn files_that_cannot_be_read_or_written_are_refused() {
    let space = Workspace::new();
    Capture::new().write(&space, "in");
    let refused = |input: &str, output: &str, parts: &[&str]| {
        let before = space.files();
        space.moe4(&["replay", input, "-o", output, "--activation", "srelu"]).fails_with(parts);
        assert_eq!(space.files(), before);
    };
    refused("in", "in", &["same file"]);
    refused("in", "no/out", &["cannot write no/out"]);
    refused("absent", "out", &["cannot open absent"]);
    let bytes = fs::read(space.path("in")).unwrap();
    fs::write(space.path("cut"), &bytes[..bytes.len() / 2]).unwrap();
    refused("cut", "out", &["truncated"]);
}

#[cfg(unix)]
#[test]
fn a_disk_that_fills_up_leaves_no_file() {
    let space = Workspace::new();
    let input = golden(&format!("{}.safetensors", GOLDEN[2].0));
    let script = "trap '' XFSZ; ulimit -f 16; exec \"$0\" replay \"$1\" -o out --activation srelu";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, env!("CARGO_BIN_EXE_moe4")]).arg(input).current_dir(space.path(""));
    Run::new(&mut shell).fails_with(&["cannot write out"]);
    assert!(space.files().is_empty());
}
