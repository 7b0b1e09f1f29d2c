//! From shapes and cases to rows.

use anyhow::{Context, Error, Result};
use indicatif::ProgressBar;
use moe4::kernels::{Capabilities, Ledger};

use super::case::{Case, Pass};
use super::check::{self, Ready};
use super::clock::{Ceilings, Clock};
use super::memory;
use super::peers::Peers;
use super::row::{Row, floor_ms};
use super::sequence;
use super::shapes::Shape;
use crate::output;

/// Calls before the timed ones, for caches and clocks.
pub(super) const WARM_UP: usize = 3;

/// How rows are measured.
#[derive(Clone, Copy)]
pub(super) struct Options {
    /// Timed runs.
    pub(super) runs: usize,
    /// Times of the single passes of forwards and steps as well.
    pub(super) per_pass: bool,
}

/// What came out.
#[derive(Default)]
pub(super) struct Measurement {
    pub(super) rows: Vec<Row>,
    /// What was left out, and why.
    pub(super) notes: Vec<String>,
}

/// Checks every case, then times every case, with the peers after each shape.
pub(super) fn all<B: Clock>(
    backend: &B,
    shapes: &[&Shape],
    cases: &[Case],
    options: Options,
    peers: Option<&Peers>,
) -> Result<Measurement> {
    let mut out = Measurement::default();
    let bar = output::step_progress("checking", (2 * shapes.len() * cases.len()) as u64);
    let mut supported = vec![];
    for &shape in shapes {
        for &case in cases {
            match check::against_reference(backend, case, shape) {
                Ok(()) => supported.push((shape, case)),
                Err(error) => out.notes.push(not_supported(error, shape, case)?),
            }
            bar.inc(1);
        }
    }
    bar.set_message("measuring what a copy reaches");
    let ceilings = backend.ceilings()?;
    for shape in shapes {
        let mut rows = vec![];
        for &(_, case) in supported.iter().filter(|(of, _)| of.name == shape.name) {
            bar.set_message(format!("{case}, {}", shape.name));
            match fits(backend, case, shape) {
                Ok(()) => rows.push(one(backend, case, shape, options, ceilings)?),
                Err(note) => out.notes.push(note),
            }
            bar.inc(1);
        }
        if let Some(peers) = peers {
            measure_peers(peers, &bar, options.runs, &mut rows, &mut out.notes)?;
        }
        out.rows.append(&mut rows);
    }
    bar.finish_and_clear();
    let matrix = ceilings
        .matrix_tflop_s
        .map_or_else(String::new, |rate| format!(", a large product {rate:.0} TFLOP/s"));
    let Capabilities { backend, path, .. } = backend.capabilities();
    let copy = ceilings.copy_gb_s;
    out.notes.push(format!("{backend}: {path}; a large copy moves {copy:.1} GB/s, read and written{matrix}"));
    Ok(out)
}

/// Every peer on the shape of these rows.
fn measure_peers(
    peers: &Peers,
    bar: &ProgressBar,
    runs: usize,
    rows: &mut [Row],
    notes: &mut Vec<String>,
) -> Result<()> {
    let Some(shape) = rows.first().map(|row| row.shape.name.clone()) else { return Ok(()) };
    bar.set_message(format!("peers, {shape}"));
    notes.extend(peers.measure(&shape, runs, rows)?);
    Ok(())
}

/// What the backend does not offer is left out; every other error stays one.
fn not_supported(error: Error, shape: &Shape, case: Case) -> Result<String> {
    match error.downcast_ref() {
        Some(moe4::kernels::Error::Unsupported(reason)) => {
            Ok(format!("left out: {case} on {}: {reason}", shape.name))
        }
        _ => Err(error),
    }
}

/// `Err` holds the note for a case that memory has no room for.
fn fits<B: Clock>(backend: &B, case: Case, shape: &Shape) -> Result<(), String> {
    let needed = memory::needed(case, shape);
    match backend.available_memory() {
        Some(available) if needed > available => {
            let gib = |bytes: u64| bytes as f64 / (1_u64 << 30) as f64;
            let (needed, available) = (gib(needed), gib(available));
            let name = &shape.name;
            Err(format!(
                "left out: {case} on {name}: needs {needed:.1} GiB of memory, {available:.1} available"
            ))
        }
        _ => Ok(()),
    }
}

fn one<B: Clock>(
    backend: &B,
    case: Case,
    shape: &Shape,
    options: Options,
    ceilings: Ceilings,
) -> Result<Row> {
    let runs = options.runs;
    let mut ready = Ready::new(backend, case, shape, backend.capabilities().unpacked_operands)?;
    ready.check_repeats(backend).with_context(|| format!("{case} on {}", shape.name))?;
    let ledger = Ledger::new(backend);
    ready.run(&ledger)?;
    let entries = ledger.take();
    let timing = backend.time(runs, WARM_UP, || ready.run(backend))?;
    let passes = match case.pass {
        // What the passes over h cost in each phase is what these rows are for.
        Pass::H(_) => sequence::time(backend, &mut ready, runs, ceilings)?,
        _ if options.per_pass => sequence::time(backend, &mut ready, runs, ceilings)?,
        _ => vec![],
    };
    let Capabilities { backend, path, .. } = backend.capabilities();
    Ok(Row {
        name: case.to_string(),
        shape: shape.id(),
        backend: format!("{backend}: {path}"),
        median_ms: timing.median,
        min_ms: timing.min,
        max_ms: timing.max,
        runs,
        floor_ms: floor_ms(&entries, ceilings),
        bytes: entries.iter().map(|entry| entry.work.bytes()).sum(),
        flops: entries.iter().map(|entry| entry.work.flops).sum(),
        saved_h_bytes: ready.saved_h_bytes()?,
        passes,
        peers: vec![],
    })
}
