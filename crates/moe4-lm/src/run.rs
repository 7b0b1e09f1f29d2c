//! A run and its folder: the same model trained once in each precision.
//!
//! ```text
//! config.toml                  everything the run follows from
//! metrics.csv                  loss of every step
//! bf16.safetensors             checkpoint: parameters and optimizer state
//! nvfp4.safetensors
//! loss.png                     the curves
//! sample.txt                   text written by the trained models
//! ```
//!
//! `metrics.csv` is written before the checkpoint: whatever moment the process dies at, the rows up to the
//! checkpoint's step are there.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use moe4::mlp::PagedStashStats;

use crate::config::{DataConfig, Precision, RunConfig};
use crate::data::{Corpus, SHIPPED_NAME};
use crate::files::write_whole;
use crate::metrics::{Metrics, MetricsRow};
use crate::trainer::Trainer;
use crate::{Error, plot};

/// The last steps that the reported training loss is the mean of.
const REPORTED_STEPS: usize = 50;

/// What sampled text goes on from.
const PROMPT: &str = "It is a truth ";

/// Hears how a run goes, and may stop it between two steps.
pub trait Observer {
    /// A model starts or goes on at `step` of `steps`.
    fn started(&mut self, precision: Precision, step: usize, steps: usize) {
        let _ = (precision, step, steps);
    }

    /// A step is done; a validation loss is there if the step ended with one.
    fn stepped(&mut self, row: &MetricsRow, bytes_per_second: f64) {
        let _ = (row, bytes_per_second);
    }

    /// The steps of a model are done or stopped; what follows takes a few seconds.
    fn finished(&mut self, precision: Precision) {
        let _ = precision;
    }

    /// Asked after each step; true saves and ends the run.
    fn stop(&self) -> bool {
        false
    }
}

/// How a run ended.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// All models are trained.
    Finished(Summary),
    /// [`Observer::stop`] said so; everything is saved.
    Stopped {
        /// The model in training.
        precision: Precision,
        /// Its steps done.
        step: usize,
    },
}

/// The result of a finished run.
#[derive(Debug, Clone)]
pub struct Summary {
    /// Validation loss of the byte-frequency model.
    pub unigram_loss: f64,
    /// One for each precision, in the order of training.
    pub models: Vec<ModelSummary>,
}

/// The result of one model.
#[derive(Debug, Clone)]
pub struct ModelSummary {
    /// The experts' number format.
    pub precision: Precision,
    /// Mean nats a byte of the last 50 steps.
    pub training_loss: f64,
    /// Mean nats a byte of the whole validation part.
    pub validation_loss: f64,
    /// Training throughput; None if no step was done in this session.
    pub bytes_per_second: Option<f64>,
    /// How full the paged stash was at most, if there is one.
    pub stash: Option<PagedStashStats>,
}

/// A run folder and what belongs to it.
pub struct Run {
    folder: PathBuf,
    config: RunConfig,
    corpus: Corpus,
    metrics: Metrics,
}

impl Run {
    /// Starts a run in a new or empty folder.
    ///
    /// # Errors
    /// A setting is out of range, the folder is not empty, or it cannot be written.
    pub fn create(folder: &Path, config: RunConfig, corpus: Corpus) -> Result<Self, Error> {
        for &precision in &config.training.precisions {
            Trainer::new(&config, &corpus, precision)?;
        }
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let mut entries = std::fs::read_dir(folder).map_err(Error::io("read", folder))?;
        if entries.next().is_some() {
            return Err(Error::OutNotEmpty(folder.to_owned()));
        }
        write_whole(&folder.join("config.toml"), config.to_toml()?.as_bytes())?;
        Ok(Self { folder: folder.to_owned(), config, corpus, metrics: Metrics::default() })
    }

    /// Goes on with the run in a folder.
    ///
    /// # Errors
    /// The folder holds no run, or its text has changed.
    pub fn resume(folder: &Path) -> Result<Self, Error> {
        let path = folder.join("config.toml");
        if !path.exists() {
            return Err(Error::foreign(folder, "it has no config.toml"));
        }
        let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
        let config: RunConfig =
            toml::from_str(&text).map_err(|error| Error::foreign(&path, error.message()))?;
        let corpus = if config.data.text == SHIPPED_NAME {
            Corpus::shipped()
        } else {
            Corpus::read(Path::new(&config.data.text))?
        };
        if DataConfig::of(&corpus) != config.data {
            return Err(Error::TextChanged { path: config.data.text });
        }
        config.check(&corpus)?;
        let path = folder.join("metrics.csv");
        // Stopped before the first checkpoint, a run has no metrics yet.
        let metrics = if path.exists() { Metrics::load(&path)? } else { Metrics::default() };
        Ok(Self { folder: folder.to_owned(), config, corpus, metrics })
    }

    /// The run's settings.
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// The run's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The loss curves so far.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Trains what is left to train, on the threads of the current rayon pool.
    ///
    /// # Errors
    /// A file cannot be read or written, or a loss is no longer finite.
    pub fn execute(&mut self, observer: &mut dyn Observer) -> Result<Outcome, Error> {
        let Self { folder, config, corpus, metrics } = self;
        let unigram_loss = corpus.unigram_loss();
        let mut models = Vec::new();
        let mut samples = String::new();
        for &precision in &config.training.precisions {
            let mut session = Session::open(folder, config, corpus, metrics, precision)?;
            let stopped = session.train(observer)?;
            let Session { trainer, speed, .. } = session;
            if stopped {
                plot::save(&folder.join("loss.png"), metrics, unigram_loss)?;
                return Ok(Outcome::Stopped { precision, step: trainer.step_count() });
            }
            models.push(ModelSummary {
                precision,
                training_loss: metrics.recent_training_loss(precision, REPORTED_STEPS),
                validation_loss: trainer.validate(None)?,
                bytes_per_second: speed.bytes_per_second(),
                stash: trainer.stash_stats(),
            });
            let text = trainer.sample(PROMPT.as_bytes(), config.training.sample_bytes)?;
            samples += &format!("[{precision}]\n{PROMPT}{}\n\n", String::from_utf8_lossy(&text));
        }
        plot::save(&folder.join("loss.png"), metrics, unigram_loss)?;
        write_whole(&folder.join("sample.txt"), samples.as_bytes())?;
        Ok(Outcome::Finished(Summary { unigram_loss, models }))
    }
}

impl Summary {
    /// How much higher the second model's validation loss is than the first one's, as a share of it.
    pub fn validation_gap(&self) -> Option<f64> {
        let [first, second] = self.models.as_slice() else { return None };
        Some(second.validation_loss / first.validation_loss - 1.0)
    }

    /// The same for the training loss.
    pub fn training_gap(&self) -> Option<f64> {
        let [first, second] = self.models.as_slice() else { return None };
        Some(second.training_loss / first.training_loss - 1.0)
    }
}

impl DataConfig {
    /// Describes a text.
    pub fn of(corpus: &Corpus) -> Self {
        Self { text: corpus.name().to_owned(), fingerprint: format!("{:016x}", corpus.fingerprint()) }
    }
}

/// The training of one model within a run.
struct Session<'a, 'm> {
    trainer: Trainer<'a>,
    config: &'a RunConfig,
    metrics: &'m mut Metrics,
    metrics_path: PathBuf,
    checkpoint_path: PathBuf,
    precision: Precision,
    speed: Speed,
}

impl<'a, 'm> Session<'a, 'm> {
    fn open(
        folder: &Path,
        config: &'a RunConfig,
        corpus: &'a Corpus,
        metrics: &'m mut Metrics,
        precision: Precision,
    ) -> Result<Self, Error> {
        let mut trainer = Trainer::new(config, corpus, precision)?;
        let metrics_path = folder.join("metrics.csv");
        let checkpoint_path = folder.join(format!("{}.safetensors", precision.name()));
        if checkpoint_path.exists() {
            trainer.load(&checkpoint_path)?;
        }
        metrics.rewind(precision, trainer.step_count());
        if metrics.of(precision).count() != trainer.step_count() {
            let reason =
                format!("it lacks steps before {}, where the checkpoint stands", trainer.step_count());
            return Err(Error::foreign(&metrics_path, reason));
        }
        let speed = Speed::default();
        Ok(Self { trainer, config, metrics, metrics_path, checkpoint_path, precision, speed })
    }

    /// Takes the steps that are left; true if stopped before the last one.
    fn train(&mut self, observer: &mut dyn Observer) -> Result<bool, Error> {
        let training = &self.config.training;
        observer.started(self.precision, self.trainer.step_count(), training.steps);
        while self.trainer.step_count() < training.steps {
            self.step(observer)?;
            let done = self.trainer.step_count();
            let stop = done < training.steps && observer.stop();
            if stop || done == training.steps || done.is_multiple_of(training.checkpoint_every) {
                self.metrics.save(&self.metrics_path)?;
                self.trainer.save(&self.checkpoint_path)?;
            }
            if stop {
                observer.finished(self.precision);
                return Ok(true);
            }
        }
        observer.finished(self.precision);
        Ok(false)
    }

    fn step(&mut self, observer: &mut dyn Observer) -> Result<(), Error> {
        let training = &self.config.training;
        let bytes_a_step = training.batch * self.config.model.context;
        let learning_rate = training.learning_rate_at(self.trainer.step_count());
        let start = Instant::now();
        let losses = self.trainer.step()?;
        self.speed.add(bytes_a_step, start.elapsed());
        let step = self.trainer.step_count();
        let validate = step.is_multiple_of(training.validate_every) || step == training.steps;
        let row = MetricsRow {
            precision: self.precision,
            step,
            bytes: step * bytes_a_step,
            learning_rate,
            train_loss: losses.cross_entropy,
            balance: losses.balance,
            validation_loss: if validate {
                Some(self.trainer.validate(Some(training.validation_windows))?)
            } else {
                None
            },
        };
        observer.stepped(&row, self.speed.bytes_per_second().unwrap_or_default());
        self.metrics.push(row);
        Ok(())
    }
}

/// Training throughput, without validation and files.
#[derive(Debug, Clone, Copy, Default)]
struct Speed {
    bytes: usize,
    time: Duration,
}

impl Speed {
    fn add(&mut self, bytes: usize, time: Duration) {
        self.bytes += bytes;
        self.time += time;
    }

    fn bytes_per_second(&self) -> Option<f64> {
        (self.bytes > 0).then(|| self.bytes as f64 / self.time.as_secs_f64())
    }
}
