//! PyTorch beside moe4: the scripts of `bench/peers`, run on the same shapes and joined row by row.
//!
//! A script prints a JSON object a line, with `peer`, `name`, `shape`, and `median_ms` or `error`. The scripts are
//! part of this program, and read the same text of shapes. One that takes too long is ended; what it printed until then
//! counts.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Map, Value};
use tempfile::TempDir;

use super::row::{PeerTime, Row};
use super::shapes::{BackendArg, Shapes};

const COMMON: &str = "common.py";
/// What measures: each takes the rows that it knows.
const SCRIPTS: [&str; 2] = ["quantize.py", "grouped_mlp.py"];
const FILES: [(&str, &str); 3] = [
    (COMMON, include_str!("../../../../bench/peers/common.py")),
    (SCRIPTS[0], include_str!("../../../../bench/peers/quantize.py")),
    (SCRIPTS[1], include_str!("../../../../bench/peers/grouped_mlp.py")),
];

/// A Python interpreter with PyTorch, and the scripts in a folder.
pub(super) struct Peers {
    python: PathBuf,
    device: &'static str,
    timeout: Duration,
    folder: TempDir,
    facts: Map<String, Value>,
}

/// A script that has ended: what it printed, and how it failed if it did.
struct Finished {
    stdout: String,
    failure: Option<String>,
}

/// One line of a script.
#[derive(Deserialize)]
struct Line {
    peer: String,
    name: String,
    shape: String,
    median_ms: Option<f64>,
    error: Option<String>,
}

impl Peers {
    /// Lays out the scripts, and asks which PyTorch there is. `timeout` is for each run of a script.
    pub(super) fn start(
        python: &Path,
        timeout: Duration,
        backend: BackendArg,
        shapes: &Shapes,
    ) -> Result<Self> {
        let folder = tempfile::tempdir().context("cannot make a folder for the peers' scripts")?;
        for (name, text) in FILES.into_iter().chain([("shapes.toml", shapes.text.as_str())]) {
            fs::write(folder.path().join(name), text).context("cannot write the peers' scripts")?;
        }
        let device = match backend {
            BackendArg::Cpu => "cpu",
            BackendArg::Cuda => "cuda",
        };
        let mut peers = Self { python: python.to_owned(), device, timeout, folder, facts: Map::new() };
        let Finished { stdout: text, failure } = peers.run(COMMON, &[])?;
        if let Some(failure) = failure {
            bail!("--peers: {failure}");
        }
        peers.facts = serde_json::from_str(text.trim())
            .with_context(|| format!("--peers: {COMMON}: expected one JSON object, got '{}'", text.trim()))?;
        Ok(peers)
    }

    /// Facts about the peers' side, for the record.
    pub(super) fn facts(&self) -> Vec<(&'static str, String)> {
        let facts = self.facts.iter().map(|(name, value)| match value {
            Value::String(text) => format!("{name} {text}"),
            other => format!("{name} {other}"),
        });
        let facts: Vec<_> = facts.collect();
        vec![("peers", facts.join(", "))]
    }

    /// Adds the peers' times to rows of one shape. Returns what they could not do: a script that ends early, such as by its
    /// self-check, costs its own rows only.
    pub(super) fn measure(&self, shape: &str, runs: usize, rows: &mut [Row]) -> Result<Vec<String>> {
        let runs = runs.to_string();
        let mut notes = vec![];
        for script in SCRIPTS {
            let mut arguments = vec!["--shape", shape, "--runs", &runs];
            arguments.extend(rows.iter().flat_map(|row| ["--row", row.name.as_str()]));
            let Finished { stdout, failure } = self.run(script, &arguments)?;
            notes.extend(failure.map(|failure| format!("left out: peers on {shape}: {failure}")));
            for line in stdout.lines() {
                let note = match serde_json::from_str(line) {
                    Ok(line) => join(line, rows),
                    Err(_) => {
                        let shown = line.replace(char::is_control, " ");
                        Some(format!("peers on {shape}: {script}: expected a line of JSON, got '{shown}'"))
                    }
                };
                notes.extend(note.map(|note| format!("left out: {note}")));
            }
        }
        Ok(notes)
    }

    fn run(&self, script: &str, arguments: &[&str]) -> Result<Finished> {
        let folder = self.folder.path();
        // Files, not pipes: helpers that a script leaves behind would keep those open.
        let [printed, told] = ["printed", "told"].map(|name| folder.join(name));
        let file = |path: &Path| File::create(path).context("cannot keep what the peers' scripts print");
        let mut child = Command::new(&self.python)
            .arg(folder.join(script))
            .args(["--device", self.device, "--shapes"])
            .arg(folder.join("shapes.toml"))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(file(&printed)?)
            .stderr(file(&told)?)
            .spawn()
            .with_context(|| format!("--peers: cannot start {}", self.python.display()))?;
        let status = wait(&mut child, self.timeout).context("--peers: cannot wait for a script")?;
        let text = |path: &Path| -> Result<String> {
            let bytes = fs::read(path).context("cannot read what the peers' scripts print")?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let failure = match status {
            Some(status) if status.success() => None,
            Some(status) => {
                let text = text(&told)?;
                let last = text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("no message");
                Some(format!("{script} ended with {status}: {}", last.replace(char::is_control, " ")))
            }
            None => {
                let seconds = self.timeout.as_secs();
                Some(format!("{script} took more than {seconds} s and was ended; see --peer-timeout"))
            }
        };
        Ok(Finished { stdout: text(&printed)?, failure })
    }
}

/// How a script ended, or `None` if it had to be ended.
fn wait(child: &mut Child, timeout: Duration) -> std::io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() >= timeout {
            // It may have ended by itself just now.
            child.kill().or_else(|error| child.try_wait()?.map(drop).ok_or(error))?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Adds one peer's time to the row of its name and shape, or says what the peer could not do.
fn join(line: Line, rows: &mut [Row]) -> Option<String> {
    let Line { peer, name, shape, median_ms, error } = line;
    let about =
        |text: &str| Some(format!("{peer}: {name} on {shape}: {text}").replace(char::is_control, " "));
    let Some(row) = rows.iter_mut().find(|row| row.name == name && row.shape.name == shape) else {
        return about("a time that was not asked for");
    };
    match (median_ms, error) {
        (Some(peer_ms), None) if peer_ms > 0.0 && peer_ms.is_finite() => {
            row.peers.push(PeerTime { peer, peer_ms, ratio: row.median_ms / peer_ms });
            None
        }
        (None, Some(error)) => about(&error),
        (Some(got), None) => about(&format!("expected a positive time, got {got}")),
        _ => about("expected either a time or an error"),
    }
}
