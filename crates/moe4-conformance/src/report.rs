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

/// The result of one named check.
#[derive(Clone, Debug)]
pub struct Line {
    /// The check's name.
    pub name: &'static str,
    /// Its result.
    pub outcome: Outcome,
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
    /// Whether every check passed, and there was one.
    pub fn passed(&self) -> bool {
        !self.lines.is_empty() && self.failed().is_empty()
    }

    /// The names of the checks that failed.
    pub fn failed(&self) -> Vec<&'static str> {
        self.lines.iter().filter(|line| line.outcome.is_err()).map(|line| line.name).collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} of {} checks failed", self.backend, self.failed().len(), self.lines.len())?;
        for Line { name, outcome } in &self.lines {
            match outcome {
                Ok(()) => writeln!(f, "  pass  {name}")?,
                Err(failure) => writeln!(f, "  FAIL  {name}: {failure}")?,
            }
        }
        Ok(())
    }
}
