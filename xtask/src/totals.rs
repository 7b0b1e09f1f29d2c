//! Counts of passed, failed and skipped tests, read from the closing lines of the test runners:
//!
//! ```text
//! test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s
//!      Summary [   1.204s] 12 tests run: 11 passed (1 slow), 1 failed, 1 skipped
//! 2 failed, 147 passed, 3 skipped, 14 warnings in 61.20s (0:01:01)
//! ```

use std::fmt;

#[derive(Debug, Default, PartialEq)]
pub(crate) struct Totals {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Totals {
    /// Adds the counts of `line` if it is a closing line; any other line counts nothing.
    pub(crate) fn read_line(&mut self, line: &str) {
        let line = line.trim_start();
        // pytest's line starts with a count and ends with a time.
        let pytest = line.starts_with(|c: char| c.is_ascii_digit())
            && line.split(" in ").nth(1).is_some_and(|time| time.trim_end().ends_with(['s', ')']));
        if !(line.starts_with("test result:") || line.starts_with("Summary [") || pytest) {
            return;
        }
        // A count is a number with its word behind it: "11 passed".
        let words: Vec<&str> =
            line.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty()).collect();
        for pair in words.windows(2) {
            let Ok(count) = pair[0].parse::<u64>() else { continue };
            match pair[1] {
                "passed" => self.passed += count,
                "failed" | "timed" | "exec" | "error" | "errors" => self.failed += count,
                "ignored" | "skipped" => self.skipped += count,
                _ => {}
            }
        }
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "test totals: {} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

#[cfg(test)]
mod tests {
    use super::Totals;

    fn read(lines: &[&str]) -> Totals {
        let mut totals = Totals::default();
        lines.iter().for_each(|line| totals.read_line(line));
        totals
    }

    #[test]
    fn cargo_test_lines_add_up() {
        let totals = read(&[
            "test a::b ... ok",
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.01s",
            "test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s",
        ]);
        assert_eq!(totals, Totals { passed: 14, failed: 1, skipped: 1 });
    }

    #[test]
    fn pytest_lines_add_up() {
        let totals = read(&[
            "tests/test_a.py:3: 4 passed",
            "4 passed",
            "0.62s call     tests/test_a.py::test_b",
            "2 failed, 147 passed, 3 skipped, 14 warnings in 61.20s (0:01:01)",
            "1 passed, 1 error in 0.62s",
        ]);
        assert_eq!(totals, Totals { passed: 148, failed: 3, skipped: 3 });
    }

    #[test]
    fn nextest_lines_add_up() {
        let totals = read(&[
            "        PASS [   0.003s] moe4 5 passed",
            "     Summary [   1.204s] 12 tests run: 11 passed (1 slow), 1 failed, 2 skipped",
        ]);
        assert_eq!(totals, Totals { passed: 11, failed: 1, skipped: 2 });
    }
}
