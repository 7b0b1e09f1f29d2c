//! The golden files: all listed, all there, small enough for a repository; and the table in the documentation names
//! checks that exist.

use moe4::kernels::reference::Reference;
use moe4_conformance::{checks, golden};
use std::collections::BTreeSet;

#[test]
fn manifest_and_folder_agree_and_stay_small() {
    let manifest = golden::manifest();
    let listed =
        |files: &serde_json::Value| files.as_object().expect("an object").keys().cloned().collect::<Vec<_>>();
    let mut names: BTreeSet<String> = listed(&manifest["files"]).into_iter().collect();
    names.extend(listed(&manifest["mlp"]["files"]));
    let entries: Vec<_> =
        std::fs::read_dir(golden::dir()).expect("the folder").map(|e| e.expect("an entry")).collect();
    let bytes: u64 = entries.iter().map(|e| e.metadata().expect("metadata").len()).sum();
    let found: BTreeSet<String> = entries
        .iter()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".safetensors"))
        .collect();
    assert_eq!(names, found);
    assert!(bytes <= 4_000_000, "{bytes} bytes");
}

#[test]
fn names_are_unique_and_the_table_names_no_other() {
    let names: Vec<_> = checks::all::<Reference>().iter().map(|check| check.name).collect();
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
    let documented = include_str!("../src/lib.rs")
        .lines()
        .filter(|line| line.starts_with("//! | ") && line.contains("` |"))
        .flat_map(|line| line.split('`'))
        .filter(|text| {
            text.contains('/')
                && (text.starts_with("defect ")
                    || text.starts_with("invariant ")
                    || text.starts_with("golden/"))
        })
        .collect::<Vec<_>>();
    assert!(documented.len() >= 25, "{documented:?}");
    for name in documented {
        assert!(names.contains(&name), "the documentation names '{name}'");
    }
}
