//! How the training goes: a bar on a terminal, else a line now and then.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use moe4_lm::{MetricsRow, Observer, Precision};

/// Shows progress on standard error and passes Ctrl-C on.
pub(super) struct Progress {
    bar: ProgressBar,
    stop: Arc<AtomicBool>,
    steps: usize,
    validation_loss: Option<f64>,
    last_line: Instant,
}

/// Between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

impl Progress {
    pub(super) fn new(stop: Arc<AtomicBool>) -> Self {
        Self { bar: ProgressBar::hidden(), stop, steps: 0, validation_loss: None, last_line: Instant::now() }
    }
}

impl Observer for Progress {
    fn started(&mut self, precision: Precision, step: usize, steps: usize) {
        let bar =
            ProgressBar::new(steps as u64).with_position(step as u64).with_prefix(precision.to_string());
        let style = ProgressStyle::with_template("{prefix:5} {wide_bar} {pos}/{len} {msg} left {eta}");
        self.bar = match style {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        };
        // The time left is that of the steps of this session.
        self.bar.reset_eta();
        self.bar.enable_steady_tick(Duration::from_millis(500));
        self.steps = steps;
        self.validation_loss = None;
    }

    fn stepped(&mut self, row: &MetricsRow, bytes_per_second: f64) {
        self.validation_loss = row.validation_loss.or(self.validation_loss);
        let validation =
            self.validation_loss.map_or_else(String::new, |loss| format!(" validation {loss:.3}"));
        let message = format!("loss {:.3}{validation} {bytes_per_second:.0} tokens/s", row.train_loss);
        let due = row.step == self.steps || self.last_line.elapsed() >= LINE_EVERY;
        if self.bar.is_hidden() && due {
            self.last_line = Instant::now();
            // Nobody is left to be told if standard error is closed.
            writeln!(io::stderr(), "{} step {}/{} {message}", row.precision, row.step, self.steps).ok();
        }
        self.bar.set_message(message);
        self.bar.set_position(row.step as u64);
        if self.stop.load(Ordering::Relaxed) {
            self.bar.set_message("saving");
        }
    }

    fn finished(&mut self, _precision: Precision) {
        // The finished bar stays as a record of the run.
        self.bar.abandon();
    }

    fn stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}
