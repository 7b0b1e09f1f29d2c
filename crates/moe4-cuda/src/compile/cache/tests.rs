//! The cache with an injected compiler: every damaged, foreign or unwritable entry costs a compilation, never more.

use std::cell::Cell;
use std::convert::Infallible;
use std::fs;
use std::path::PathBuf;

use super::{Cache, HEADER, user_folder};
use crate::compile::key::Inputs;
use crate::compile::{Arch, Key, Version};

fn key(source: &str) -> Key {
    let (version, arch) = (Version { major: 13, minor: 0 }, Arch::new(9, 0).unwrap());
    Key::of(&Inputs { name: "k.cu", source, headers: &[], version, arch, options: &[] })
}

/// Gets `key` with a compiler that returns `cubin`; whether it was compiled.
fn get(cache: &Cache, key: &Key, cubin: &[u8]) -> bool {
    let compiled = Cell::new(false);
    let compile = || {
        compiled.set(true);
        Ok::<_, Infallible>(cubin.to_vec())
    };
    let Ok(found) = cache.get_or_compile(key, compile);
    assert_eq!(found, cubin);
    compiled.get()
}

fn files(cache: &Cache) -> Vec<PathBuf> {
    fs::read_dir(cache.folder().unwrap()).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_second_get_does_not_compile() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path().join("made/on/demand"));
    assert!(get(&cache, &key("a"), b"cubin a"));
    assert!(!get(&cache, &key("a"), b"cubin a"));
    assert!(get(&cache, &key("b"), b""), "an empty cubin is one too");
    assert!(!get(&Cache::at(cache.folder().unwrap()), &key("b"), b""), "another process");
    assert_eq!(files(&cache).len(), 2, "no temporary file stays");
}

#[test]
fn damaged_and_foreign_entries_are_compiled_again_and_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let wanted = key("a");
    get(&cache, &key("other"), b"another cubin");
    let foreign = fs::read(&files(&cache)[0]).unwrap();
    fs::remove_file(&files(&cache)[0]).unwrap();

    get(&cache, &wanted, b"the cubin");
    let path = files(&cache).remove(0);
    let whole = fs::read(&path).unwrap();
    let flipped = |index: usize| {
        let mut bytes = whole.clone();
        bytes[index] ^= 1;
        bytes
    };
    let longer = [&whole[..], b"x"].concat();
    let truncated = whole[..whole.len() - 1].to_vec();
    let damaged: [Vec<u8>; 9] = [
        Vec::new(),
        whole[..HEADER - 1].to_vec(),
        whole[..HEADER].to_vec(),
        truncated,
        longer,
        flipped(0),
        flipped(8),
        flipped(HEADER),
        foreign,
    ];
    for bytes in damaged {
        fs::write(&path, &bytes).unwrap();
        assert!(get(&cache, &wanted, b"the cubin"), "served from {} damaged bytes", bytes.len());
        assert!(!get(&cache, &wanted, b"the cubin"), "not replaced");
    }
}

#[test]
fn an_unwritable_folder_is_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a file");
    fs::write(&file, "").unwrap();
    let below_a_file = Cache::at(file.join("cache"));
    assert!(get(&below_a_file, &key("a"), b"cubin"));
    assert!(get(&below_a_file, &key("a"), b"cubin"));
    assert!(get(&Cache::disabled(), &key("a"), b"cubin"));

    // A folder in the entry's place can be neither read nor replaced.
    let cache = Cache::at(folder.path().join("cache"));
    fs::create_dir_all(cache.folder().unwrap().join(format!("{}.cubin", key("a")))).unwrap();
    assert!(get(&cache, &key("a"), b"cubin"));
}

#[test]
fn a_failed_compilation_is_returned_and_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    assert_eq!(cache.get_or_compile(&key("a"), || Err("does not compile")), Err("does not compile"));
    assert!(files(&cache).is_empty());
}

#[test]
fn many_threads_with_one_key_are_fine() {
    let folder = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| get(&Cache::at(folder.path()), &key("a"), &[7; 100_000]));
        }
    });
    assert!(!get(&Cache::at(folder.path()), &key("a"), &[7; 100_000]));
    assert_eq!(files(&Cache::at(folder.path())).len(), 1);
}

#[test]
fn the_users_folder_follows_xdg() {
    let folder =
        |xdg: Option<&str>, home: Option<&str>| user_folder(xdg.map(Into::into), home.map(Into::into));
    assert_eq!(folder(Some("/x"), Some("/home/u")), Some("/x/moe4".into()));
    assert_eq!(folder(None, Some("/home/u")), Some("/home/u/.cache/moe4".into()));
    assert_eq!(folder(Some("relative"), Some("/home/u")), Some("/home/u/.cache/moe4".into()));
    assert_eq!(folder(Some(""), None), None);
}
