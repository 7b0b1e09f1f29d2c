//! Compiled kernels on disk: kept, checked, replaced, and done without.

use crate::support::must;
use moe4::kernels::cpu::Cpu;
use moe4::tensor::Groups;
use moe4_conformance::compare::f32_bits;
use moe4_conformance::drive::amax;
use moe4_conformance::{InCase, Outcome, data};
use moe4_cuda::{Cuda, CudaOptions};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::SystemTime;

/// A pass of a backend that keeps its kernels in `folder`.
fn works(folder: &Path) -> Outcome {
    let options = CudaOptions { cache: Some(folder.into()), ..CudaOptions::default() };
    let cuda = Cuda::open(&options).unwrap_or_else(|e| panic!("{e}"));
    let (x, groups) = (data::normal(50 * 48, 1.0, 1300), Groups::new(&[30, 0, 17], 50).expect("fits"));
    let expected = amax(&Cpu::new(), &x, 48, &groups)?;
    f32_bits("amax", &[3], &expected, &amax(&cuda, &x, 48, &groups)?)
}

/// Contents and time of writing, by name.
type Files = BTreeMap<String, (Vec<u8>, SystemTime)>;

fn files(folder: &Path) -> Files {
    let entries = fs::read_dir(folder).expect("the folder is there").map(|entry| entry.expect("readable"));
    let file = |entry: fs::DirEntry| {
        let written = entry.metadata().and_then(|m| m.modified()).expect("files have a time");
        let contents = fs::read(entry.path()).expect("readable");
        (entry.file_name().to_string_lossy().into_owned(), (contents, written))
    };
    entries.map(file).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn a_second_start_compiles_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path().join("not").join("yet");
    must(works(&folder));
    let first = files(&folder);
    assert_eq!(first.len(), 1, "one kernel was needed");
    must(works(&folder));
    assert!(files(&folder) == first, "files were written again");
}

#[test]
#[ignore = "needs a GPU"]
fn damaged_files_are_replaced() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    must(works(folder.path()));
    let (name, (whole, _)) = files(folder.path()).into_iter().next().expect("one kernel was needed");
    let path = folder.path().join(name);
    let mut flipped = whole.clone();
    *flipped.last_mut().expect("a cubin is not empty") ^= 1;
    let mut of_another_key = whole.clone();
    of_another_key[8] ^= 1;
    let damages = [
        ("a flipped bit", flipped),
        ("another key", of_another_key),
        ("half of it", whole[..whole.len() / 2].to_vec()),
        ("nothing", vec![]),
        ("something else", vec![0x7F; 4096]),
    ];
    for (damage, contents) in damages {
        fs::write(&path, &contents).expect("writable");
        must(works(folder.path()).in_case(damage));
        let replaced = files(folder.path());
        assert_eq!(replaced.len(), 1, "{damage}");
        assert!(fs::read(&path).expect("readable") != contents, "{damage} was not replaced");
        must(works(folder.path()).in_case(damage));
        assert!(files(folder.path()) == replaced, "{damage}: the replacement was replaced");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_folder_that_takes_no_files() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("file");
    fs::write(&file, b"in the way").expect("writable");
    must(works(&file.join("below")));
    must(works(&file));
    assert_eq!(fs::read(&file).expect("readable"), b"in the way");
    // For the superuser this folder takes files all the same.
    let read_only = folder.path().join("read only");
    fs::create_dir(&read_only).expect("writable");
    let permissions = |read_only| {
        let mut permissions = fs::metadata(folder.path()).expect("readable").permissions();
        permissions.set_readonly(read_only);
        permissions
    };
    fs::set_permissions(&read_only, permissions(true)).expect("our own folder");
    let outcome = works(&read_only);
    fs::set_permissions(&read_only, permissions(false)).expect("our own folder");
    must(outcome);
}
