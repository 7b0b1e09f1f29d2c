//! The text: bytes as tokens, a training and a validation part, and batches that depend on nothing but
//! (seed, step).
//!
//! A batch is drawn afresh from its step number instead of from a shuffled queue, so that a resumed run needs
//! no saved position and sees the same bytes as one that was never interrupted.

use std::path::Path;

use rand::Rng;
use rand::rngs::StdRng;

use crate::Error;
use crate::files::fnv1a;
use crate::rng::{Stream, rng};

/// *Pride and Prejudice*, 684,768 bytes of ASCII; see `data/ORIGIN.md`.
const SHIPPED: &[u8] = include_bytes!("../data/pride_and_prejudice.txt");

/// The name under which the shipped text appears in `config.toml` and in messages.
pub const SHIPPED_NAME: &str = "pride_and_prejudice";

/// One part in ten, the last one, is kept for validation.
const VALIDATION_PARTS: usize = 10;

/// A text split into a training and a validation part.
#[derive(Debug, Clone)]
pub struct Corpus {
    name: String,
    bytes: std::borrow::Cow<'static, [u8]>,
    split: usize,
}

/// `rows` windows of `context` bytes and the byte that follows each position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Windows in the batch.
    pub rows: usize,
    /// Bytes in a window.
    pub context: usize,
    /// `[rows, context]`, row-major.
    pub inputs: Vec<u8>,
    /// `[rows, context]`: `targets[r, t]` follows `inputs[r, t]` in the text.
    pub targets: Vec<u8>,
}

impl Corpus {
    /// The text that ships with moe4.
    pub fn shipped() -> Self {
        Self::new(SHIPPED_NAME.to_owned(), SHIPPED.into())
    }

    /// The bytes of a file, whatever they are.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
        Ok(Self::new(path.display().to_string(), bytes.into()))
    }

    fn new(name: String, bytes: std::borrow::Cow<'static, [u8]>) -> Self {
        let split = bytes.len() - bytes.len() / VALIDATION_PARTS;
        Self { name, bytes, split }
    }

    /// The file's name, or [`SHIPPED_NAME`].
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The first nine tenths.
    pub fn training(&self) -> &[u8] {
        &self.bytes[..self.split]
    }

    /// The last tenth.
    pub fn validation(&self) -> &[u8] {
        &self.bytes[self.split..]
    }

    /// FNV-1a over all bytes: tells whether a resumed run still has its text.
    pub fn fingerprint(&self) -> u64 {
        fnv1a([&self.bytes[..]])
    }

    /// Checks that both parts hold at least one window and the byte after it.
    ///
    /// # Errors
    /// The text is too short.
    pub fn check(&self, context: usize) -> Result<(), Error> {
        // The validation part is the smaller one; it needs a window and the byte after it.
        let needed = (context + 1).saturating_mul(VALIDATION_PARTS);
        if self.bytes.len() < needed {
            return Err(Error::TextTooShort {
                path: self.name.clone(),
                got: self.bytes.len(),
                needed,
                context,
            });
        }
        Ok(())
    }

    /// The training batch of a step: `rows` windows at uniformly drawn positions.
    pub fn training_batch(&self, seed: u64, step: u64, rows: usize, context: usize) -> Batch {
        let text = self.training();
        let mut rng: StdRng = rng(seed, Stream::Data, step);
        let starts = (0..rows).map(|_| rng.random_range(0..text.len() - context));
        batch(text, starts, rows, context)
    }

    /// The validation part in windows that follow each other, cut into batches of at most `rows`.
    ///
    /// With `limit`, only that many windows, spread evenly over the part.
    pub fn validation_batches(&self, limit: Option<usize>, rows: usize, context: usize) -> Vec<Batch> {
        let text = self.validation();
        let available = (text.len() - 1) / context;
        let windows = limit.map_or(available, |limit| limit.min(available));
        let starts: Vec<usize> = (0..windows).map(|i| i * available / windows * context).collect();
        starts.chunks(rows).map(|chunk| batch(text, chunk.iter().copied(), chunk.len(), context)).collect()
    }

    /// Mean nats per validation byte of a model that knows only how often each byte occurs in training
    /// (add-one smoothing): what a language model must beat.
    pub fn unigram_loss(&self) -> f64 {
        let mut counts = [1_u64; 256];
        for &byte in self.training() {
            counts[usize::from(byte)] += 1;
        }
        let total = counts.iter().sum::<u64>() as f64;
        let nats: f64 =
            self.validation().iter().map(|&byte| -(counts[usize::from(byte)] as f64 / total).ln()).sum();
        nats / self.validation().len() as f64
    }
}

impl From<Vec<u8>> for Corpus {
    /// A text from memory.
    fn from(bytes: Vec<u8>) -> Self {
        Self::new("text from memory".to_owned(), bytes.into())
    }
}

fn batch(text: &[u8], starts: impl Iterator<Item = usize>, rows: usize, context: usize) -> Batch {
    let mut inputs = Vec::with_capacity(rows * context);
    let mut targets = Vec::with_capacity(rows * context);
    for start in starts {
        inputs.extend_from_slice(&text[start..start + context]);
        targets.extend_from_slice(&text[start + 1..start + 1 + context]);
    }
    Batch { rows, context, inputs, targets }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_text_is_whole_ascii_and_starts_with_its_title() {
        let corpus = Corpus::shipped();
        assert_eq!(corpus.bytes.len(), 684_768);
        assert!(corpus.bytes.is_ascii());
        assert!(corpus.training().starts_with(b"PRIDE AND PREJUDICE\n"));
        assert_eq!(corpus.training().len() + corpus.validation().len(), 684_768);
    }

    #[test]
    fn a_batch_depends_on_seed_and_step_alone_and_targets_follow_inputs() {
        let corpus = Corpus::shipped();
        let batch = corpus.training_batch(3, 7, 4, 16);
        assert_eq!(batch, corpus.training_batch(3, 7, 4, 16));
        assert_ne!(batch, corpus.training_batch(3, 8, 4, 16));
        assert_ne!(batch, corpus.training_batch(4, 7, 4, 16));
        for row in 0..4 {
            assert_eq!(batch.inputs[row * 16 + 1..row * 16 + 16], batch.targets[row * 16..row * 16 + 15]);
        }
    }

    #[test]
    fn validation_windows_cover_the_part_or_are_spread_over_it() {
        let corpus = Corpus::from((0..2000_u32).map(|i| (i % 251) as u8).collect::<Vec<_>>());
        let all: usize = corpus.validation_batches(None, 3, 10).iter().map(|batch| batch.rows).sum();
        assert_eq!(all, 19);
        let some = corpus.validation_batches(Some(4), 3, 10);
        assert_eq!(some.iter().map(|batch| batch.rows).collect::<Vec<_>>(), [3, 1]);
        assert_eq!(some[0].inputs[..10], corpus.validation()[..10]);
    }

    #[test]
    fn too_short_a_text_is_refused_before_any_window_is_cut() {
        assert!(Corpus::from(vec![b'a'; 169]).check(16).is_err());
        let corpus = Corpus::from(vec![b'a'; 170]);
        corpus.check(16).expect("long enough");
        assert_eq!(corpus.validation_batches(None, 8, 16).len(), 1);
        corpus.training_batch(0, 0, 2, 16);
    }

    #[test]
    fn the_unigram_model_of_a_constant_text_is_nearly_certain() {
        let corpus = Corpus::from(vec![b'x'; 10_000]);
        assert!(corpus.unigram_loss() < 0.05);
    }
}
