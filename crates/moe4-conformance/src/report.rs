//! What a run of the suite says: for each check, that it passed or where it did not.

use moe4::kernels::Error;
use std::fmt;

/// Why a check failed: tensor, index, expected, got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure(String);

impl Failure {
    /// With this message.
    pub fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Self(format!("the backend refused: {e}"))
    }
}

/// The result of a check.
pub type Outcome = Result<(), Failure>;

/// Says in which case something failed.
pub trait InCase {
    /// Puts `case` before the message.
    fn in_case(self, case: impl fmt::Display) -> Self;
}

impl<T> InCase for Result<T, Failure> {
    fn in_case(self, case: impl fmt::Display) -> Self {
        self.map_err(|Failure(message)| Failure(format!("{case}: {message}")))
    }
}

/// What came of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It ran and found nothing wrong.
    Passed,
    /// It ran and found this.
    Failed(Failure),
    /// It did not run, for this reason.
    Skipped(&'static str),
}

/// The result of one named check.
#[derive(Clone, Debug)]
pub struct Line {
    /// The check's name.
    pub name: &'static str,
    /// Its result.
    pub verdict: Verdict,
}

/// The results of all checks, in the order of the list.
#[derive(Clone, Debug)]
pub struct Report {
    /// The backend, as it describes itself.
    pub backend: String,
    /// One line a check.
    pub lines: Vec<Line>,
}

impl Report {
    /// Whether every check that ran passed, and one ran. [`Report::skipped`] lists the others.
    pub fn passed(&self) -> bool {
        self.failed().is_empty() && self.skipped().len() < self.lines.len()
    }

    /// The names of the checks that failed.
    pub fn failed(&self) -> Vec<&'static str> {
        self.names(|verdict| matches!(verdict, Verdict::Failed(_)))
    }

    /// The names of the checks that did not run, for want of a capability.
    pub fn skipped(&self) -> Vec<&'static str> {
        self.names(|verdict| matches!(verdict, Verdict::Skipped(_)))
    }

    fn names(&self, which: impl Fn(&Verdict) -> bool) -> Vec<&'static str> {
        self.lines.iter().filter(|line| which(&line.verdict)).map(|line| line.name).collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (failed, skipped) = (self.failed().len(), self.skipped().len());
        let ran = self.lines.len() - skipped;
        write!(f, "{}: {failed} of {ran} checks failed", self.backend)?;
        writeln!(f, "{}", if skipped > 0 { format!(", {skipped} skipped") } else { String::new() })?;
        for Line { name, verdict } in &self.lines {
            match verdict {
                Verdict::Passed => writeln!(f, "  pass  {name}")?,
                Verdict::Failed(failure) => writeln!(f, "  FAIL  {name}: {failure}")?,
                Verdict::Skipped(reason) => writeln!(f, "  skip  {name}: {reason}")?,
            }
        }
        Ok(())
    }
}
