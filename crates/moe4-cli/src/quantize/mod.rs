//! `moe4 quantize`: the 2-D tensors of a file, one at a time, to NVFP4.
//!
//! For each F32, F16 or BF16 tensor `NAME` of shape `[M, K]` the output holds, with `[R, C] = [M, K]` rowwise and
//! `[K, M]` columnwise (`M` rounded up to 16, the tail zero):
//!
//! | tensor | dtype, shape | contents |
//! |---|---|---|
//! | `NAME.codes` | U8 `[R, C/2]` | E2M1, the even element in the low nibble |
//! | `NAME.scales` | F8_E4M3 `[R, C/16]` | block scales; a 16x16 tile's scale repeats over its 16 rows |
//! | `NAME.amax` | F32 `[1]` | largest magnitude, after the RHT if there is one |
//! | `NAME.dequant` | F32 `[R, C]` | with `--dequant`: the values that the codes stand for |
//!
//! With `--splits` each expert's rows are quantized alone, as `NAME.<expert>.codes` and so on. The bytes are those
//! of the operator's kernels: the same functions of [`moe4::numerics`] in the same order.

mod encode;
mod operand;
mod plan;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use half::{bf16, f16};
use moe4::checkpoint::{Dtype, TensorFile, TensorWriter, printable};
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::RandomStream;
use moe4::tensor::Tile;

use crate::options::{RhtArg, RoundingArg};
use crate::output;
use encode::{Encoded, encode};
use operand::Operand;
use plan::{Job, Plan};

/// Arguments of `moe4 quantize`.
#[derive(Args)]
pub(crate) struct QuantizeArgs {
    /// File to read.
    #[arg(value_name = "IN.safetensors")]
    input: PathBuf,
    /// File to write.
    #[arg(short, long, value_name = "OUT.safetensors")]
    output: PathBuf,
    /// Direction of the blocks: along a row, or along axis 0 (the output is transposed).
    #[arg(long, value_enum, default_value = "rowwise")]
    axis: Axis,
    /// What one block scale covers.
    #[arg(long, value_enum, default_value = "1x16")]
    tile: TileArg,
    /// Sign mask of the random Hadamard transform, or `off` [default: 0xD7E8 columnwise with 1x16, else off].
    #[arg(long, value_name = "MASK|off")]
    rht: Option<RhtArg>,
    /// Rounding of the elements to E2M1; block scales are always rounded to nearest.
    #[arg(long, value_enum, default_value = "nearest")]
    rounding: RoundingArg,
    /// Seed of stochastic rounding [default: 0].
    #[arg(long)]
    seed: Option<u64>,
    /// Rows of each expert, such as 128,0,64: each expert is quantized alone.
    #[arg(long, value_delimiter = ',', value_name = "ROWS,ROWS,...")]
    splits: Option<Vec<usize>>,
    /// Also write the values that the codes stand for.
    #[arg(long)]
    dequant: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Axis {
    Rowwise,
    Columnwise,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum TileArg {
    /// 16 consecutive elements (activations, gradients).
    #[value(name = "1x16")]
    Row16,
    /// A square (weights).
    #[value(name = "16x16")]
    Square16,
}

/// The arguments after defaults and contradictions are settled.
struct Settings {
    axis: Axis,
    tile: Tile,
    rht: Option<SignMask>,
    /// The seed of stochastic rounding; nearest if absent.
    seed: Option<u64>,
    splits: Option<Vec<usize>>,
    dequant: bool,
}

impl Settings {
    fn new(args: &QuantizeArgs) -> Result<Self> {
        let tile = match args.tile {
            TileArg::Row16 => Tile::Row16,
            TileArg::Square16 => Tile::Square16,
        };
        let default_rht = (args.axis == Axis::Columnwise && tile == Tile::Row16).then_some(SignMask::DEFAULT);
        let rht = args.rht.map_or(default_rht, |rht| rht.0);
        if tile == Tile::Square16 && rht.is_some() {
            bail!("--rht with --tile 16x16: weights are not transformed; leave one of the two out");
        }
        let seed = match (args.rounding, args.seed) {
            (RoundingArg::Stochastic, seed) => Some(seed.unwrap_or(0)),
            (RoundingArg::Nearest, None) => None,
            (RoundingArg::Nearest, Some(_)) => bail!("--seed has a meaning only with --rounding stochastic"),
        };
        if tile == Tile::Square16 && seed.is_some() {
            bail!(
                "--rounding stochastic with --tile 16x16: weights are rounded to nearest; leave one of the two out"
            );
        }
        Ok(Self { axis: args.axis, tile, rht, seed, splits: args.splits.clone(), dequant: args.dequant })
    }

    /// What a reader of the output needs to know about it.
    fn metadata(&self) -> Vec<(&'static str, String)> {
        let text = |value: &str| value.to_owned();
        vec![
            ("format", text("nvfp4")),
            ("axis", text(if self.axis == Axis::Rowwise { "rowwise" } else { "columnwise" })),
            ("tile", text(if self.tile == Tile::Row16 { "1x16" } else { "16x16" })),
            ("rht", self.rht.map_or(text("off"), |mask| mask.to_string())),
            ("rounding", self.seed.map_or(text("nearest"), |seed| format!("stochastic, seed {seed}"))),
        ]
    }

    /// The random numbers of a tensor. They depend on its name and on the axis, so that no two copies share them,
    /// and not on what else is in the file.
    fn stream(&self, name: &str) -> Option<RandomStream> {
        let hash = name.bytes().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
            // FNV-1a.
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
        });
        let stream = (hash << 1) | u64::from(self.axis == Axis::Columnwise);
        self.seed.map(|seed| RandomStream { seed, stream })
    }
}

/// Runs the command.
pub(crate) fn run(args: QuantizeArgs) -> Result<()> {
    let settings = Settings::new(&args)?;
    let mut input = TensorFile::open(&args.input)?;
    output::refuse_same_file(&args.input, &args.output)?;
    let plan = Plan::new(&input, &settings)?;
    // Before there is a temporary file that an interrupt could leave behind.
    let interrupted = output::interrupt_flag()?;
    let mut writer = TensorWriter::create(&args.output, &plan.outputs(&settings), &settings.metadata())?;

    let progress = output::byte_progress(plan.input_bytes());
    let mut rows = Vec::new();
    for job in &plan.jobs {
        progress.set_message(printable(&job.name).into_owned());
        let values = read_values(&mut input, job)?;
        for group in &job.groups {
            if interrupted.load(Ordering::Relaxed) {
                bail!("interrupted at tensor '{}'; nothing was written", printable(&job.name));
            }
            let elements = &values[group.rows.start * job.cols..group.rows.end * job.cols];
            let place = |index: usize| (group.rows.start + index / job.cols.max(1), index % job.cols.max(1));
            let operand = Operand::new(elements, group.rows.len(), job.cols, &settings)
                .map_err(|fault| fault.describe(&job.name, input.path(), place))?;
            let encoded = encode(&operand, &settings, settings.stream(&job.name));
            write(&mut writer, &group.prefix, &encoded, &operand, settings.dequant)?;
            rows.push(table_row(&group.prefix, &operand, &encoded));
        }
        progress.inc(job.bytes);
    }
    writer.finish()?;
    progress.finish_and_clear();

    let heads = ["tensor", "shape", "amax", "relative error", "SQNR dB"];
    let mut text = output::table(&heads, 1, rows);
    for notice in plan.notices() {
        text.push_str(&format!("{notice}\n"));
    }
    output::print(&text)?;
    if let Some(note) = plan.note(&settings) {
        output::note(&note);
    }
    Ok(())
}

/// A tensor as `f32`, which holds every F16 and BF16 value exactly.
fn read_values(input: &mut TensorFile, job: &Job) -> Result<Vec<f32>> {
    Ok(match job.dtype {
        Dtype::BF16 => input.read::<bf16>(&job.name)?.into_iter().map(bf16::to_f32).collect(),
        Dtype::F16 => input.read::<f16>(&job.name)?.into_iter().map(f16::to_f32).collect(),
        _ => input.read::<f32>(&job.name)?,
    })
}

fn write(
    writer: &mut TensorWriter,
    prefix: &str,
    encoded: &Encoded,
    operand: &Operand,
    dequant: bool,
) -> Result<()> {
    writer.write(&format!("{prefix}.codes"), &encoded.codes)?;
    writer.write(&format!("{prefix}.scales"), &encoded.scales)?;
    writer.write(&format!("{prefix}.amax"), &[encoded.amax])?;
    if dequant {
        writer.write(&format!("{prefix}.dequant"), &encoded.dequantize(operand.cols))?;
    }
    Ok(())
}

fn table_row(prefix: &str, operand: &Operand, encoded: &Encoded) -> Vec<String> {
    let error = encoded.relative_error(operand);
    let sqnr = if error == 0.0 { "exact".into() } else { format!("{:.2}", -20.0 * error.log10()) };
    vec![
        printable(prefix).into_owned(),
        output::shape(&[operand.rows, operand.cols]),
        output::number(encoded.amax),
        format!("{error:.5}"),
        sqnr,
    ]
}
