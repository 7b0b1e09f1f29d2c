//! `moe4`: mixture-of-experts training in NVFP4 on the command line.
//!
//! Whatever goes wrong ends in one line on standard error and exit code 1; notes go there too, results go to standard
//! output.

#![forbid(unsafe_code)]

mod bench;
mod convert;
mod cuda;
mod doctor;
mod options;
mod output;
mod plan;
mod quantize;
mod replay;
mod train;

use std::io::Write;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};

/// Training allocates and frees large tensors all the time, which the system's allocator is slow at.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Mixture-of-experts training in NVFP4.
#[derive(Parser)]
#[command(name = "moe4", version, propagate_version = true, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a small mixture-of-experts language model in BF16 and in NVFP4, and compare the losses.
    Train(train::TrainArgs),
    /// Tell what this machine has and which kernels run on it, and check their bytes.
    Doctor(doctor::DoctorArgs),
    /// Show what the operator will do for a shape: copies, passes, bytes, savings.
    Plan(plan::PlanArgs),
    /// Time passes and training steps on this machine, after checking their answers.
    Bench(bench::BenchArgs),
    /// Quantize the 2-D tensors of a safetensors file to NVFP4.
    Quantize(quantize::QuantizeArgs),
    /// Convert the expert weights of a model between BF16 and NVFP4 formats of other programs.
    Convert(convert::ConvertArgs),
    /// Run the grouped MLP, forward and backward, on captured tensors.
    Replay(replay::ReplayArgs),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let result = match cli.command {
        Command::Train(args) => train::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Quantize(args) => quantize::run(args),
        Command::Convert(args) => convert::run(args),
        Command::Replay(args) => replay::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&describe(&error)),
    }
}

/// Help and version go to standard output and succeed; everything else is one line and a failure.
fn usage(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    if !error.use_stderr() {
        return output::print(&text).map_or_else(|error| fail(&describe(&error)), |()| ExitCode::SUCCESS);
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let command = Cli::command();
        let names: Vec<_> = command.get_subcommands().map(clap::Command::get_name).collect();
        return fail(&format!("no command given; commands: {} (see --help)", names.join(", ")));
    }
    let message = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join(" ");
    fail(&format!("{} (see --help)", message.trim_start_matches("error: ")))
}

/// An error and its causes, leaving out a cause that the line before already tells.
fn describe(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn fail(message: &str) -> ExitCode {
    // A file's name or a cause can hold a line break; the message stays one line.
    let line = format!("error: {}\n", message.replace(char::is_control, " "));
    // Nobody is left to be told if standard error is closed.
    std::io::stderr().write_all(line.as_bytes()).ok();
    ExitCode::FAILURE
}
