//! The README's command lines, run as they stand there.

use std::fs;
use std::path::Path;

use half::bf16;
use moe4::checkpoint::{Dtype, TensorSpec, TensorWriter};

use crate::common::Workspace;

/// Lines of the README's `sh` blocks, without comments.
fn shell_lines() -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let text = fs::read_to_string(path).expect("the README");
    let blocks = text.split("```").skip(1).step_by(2).filter_map(|block| block.strip_prefix("sh\n"));
    let lines = blocks.flat_map(str::lines).map(|line| line.split(" #").next().unwrap_or(line).trim());
    lines.filter(|line| !line.is_empty()).map(String::from).collect()
}

/// The files that the README's examples read.
fn make_examples(space: &Workspace) {
    let wave = |n: usize| (0..n).map(|index| bf16::from_f32((index as f32 * 0.3).sin())).collect::<Vec<_>>();
    space.write("weights.safetensors", "w", Dtype::BF16, &[32, 32], &wave(1024));
    space.write("acts.safetensors", "x", Dtype::BF16, &[8, 32], &wave(256));
    let experts = [("gate_proj", [16, 32]), ("up_proj", [16, 32]), ("down_proj", [32, 16])];
    let named = |(name, shape): &(&str, [usize; 2])| {
        TensorSpec::new(format!("layers.0.mlp.experts.0.{name}.weight"), Dtype::BF16, shape)
    };
    let specs: Vec<_> = experts.iter().map(named).collect();
    let mut writer =
        TensorWriter::create(space.path("model.safetensors"), &specs, &[]).expect("a writable file");
    specs.iter().for_each(|spec| writer.write(&spec.name, &wave(512)).expect("a writable file"));
    writer.finish().expect("a writable file");
    let bf16s = [("x", &[8, 32][..]), ("w1", &[3, 32, 32]), ("w2", &[3, 32, 16]), ("dy", &[8, 32])];
    let mut specs: Vec<_> =
        bf16s.iter().map(|(name, shape)| TensorSpec::new(*name, Dtype::BF16, shape)).collect();
    specs.push(TensorSpec::new("prob", Dtype::F32, &[8]));
    specs.push(TensorSpec::new("splits", Dtype::I64, &[3]));
    let mut writer =
        TensorWriter::create(space.path("step.safetensors"), &specs, &[]).expect("a writable file");
    for (name, shape) in bf16s {
        writer.write(name, &wave(shape.iter().product())).expect("a writable file");
    }
    writer.write("prob", &[0.5_f32; 8]).expect("a writable file");
    writer.write("splits", &[5_i64, 0, 3]).expect("a writable file");
    writer.finish().expect("a writable file");
}

#[test]
fn every_moe4_line_runs() {
    let space = Workspace::new();
    make_examples(&space);
    let lines = shell_lines();
    let commands: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix("moe4 ")).collect();
    assert!(commands.len() >= 3, "{lines:?}");
    for command in commands {
        space.moe4(&command.split_whitespace().collect::<Vec<_>>()).succeeds();
    }
}

#[test]
fn every_cargo_line_names_a_command_that_exists() {
    let space = Workspace::new();
    let tasks = include_str!("../../../../xtask/src/main.rs");
    for line in shell_lines().iter().filter(|line| line.starts_with("cargo ")) {
        if let Some(arguments) = line.strip_prefix("cargo run --release -p moe4-cli -- ") {
            let command = arguments.split_whitespace().next().expect("a command");
            space.moe4(&[command, "--help"]).succeeds();
        } else {
            let task = line.strip_prefix("cargo xtask ").unwrap_or_else(|| panic!("unexpected: {line}"));
            assert!(tasks.contains(&format!("[\"{task}\"")), "no task '{task}'");
        }
    }
}
