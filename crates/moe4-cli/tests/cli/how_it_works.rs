//! The tables in `docs/how-it-works.md` are what the program prints.
//!
//! A `text` block of the document that starts with `$ moe4 ...` holds that command's whole output. Where they differ, the
//! test leaves the document as it should be in the target folder and says where.

use std::fs;
use std::path::Path;

use crate::common::Workspace;

#[test]
fn tables_are_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/how-it-works.md");
    let document = fs::read_to_string(&path).expect("the document");
    let mut fresh = String::new();
    let mut commands = 0;
    for (i, part) in document.split("```").enumerate() {
        let separator = if i == 0 { "" } else { "```" };
        let command =
            part.strip_prefix("text\n$ moe4 ").filter(|_| i % 2 == 1).and_then(|rest| rest.lines().next());
        match command {
            None => fresh += &format!("{separator}{part}"),
            Some(command) => {
                commands += 1;
                let run = Workspace::new().moe4(&command.split_whitespace().collect::<Vec<_>>()).succeeds();
                let lines: Vec<&str> = run.stdout.lines().map(str::trim_end).collect();
                fresh += &format!("{separator}text\n$ moe4 {command}\n\n{}\n", lines.join("\n"));
            }
        }
    }
    assert!(commands >= 2, "the document shows no command");
    let corrected = Path::new(env!("CARGO_TARGET_TMPDIR")).join("how-it-works.md");
    if fresh != document {
        fs::write(&corrected, &fresh).expect("the target folder can be written");
        panic!("{} is out of date; look at {} and copy it over", path.display(), corrected.display());
    }
}
