//! `moe4 bench`: times of single passes and of whole training steps, on shapes that the peers measure as well.
//!
//! ```text
//! for each shape and case:  small shape against the reference   wrong: the command fails, nothing is timed
//! for each shape and case:  two runs, the same bytes?           wrong: the command fails, nothing is recorded
//!                           one run under a ledger              bytes and operations, hence the floor
//!                           timed runs, then if asked for runs with marks around every pass
//! for each shape:           the peers, on the same rows    wrong: a line says so, the rest is recorded
//! then:                     table, record
//! ```

mod case;
mod check;
mod clock;
mod clock_cuda;
mod copies;
mod h_passes;
mod inputs;
mod measure;
mod memory;
mod passes;
mod peers;
mod products;
mod record;
mod row;
mod sequence;
mod shapes;
mod step;
mod table;
mod tensors;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use moe4::kernels::cpu::Cpu;

use self::clock::Clock;
use self::measure::{Measurement, Options};
use self::peers::Peers;
use self::record::Record;
use self::shapes::{BackendArg, Shapes};
use crate::{cuda, output};

/// Arguments of `moe4 bench`.
#[derive(Args)]
pub(crate) struct BenchArgs {
    /// Whose kernels are measured.
    #[arg(long, value_enum, default_value = "cpu")]
    backend: BackendArg,
    /// A shape by its name, repeatable [default: those meant for the backend].
    #[arg(long, value_name = "NAME")]
    shape: Vec<String>,
    /// A pass by its name or the start of it, repeatable: group_quantize, step_nvfp4 [default: all].
    #[arg(long, value_name = "NAME")]
    pass: Vec<String>,
    /// Show each pass of forwards and steps as well, with its time on the device.
    #[arg(long)]
    per_pass: bool,
    /// Timed runs of each row, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    runs: u32,
    /// Keep the results in DIR/<machine>/<date>.json, where rows measured again replace the older ones.
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,
    /// The machine's name in the record [default: made from the device's name].
    #[arg(long, value_name = "NAME", requires = "record")]
    machine: Option<String>,
    /// Measure the PyTorch scripts of bench/peers beside, with this Python interpreter.
    #[arg(long, value_name = "PYTHON")]
    peers: Option<PathBuf>,
    /// Seconds after which a script of the peers is ended; each runs once a shape, compiling included.
    #[arg(long, value_name = "SECONDS", default_value_t = 1800, requires = "peers", value_parser = clap::value_parser!(u32).range(1..))]
    peer_timeout: u32,
    /// Shapes to take instead of bench/shapes.toml, whose form they have.
    #[arg(long, value_name = "FILE")]
    shapes: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(args: BenchArgs) -> Result<()> {
    match args.backend {
        BackendArg::Cpu => run_on(&Cpu::new(), &args),
        BackendArg::Cuda => run_on(&cuda::open(0).context("--backend cuda")?, &args),
    }
}

fn run_on<B: Clock>(backend: &B, args: &BenchArgs) -> Result<()> {
    let shapes = Shapes::read(args.shapes.as_deref())?;
    let selected = shapes.select(&args.shape, args.backend)?;
    let cases = case::select(&args.pass)?;
    // Whatever can be refused is refused before minutes are spent.
    let timeout = Duration::from_secs(u64::from(args.peer_timeout));
    let start = |python| Peers::start(python, timeout, args.backend, &shapes);
    let peers = args.peers.as_deref().map(start).transpose()?;
    let record = match &args.record {
        Some(folder) => {
            let machine = args.machine.clone().unwrap_or_else(|| record::slug(&backend.device()));
            Some(Record::open(folder, &machine)?)
        }
        None => None,
    };

    let options = Options { runs: args.runs as usize, per_pass: args.per_pass };
    let Measurement { mut rows, mut notes } =
        measure::all(backend, &selected, &cases, options, peers.as_ref())?;
    if rows.is_empty() {
        bail!("nothing could be measured: {}", notes.join("; "));
    }
    row::round(&mut rows);
    let mut text = table::all(&rows);
    if cfg!(debug_assertions) {
        notes.push("a development build; times that count need cargo run --release".into());
    }
    if let Some(record) = record {
        let mut facts = backend.facts();
        facts.push(("build", if cfg!(debug_assertions) { "dev" } else { "release" }.into()));
        facts.extend(peers.iter().flat_map(Peers::facts));
        let path = record.write(&rows, facts)?;
        notes.push(format!("recorded in {}", path.display()));
    }
    for note in notes {
        text.push_str(&format!("{note}\n"));
    }
    output::print(&text)
}
