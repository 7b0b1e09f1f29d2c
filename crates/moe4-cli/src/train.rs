//! `moe4 train`: one small mixture-of-experts language model, trained in BF16 and in NVFP4 on the same bytes.

mod progress;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;
use moe4::kernels::activation::Activation;
use moe4::mlp::PagedStashStats;
use moe4_lm::{
    Corpus, DataConfig, ModelConfig, Outcome, Precision, Run, RunConfig, Stash, Summary, TrainingConfig,
};

use self::progress::Progress;
use crate::output;

/// Options of `moe4 train`.
#[derive(clap::Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    settings: Settings,

    /// Folder for the results; must be new or empty [default: runs/001, or the next free number]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Go on with the run in this folder, with its settings
    #[arg(long, value_name = "DIR", conflicts_with_all = ["Settings", "out"])]
    resume: Option<PathBuf>,

    /// Threads to compute with; the results do not depend on it [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

/// What a run follows from; fixed once it has started.
#[derive(clap::Args)]
struct Settings {
    /// Number format of the experts' matrix products
    #[arg(long, value_enum, default_value_t = Precisions::Both)]
    precision: Precisions,

    /// Experts' activation: swiglu, srelu, tanh_srelu:s=16, situ_glu:beta1=4,beta2=25 or
    /// clamped_qgeglu:limit=7,alpha=1.702,offset=1
    #[arg(long, default_value_t = ModelConfig::default().activation)]
    activation: Activation,

    /// Rebuild the experts' inner activations in the backward pass instead of keeping them
    #[arg(long)]
    recompute: bool,

    /// Where the experts' saved tensors wait for the backward pass: where they were made, or in a pool of pages
    #[arg(long, value_enum, default_value_t = StashArg::InPlace)]
    stash: StashArg,

    /// Optimizer steps
    #[arg(long, value_name = "N", default_value_t = TrainingConfig::default().steps)]
    steps: usize,

    /// Windows of text in a step
    #[arg(long, value_name = "N", default_value_t = TrainingConfig::default().batch)]
    batch: usize,

    /// Peak learning rate
    #[arg(long, value_name = "X", default_value_t = TrainingConfig::default().learning_rate)]
    lr: f64,

    /// Steps over which the learning rate rises
    #[arg(long, value_name = "N", default_value_t = TrainingConfig::default().warmup)]
    warmup: usize,

    /// Transformer blocks
    #[arg(long, value_name = "N", default_value_t = ModelConfig::default().layers)]
    layers: usize,

    /// Width of the model
    #[arg(long, value_name = "N", default_value_t = ModelConfig::default().hidden)]
    hidden: usize,

    /// Attention heads
    #[arg(long, value_name = "N", default_value_t = ModelConfig::default().heads)]
    heads: usize,

    /// Bytes that the model sees at once
    #[arg(long, value_name = "N", default_value_t = ModelConfig::default().context)]
    context: usize,

    /// Experts in each block
    #[arg(long, value_name = "N", default_value_t = ModelConfig::default().experts)]
    experts: usize,

    /// Experts that a byte is sent to
    #[arg(long, value_name = "N", default_value_t = ModelConfig::default().top_k)]
    top_k: usize,

    /// Width of an expert
    #[arg(long, value_name = "N", default_value_t = ModelConfig::default().ffn)]
    ffn: usize,

    /// Seed of parameters, batches, stochastic rounding and sampled text
    #[arg(long, value_name = "N", default_value_t = TrainingConfig::default().seed)]
    seed: u64,

    /// Text to train on [default: Pride and Prejudice, which ships with moe4]
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum StashArg {
    InPlace,
    Paged,
}

#[derive(Clone, Copy, ValueEnum)]
enum Precisions {
    Bf16,
    Nvfp4,
    Both,
}

pub(crate) fn run(args: TrainArgs) -> Result<()> {
    // burn and moe4 both compute on the rayon pool that they are called from.
    let mut pool = rayon::ThreadPoolBuilder::new();
    if let Some(threads) = args.threads {
        pool = pool.num_threads(threads.into());
    }
    let pool = pool.build().context("cannot start the threads")?;

    // Before there is a folder that an interrupt could leave half made.
    let mut progress = Progress::new(output::interrupt_flag()?);
    let mut run = match &args.resume {
        Some(folder) => Run::resume(folder)?,
        None => start(&args)?,
    };
    let outcome = pool.install(|| run.execute(&mut progress))?;
    output::print(&report(&run, &outcome))
}

fn start(args: &TrainArgs) -> Result<Run> {
    let settings = &args.settings;
    let corpus = match &settings.data {
        // The whole path, so that the run can be resumed from any folder.
        Some(path) => Corpus::read(&std::fs::canonicalize(path).unwrap_or_else(|_| path.clone()))?,
        None => Corpus::shipped(),
    };
    let config = RunConfig {
        model: ModelConfig {
            layers: settings.layers,
            hidden: settings.hidden,
            heads: settings.heads,
            context: settings.context,
            experts: settings.experts,
            top_k: settings.top_k,
            ffn: settings.ffn,
            activation: settings.activation,
        },
        training: TrainingConfig {
            precisions: match settings.precision {
                Precisions::Bf16 => vec![Precision::Bf16],
                Precisions::Nvfp4 => vec![Precision::Nvfp4],
                Precisions::Both => vec![Precision::Bf16, Precision::Nvfp4],
            },
            steps: settings.steps,
            batch: settings.batch,
            learning_rate: settings.lr,
            warmup: settings.warmup,
            recompute: settings.recompute,
            stash: match settings.stash {
                StashArg::InPlace => Stash::InPlace,
                StashArg::Paged => Stash::Paged,
            },
            seed: settings.seed,
            ..TrainingConfig::default()
        },
        data: DataConfig::of(&corpus),
    };
    let folder = args.out.clone().unwrap_or_else(next_folder);
    Ok(Run::create(&folder, config, corpus)?)
}

/// `runs/001`, or the first number after it that is not taken.
fn next_folder() -> PathBuf {
    let mut number = 1_u32;
    loop {
        let folder = Path::new("runs").join(format!("{number:03}"));
        if !folder.exists() {
            return folder;
        }
        number += 1;
    }
}

fn report(run: &Run, outcome: &Outcome) -> String {
    let folder = run.folder().display();
    match outcome {
        Outcome::Finished(summary) => {
            let files = "metrics.csv, loss.png, config.toml, sample.txt and the checkpoints";
            format!("{}\n{files} are in {folder}\n", table(summary))
        }
        Outcome::Stopped { precision, step } => format!(
            "stopped and saved after step {step} of {} in {precision}; go on with: moe4 train --resume {folder}\n",
            run.config().training.steps,
        ),
    }
}

fn table(summary: &Summary) -> String {
    let loss = |loss: f64| format!("{loss:.4}");
    let gap = |gap: Option<f64>| gap.map_or_else(String::new, |gap| format!("{:+.2} %", 100.0 * gap));
    let mut rows: Vec<_> = summary
        .models
        .iter()
        .map(|model| {
            let speed = model.bytes_per_second.map_or_else(|| "-".to_owned(), |speed| format!("{speed:.0}"));
            vec![model.precision.to_string(), loss(model.training_loss), loss(model.validation_loss), speed]
        })
        .collect();
    if summary.models.len() == 2 {
        rows.push(vec![
            "gap".to_owned(),
            gap(summary.training_gap()),
            gap(summary.validation_gap()),
            String::new(),
        ]);
    }
    rows.push(vec!["byte frequencies".to_owned(), String::new(), loss(summary.unigram_loss), String::new()]);
    let mut text = output::table(&["nats per byte", "training", "validation", "tokens/s"], 1, rows);
    for model in &summary.models {
        if let Some(stash) = &model.stash {
            text.push_str(&stash_line(model.precision, stash));
        }
    }
    text
}

fn stash_line(precision: Precision, stash: &PagedStashStats) -> String {
    let mib = |pages: usize| (pages * stash.page_bytes) as f64 / (1 << 20) as f64;
    let (peak, total) = (stash.pages.peak, stash.pages.total);
    format!(
        "paged stash, {precision}: peak {peak} of {total} pages of {} KiB, {:.1} of {:.1} MiB\n",
        stash.page_bytes >> 10,
        mib(peak),
        mib(total),
    )
}
