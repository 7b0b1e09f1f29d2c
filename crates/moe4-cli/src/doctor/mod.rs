//! `moe4 doctor`: what this machine has, which kernels run on it and why, and whether they give the right bytes.

mod copies;
mod gpus;
pub(crate) mod machine;
mod self_check;

use anyhow::{Result, bail};
use clap::Args;
use moe4::kernels::Backend;
use moe4::kernels::cpu::{Cpu, Isa};

use crate::output;

/// Arguments of `moe4 doctor`.
#[derive(Args)]
pub(crate) struct DoctorArgs {}

/// Runs the command; a failed self-check is an error.
pub(crate) fn run(_: DoctorArgs) -> Result<()> {
    let mut text = format!("moe4 {}\n\nmachine\n", env!("CARGO_PKG_VERSION"));
    for (name, value) in machine::facts() {
        text.push_str(&line(name, &value));
    }
    text.push_str("\nkernels\n");
    let found = gpus::find();
    for (name, value) in kernels().into_iter().chain(gpus::lines(&found)) {
        text.push_str(&line(name, &value));
    }
    output::print(&format!("{text}\nself-check\n"))?;
    let outcomes = self_check::run(found.as_deref().unwrap_or_default());
    let failed = outcomes.iter().filter(|o| o.problem.is_some()).count();
    let rows = outcomes.iter().map(|o| {
        let verdict = o.problem.as_deref().unwrap_or("ok");
        line(&o.backend, &format!("{verdict} ({} comparisons, {:.2} s)", o.comparisons, o.time.as_secs_f64()))
    });
    output::print(&rows.collect::<String>())?;
    if failed > 0 {
        bail!("the self-check failed; do not train with these kernels, and report this output");
    }
    Ok(())
}

fn line(name: &str, value: &str) -> String {
    format!("  {name:<20} {value}\n")
}

/// What would run, and why.
fn kernels() -> Vec<(&'static str, String)> {
    let available: Vec<String> = Isa::available().iter().map(Isa::to_string).collect();
    let chosen = Cpu::new().capabilities();
    let why = match available.len() {
        1 => "this processor has none of the vector extensions that moe4 has kernels for".to_owned(),
        _ => format!("the best of {}", available.join(", ")),
    };
    vec![
        ("cpu backend", format!("{}: {why}; the same quantized bytes on each", chosen.path)),
        ("reference backend", "scalar; the oracle for tests and `moe4 replay --backend reference`".into()),
    ]
}
