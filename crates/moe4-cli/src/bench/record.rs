//! `DIR/<machine>/<date>.json`: rows of one machine on one day, with what the machine is.
//!
//! A file of the same day keeps its other rows and whatever else it holds. It is replaced as a whole or not at all, and
//! by one run at a time: between reading and replacing, the folder is locked.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use tempfile::NamedTempFile;

use super::row::Row;
use crate::doctor::machine::Machine;

/// A record that can be written.
pub(super) struct Record {
    path: PathBuf,
    date: String,
}

impl Record {
    /// Makes the folder and looks at the file of today, so that a mistake shows before anything is measured.
    pub(super) fn open(folder: &Path, machine: &str) -> Result<Self> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if !machine.chars().all(plain) || !machine.starts_with(|c: char| c.is_ascii_alphanumeric()) {
            bail!(
                "--machine: expected letters, digits, '-', '_' and '.', starting with a letter or a digit, got \
                 '{machine}'"
            );
        }
        let folder = folder.join(machine);
        fs::create_dir_all(&folder)
            .with_context(|| format!("--record: cannot make the folder {}", folder.display()))?;
        NamedTempFile::new_in(&folder)
            .with_context(|| format!("--record: cannot write in {}", folder.display()))?;
        let date = today();
        let path = folder.join(format!("{date}.json"));
        read(&path)?;
        Ok(Self { path, date })
    }

    /// Writes the rows; those of the same name, shape and backend that were there before go.
    pub(super) fn write(self, rows: &[Row], facts: Vec<(&'static str, String)>) -> Result<PathBuf> {
        let Self { path, date } = self;
        let _locked = lock(&path).with_context(|| format!("--record: cannot lock {}", path.display()))?;
        // Read anew: another run may have written while this one measured.
        let mut former = read(&path)?;
        let new = rows.iter().map(recorded).collect::<Result<Vec<_>>>()?;
        let mut all = match former.remove("rows") {
            Some(Value::Array(rows)) => rows,
            _ => vec![],
        };
        all.retain(|old| !new.iter().any(|new| same_row(old, new)));
        all.extend(new);
        former.insert("date".into(), date.into());
        former.insert("moe4".into(), env!("CARGO_PKG_VERSION").into());
        // What an earlier run of the day knew of another device of the machine stays.
        let mut machine = match former.remove("machine") {
            Some(Value::Object(machine)) => machine,
            _ => Map::new(),
        };
        machine.extend(machine_facts());
        machine.extend(facts.into_iter().map(|(name, value)| (name.to_owned(), value.into())));
        former.insert("machine".into(), machine.into());
        former.insert("rows".into(), all.into());
        let text = serde_json::to_string_pretty(&former).context("the record cannot be written as JSON")?;
        replace(&path, &format!("{text}\n")).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }
}

/// What a file of the day holds, nothing if there is none.
fn read(path: &Path) -> Result<Map<String, Value>> {
    let held: Map<String, Value> = match fs::read_to_string(path) {
        Ok(text) => serde_json::from_str(&text)
            .with_context(|| format!("--record: {} is no record; move it away or mend it", path.display()))?,
        Err(error) if error.kind() == ErrorKind::NotFound => Map::new(),
        Err(error) => return Err(error).with_context(|| format!("--record: cannot read {}", path.display())),
    };
    if !matches!(held.get("rows"), None | Some(Value::Array(_))) {
        bail!("--record: {}: expected a list of rows; move the file away or mend it", path.display());
    }
    Ok(held)
}

/// A row with the fastest of its peers beside its own numbers; all of them stand in a list.
fn recorded(row: &Row) -> Result<Value> {
    let mut value = serde_json::to_value(row)?;
    let fastest = row.peers.iter().min_by(|a, b| a.peer_ms.total_cmp(&b.peer_ms));
    if let (Value::Object(fields), Some(fastest)) = (&mut value, fastest)
        && let Value::Object(fastest) = serde_json::to_value(fastest)?
    {
        fields.extend(fastest);
    }
    Ok(value)
}

fn same_row(a: &Value, b: &Value) -> bool {
    ["name", "shape", "backend"].into_iter().all(|key| a.get(key) == b.get(key))
}

fn machine_facts() -> Map<String, Value> {
    let Machine { system, processor, cores, memory } = Machine::detect();
    let memory = memory.map(|m| (m.total as f64 / (1_u64 << 30) as f64 * 10.0).round() / 10.0);
    let facts = json!({ "system": system, "processor": processor, "cores": cores, "memory_gib": memory });
    facts.as_object().cloned().unwrap_or_default()
}

/// Waits until no other run is between reading and replacing; until the file is closed, none is but this one.
#[cfg(unix)]
fn lock(path: &Path) -> Result<File> {
    // The folder, because the record itself is replaced, and a file of its own would be left behind.
    let folder = File::open(path.parent().context("a file in a folder")?)?;
    folder.lock()?;
    Ok(folder)
}

#[cfg(not(unix))]
fn lock(path: &Path) -> Result<File> {
    let file = File::create(path.with_extension("lock"))?;
    file.lock()?;
    Ok(file)
}

fn replace(path: &Path, text: &str) -> Result<()> {
    let mut file = NamedTempFile::new_in(path.parent().context("a file in a folder")?)?;
    file.write_all(text.as_bytes())?;
    file.as_file().sync_all()?;
    readable(&file)?;
    file.persist(path)?;
    Ok(())
}

/// A temporary file is its owner's alone; a record is for everybody.
#[cfg(unix)]
fn readable(file: &NamedTempFile) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;

    Ok(file.as_file().set_permissions(fs::Permissions::from_mode(0o644))?)
}

#[cfg(not(unix))]
fn readable(_: &NamedTempFile) -> Result<()> {
    Ok(())
}

/// `nvidia-h200` of `NVIDIA H200`: a device's name as a folder's.
pub(super) fn slug(device: &str) -> String {
    let plain = device.to_lowercase().replace("(r)", " ").replace("(tm)", " ");
    let words = plain.split(|c: char| !c.is_ascii_alphanumeric() && c != '.');
    let telling = |word: &&str| !word.is_empty() && !matches!(*word, "cpu" | "processor");
    let slug = words.map(|word| word.trim_matches('.')).filter(telling).collect::<Vec<_>>().join("-");
    if slug.is_empty() { "unknown".into() } else { slug }
}

/// The date in UTC, `2026-11-30`.
fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (year, month, day) = date(seconds / 86_400);
    format!("{year:04}-{month:02}-{day:02}")
}

/// The Gregorian date of a day counted from 1970-01-01.
fn date(mut days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    for (month, length) in (1..).zip([31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]) {
        if days < length {
            return (year, month, days + 1);
        }
        days -= length;
    }
    (year, 12, 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(11_016), (2000, 2, 29));
        assert_eq!(date(20_787), (2026, 11, 30));
        assert_eq!(date(20_818), (2026, 12, 31));
    }

    #[test]
    fn runs_that_write_at_the_same_time_keep_each_others_rows() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let row = |index: usize| Row {
            name: format!("row {index}"),
            shape: crate::bench::shapes::Shapes::read(None).expect("the shipped shapes").all[0].id(),
            backend: "cpu".into(),
            median_ms: 1.0,
            min_ms: 1.0,
            max_ms: 1.0,
            runs: 1,
            floor_ms: None,
            bytes: 1,
            flops: 0,
            saved_h_bytes: None,
            passes: vec![],
            peers: vec![],
        };
        let write = |index| Record::open(folder.path(), "m")?.write(&[row(index)], vec![]);
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..16).map(|index| scope.spawn(move || write(index))).collect();
            all.into_iter().try_for_each(|thread| thread.join().expect("no panic").map(drop))
        })?;
        let Record { path, .. } = Record::open(folder.path(), "m")?;
        assert_eq!(read(&path)?["rows"].as_array().map(Vec::len), Some(16));
        Ok(())
    }

    #[test]
    fn slugs() {
        assert_eq!(slug("NVIDIA H200"), "nvidia-h200");
        assert_eq!(slug("Intel(R) Xeon(R) Processor @ 2.90GHz 2cores"), "intel-xeon-2.90ghz-2cores");
        assert_eq!(slug("../.."), "unknown");
        assert_eq!(slug("…"), "unknown");
    }
}
