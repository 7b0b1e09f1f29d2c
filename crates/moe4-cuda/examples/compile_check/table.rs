//! The table of resources as Markdown, and how it differs from the one under version control.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt::Write;

use moe4_cuda::compile::{Job, Version};

use crate::ptxas::Usage;

/// A compiled variant and what it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub job: Job,
    pub usage: Usage,
}

const COLUMNS: &str = "| kernel | defines | arch | registers | shared | stack | spill stores | spill loads |";
const RULE: &str = "|---|---|---|---:|---:|---:|---:|---:|";

/// How many cells name a row; the others are its numbers.
const KEY_CELLS: usize = 3;

/// The whole file. The order of the catalog does not matter: rows are sorted.
pub(crate) fn render(version: Version, rows: &mut [Row]) -> String {
    rows.sort_by(|a, b| (&a.job.variant, a.job.arch).cmp(&(&b.job.variant, b.job.arch)));
    let mut text = format!(
        "# What each kernel needs\n\n\
         Written by `cargo xtask kernels --bless` and checked by `cargo xtask check`, with NVRTC {version}. Registers\n\
         and stack are those of a thread, shared memory that of a block (the part that is known when it is compiled);\n\
         all but the registers in bytes.\n\n\
         {COLUMNS}\n{RULE}\n"
    );
    for Row { job, usage } in rows {
        let Usage { registers, shared, stack, spill_stores, spill_loads } = usage;
        let defines = job.variant.defines.iter().map(|(name, value)| format!("{name}={value}"));
        let defines = defines.collect::<Vec<_>>().join(" ");
        let defines = if defines.is_empty() { "-" } else { &defines };
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "| {} | {defines} | {} | {registers} | {shared} | {stack} | {spill_stores} | {spill_loads} |",
            job.variant.kernel, job.arch
        );
    }
    text
}

/// One line for each row that differs; empty if the files are the same.
pub(crate) fn differences(recorded: &str, now: &str) -> Vec<String> {
    if recorded == now {
        return Vec::new();
    }
    let (old, new) = (rows(recorded), rows(now));
    let mut lines = Vec::new();
    for (key, numbers) in &new {
        match old.get(key) {
            None => lines.push(format!("  {key}: not recorded, got {numbers}")),
            Some(recorded) if recorded != numbers => {
                lines.push(format!("  {key}: expected {recorded}, got {numbers}"));
            }
            Some(_) => {}
        }
    }
    for (key, numbers) in old.iter().filter(|(key, _)| !new.contains_key(*key)) {
        lines.push(format!("  {key}: expected {numbers}, got no such variant"));
    }
    if lines.is_empty() {
        lines.push("  the numbers are the same, the text around them is not".into());
    }
    lines
}

/// The table's rows: what names each, and its numbers.
fn rows(text: &str) -> BTreeMap<String, String> {
    let lines = text.lines().filter(|line| line.starts_with("| ") && *line != COLUMNS);
    lines
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let (key, numbers) = cells.split_at(cells.len().min(KEY_CELLS));
            (key.join(" "), numbers.join(" / "))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use moe4_cuda::compile::{Arch, Job, Version};
    use moe4_cuda::variant::Variant;

    use super::{Row, differences, render};
    use crate::ptxas::Usage;

    const VERSION: Version = Version { major: 13, minor: 0 };

    fn row(kernel: &'static str, arch: Arch, registers: u32) -> Row {
        let variant = Variant { kernel, defines: vec![("ROWWISE", 1), ("COLUMNWISE", 0)] };
        Row { job: Job { variant, arch }, usage: Usage { registers, shared: 1024, ..Usage::default() } }
    }

    #[test]
    fn rows_are_sorted_and_whole() {
        let [a, b, ..] = Arch::CHECKED;
        let text = render(VERSION, &mut [row("k", b, 2), row("l", a, 3), row("k", a, 1)]);
        let table: Vec<&str> = text.lines().rev().take(3).collect();
        assert_eq!(table[0], "| l | ROWWISE=1 COLUMNWISE=0 | sm_90a | 3 | 1024 | 0 | 0 | 0 |");
        assert!(table[1].contains("sm_100a | 2 |") && table[2].contains("sm_90a | 1 |"), "{text}");
        assert_eq!(text, render(VERSION, &mut [row("k", a, 1), row("k", b, 2), row("l", a, 3)]));
    }

    #[test]
    fn each_kind_of_difference_is_named() {
        let [a, b, c, ..] = Arch::CHECKED;
        let old = render(VERSION, &mut [row("k", a, 1), row("k", b, 2)]);
        let new = render(VERSION, &mut [row("k", a, 9), row("k", c, 2)]);
        assert!(differences(&old, &old).is_empty());
        let name = "  k ROWWISE=1 COLUMNWISE=0";
        assert_eq!(
            differences(&old, &new),
            [
                format!("{name} sm_103a: not recorded, got 2 / 1024 / 0 / 0 / 0"),
                format!("{name} sm_90a: expected 1 / 1024 / 0 / 0 / 0, got 9 / 1024 / 0 / 0 / 0"),
                format!("{name} sm_100a: expected 2 / 1024 / 0 / 0 / 0, got no such variant"),
            ]
        );
        let other_version = render(Version { major: 13, minor: 1 }, &mut [row("k", a, 1), row("k", b, 2)]);
        assert_eq!(differences(&old, &other_version).len(), 1);
        assert_eq!(differences("", &old).len(), 2);
    }
}
