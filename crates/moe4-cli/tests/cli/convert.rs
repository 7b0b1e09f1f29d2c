//! `moe4 convert`: a model's experts there and back, and what goes wrong in one line.

use half::bf16;
use moe4::checkpoint::{Dtype, TensorSpec, TensorWriter};

use crate::common::Workspace;

const NAMES: [(&str, [usize; 2]); 3] =
    [("gate_proj", [16, 32]), ("up_proj", [16, 32]), ("down_proj", [32, 16])];

/// Two experts and a norm in `in.safetensors`; without the tensor called `missing`.
fn write_model(space: &Workspace, missing: &str) {
    let mut specs = vec![TensorSpec::new("norm", Dtype::BF16, &[32])];
    for expert in 0..2 {
        let name = |name: &str| format!("layers.0.mlp.experts.{expert}.{name}.weight");
        specs.extend(NAMES.iter().map(|(n, shape)| TensorSpec::new(name(n), Dtype::BF16, shape)));
    }
    specs.retain(|spec| spec.name != missing);
    let mut writer =
        TensorWriter::create(space.path("in.safetensors"), &specs, &[]).expect("a writable file");
    for (at, spec) in specs.iter().enumerate() {
        let len: usize = spec.shape.iter().product();
        let data: Vec<_> = (0..len).map(|i| bf16::from_f32(((i * (at + 3)) as f32).sin())).collect();
        writer.write(&spec.name, &data).expect("a writable file");
    }
    writer.finish().expect("a writable file");
}

#[test]
fn there_and_back() {
    let space = Workspace::new();
    write_model(&space, "");
    let run = space.moe4(&["convert", "in.safetensors", "nvfp4.safetensors", "--to", "compressed-tensors"]);
    assert_eq!(
        run.succeeds().stdout,
        "1 layers of experts: 6 weights as compressed-tensors; 1 tensors copied\n"
    );
    let file = space.open("nvfp4.safetensors");
    let name = "layers.0.mlp.experts.1.down_proj.weight_packed";
    assert_eq!(
        (file.info(name).unwrap().dtype, &file.info(name).unwrap().shape[..]),
        (Dtype::U8, &[32, 8][..])
    );
    space.moe4(&["convert", "nvfp4.safetensors", "out.safetensors", "--to", "bf16"]).succeeds();
    let mut names = [space.open("in.safetensors"), space.open("out.safetensors")].map(|f| f.names().to_vec());
    names.iter_mut().for_each(|names| names.sort());
    assert_eq!(names[0], names[1]);
    let norms = ["in.safetensors", "out.safetensors"].map(|f| space.open(f).read::<bf16>("norm").unwrap());
    assert_eq!(norms[0], norms[1]);
}

#[test]
fn faults_are_told_in_one_line() {
    let space = Workspace::new();
    write_model(&space, "layers.0.mlp.experts.1.up_proj.weight");
    let fails = |arguments: &[&str], parts: &[&str]| {
        space.moe4(&[&["convert"], arguments].concat()).fails_with(parts);
    };
    let (input, out) = ("in.safetensors", "out.safetensors");
    fails(
        &[input, out, "--to", "modelopt"],
        &["'layers.0.mlp.experts.1.up_proj.weight'", "the tensor is missing"],
    );
    fails(&[input, out], &["--to"]);
    fails(&[input, input, "--to", "bf16"], &["error"]);
    fails(&["none", out, "--to", "bf16"], &["none"]);
    assert_eq!(space.files(), ["in.safetensors"]);
}
