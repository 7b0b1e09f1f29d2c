//! Round trips, every error, and what is left on disk after a failure.

use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use proptest::prelude::*;
use tempfile::{TempDir, tempdir};

use super::*;

fn folder() -> TempDir {
    tempdir().expect("a temporary folder")
}

fn file_names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

fn one_tensor(folder: &TempDir) -> PathBuf {
    let path = folder.path().join("one.safetensors");
    let mut writer = TensorWriter::create(&path, &[TensorSpec::new("x", Dtype::F32, &[2, 3])], &[]).unwrap();
    writer.write("x", &[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
    writer.finish().unwrap();
    path
}

/// A header of one's own choice, correctly framed.
fn with_header(folder: &TempDir, header: &str, data: &[u8]) -> PathBuf {
    let path = folder.path().join("made.safetensors");
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn every_dtype_round_trips_and_other_readers_agree() {
    let folder = folder();
    let path = folder.path().join("all.safetensors");
    let specs = [
        TensorSpec::new("codes", Dtype::U8, &[3]),
        TensorSpec::new("scales", Dtype::F8_E4M3, &[1, 1]),
        TensorSpec::new("half", Dtype::F16, &[2]),
        TensorSpec::new("brain", Dtype::BF16, &[1]),
        TensorSpec::new("single", Dtype::F32, &[2]),
        TensorSpec::new("double", Dtype::F64, &[]),
        TensorSpec::new("splits", Dtype::I64, &[2]),
        TensorSpec::new("nothing", Dtype::F32, &[0, 5]),
    ];
    let mut writer =
        TensorWriter::create(&path, &specs, &[("b", "2".into()), ("a", "\"quoted\"\n".into())]).unwrap();
    writer.write("splits", &[-1_i64, i64::MAX]).unwrap();
    writer.write("codes", &[1_u8, 2, 3]).unwrap();
    writer.write("scales", &[0x7E_u8]).unwrap();
    writer.write("half", &[f16::MAX, f16::MIN]).unwrap();
    writer.write("brain", &[bf16::MAX]).unwrap();
    writer.write("single", &[f32::MIN_POSITIVE, -0.0]).unwrap();
    writer.write("double", &[std::f64::consts::PI]).unwrap();
    writer.write::<f32>("nothing", &[]).unwrap();
    writer.finish().unwrap();

    let mut file = TensorFile::open(&path).unwrap();
    assert_eq!(file.metadata()["a"], "\"quoted\"\n");
    assert_eq!(file.read::<i64>("splits").unwrap(), [-1, i64::MAX]);
    assert_eq!(file.read::<u8>("codes").unwrap(), [1, 2, 3]);
    assert_eq!(file.read::<u8>("scales").unwrap(), [0x7E]);
    assert_eq!(file.read::<f16>("half").unwrap(), [f16::MAX, f16::MIN]);
    assert_eq!(file.read_shaped::<bf16>("brain", &[1]).unwrap(), [bf16::MAX]);
    let single = file.read::<f32>("single").unwrap();
    assert_eq!(
        [single[0].to_bits(), single[1].to_bits()],
        [f32::MIN_POSITIVE.to_bits(), (-0.0_f32).to_bits()]
    );
    assert_eq!(file.read_shaped::<f64>("double", &[]).unwrap(), [std::f64::consts::PI]);
    assert!(file.read_shaped::<f32>("nothing", &[0, 5]).unwrap().is_empty());

    // The safetensors crate's own reader, and elements aligned to their size in a mapping of the file.
    let bytes = fs::read(&path).unwrap();
    let other = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(other.len(), specs.len());
    for (name, view) in other.iter() {
        let offset = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
        assert_eq!(offset % (view.dtype().bitsize() / 8), 0, "{name} is not aligned");
    }
    assert_eq!(file_names(folder.path()), ["all.safetensors"]);
}

proptest! {
    #[test]
    fn files_of_the_safetensors_crate_are_read(values in proptest::collection::vec(any::<f32>(), 0..40), split in 0usize..40) {
        let split = split.min(values.len());
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let view = |range: std::ops::Range<usize>| {
            let data = &bytes[range.start * 4..range.end * 4];
            safetensors::tensor::TensorView::new(Dtype::F32, vec![range.len()], data).unwrap()
        };
        let folder = folder();
        let path = folder.path().join("theirs.safetensors");
        let tensors = [("a", view(0..split)), ("b", view(split..values.len()))];
        fs::write(&path, safetensors::serialize(tensors, None).unwrap()).unwrap();
        let mut file = TensorFile::open(&path).unwrap();
        let mut read = file.read::<f32>("a").unwrap();
        read.extend(file.read::<f32>("b").unwrap());
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(&read), bits(&values));
    }

    #[test]
    fn any_bytes_end_in_an_error_or_a_file(bytes in proptest::collection::vec(any::<u8>(), 0..200), framed in any::<bool>()) {
        let folder = folder();
        let path = folder.path().join("noise.safetensors");
        let mut content = if framed { (bytes.len() as u64 / 2).to_le_bytes().to_vec() } else { Vec::new() };
        content.extend(bytes);
        fs::write(&path, content).unwrap();
        if let Err(error) = TensorFile::open(&path) {
            prop_assert!(!error.to_string().contains('\n'));
        }
    }
}

#[test]
fn a_missing_tensor_lists_what_exists() {
    let folder = folder();
    let mut file = TensorFile::open(one_tensor(&folder)).unwrap();
    let error = file.read::<f32>("w1").unwrap_err();
    assert!(matches!(error, CheckpointError::MissingTensor { .. }));
    assert!(error.to_string().contains("has no tensor 'w1'; it has: x"), "{error}");
}

#[test]
fn a_long_list_of_names_is_cut() {
    let names: Vec<String> = (0..30).map(|index| format!("t{index}")).collect();
    let error = CheckpointError::MissingTensor { path: "f".into(), name: "x".into(), available: names };
    assert!(error.to_string().ends_with("t23 and 6 more"), "{error}");
}

#[test]
fn wrong_dtype_and_shape_say_expected_and_got() {
    let folder = folder();
    let mut file = TensorFile::open(one_tensor(&folder)).unwrap();
    let dtype = file.read::<bf16>("x").unwrap_err();
    assert!(dtype.to_string().ends_with("expected dtype BF16, got F32"), "{dtype}");
    let shape = file.read_shaped::<f32>("x", &[3, 2]).unwrap_err();
    assert!(shape.to_string().ends_with("expected shape [3, 2], got [2, 3]"), "{shape}");
}

#[test]
fn every_truncation_is_an_error() {
    let folder = folder();
    let path = one_tensor(&folder);
    let bytes = fs::read(&path).unwrap();
    for length in 0..bytes.len() {
        fs::write(&path, &bytes[..length]).unwrap();
        let error = TensorFile::open(&path).unwrap_err();
        let expected = length < bytes.len() - 24;
        assert_eq!(matches!(error, CheckpointError::NotSafetensors { .. }), expected, "{length}: {error}");
        assert_eq!(matches!(error, CheckpointError::Length { .. }), !expected, "{length}: {error}");
    }
    fs::write(&path, [&bytes[..], &[0]].concat()).unwrap();
    let error = TensorFile::open(&path).unwrap_err();
    assert!(error.to_string().contains("longer than its tensors"), "{error}");
}

#[test]
fn headers_that_lie_are_refused() {
    let folder = folder();
    for (header, data_bytes) in [
        ("", 0),
        ("{", 0),
        ("[]", 0),
        (r#"{"x":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}"#, 4),
        (r#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, 4),
        (r#"{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#, 8),
        (r#"{"x":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}}"#, 4),
        (r#"{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#, 4),
        (
            r#"{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"y":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#,
            6,
        ),
    ] {
        let path = with_header(&folder, header, &vec![0; data_bytes]);
        let error = TensorFile::open(path).unwrap_err();
        assert!(matches!(error, CheckpointError::NotSafetensors { .. }), "{header}: {error}");
    }
}

#[test]
fn a_folder_and_a_missing_file_are_refused() {
    let folder = folder();
    assert!(matches!(TensorFile::open(folder.path()), Err(CheckpointError::NotSafetensors { .. })));
    assert!(matches!(TensorFile::open(folder.path().join("no")), Err(CheckpointError::Open { .. })));
}

#[test]
fn a_dropped_writer_leaves_nothing() {
    let folder = folder();
    let path = folder.path().join("out.safetensors");
    let mut writer = TensorWriter::create(&path, &[TensorSpec::new("x", Dtype::U8, &[4])], &[]).unwrap();
    assert_eq!(file_names(folder.path()).len(), 1);
    assert!(writer.write("x", &[1_u8]).is_err());
    drop(writer);
    assert!(file_names(folder.path()).is_empty());
}

#[test]
fn an_unfinished_file_keeps_the_old_one() {
    let folder = folder();
    let path = one_tensor(&folder);
    let before = fs::read(&path).unwrap();
    let writer = TensorWriter::create(&path, &[TensorSpec::new("y", Dtype::U8, &[4])], &[]).unwrap();
    let error = writer.finish().unwrap_err();
    assert!(error.to_string().contains("not written yet: y"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(file_names(folder.path()), ["one.safetensors"]);
}

#[test]
fn misuse_of_the_writer_is_told() {
    let folder = folder();
    let path = folder.path().join("out.safetensors");
    let spec = TensorSpec::new("x", Dtype::F32, &[2]);
    let mut writer = TensorWriter::create(&path, std::slice::from_ref(&spec), &[]).unwrap();
    for error in [
        writer.write("x", &[1_i64]).unwrap_err(),
        writer.write("x", &[1.0_f32]).unwrap_err(),
        writer.write("y", &[1.0_f32]).unwrap_err(),
    ] {
        assert!(matches!(error, CheckpointError::DataMismatch { .. }), "{error}");
    }
    writer.write("x", &[1.0_f32, 2.0]).unwrap();
    assert!(writer.write("x", &[1.0_f32, 2.0]).is_err());
    for specs in [vec![spec.clone(), spec], vec![TensorSpec::new("__metadata__", Dtype::U8, &[1])]] {
        assert!(matches!(TensorWriter::create(&path, &specs, &[]), Err(CheckpointError::BadName { .. })));
    }
    let huge = TensorSpec::new("x", Dtype::F64, &[usize::MAX, 2]);
    assert!(matches!(TensorWriter::create(&path, &[huge], &[]), Err(CheckpointError::BadName { .. })));
}

#[test]
fn targets_that_are_no_files_are_refused() {
    let folder = folder();
    let create = |path: &Path| TensorWriter::create(path, &[], &[]);
    assert!(matches!(create(folder.path()), Err(CheckpointError::NotAFile { .. })));
    assert!(matches!(create(&folder.path().join("no/out")), Err(CheckpointError::Write { .. })));
    assert!(matches!(create(Path::new("")), Err(CheckpointError::Write { .. })));
    #[cfg(unix)]
    assert!(matches!(create(Path::new("/dev/null")), Err(CheckpointError::NotAFile { .. })));
}

#[cfg(unix)]
#[test]
fn a_link_is_followed_and_permissions_are_those_of_a_new_file() {
    use std::os::unix::fs::{PermissionsExt, symlink};

    let folder = folder();
    let target = folder.path().join("real.safetensors");
    let link = folder.path().join("link.safetensors");
    fs::write(&target, "old").unwrap();
    symlink(&target, &link).unwrap();
    TensorWriter::create(&link, &[], &[]).unwrap().finish().unwrap();
    assert!(link.is_symlink());
    assert!(TensorFile::open(&target).unwrap().names().is_empty());

    let plain = folder.path().join("plain");
    fs::write(&plain, "").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&target), mode(&plain));
}
