//! The tables in `docs/how-it-works.md` are what the program prints.
//!
//! A `text` block of the document that starts with `$ moe4 ...` holds that command's whole output. To bring them up to
//! date, run this test with the variable `MOE4_WRITE_DOCS` set and look at the difference.

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
    if std::env::var_os("MOE4_WRITE_DOCS").is_some() {
        fs::write(&path, &fresh).expect("the document can be written");
    }
    assert!(fresh == document, "{} is out of date; run this test with MOE4_WRITE_DOCS=1", path.display());
}
