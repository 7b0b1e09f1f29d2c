//! `cargo xtask layers`: arrows between modules and crates point one way.
//!
//! Inside the library, `numerics → tensor → kernels → mlp`, with routing and checkpoint at the side, and `mlp`
//! and `routing` see the kernels' contract, never a backend. Between crates, the library knows nobody, and a
//! backend crate sees the contract and what is below it. The rules are the tables below; a module or crate that
//! no table names is an error, so that a new one gets a rule.
//!
//! Source files are read by the lexer of [`crate::paths`]; files named `tests.rs` and folders named `tests` are
//! test code and may name anything.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::paths::{NamedPath, named_paths};

/// A module of the library and the modules it may name.
const MODULES: &[(&str, &[&str])] = &[
    ("numerics", &[]),
    ("tensor", &["numerics"]),
    ("kernels", &["numerics", "tensor"]),
    ("mlp", &["numerics", "tensor", "kernels"]),
    ("routing", &["numerics", "tensor", "kernels"]),
    ("checkpoint", &["numerics", "tensor"]),
];

/// The backends, and the modules that work with any of them and so name none.
const BACKENDS: &[&str] = &["reference", "cpu"];
const BACKEND_NEUTRAL: &[&str] = &["mlp", "routing", "checkpoint"];

/// A crate of the workspace and the workspace crates it may depend on (development dependencies are free).
const CRATES: &[(&str, &[&str])] = &[
    ("moe4", &[]),
    ("moe4-cuda", &["moe4"]),
    ("moe4-conformance", &["moe4"]),
    ("moe4-lm", &["moe4"]),
    ("moe4-cli", &["moe4", "moe4-lm", "moe4-cuda"]),
    ("moe4-python", &["moe4", "moe4-cuda"]),
];

/// Crates that may name only some modules of the library.
const CRATE_MODULES: &[(&str, &[&str])] = &[("moe4-cuda", &["numerics", "tensor", "kernels"])];

/// Checks the repository at `root`; the error lists every arrow that points the wrong way.
pub(crate) fn run(root: &Path) -> Result<()> {
    let mut folders: Vec<(PathBuf, String)> = subfolders(&root.join("crates"))?
        .into_iter()
        .map(|folder| (folder.clone(), file_name(&folder)))
        .collect();
    let bindings = root.join("bindings");
    if bindings.is_dir() {
        let named = |folder: PathBuf| (folder.clone(), format!("moe4-{}", file_name(&folder)));
        folders.extend(subfolders(&bindings)?.into_iter().map(named));
    }
    let mut violations = Vec::new();
    for (folder, name) in folders {
        check_manifest(&folder, &name, &mut violations)?;
        let source_root = folder.join("src");
        for file in rust_files(&source_root)? {
            let module = module_path(&source_root, &file);
            let source = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
            let found = match name.as_str() {
                "moe4" => check_library_source(&module, &source),
                other => check_crate_source(other, &source),
            };
            let shown = file.strip_prefix(root).unwrap_or(&file).display().to_string();
            violations.extend(found.into_iter().map(|(line, text)| format!("{shown}:{line}: {text}")));
        }
    }
    if !violations.is_empty() {
        bail!("{} arrows point the wrong way:\n  {}", violations.len(), violations.join("\n  "));
    }
    println!("layers: every arrow points the right way");
    Ok(())
}

/// Checks the `[dependencies]` and `[build-dependencies]` of a crate, also those of single targets.
fn check_manifest(folder: &Path, name: &str, violations: &mut Vec<String>) -> Result<()> {
    let path = folder.join("Cargo.toml");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let manifest: toml::Table = text.parse().with_context(|| format!("reading {}", path.display()))?;
    let Some(allowed) = lookup(CRATES, name) else {
        violations.push(format!("crate {name} has no rule: add it to CRATES in xtask/src/layers.rs"));
        return Ok(());
    };
    let tables = dependency_tables(&manifest);
    for dependency in tables.iter().flat_map(|table| table.keys()) {
        if lookup(CRATES, dependency).is_some() && !allowed.contains(&dependency.as_str()) {
            violations.push(format!("crate {name} depends on {dependency}; allowed: {}", listed(allowed)));
        }
    }
    Ok(())
}

fn dependency_tables(manifest: &toml::Table) -> Vec<&toml::Table> {
    let targets = manifest.get("target").and_then(toml::Value::as_table);
    let scopes = targets.into_iter().flat_map(|targets| targets.values()).filter_map(toml::Value::as_table);
    std::iter::once(manifest)
        .chain(scopes)
        .flat_map(|scope| [scope.get("dependencies"), scope.get("build-dependencies")])
        .filter_map(|table| table?.as_table())
        .collect()
}

/// Violations in a file of the library, whose module is `module` (empty for `lib.rs`), with their lines.
fn check_library_source(module: &[String], source: &str) -> Vec<(usize, String)> {
    let Some(own) = module.first() else { return Vec::new() };
    let Some(allowed) = lookup(MODULES, own) else {
        return vec![(1, format!("module {own} has no rule: add it to MODULES in xtask/src/layers.rs"))];
    };
    let mut violations = Vec::new();
    for path in named_paths(source) {
        let Some(target) = absolute(module, &path.segments) else { continue };
        let name = path.segments.join("::");
        let first = target.first().map_or("", String::as_str);
        if lookup(MODULES, first).is_some() && first != own && !allowed.contains(&first) {
            violations.push((path.line, format!("{own} names {name}; it may name: {}", listed(allowed))));
        }
        if BACKEND_NEUTRAL.contains(&own.as_str()) && names_backend(&target) {
            violations.push((
                path.line,
                format!("{own} names the backend in {name}; it may name the contract only"),
            ));
        }
    }
    violations
}

/// A glob of `kernels` counts: it brings the backends' modules into scope.
fn names_backend(target: &[String]) -> bool {
    target.len() > 1 && target[0] == "kernels" && (target[1] == "*" || BACKENDS.contains(&target[1].as_str()))
}

/// Violations in a file of a crate that may name only some modules of the library.
fn check_crate_source(name: &str, source: &str) -> Vec<(usize, String)> {
    let Some(allowed) = lookup(CRATE_MODULES, name) else { return Vec::new() };
    let wrong = |path: &NamedPath| {
        path.segments[0] == "moe4"
            && lookup(MODULES, &path.segments[1]).is_some()
            && !allowed.contains(&path.segments[1].as_str())
    };
    named_paths(source)
        .iter()
        .filter(|path| wrong(path))
        .map(|path| {
            let text = format!("{name} names {}; it may name: {}", path.segments.join("::"), listed(allowed));
            (path.line, text)
        })
        .collect()
}

/// A path as seen from the crate's root, or `None` if it starts in another crate or in a local name.
fn absolute(module: &[String], segments: &[String]) -> Option<Vec<String>> {
    let mut base = module.to_vec();
    let mut rest = segments;
    match segments[0].as_str() {
        "crate" => {
            base.clear();
            rest = &segments[1..];
        }
        "self" => rest = &segments[1..],
        "super" => {
            while rest.first().is_some_and(|segment| segment == "super") {
                base.pop();
                rest = &rest[1..];
            }
        }
        // `use crate::kernels;` lets code say `kernels::cpu::run`.
        first if lookup(MODULES, first).is_some() => base.clear(),
        _ => return None,
    }
    base.extend_from_slice(rest);
    Some(base)
}

/// `src/kernels/cpu/mod.rs` and `src/kernels/cpu.rs` are `[kernels, cpu]`; `src/lib.rs` is `[]`.
fn module_path(source_root: &Path, file: &Path) -> Vec<String> {
    let relative = file.strip_prefix(source_root).unwrap_or(file).with_extension("");
    let mut module: Vec<String> =
        relative.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect();
    if module.last().is_some_and(|last| matches!(last.as_str(), "mod" | "lib" | "main")) {
        module.pop();
    }
    module
}

/// Rust files under `folder` that are not test code.
fn rust_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in sorted_entries(folder)? {
        if entry.is_dir() && file_name(&entry) != "tests" {
            files.extend(rust_files(&entry)?);
        } else if entry.extension().is_some_and(|extension| extension == "rs")
            && file_name(&entry) != "tests.rs"
        {
            files.push(entry);
        }
    }
    Ok(files)
}

fn subfolders(folder: &Path) -> Result<Vec<PathBuf>> {
    Ok(sorted_entries(folder)?.into_iter().filter(|entry| entry.is_dir()).collect())
}

fn sorted_entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn lookup<'a>(table: &[(&str, &'a [&'a str])], name: &str) -> Option<&'a [&'a str]> {
    table.iter().find(|(key, _)| *key == name).map(|(_, allowed)| *allowed)
}

fn listed(names: &[&str]) -> String {
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{check_crate_source, check_library_source, run};

    fn lines(module: &str, source: &str) -> Vec<usize> {
        let module: Vec<String> = module.split("::").map(String::from).collect();
        check_library_source(&module, source).into_iter().map(|(line, _)| line).collect()
    }

    #[test]
    fn arrows_down_pass() {
        assert!(
            lines("mlp::forward", "use crate::kernels::{Backend, Error};\nuse crate::tensor::Groups;")
                .is_empty()
        );
        assert!(lines("kernels::cpu", "use super::reference::dot;\nuse crate::numerics::e2m1;").is_empty());
        assert!(lines("checkpoint", "use crate::tensor::Groups;\nuse std::mlp::x;").is_empty());
    }

    #[test]
    fn arrows_up_and_sideways_are_found() {
        assert_eq!(lines("numerics::e2m1", "\nuse crate::tensor::Groups;"), [2]);
        assert_eq!(lines("tensor", "fn f() { super::kernels::amax() }"), [1]);
        assert_eq!(lines("kernels::cpu::amax", "use super::super::super::mlp::Plan;"), [1]);
        assert_eq!(lines("checkpoint", "use crate::{mlp, tensor};"), [1]);
        assert_eq!(lines("unheard_of", ""), [1]);
    }

    #[test]
    fn backends_named_above_the_contract_are_found() {
        assert_eq!(lines("mlp", "use crate::kernels::{Backend, cpu::Cpu};"), [1]);
        assert_eq!(lines("mlp::plan", "use crate::kernels;\nfn f() { kernels::reference::run() }"), [2]);
        assert_eq!(lines("routing", "use crate::kernels::*;"), [1]);
        assert!(lines("mlp", "#[cfg(test)]\nmod tests { use crate::kernels::cpu::Cpu; }").is_empty());
        assert!(lines("mlp", "/// use moe4::kernels::cpu::Cpu;\nfn f() {}").is_empty());
    }

    #[test]
    fn a_backend_crate_sees_the_contract_only() {
        assert!(check_crate_source("moe4-cuda", "use moe4::kernels::Backend;").is_empty());
        assert_eq!(check_crate_source("moe4-cuda", "use moe4::mlp::Plan;").len(), 1);
    }

    #[test]
    fn a_dependency_the_wrong_way_is_found() {
        let root = tempfile::tempdir().unwrap();
        let source = root.path().join("crates/moe4/src");
        fs::create_dir_all(&source).unwrap();
        fs::write(source.join("lib.rs"), "").unwrap();
        let manifest = root.path().join("crates/moe4/Cargo.toml");
        fs::write(&manifest, "[dev-dependencies]\nmoe4-conformance = '1'\n").unwrap();
        run(root.path()).unwrap();
        fs::write(&manifest, "[target.'cfg(unix)'.dependencies]\nmoe4-lm = '1'\n").unwrap();
        let message = run(root.path()).unwrap_err().to_string();
        assert!(message.contains("moe4 depends on moe4-lm"), "{message}");
        fs::write(&manifest, "").unwrap();
        let bindings = root.path().join("bindings/python");
        fs::create_dir_all(bindings.join("src")).unwrap();
        fs::write(bindings.join("Cargo.toml"), "[dependencies]\nmoe4 = '1'\nmoe4-cli = '1'\n").unwrap();
        let message = run(root.path()).unwrap_err().to_string();
        assert!(message.contains("moe4-python depends on moe4-cli"), "{message}");
    }
}
