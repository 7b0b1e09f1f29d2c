//! `moe4 convert`: the expert weights of a model from one format to another, file by file and tensor by tensor.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use anyhow::Result;
use clap::{Args, ValueEnum};
use moe4::checkpoint::{ConvertProgress, Converted, ExpertFormat, ModelFiles, convert, printable};
use moe4::tensor::Tile;

use crate::output;

/// Arguments of `moe4 convert`.
#[derive(Args)]
pub(crate) struct ConvertArgs {
    /// File to read, or folder with model.safetensors or model.safetensors.index.json.
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// File or folder to write; it must not exist.
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Format of the experts' weights; other tensors are copied.
    #[arg(long, value_enum)]
    to: FormatArg,
    /// What one block scale covers where BF16 is quantized.
    #[arg(long, value_enum, default_value = "16x16")]
    tile: TileArg,
}

#[derive(Clone, Copy, ValueEnum)]
enum FormatArg {
    /// NVFP4: weight, weight_scale, weight_scale_2.
    Modelopt,
    /// NVFP4: weight_packed, weight_scale, weight_global_scale.
    CompressedTensors,
    /// Unquantized.
    Bf16,
}

#[derive(Clone, Copy, ValueEnum)]
enum TileArg {
    /// A square: the weights that moe4 trains with.
    #[value(name = "16x16")]
    Square16,
    /// 16 elements of a row: smaller errors.
    #[value(name = "1x16")]
    Row16,
}

/// Runs the command.
pub(crate) fn run(args: ConvertArgs) -> Result<()> {
    let to = match args.to {
        FormatArg::Modelopt => ExpertFormat::ModelOpt,
        FormatArg::CompressedTensors => ExpertFormat::CompressedTensors,
        FormatArg::Bf16 => ExpertFormat::Bf16,
    };
    let tile = match args.tile {
        TileArg::Square16 => Tile::Square16,
        TileArg::Row16 => Tile::Row16,
    };
    let mut files = ModelFiles::open(&args.input)?;
    // Before there are temporary files that an interrupt could leave behind.
    let interrupted = output::interrupt_flag()?;
    let bar = output::byte_progress(0);
    let mut show = |progress: ConvertProgress<'_>| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
        bar.set_message(printable(progress.tensor).into_owned());
        !interrupted.load(Ordering::Relaxed)
    };
    let done = convert(&mut files, &args.output, to, tile, &mut show);
    bar.finish_and_clear();
    let Converted { layers, weights, copied } = done?;
    output::print(&format!(
        "{layers} layers of experts: {weights} weights as {to}; {copied} tensors copied\n"
    ))
}
