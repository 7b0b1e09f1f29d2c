//! `moe4 quantize`: golden bytes, what is printed, and every kind of bad input.

use std::fs;
use std::process::Stdio;

use crate::common::{Run, Workspace, golden};
use half::{bf16, f16};
use moe4::checkpoint::{Dtype, TensorFile, TensorSpec, TensorWriter};

/// Files of the golden data whose names start with `prefix`, by name.
fn golden_files(prefix: &str) -> Vec<String> {
    let entries = fs::read_dir(golden("")).expect("golden data");
    let names = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
    let mut names: Vec<_> = names.filter(|name| name.starts_with(prefix)).collect();
    names.sort();
    assert!(!names.is_empty(), "no golden file {prefix}*");
    names
}

/// Writes tensor `x` of `source`, or one slice of it along a leading dimension, as a file of its own.
fn extract_x(space: &Workspace, source: &mut TensorFile, slice: Option<usize>) {
    let info = source.info("x").unwrap().clone();
    let shape = if slice.is_some() { &info.shape[1..] } else { &info.shape[..] };
    let elements: usize = shape.iter().product();
    let start = slice.unwrap_or(0) * elements;
    let range = start..start + elements;
    match info.dtype {
        Dtype::BF16 => {
            let x = source.read::<bf16>("x").unwrap();
            space.write("in.safetensors", "x", info.dtype, shape, &x[range]);
        }
        _ => {
            let x = source.read::<f32>("x").unwrap();
            space.write("in.safetensors", "x", info.dtype, shape, &x[range]);
        }
    }
}

/// Compares what was written under `prefix` with slice `slice` of golden codes, scales and amax of these names.
///
/// The Python reference encodes -0.0 as code 0 and moe4, as the hardware does, as code 8: they count as equal
/// where the reference has no emulation of the hardware, which is after an RHT.
fn assert_golden(
    output: &mut TensorFile,
    prefix: &str,
    expected: &mut TensorFile,
    names: [&str; 3],
    slice: usize,
) {
    let [codes, scales, amax] = names;
    let file = expected.path().display().to_string();
    let rht = file.contains("rht") && codes.ends_with("_col");
    let plain_zero = |code: u8| if rht && code == 8 { 0 } else { code };
    let mut same = |ours: &str, theirs: &str, canonical: &dyn Fn(u8) -> u8| {
        let ours = output.read::<u8>(&format!("{prefix}.{ours}")).unwrap();
        let theirs = &expected.read::<u8>(theirs).unwrap()[slice * ours.len()..];
        let differs = |at: &usize| canonical(ours[*at]) != canonical(theirs[*at]);
        let first = (0..ours.len()).find(differs);
        assert_eq!(first, None, "{file}: {prefix} differs from {codes}/{scales}");
    };
    same("codes", codes, &|byte| plain_zero(byte >> 4) << 4 | plain_zero(byte & 15));
    same("scales", scales, &|byte| byte);
    let ours = output.read::<f32>(&format!("{prefix}.amax")).unwrap();
    let theirs = expected.read::<f32>(amax).unwrap();
    assert_eq!(ours[0].to_bits(), theirs[slice].to_bits(), "{file}: amax");
    let dequant = if codes.ends_with("_col") { "dequant_col" } else { "dequant" };
    let (ours, theirs) = (format!("{prefix}.dequant"), dequant);
    if output.contains(&ours) && expected.contains(theirs) {
        let (ours, theirs) = (output.read::<f32>(&ours).unwrap(), expected.read::<f32>(theirs).unwrap());
        assert!(ours == theirs, "{file}: {dequant}");
    }
}

/// The codes that the CUDA kernels give, where they differ from the Python reference (-0.0 keeps its sign).
fn codes_name(expected: &TensorFile) -> &'static str {
    if expected.contains("fp4_kernel_emul") { "fp4_kernel_emul" } else { "fp4" }
}

fn check_golden(prefix: &str, options: &[&str], columnwise: bool) {
    for file in golden_files(prefix) {
        let space = Workspace::new();
        let mut expected = TensorFile::open(golden(&file)).unwrap();
        extract_x(&space, &mut expected, None);
        let mut arguments = vec!["quantize", "in.safetensors", "-o", "out.safetensors", "--dequant"];
        arguments.extend(options);
        space.moe4(&arguments).succeeds();
        let names = if columnwise {
            ["fp4_col", "scale_col", "amax_col"]
        } else {
            [codes_name(&expected), "scale", "amax"]
        };
        assert_golden(&mut space.open("out.safetensors"), "x", &mut expected, names, 0);
    }
}

#[test]
fn rowwise_golden_bytes() {
    for prefix in
        ["q1d_row__", "q1d_row_f32__", "q1d_rowcol__", "q1d_rowcol_f32__", "q1d_rht__", "q1d_rht_nosign__"]
    {
        check_golden(prefix, &[], false);
    }
}

#[test]
fn columnwise_golden_bytes() {
    check_golden("q1d_rowcol__", &["--axis", "columnwise", "--rht", "off"], true);
    check_golden("q1d_rowcol_f32__", &["--axis", "columnwise", "--rht", "off"], true);
    check_golden("q1d_rht__", &["--axis", "columnwise"], true);
    check_golden("q1d_rht_nosign__", &["--axis", "columnwise", "--rht", "0"], true);
}

#[test]
fn tile_golden_bytes() {
    for prefix in ["q2d__", "q2d_f32__"] {
        check_golden(prefix, &["--tile", "16x16"], false);
        check_golden(prefix, &["--tile", "16x16", "--axis", "columnwise"], true);
    }
}

#[test]
fn slices_golden_bytes() {
    for file in [golden_files("q1d_sweep__"), golden_files("q1d_ordertie__")].concat() {
        let mut expected = TensorFile::open(golden(&file)).unwrap();
        let slices = expected.info("x").unwrap().shape[0];
        // A process for each slice: every third one.
        for slice in (0..slices).step_by(3) {
            let space = Workspace::new();
            extract_x(&space, &mut expected, Some(slice));
            space.moe4(&["quantize", "in.safetensors", "-o", "out.safetensors"]).succeeds();
            let names = [codes_name(&expected), "scale", "amax"];
            assert_golden(&mut space.open("out.safetensors"), "x", &mut expected, names, slice);
        }
    }
}

#[test]
fn group_golden_bytes() {
    let file = &golden_files("group__rht__")[0];
    let mut expected = TensorFile::open(golden(file)).unwrap();
    let splits = expected.read::<i64>("splits").unwrap();
    let list = splits.iter().map(i64::to_string).collect::<Vec<_>>().join(",");
    for (axis, suffix) in [("rowwise", ""), ("columnwise", "_col")] {
        let space = Workspace::new();
        extract_x(&space, &mut expected, None);
        let arguments =
            ["quantize", "in.safetensors", "-o", "out.safetensors", "--splits", &list, "--axis", axis];
        space.moe4(&arguments).succeeds();
        let mut output = space.open("out.safetensors");
        for (expert, rows) in splits.iter().enumerate() {
            let prefix = format!("x.{expert}");
            if *rows == 0 {
                assert_eq!(output.read::<f32>(&format!("{prefix}.amax")).unwrap(), [0.0]);
                assert!(output.read::<u8>(&format!("{prefix}.codes")).unwrap().is_empty());
                continue;
            }
            let names = ["fp4", "scale", "amax"].map(|name| format!("g{expert}_{name}{suffix}"));
            assert_golden(&mut output, &prefix, &mut expected, [&names[0], &names[1], &names[2]], 0);
        }
    }
}

/// `[rows, cols]` of values between -2 and 2 that fill the block scales unevenly.
fn ramp(rows: usize, cols: usize) -> Vec<bf16> {
    let value = |index: usize| ((index * 37 % 101) as f32 / 25.0 - 2.0) * (1.0 + (index / 64 % 3) as f32);
    (0..rows * cols).map(|index| bf16::from_f32(value(index))).collect()
}

#[test]
fn ragged_tokens_are_padded_with_zeros_columnwise() {
    let space = Workspace::new();
    let x = ramp(37, 5);
    space.write("ragged.safetensors", "x", Dtype::BF16, &[37, 5], &x);
    let padded = [&x[..], &[bf16::ZERO; 11 * 5]].concat();
    space.write("padded.safetensors", "x", Dtype::BF16, &[48, 5], &padded);
    for name in ["ragged", "padded"] {
        let (input, output) = (format!("{name}.safetensors"), format!("{name}.out"));
        space.moe4(&["quantize", &input, "-o", &output, "--axis", "columnwise", "--dequant"]).succeeds();
    }
    assert_eq!(space.open("ragged.out").info("x.codes").unwrap().shape, [5, 24]);
    assert_eq!(fs::read(space.path("ragged.out")).unwrap(), fs::read(space.path("padded.out")).unwrap());
}

#[test]
fn f16_is_quantized_from_its_exact_values() {
    let space = Workspace::new();
    let half: Vec<f16> = (0..64).map(|index| f16::from_f32(index as f32 / 7.0 - 4.0)).collect();
    let single: Vec<f32> = half.iter().map(|value| value.to_f32()).collect();
    space.write("half.safetensors", "x", Dtype::F16, &[4, 16], &half);
    space.write("single.safetensors", "x", Dtype::F32, &[4, 16], &single);
    for name in ["half", "single"] {
        let (input, output) = (format!("{name}.safetensors"), format!("{name}.out"));
        space.moe4(&["quantize", &input, "-o", &output]).succeeds();
    }
    assert_eq!(fs::read(space.path("half.out")).unwrap(), fs::read(space.path("single.out")).unwrap());
}

#[test]
fn stochastic_rounding_follows_seed_name_and_axis() {
    let space = Workspace::new();
    let x = ramp(32, 32);
    space.write("x.safetensors", "x", Dtype::BF16, &[32, 32], &x);
    space.write("y.safetensors", "y", Dtype::BF16, &[32, 32], &x);
    let codes = |file: &str, name: &str, seed: &str| {
        let input = format!("{file}.safetensors");
        let arguments = ["quantize", &input, "-o", "out", "--rounding", "stochastic", "--seed", seed];
        space.moe4(&arguments).succeeds();
        space.open("out").read::<u8>(&format!("{name}.codes")).unwrap()
    };
    let first = codes("x", "x", "1");
    assert_eq!(first, codes("x", "x", "1"));
    assert_ne!(first, codes("x", "x", "2"));
    assert_ne!(first, codes("y", "y", "1"));
    space.moe4(&["quantize", "x.safetensors", "-o", "out"]).succeeds();
    assert_ne!(first, space.open("out").read::<u8>("x.codes").unwrap());
}

#[test]
fn the_table_tells_shape_error_and_what_was_left_out() {
    let space = Workspace::new();
    space.write("x.safetensors", "x", Dtype::BF16, &[20, 16], &ramp(20, 16));
    let run = space.moe4(&["quantize", "x.safetensors", "-o", "out", "--splits", "12,4"]).succeeds();
    for part in ["x.0", "[12, 16]", "x.1", "SQNR dB"] {
        assert!(run.stdout.contains(part), "expected '{part}' in: {}", run.stdout);
    }
    let [note] = &run.notes[..] else { panic!("expected one note, got {:?}", run.notes) };
    assert!(note.contains("sum to 16;") && note.ends_with("left out: rows 16..20 of x"), "{note}");
    let run = space.moe4(&["quantize", "x.safetensors", "-o", "whole", "--splits", "12,8"]).succeeds();
    assert!(run.notes.is_empty(), "{:?}", run.notes);
    let run = space.moe4(&["quantize", "out", "-o", "again"]);
    run.fails_with(&[
        "no 2-D tensor of dtype F32, F16 or BF16",
        "it has: 2 of F32 1-D, 2 of F8_E4M3 2-D, 2 of U8 2-D",
    ]);
}

#[test]
fn control_characters_in_names_reach_no_terminal() {
    let space = Workspace::new();
    let (first, second) = ("a\n\u{1b}[2Jb", "s\t\u{9b}");
    let specs = [TensorSpec::new(first, Dtype::BF16, &[16, 16]), TensorSpec::new(second, Dtype::BF16, &[16])];
    let mut writer = TensorWriter::create(space.path("in"), &specs, &[]).unwrap();
    writer.write(first, &ramp(16, 16)).unwrap();
    writer.write(second, &ramp(1, 16)).unwrap();
    writer.finish().unwrap();
    let stdout = space.moe4(&["quantize", "in", "-o", "out"]).succeeds().stdout;
    assert!(stdout.contains(r"a\n\u{1b}[2Jb ") && stdout.contains(r"s\t\u{9b}"), "{stdout}");
    assert!(!stdout.replace('\n', "").contains(char::is_control), "{stdout:?}");
    // In the output the name is what it was.
    assert!(space.open("out").contains(&format!("{first}.codes")));
    let run = space.moe4(&["replay", "in", "-o", "out", "--activation", "srelu"]);
    run.fails_with(&["has no tensor 'x'", r"a\n\u{1b}[2Jb", r"s\t\u{9b}"]);
}

/// Runs that must fail, leave the folder as it was, and say these parts.
fn refused(space: &Workspace, arguments: &[&str], parts: &[&str]) {
    let before = space.files();
    space.moe4(arguments).fails_with(parts);
    assert_eq!(space.files(), before, "{arguments:?} left something behind");
}

#[test]
fn bad_arguments_are_refused_in_one_line() {
    let space = Workspace::new();
    space.write("x.safetensors", "x", Dtype::BF16, &[32, 32], &ramp(32, 32));
    let with = |options: &[&'static str]| [&["quantize", "x.safetensors", "-o", "out"], options].concat();
    refused(&space, &[], &["no command given", "quantize"]);
    refused(&space, &["quantise"], &["unrecognized subcommand 'quantise'"]);
    refused(&space, &["quantize"], &["required", "--output"]);
    refused(&space, &with(&["--bogus"]), &["unexpected argument '--bogus'"]);
    refused(&space, &with(&["--tile", "4x4"]), &["'4x4'", "1x16, 16x16"]);
    refused(&space, &with(&["--rht", "0x1D7E8"]), &["16-bit sign mask", "'off'"]);
    refused(&space, &with(&["--splits", "16,-1"]), &["'-1'"]);
    refused(&space, &with(&["--splits", "16,x"]), &["'x'"]);
    refused(&space, &with(&["--splits", "16,17"]), &["tensor 'x'", "at most 32", "got 33"]);
    refused(
        &space,
        &with(&["--splits", "8,24", "--tile", "16x16"]),
        &["'x.0'", "dim 0 is 8", "multiple of 16"],
    );
    refused(&space, &with(&["--tile", "16x16", "--rht", "0xD7E8"]), &["--rht", "--tile 16x16"]);
    refused(&space, &with(&["--tile", "16x16", "--rounding", "stochastic"]), &["stochastic"]);
    refused(&space, &with(&["--seed", "3"]), &["--seed", "stochastic"]);
}

#[test]
fn bad_tensors_are_refused_in_one_line() {
    let space = Workspace::new();
    space.write("odd.safetensors", "a\nb", Dtype::BF16, &[16, 17], &ramp(16, 17));
    refused(&space, &["quantize", "odd.safetensors", "-o", "out"], &[r"'a\nb' [16, 17]", "dim 1 is 17"]);
    space.write("f32.safetensors", "w", Dtype::F32, &[16, 16], &[1.0_f32; 256]);
    let columnwise = ["quantize", "f32.safetensors", "-o", "out", "--axis", "columnwise"];
    refused(&space, &columnwise, &["'w' is F32", "BF16 only", "--rht off"]);
    for (value, shown) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf")] {
        let mut x = vec![1.0_f32; 256];
        x[35] = value;
        space.write("nan.safetensors", "w", Dtype::F32, &[16, 16], &x);
        let position = format!("element [2, 3] is {shown}");
        refused(&space, &["quantize", "nan.safetensors", "-o", "out"], &["tensor 'w'", &position]);
        let splits = ["quantize", "nan.safetensors", "-o", "out", "--splits", "1,15"];
        refused(&space, &splits, &["tensor 'w'", &position]);
    }
    space.write("huge.safetensors", "w", Dtype::BF16, &[16, 16], &[bf16::MAX; 256]);
    let columnwise = ["quantize", "huge.safetensors", "-o", "out", "--axis", "columnwise", "--rht", "0"];
    refused(&space, &columnwise, &["exceeds the range of BF16"]);
    space.write("empty.safetensors", "splits", Dtype::I64, &[1], &[1_i64]);
    refused(
        &space,
        &["quantize", "empty.safetensors", "-o", "out"],
        &["no 2-D tensor", "it has: 1 of I64 1-D"],
    );
    TensorWriter::create(space.path("none.safetensors"), &[], &[]).unwrap().finish().unwrap();
    refused(&space, &["quantize", "none.safetensors", "-o", "out"], &["no 2-D tensor", "it has: none"]);
}

#[test]
fn bad_files_are_refused_in_one_line() {
    let space = Workspace::new();
    space.write("x.safetensors", "x", Dtype::BF16, &[16, 16], &ramp(16, 16));
    let bytes = fs::read(space.path("x.safetensors")).unwrap();
    fs::write(space.path("cut.safetensors"), &bytes[..bytes.len() - 1]).unwrap();
    fs::write(space.path("text.safetensors"), "not a tensor in sight").unwrap();
    fs::create_dir(space.path("folder")).unwrap();
    refused(&space, &["quantize", "absent", "-o", "out"], &["cannot open absent"]);
    refused(&space, &["quantize", "folder", "-o", "out"], &["folder", "not"]);
    refused(&space, &["quantize", "cut.safetensors", "-o", "out"], &["truncated"]);
    refused(&space, &["quantize", "text.safetensors", "-o", "out"], &["not a safetensors file"]);
    refused(&space, &["quantize", "x.safetensors", "-o", "no/out"], &["cannot write no/out"]);
    refused(&space, &["quantize", "x.safetensors", "-o", "folder"], &["not a regular file"]);
    refused(&space, &["quantize", "x.safetensors", "-o", "./x.safetensors"], &["same file"]);
    fs::hard_link(space.path("x.safetensors"), space.path("y.safetensors")).unwrap();
    refused(&space, &["quantize", "x.safetensors", "-o", "y.safetensors"], &["same file"]);
    assert_eq!(fs::read(space.path("x.safetensors")).unwrap(), bytes);
}

/// A limit on file size stands in for a full disk: writing past it fails with an error of the system.
#[cfg(unix)]
#[test]
fn a_disk_that_fills_up_leaves_no_file() {
    let space = Workspace::new();
    space.write("x.safetensors", "x", Dtype::BF16, &[256, 256], &ramp(256, 256));
    fs::write(space.path("out"), "what was there before").unwrap();
    let script = "trap '' XFSZ; ulimit -f 16; exec \"$0\" quantize x.safetensors -o out --dequant";
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", script, env!("CARGO_BIN_EXE_moe4")]).current_dir(space.path(""));
    Run::new(&mut shell).fails_with(&["cannot write out"]);
    assert_eq!(space.files(), ["out", "x.safetensors"]);
    assert_eq!(fs::read(space.path("out")).unwrap(), b"what was there before");
}

#[cfg(unix)]
#[test]
fn ctrl_c_leaves_no_file() {
    let space = Workspace::new();
    let x = vec![bf16::ONE; 512 * 512];
    let names: Vec<String> = (0..200).map(|index| format!("w{index}")).collect();
    let specs: Vec<_> = names.iter().map(|name| TensorSpec::new(name, Dtype::BF16, &[512, 512])).collect();
    let mut writer = TensorWriter::create(space.path("in"), &specs, &[]).unwrap();
    names.iter().for_each(|name| writer.write(name, &x).unwrap());
    writer.finish().unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_moe4"));
    command.args(["quantize", "in", "-o", "out"]).current_dir(space.path("")).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // As soon as there is a temporary file.
    while space.files().len() < 2 && child.try_wait().unwrap().is_none() {}
    let killed = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(killed.unwrap().success());
    Run::of(child.wait_with_output().unwrap()).fails_with(&["interrupted at tensor", "nothing was written"]);
    assert_eq!(space.files(), ["in"]);
}

#[test]
fn help_and_version_succeed() {
    let space = Workspace::new();
    assert!(space.moe4(&["--version"]).succeeds().stdout.starts_with("moe4 "));
    assert!(space.moe4(&["quantize", "--help"]).succeeds().stdout.contains("--splits"));
}

#[cfg(unix)]
#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let space = Workspace::new();
    let mut shell = std::process::Command::new("bash");
    let script = "set -o pipefail; \"$0\" quantize --help | true";
    shell.args(["-c", script, env!("CARGO_BIN_EXE_moe4")]).current_dir(space.path(""));
    Run::new(&mut shell).succeeds();
}
