//! The loss curves of a run, and their file `metrics.csv`.
//!
//! The file holds nothing that depends on the clock: an interrupted and resumed run writes the same bytes as one
//! that was left alone.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::config::Precision;
use crate::files::write_whole;

/// One optimizer step of one of the runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MetricsRow {
    /// Which run.
    pub precision: Precision,
    /// Counted from 1.
    pub step: usize,
    /// Bytes trained on so far.
    pub bytes: usize,
    /// Learning rate of the step's update.
    pub learning_rate: f64,
    /// Mean nats a byte of the step's batch, before the update.
    pub train_loss: f32,
    /// Load-balance loss of the batch; 1 is perfectly even.
    pub balance: f32,
    /// Mean nats a validation byte after the update, in the steps that end with a validation.
    pub validation_loss: Option<f64>,
}

/// All rows so far, in the order in which they were made.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metrics(Vec<MetricsRow>);

impl Metrics {
    /// The rows of one run, step 1 first.
    pub fn of(&self, precision: Precision) -> impl DoubleEndedIterator<Item = &MetricsRow> {
        self.0.iter().filter(move |row| row.precision == precision)
    }

    /// The runs that have at least one row.
    pub fn precisions(&self) -> Vec<Precision> {
        let mut precisions: Vec<_> = self.0.iter().map(|row| row.precision).collect();
        precisions.dedup();
        precisions
    }

    /// Mean training loss of the last `steps` steps of a run; NaN if it has none.
    pub fn recent_training_loss(&self, precision: Precision, steps: usize) -> f64 {
        let recent: Vec<f64> =
            self.of(precision).rev().take(steps).map(|row| f64::from(row.train_loss)).collect();
        recent.iter().sum::<f64>() / recent.len() as f64
    }

    pub(crate) fn push(&mut self, row: MetricsRow) {
        self.0.push(row);
    }

    /// Drops what came after a checkpoint: the resumed run makes those rows again.
    pub(crate) fn rewind(&mut self, precision: Precision, step: usize) {
        self.0.retain(|row| row.precision != precision || row.step <= step);
    }

    pub(crate) fn save(&self, path: &Path) -> Result<(), Error> {
        let mut writer = csv::Writer::from_writer(Vec::new());
        let rows = self.0.iter().try_for_each(|row| writer.serialize(row));
        let failed = |error: String| Error::io("write", path)(std::io::Error::other(error));
        rows.map_err(|error| failed(error.to_string()))?;
        write_whole(path, &writer.into_inner().map_err(|error| failed(error.to_string()))?)
    }

    pub(crate) fn load(path: &Path) -> Result<Self, Error> {
        let file = std::fs::read(path).map_err(Error::io("read", path))?;
        let rows = csv::Reader::from_reader(file.as_slice()).into_deserialize().collect::<Result<_, _>>();
        let metrics = rows.map(Self).map_err(|error| Error::foreign(path, error))?;
        for precision in metrics.precisions() {
            for (i, row) in metrics.of(precision).enumerate() {
                let losses = [f64::from(row.train_loss), row.validation_loss.unwrap_or(1.0)];
                if row.step != i + 1 || !losses.iter().all(|loss| loss.is_finite() && *loss >= 0.0) {
                    let reason = format!("its row for {precision}, step {} is none of a run", row.step);
                    return Err(Error::foreign(path, reason));
                }
            }
        }
        Ok(metrics)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(precision: Precision, step: usize) -> MetricsRow {
        MetricsRow {
            precision,
            step,
            bytes: step * 2048,
            learning_rate: 1e-3 / 3.0,
            train_loss: 1.0 / (step as f32 + 0.1),
            balance: 1.01,
            validation_loss: step.is_multiple_of(2).then_some(1.0 / 3.0),
        }
    }

    #[test]
    fn metrics_survive_their_file_bit_for_bit_and_rewind() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("metrics.csv");
        let mut metrics = Metrics::default();
        (1..=3).for_each(|step| metrics.push(row(Precision::Bf16, step)));
        (1..=3).for_each(|step| metrics.push(row(Precision::Nvfp4, step)));
        metrics.save(&path).expect("save");
        assert_eq!(Metrics::load(&path).expect("load"), metrics);

        metrics.rewind(Precision::Nvfp4, 1);
        assert_eq!(metrics.of(Precision::Bf16).count(), 3);
        assert_eq!(metrics.of(Precision::Nvfp4).count(), 1);
        assert_eq!(metrics.precisions(), [Precision::Bf16, Precision::Nvfp4]);
    }

    #[test]
    fn a_foreign_file_is_refused() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("metrics.csv");
        std::fs::write(&path, "a,b\n1,2\n").expect("write");
        assert!(matches!(Metrics::load(&path), Err(Error::Foreign { .. })));
        let tampered: [fn(&mut MetricsRow); 4] = [
            |row| row.train_loss = f32::INFINITY,
            |row| row.validation_loss = Some(f64::NAN),
            |row| row.train_loss = -1.0,
            |row| row.step = 7,
        ];
        for tamper in tampered {
            let mut metrics = Metrics::default();
            (1..=3).for_each(|step| metrics.push(row(Precision::Bf16, step)));
            tamper(&mut metrics.0[1]);
            metrics.save(&path).expect("save");
            assert!(matches!(Metrics::load(&path), Err(Error::Foreign { .. })), "{metrics:?}");
        }
    }
}
