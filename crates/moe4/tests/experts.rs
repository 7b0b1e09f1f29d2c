//! Expert weights of other programs: found complete or refused by name, converted without loss where formats allow it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use moe4::checkpoint::{
    CheckpointError, Dtype, ExpertFormat, ExpertLayer, ModelFiles, Projection, TensorFile, TensorSpec,
    TensorWriter, convert,
};
use moe4::kernels::reference::Reference;
use moe4::mlp::{Activation, GroupedMlp, GroupedMlpConfig, WeightSource};
use moe4::numerics::philox::philox4x32;
use moe4::tensor::Tile;

const EXPERTS: usize = 3;
const HIDDEN: usize = 32;
const FFN: usize = 48;

fn values(stream: u64, len: usize) -> Vec<bf16> {
    let unit = |i: usize| philox4x32(9, stream, i as u64)[0] as f32 / u32::MAX as f32 - 0.5;
    (0..len).map(|i| bf16::from_f32(unit(i))).collect()
}

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn bytes<T: bytemuck::NoUninit>(values: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

fn write(path: &Path, tensors: &Tensors) {
    let specs: Vec<_> =
        tensors.iter().map(|(name, (dtype, shape, _))| TensorSpec::new(name, *dtype, shape)).collect();
    let mut writer = TensorWriter::create(path, &specs, &[("format", "pt".into())]).unwrap();
    for (name, (_, _, data)) in tensors {
        writer.write_bytes(name, data).unwrap();
    }
    writer.finish().unwrap();
}

fn read(path: &Path) -> Tensors {
    let mut file = TensorFile::open(path).unwrap();
    let names = file.names().to_vec();
    let one = |name: String| {
        let info = file.info(&name).unwrap().clone();
        let data = file.read_bytes(&name).unwrap();
        (name, (info.dtype, info.shape, data))
    };
    names.into_iter().map(one).collect()
}

/// Per-expert BF16 weights of one layer.
fn layer(prefix: &str, [gate, up, down]: [&str; 3]) -> Tensors {
    let mut all = Tensors::new();
    for e in 0..EXPERTS {
        for (at, (name, shape)) in
            [(gate, [FFN, HIDDEN]), (up, [FFN, HIDDEN]), (down, [HIDDEN, FFN])].into_iter().enumerate()
        {
            let data = values((10 * e + at) as u64, HIDDEN * FFN);
            all.insert(
                format!("{prefix}.experts.{e}.{name}.weight"),
                (Dtype::BF16, shape.to_vec(), bytes(&data)),
            );
        }
    }
    all.insert(format!("{prefix}.gate.weight"), (Dtype::BF16, vec![EXPERTS, HIDDEN], bytes(&values(99, 96))));
    all
}

const MIXTRAL: [&str; 3] = ["w1", "w3", "w2"];
const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// A folder with two shards, the second layer's last expert in the first one, an index and a configuration.
fn sharded(folder: &Path) -> PathBuf {
    let model = folder.join("model");
    fs::create_dir(&model).unwrap();
    let mut first = layer("model.layers.0.mlp", MIXTRAL);
    let mut second = layer("model.layers.1.mlp", MIXTRAL);
    let key = "model.layers.1.mlp.experts.2.w3.weight";
    first.insert(key.into(), second.remove(key).unwrap());
    let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let mut map = BTreeMap::new();
    for (name, tensors) in names.into_iter().zip([&first, &second]) {
        write(&model.join(name), tensors);
        map.extend(tensors.keys().map(|tensor| (tensor.clone(), name)));
    }
    let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(model.join("model.safetensors.index.json"), index.to_string()).unwrap();
    fs::write(model.join("config.json"), "{}").unwrap();
    model
}

fn to(input: &Path, output: &Path, format: ExpertFormat, tile: Tile) -> Result<(), CheckpointError> {
    let mut files = ModelFiles::open(input)?;
    let mut last = (0, 1);
    let done = convert(&mut files, output, format, tile, &mut |p| {
        assert!(p.done < p.total && p.done >= last.0, "{p:?}");
        last = (p.done, p.total);
        true
    })?;
    assert!(done.layers > 0);
    Ok(())
}

fn all(folder: &Path) -> Tensors {
    let files = ModelFiles::open(folder).unwrap();
    files.files().iter().flat_map(|file| read(file.path())).collect()
}

fn f32_of(tensors: &Tensors, name: &str) -> f32 {
    f32::from_le_bytes(tensors[name].2[..].try_into().unwrap())
}

#[test]
fn a_sharded_model_there_and_back() {
    let root = tempfile::tempdir().unwrap();
    let input = sharded(root.path());
    let place = |name: &str| root.path().join(name);
    to(&input, &place("modelopt"), ExpertFormat::ModelOpt, Tile::Row16).unwrap();
    to(&place("modelopt"), &place("ct"), ExpertFormat::CompressedTensors, Tile::Row16).unwrap();
    to(&place("ct"), &place("again"), ExpertFormat::ModelOpt, Tile::Row16).unwrap();
    to(&place("ct"), &place("bf16"), ExpertFormat::Bf16, Tile::Row16).unwrap();

    let (from, modelopt, ct) = (all(&input), all(&place("modelopt")), all(&place("ct")));
    assert_eq!(modelopt, all(&place("again")), "nothing is lost between the two formats");
    let e = "model.layers.1.mlp.experts.2";
    let shape = |tensors: &Tensors, name: &str| (tensors[name].0, tensors[name].1.clone());
    assert_eq!(shape(&modelopt, &format!("{e}.w3.weight")), (Dtype::U8, vec![FFN, HIDDEN / 2]));
    assert_eq!(shape(&modelopt, &format!("{e}.w3.weight_scale")), (Dtype::F8_E4M3, vec![FFN, HIDDEN / 16]));
    assert_eq!(shape(&modelopt, &format!("{e}.w3.weight_scale_2")), (Dtype::F32, vec![]));
    assert_eq!(shape(&ct, &format!("{e}.w3.weight_packed")), (Dtype::U8, vec![FFN, HIDDEN / 2]));
    assert_eq!(ct[&format!("{e}.w3.weight_packed")].2, modelopt[&format!("{e}.w3.weight")].2);
    let amax = |name: &str| {
        let weight: &[bf16] = bytemuck::cast_slice(&from[&format!("{e}.{name}.weight")].2);
        weight.iter().fold(0.0_f32, |a, v| a.max(v.to_f32().abs()))
    };
    let shared = amax("w1").max(amax("w3"));
    for name in ["w1", "w3"] {
        assert_eq!(f32_of(&modelopt, &format!("{e}.{name}.weight_scale_2")), shared / 2688.0);
        assert_eq!(f32_of(&ct, &format!("{e}.{name}.weight_global_scale")), 2688.0 / shared);
    }
    assert_eq!(f32_of(&modelopt, &format!("{e}.w2.weight_scale_2")), amax("w2") / 2688.0);
    assert_eq!(modelopt["model.layers.0.mlp.gate.weight"], from["model.layers.0.mlp.gate.weight"]);

    // Same names and files as before; values within half a step of E2M1, a sixth of a block's largest, and a bit.
    let back = all(&place("bf16"));
    assert_eq!(back.keys().collect::<Vec<_>>(), from.keys().collect::<Vec<_>>());
    for (name, (dtype, shape, data)) in &from {
        assert_eq!((dtype, shape), (&back[name].0, &back[name].1));
        let (old, new): (&[bf16], &[bf16]) =
            (bytemuck::cast_slice(data), bytemuck::cast_slice(&back[name].2));
        for (old, new) in old.as_chunks::<16>().0.iter().zip(new.as_chunks::<16>().0) {
            let largest = old.iter().fold(0.0_f32, |a, v| a.max(v.to_f32().abs()));
            let far = |(a, b): (&bf16, &bf16)| (a.to_f32() - b.to_f32()).abs() > largest * 0.18;
            assert!(!old.iter().zip(new).any(far), "{name}");
        }
    }
    let of = |folder: &str| ModelFiles::open(place(folder)).unwrap().files().len();
    assert_eq!((of("modelopt"), of("bf16")), (2, 2));
    assert!(place("ct").join("config.json").exists());
    let left: Vec<_> = fs::read_dir(root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 5, "{left:?}");
    assert_eq!(fs::read_dir(place("ct")).unwrap().count(), 4);
}

#[test]
fn square_tiles_are_the_operands_of_training() {
    let root = tempfile::tempdir().unwrap();
    let (input, output) = (root.path().join("in.safetensors"), root.path().join("out.safetensors"));
    write(&input, &layer("layers.0", PROJECTIONS));
    to(&input, &output, ExpertFormat::ModelOpt, Tile::Square16).unwrap();
    let mut files = ModelFiles::open(&input).unwrap();
    let found = ExpertLayer::find(&files).unwrap().remove(0);
    let mut weights = [vec![], vec![]];
    for e in 0..EXPERTS {
        for p in found.projections() {
            let to = usize::from(p == Projection::Down);
            weights[to].extend(found.read_bf16(&mut files, e, p).unwrap());
        }
    }
    let config =
        GroupedMlpConfig { activation: Activation::SWIGLU, ..GroupedMlpConfig::new(EXPERTS, HIDDEN, FFN) };
    let mlp = GroupedMlp::new(config).unwrap();
    let (w1, w2) = (WeightSource::Packed(&weights[0][..]), WeightSource::Packed(&weights[1][..]));
    let prepared = mlp.prepare_weights(&Reference, w1, w2, None).unwrap();
    let [w1, w2] = prepared.nvfp4().unwrap();
    let mut files = ModelFiles::open(&output).unwrap();
    let found = ExpertLayer::find(&files).unwrap().remove(0);
    assert_eq!(
        (found.format, found.experts, found.hidden, found.ffn),
        (ExpertFormat::ModelOpt, EXPERTS, HIDDEN, FFN)
    );
    let stored = |files: &mut ModelFiles, p| found.read_nvfp4(files, 1, p).unwrap().unwrap();
    let (gate, up, down) = (
        stored(&mut files, Projection::Gate),
        stored(&mut files, Projection::Up),
        stored(&mut files, Projection::Down),
    );
    let n = 2 * FFN * HIDDEN;
    assert_eq!([gate.codes, up.codes].concat(), w1.codes[n / 2..n]);
    assert_eq!([gate.scales, up.scales].concat(), w1.scales[n / 16..n / 8]);
    assert_eq!([gate.amax, up.amax, down.amax], [w1.amax[1], w1.amax[1], w2.amax[1]]);
    assert_eq!(down.codes, w2.codes[n / 4..n / 2]);
}

#[test]
fn fused_tensors_in_both_orders() {
    let root = tempfile::tempdir().unwrap();
    let names = ["experts.gate_up_proj", "experts.down_proj"];
    // Element (e, row, column) of a plain layer has a value of its own.
    let element = |which: usize, e: usize, row: usize, col: usize| {
        bf16::from_f32((which * 64 + e * 16) as f32 + row as f32 * 0.25 + col as f32 * 2.0_f32.powi(-6))
    };
    let expected = |p: Projection, e: usize, row: usize, col: usize| match p {
        Projection::Gate => element(0, e, row, col),
        Projection::Up => element(1, e, row, col),
        Projection::Down => element(2, e, row, col),
    };
    for transposed in [false, true] {
        let mut tensors = Tensors::new();
        let (mut up, mut down) =
            (vec![bf16::ZERO; EXPERTS * 2 * FFN * HIDDEN], vec![bf16::ZERO; EXPERTS * FFN * HIDDEN]);
        for e in 0..EXPERTS {
            for f in 0..FFN {
                for h in 0..HIDDEN {
                    for (half, p) in [Projection::Gate, Projection::Up].into_iter().enumerate() {
                        // Transposed ones alternate gate and up, plain ones have halves.
                        let at = match transposed {
                            false => (e * 2 * FFN + half * FFN + f) * HIDDEN + h,
                            true => (e * HIDDEN + h) * 2 * FFN + 2 * f + half,
                        };
                        up[at] = expected(p, e, f, h);
                    }
                    let at = if transposed { (e * FFN + f) * HIDDEN + h } else { (e * HIDDEN + h) * FFN + f };
                    down[at] = expected(Projection::Down, e, h, f);
                }
            }
        }
        let shapes = match transposed {
            false => [vec![EXPERTS, 2 * FFN, HIDDEN], vec![EXPERTS, HIDDEN, FFN]],
            true => [vec![EXPERTS, HIDDEN, 2 * FFN], vec![EXPERTS, FFN, HIDDEN]],
        };
        for ((name, shape), data) in names.into_iter().zip(shapes).zip([&up, &down]) {
            tensors.insert(name.into(), (Dtype::BF16, shape, bytes(data)));
        }
        if transposed {
            let bias = |n| (Dtype::BF16, vec![EXPERTS, n], bytes(&values(7, EXPERTS * n)));
            tensors.insert("experts.gate_up_proj_bias".into(), bias(2 * FFN));
            tensors.insert("experts.down_proj_bias".into(), bias(HIDDEN));
        }
        let path = root.path().join(format!("{transposed}.safetensors"));
        write(&path, &tensors);
        let mut files = ModelFiles::open(&path).unwrap();
        let found = ExpertLayer::find(&files).unwrap().remove(0);
        assert_eq!((found.experts, found.hidden, found.ffn, found.bias), (EXPERTS, HIDDEN, FFN, transposed));
        assert_eq!(found.elementwise(), transposed);
        for p in found.projections() {
            let weight = found.read_bf16(&mut files, 2, p).unwrap();
            let k = found.shape(p)[1];
            assert!(
                (0..weight.len()).all(|at| weight[at] == expected(p, 2, at / k, at % k)),
                "{p:?} {transposed}"
            );
        }
        assert_eq!(found.read_biases(&mut files).unwrap().is_some(), transposed);
        let output = root.path().join(format!("{transposed}-nvfp4.safetensors"));
        to(&path, &output, ExpertFormat::CompressedTensors, Tile::Square16).unwrap();
        assert!(read(&output).contains_key("experts.2.gate_proj.weight_packed"));
        assert_eq!(read(&output).contains_key("experts.gate_up_proj_bias"), transposed);
    }
}

/// What [`ExpertLayer::find`] or reading says about a quantized layer that was tampered with.
fn refused(tamper: impl FnOnce(&mut Tensors)) -> String {
    let root = tempfile::tempdir().unwrap();
    let (plain, path) = (root.path().join("plain.safetensors"), root.path().join("m.safetensors"));
    write(&plain, &layer("layers.0", PROJECTIONS));
    to(&plain, &path, ExpertFormat::ModelOpt, Tile::Row16).unwrap();
    let mut tensors = read(&path);
    tamper(&mut tensors);
    write(&path, &tensors);
    let outcome = to(&path, &root.path().join("out.safetensors"), ExpertFormat::Bf16, Tile::Row16);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2, "nothing is left behind");
    outcome.unwrap_err().to_string()
}

#[test]
fn faults_are_named_with_their_tensor() {
    let up = "layers.0.experts.1.up_proj";
    let set = |part: &str, value: (Dtype, Vec<usize>, Vec<u8>)| {
        let name = format!("{up}.{part}");
        refused(|t| drop(t.insert(name, value)))
    };
    let contains = |message: String, parts: &[&str]| {
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    };
    for part in ["weight", "weight_scale", "weight_scale_2"] {
        let name = format!("{up}.{part}");
        contains(refused(|t| drop(t.remove(&name))), &[&name, "the tensor is missing"]);
    }
    let whole = |t: &mut Tensors| t.retain(|name, _| !name.starts_with("layers.0.experts.1."));
    contains(refused(whole), &["layers.0.experts.1.gate_proj.weight'", "the tensor is missing"]);
    let scales = FFN * HIDDEN / 16;
    let e5m2 = set("weight_scale", (Dtype::F8_E5M2, vec![FFN, HIDDEN / 16], vec![0x38; scales]));
    contains(e5m2, &["up_proj.weight_scale'", "expected dtype F8_E4M3, got F8_E5M2"]);
    let swizzled = set("weight_scale", (Dtype::F8_E4M3, vec![scales], vec![0x38; scales]));
    contains(swizzled, &["up_proj.weight_scale'", "expected shape [48, 2], got [96]", "swizzled"]);
    let mut nan = vec![0x38; scales];
    nan[2 * 2 + 1] = 0xFF;
    let nan = set("weight_scale", (Dtype::F8_E4M3, vec![FFN, HIDDEN / 16], nan));
    contains(nan, &["up_proj.weight_scale'", "scale [2, 1] is NaN"]);
    let mut negative = vec![0x38; scales];
    negative[7] = 0xB8;
    let negative = set("weight_scale", (Dtype::F8_E4M3, vec![FFN, HIDDEN / 16], negative));
    contains(negative, &["up_proj.weight_scale'", "scale [3, 1] is -1; expected 0 or more"]);
    for bad in [f32::NAN, f32::INFINITY, -1.0, 0.0, -0.0] {
        let message = set("weight_scale_2", (Dtype::F32, vec![], bytes(&[bad])));
        contains(message, &["up_proj.weight_scale_2'", "expected a finite, positive number"]);
    }
    for number in ["99999999999999999999", "65536", "007", "+5", "-1"] {
        let name = format!("layers.0.experts.{number}.up_proj.weight");
        let extra = (Dtype::BF16, vec![16], bytes(&values(1, 16)));
        let message = refused(|t| drop(t.insert(name.clone(), extra)));
        contains(message, &[&format!("'{name}'"), "from 0 to 65535", &format!("got {number};")]);
    }
    let codes = set("weight", (Dtype::I8, vec![FFN, HIDDEN / 2], vec![0; FFN * HIDDEN / 2]));
    contains(codes, &["up_proj.weight'", "expected dtype U8, got I8"]);
    let narrow = set("weight", (Dtype::U8, vec![FFN, HIDDEN / 4], vec![0; FFN * HIDDEN / 4]));
    contains(narrow, &["up_proj.weight'", "expected shape [48, 16], got [48, 8]"]);
    let fused = |t: &mut Tensors| {
        let data = bytes(&values(1, EXPERTS * HIDDEN * FFN));
        drop(t.insert("layers.0.experts.down_proj".into(), (Dtype::BF16, vec![EXPERTS, HIDDEN, FFN], data)));
    };
    contains(refused(fused), &["layers.0.experts.0'", "fused and per-expert"]);
}

#[test]
fn zeros_are_no_damage() {
    let root = tempfile::tempdir().unwrap();
    let place = |name: &str| root.path().join(name);
    let mut tensors = layer("layers.0", PROJECTIONS);
    for name in PROJECTIONS {
        let weight = tensors.get_mut(&format!("layers.0.experts.1.{name}.weight")).unwrap();
        weight.2 = bytes(&[bf16::NEG_ZERO; FFN * HIDDEN]);
    }
    write(&place("plain"), &tensors);
    to(&place("plain"), &place("modelopt"), ExpertFormat::ModelOpt, Tile::Row16).unwrap();
    // Zero scales of the other sign.
    let mut stored = read(&place("modelopt"));
    let up = "layers.0.experts.1.up_proj";
    assert_eq!(f32_of(&stored, &format!("{up}.weight_scale_2")), 0.0);
    stored.get_mut(&format!("{up}.weight_scale")).unwrap().2.fill(0x80);
    write(&place("modelopt"), &stored);
    to(&place("modelopt"), &place("ct"), ExpertFormat::CompressedTensors, Tile::Row16).unwrap();
    to(&place("ct"), &place("back"), ExpertFormat::Bf16, Tile::Row16).unwrap();
    let back = read(&place("back"));
    let values: &[bf16] = bytemuck::cast_slice(&back[&format!("{up}.weight")].2);
    assert!(values.iter().all(|value| *value == bf16::ZERO));

    let global = format!("{up}.weight_global_scale");
    let mut stored = read(&place("ct"));
    stored.get_mut(&global).unwrap().2 = bytes(&[0.0_f32]);
    write(&place("ct"), &stored);
    let message = to(&place("ct"), &place("no"), ExpertFormat::Bf16, Tile::Row16).unwrap_err().to_string();
    assert!(message.contains(&global) && message.contains("positive number, got 0"), "{message}");
}

#[test]
fn weights_that_cannot_be_quantized_are_named() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("m.safetensors");
    let mut tensors = layer("layers.0", PROJECTIONS);
    let name = "layers.0.experts.2.down_proj.weight";
    let mut data = values(3, HIDDEN * FFN);
    data[FFN + 5] = bf16::NAN;
    tensors.insert(name.into(), (Dtype::BF16, vec![HIDDEN, FFN], bytes(&data)));
    write(&path, &tensors);
    let out = root.path().join("out.safetensors");
    let message = to(&path, &out, ExpertFormat::ModelOpt, Tile::Row16).unwrap_err().to_string();
    assert!(message.contains(name) && message.contains("element [1, 5] of expert 2 is NaN"), "{message}");

    let mut odd = Tensors::new();
    for (name, shape) in [("gate_proj", [24, 32]), ("up_proj", [24, 32]), ("down_proj", [32, 24])] {
        let data = bytes(&values(1, 768));
        odd.insert(format!("experts.0.{name}.weight"), (Dtype::BF16, shape.to_vec(), data));
    }
    write(&path, &odd);
    for (tile, rows) in [(Tile::Row16, "multiples of 1 and"), (Tile::Square16, "multiples of 16 and")] {
        let message = to(&path, &out, ExpertFormat::ModelOpt, tile).unwrap_err().to_string();
        assert!(message.contains("experts.0.down_proj") && message.contains(rows), "{message}");
        assert!(message.contains("columns of 16, got shape [32, 24]"), "{message}");
    }

    write(&path, &layer("layers.0", PROJECTIONS));
    fs::write(&out, "kept").unwrap();
    let message = to(&path, &out, ExpertFormat::ModelOpt, Tile::Row16).unwrap_err().to_string();
    assert!(message.contains("it exists; choose another name"), "{message}");
    assert_eq!(fs::read(&out).unwrap(), b"kept");

    fs::remove_file(&out).unwrap();
    let mut files = ModelFiles::open(&path).unwrap();
    let mut calls = 0;
    let mut stop = |_: moe4::checkpoint::ConvertProgress<'_>| {
        calls += 1;
        calls < 12
    };
    let outcome = convert(&mut files, &out, ExpertFormat::ModelOpt, Tile::Row16, &mut stop);
    assert!(matches!(outcome, Err(CheckpointError::Interrupted { .. })));
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1, "nothing is left behind");
}

#[test]
fn another_number_of_experts_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("m.safetensors");
    write(&path, &layer("layers.0", MIXTRAL));
    let files = ModelFiles::open(&path).unwrap();
    let found = ExpertLayer::find(&files).unwrap().remove(0);
    found.expect_experts(&files, EXPERTS).unwrap();
    let message = found.expect_experts(&files, 4).unwrap_err().to_string();
    assert!(
        message.contains("layers.0.experts.3.w2.weight") && message.contains("expert 3 is missing"),
        "{message}"
    );
    let message = found.expect_experts(&files, 2).unwrap_err().to_string();
    assert!(
        message.contains("layers.0.experts.2.w2.weight") && message.contains("one expert too many"),
        "{message}"
    );
}

#[test]
fn an_index_that_lies_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let model = sharded(root.path());
    let index = model.join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).unwrap();
    let says = |text: String| {
        fs::write(&index, text).unwrap();
        ModelFiles::open(&model).unwrap_err().to_string()
    };
    let moved = says(text.replacen("00001-of", "00002-of", 1));
    assert!(moved.contains("but model-00001-of-00002.safetensors has it"), "{moved}");
    let gone = says(text.replace("layers.1.mlp.experts.0.w1", "layers.9.mlp.experts.0.w1"));
    assert!(gone.contains("layers.9.mlp.experts.0.w1.weight") && gone.contains("no file has it"), "{gone}");
    assert!(says("[]".into()).contains("is malformed"));
    let outside = says(r#"{"weight_map": {"x": "../m.safetensors"}}"#.into());
    assert!(outside.contains("not in this folder"), "{outside}");
    fs::remove_file(&index).unwrap();
    let message = ModelFiles::open(&model).unwrap_err().to_string();
    assert!(message.contains("found neither"), "{message}");
}
