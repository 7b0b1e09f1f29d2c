//! Whole runs in small: determinism, resuming, and run folders that are not what they should be.

use std::io::Write;
use std::path::Path;
use std::sync::LazyLock;

use moe4_lm::{
    Corpus, DataConfig, Error, MetricsRow, ModelConfig, Observer, Outcome, Precision, Run, RunConfig,
    SHIPPED_NAME, Stash, TrainingConfig,
};

/// Stops the run after so many steps.
struct StopAfter(usize);

impl Observer for StopAfter {
    fn stepped(&mut self, _row: &MetricsRow, _bytes_per_second: f64) {
        self.0 = self.0.saturating_sub(1);
    }

    fn stop(&self) -> bool {
        self.0 == 0
    }
}

struct Silent;

impl Observer for Silent {}

/// The start of the shipped text, as a file, so that the runs can be resumed.
fn text() -> Corpus {
    static FILE: LazyLock<tempfile::NamedTempFile> = LazyLock::new(|| {
        let mut file = tempfile::NamedTempFile::new().expect("temporary file");
        file.write_all(&Corpus::shipped().training()[..5000]).expect("write");
        file
    });
    Corpus::read(FILE.path()).expect("read")
}

fn config() -> RunConfig {
    RunConfig {
        model: ModelConfig {
            layers: 2,
            hidden: 32,
            heads: 2,
            context: 16,
            experts: 4,
            top_k: 2,
            ffn: 32,
            ..ModelConfig::default()
        },
        training: TrainingConfig {
            steps: 7,
            batch: 2,
            warmup: 2,
            validate_every: 3,
            validation_windows: 4,
            checkpoint_every: 5,
            sample_bytes: 8,
            ..TrainingConfig::default()
        },
        data: DataConfig::of(&text()),
    }
}

fn create(folder: &Path, config: RunConfig) -> Result<Run, Error> {
    Run::create(folder, config, text())
}

fn read(folder: &Path, name: &str) -> Vec<u8> {
    std::fs::read(folder.join(name)).expect(name)
}

/// Runs to the end on so many threads.
fn finish(run: &mut Run, threads: usize) -> Outcome {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("thread pool");
    pool.install(|| run.execute(&mut Silent)).expect("run")
}

#[test]
fn an_interrupted_run_ends_like_an_uninterrupted_one_on_any_number_of_threads() {
    let [whole, pieces] = [(); 2].map(|()| tempfile::tempdir().expect("temporary folder"));
    let outcome = finish(&mut create(whole.path(), config()).expect("create"), 1);
    let Outcome::Finished(expected) = outcome else { panic!("stopped by nobody: {outcome:?}") };

    // Steps 3 of the first model, its last one, and 1 of the second; a fresh process each time.
    for (steps, precision, step) in [(3, Precision::Bf16, 3), (5, Precision::Nvfp4, 1)] {
        let mut run = match step {
            3 => create(pieces.path(), config()),
            _ => Run::resume(pieces.path()),
        }
        .expect("run");
        let outcome = run.execute(&mut StopAfter(steps)).expect("run");
        let Outcome::Stopped { precision: got, step: at } = outcome else { panic!("not stopped") };
        assert_eq!((got, at), (precision, step));
        assert!(pieces.path().join("loss.png").exists());
    }
    let outcome = finish(&mut Run::resume(pieces.path()).expect("resume"), 3);
    let Outcome::Finished(got) = outcome else { panic!("stopped by nobody: {outcome:?}") };

    for name in ["metrics.csv", "config.toml", "sample.txt", "loss.png"] {
        assert_eq!(read(whole.path(), name), read(pieces.path(), name), "{name}");
    }
    for (got, expected) in got.models.iter().zip(&expected.models) {
        assert_eq!(got.validation_loss.to_bits(), expected.validation_loss.to_bits());
        assert_eq!(got.training_loss.to_bits(), expected.training_loss.to_bits());
    }
    assert_eq!(got.models.len(), 2);
}

#[test]
fn precisions_share_parameters_and_batches_but_not_results() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let mut run = create(folder.path(), config()).expect("create");
    finish(&mut run, 2);
    let first = |precision| run.metrics().of(precision).next().expect("a row").train_loss;
    let (bf16, nvfp4) = (first(Precision::Bf16), first(Precision::Nvfp4));
    assert_ne!(bf16, nvfp4);
    assert!((bf16 - nvfp4).abs() < 0.01 * bf16, "{bf16} {nvfp4}");
}

#[test]
fn recompute_and_a_paged_stash_change_no_bit() {
    let options =
        [(false, Stash::InPlace), (true, Stash::InPlace), (false, Stash::Paged), (true, Stash::Paged)];
    let [plain, others @ ..] = options.map(|(recompute, stash)| {
        let folder = tempfile::tempdir().expect("temporary folder");
        let training = TrainingConfig { recompute, stash, steps: 4, ..config().training };
        let mut run = create(folder.path(), RunConfig { training, ..config() }).expect("create");
        let Outcome::Finished(summary) = finish(&mut run, 2) else { panic!("stopped by nobody") };
        for model in &summary.models {
            // Every layer's tensors were in pages at the same time, and none is left.
            let used = model.stash.map(|stats| (stats.pages.used, stats.pages.peak >= config().model.layers));
            assert_eq!(used, (stash == Stash::Paged).then_some((0, true)));
        }
        read(folder.path(), "metrics.csv")
    });
    for other in others {
        assert_eq!(plain, other);
    }
}

#[test]
fn a_small_model_learns_a_simple_text() {
    let corpus = || Corpus::from(b"abcd".repeat(500));
    let folder = tempfile::tempdir().expect("temporary folder");
    let training =
        TrainingConfig { steps: 60, batch: 4, learning_rate: 5e-3, warmup: 10, ..config().training };
    let config = RunConfig { training, data: DataConfig::of(&corpus()), ..config() };
    let mut run = Run::create(folder.path(), config, corpus()).expect("create");
    let Outcome::Finished(summary) = finish(&mut run, 2) else { panic!("stopped by nobody") };
    for model in &summary.models {
        assert!(model.validation_loss < 0.3 * summary.unigram_loss, "{summary:?}");
    }
}

#[test]
fn a_folder_that_is_not_empty_is_left_alone() {
    let folder = tempfile::tempdir().expect("temporary folder");
    std::fs::write(folder.path().join("thesis.txt"), "years of work").expect("write");
    assert!(matches!(create(folder.path(), config()), Err(Error::OutNotEmpty(_))));
    assert_eq!(std::fs::read_dir(folder.path()).expect("list").count(), 1);
}

#[test]
fn bad_settings_create_no_folder() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let out = folder.path().join("out");
    let bad = [
        ModelConfig { top_k: 5, ..config().model },
        ModelConfig { ffn: 40, ..config().model },
        ModelConfig { heads: 5, ..config().model },
        ModelConfig { context: 100_000, ..config().model },
        ModelConfig { experts: usize::MAX, ..config().model },
    ];
    for model in bad {
        let error = create(&out, RunConfig { model, ..config() }).err().expect("refused");
        assert!(!error.to_string().contains('\n'), "{error}");
        assert!(!out.exists(), "{error}");
    }
}

#[test]
fn what_is_no_run_is_not_resumed() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path();
    assert!(matches!(Run::resume(path), Err(Error::Foreign { .. })));
    std::fs::write(path.join("config.toml"), "model = 3\n").expect("write");
    assert!(matches!(Run::resume(path), Err(Error::Foreign { .. })));
    let data = DataConfig { text: SHIPPED_NAME.to_owned(), fingerprint: "0".to_owned() };
    let other = RunConfig { data, ..config() }.to_toml().expect("TOML");
    std::fs::write(path.join("config.toml"), other).expect("write");
    assert!(matches!(Run::resume(path), Err(Error::TextChanged { .. })));
}

#[test]
fn a_foreign_or_broken_checkpoint_is_refused() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path();
    let mut run = create(path, config()).expect("create");
    run.execute(&mut StopAfter(2)).expect("run");
    let resume = || Run::resume(path).and_then(|mut run| run.execute(&mut Silent));

    let checkpoint = read(path, "bf16.safetensors");
    for broken in [&checkpoint[..checkpoint.len() / 2], b"not a checkpoint", b""] {
        std::fs::write(path.join("bf16.safetensors"), broken).expect("write");
        assert!(matches!(resume(), Err(Error::Foreign { .. })));
    }
    std::fs::write(path.join("bf16.safetensors"), &checkpoint).expect("write");
    let metrics = read(path, "metrics.csv");
    std::fs::write(path.join("metrics.csv"), "precision,step\n").expect("write");
    assert!(matches!(resume(), Err(Error::Foreign { .. })));
    std::fs::write(path.join("metrics.csv"), metrics).expect("write");

    // A checkpoint of the same shape from another seed.
    let training = TrainingConfig { seed: 2, ..config().training };
    let toml = RunConfig { training, ..config() }.to_toml().expect("TOML");
    std::fs::write(path.join("config.toml"), toml).expect("write");
    assert!(matches!(resume(), Err(Error::Foreign { .. })));
}
