//! `moe4 replay`: the operator, forward and backward, on tensors captured from a training job.
//!
//! It is how someone with a bad step finds which tensor went wrong: capture the operator's inputs (and as many of
//! its intermediate tensors as are at hand), replay, and let `--compare` name the first tensor that differs by more
//! than rounding and fail. Names and shapes are those of the golden operator data: [`inputs`] has the inputs,
//! [`compare`] the order of all others.

mod compare;
mod inputs;
mod operator;
mod tensor;

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use moe4::checkpoint::{TensorFile, TensorWriter};

use moe4::kernels::cpu::Cpu;
use moe4::kernels::reference::Reference;
use moe4::kernels::work::Work;
use moe4::kernels::{Backend, Entry, Host, Ledger};
use moe4::mlp::{Activation, DcAmax, GluLayout, GradientRounding, GroupedMlpConfig};

use crate::options::{DcAmaxArg, PrecisionArg, RhtArg, RoundingArg, Switch};
use crate::output;
use inputs::Inputs;
use operator::Replayed;
use tensor::Tensor;

/// Arguments of `moe4 replay`.
#[derive(Args)]
pub(crate) struct ReplayArgs {
    /// File with x, w1, w2, prob, splits, dy, and b1, b2 if there are biases.
    #[arg(value_name = "IN.safetensors")]
    input: PathBuf,
    /// File to write.
    #[arg(short, long, value_name = "OUT.safetensors")]
    output: PathBuf,
    /// swiglu, srelu, tanh_srelu:s=16, situ_glu:beta1=4,beta2=25 or clamped_qgeglu:limit=7,alpha=1.702,offset=1.
    #[arg(long)]
    activation: Activation,
    /// Order of gate and up rows in w1: halves, interleaved32 or elementwise.
    #[arg(long, default_value_t, value_name = "LAYOUT")]
    glu_layout: GluLayout,
    /// Rounding of dy and dc to E2M1 [default: stochastic].
    #[arg(long, value_enum)]
    gradient_rounding: Option<RoundingArg>,
    /// Seed of stochastic rounding [default: 0].
    #[arg(long)]
    seed: Option<u64>,
    /// Sign mask of the random Hadamard transform along tokens, or `off` [default: 0xD7E8].
    #[arg(long, value_name = "MASK|off")]
    rht: Option<RhtArg>,
    /// Rebuild h in the backward instead of saving it; the results are the same bits.
    #[arg(long, value_enum, default_value = "off")]
    recompute: Switch,
    /// Where the amaxes of dc come from [default: exact].
    #[arg(long, value_enum)]
    dc_amax: Option<DcAmaxArg>,
    /// Operands of the matrix products.
    #[arg(long, value_enum, default_value = "nvfp4")]
    precision: PrecisionArg,
    /// Which kernels run.
    #[arg(long, value_enum, default_value = "cpu")]
    backend: BackendArg,
    /// Threads of the cpu backend [default: one a core].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Print every pass with the bytes it read and wrote and its time.
    #[arg(long)]
    ledger: bool,
    /// Also write the inputs and every intermediate tensor.
    #[arg(long)]
    intermediates: bool,
    /// Compare with the tensors of this file; fail if one is off by more than rounding, and name the first.
    #[arg(long, value_name = "EXPECTED.safetensors")]
    compare: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum BackendArg {
    /// All cores.
    Cpu,
    /// Scalar, sums in f64: the oracle.
    Reference,
}

/// Runs the command.
pub(crate) fn run(args: ReplayArgs) -> Result<()> {
    args.check()?;
    let mut expected = args.compare.as_ref().map(TensorFile::open).transpose()?;
    let mut file = TensorFile::open(&args.input)?;
    output::refuse_same_file(&args.input, &args.output)?;
    if let Some(compare) = &args.compare {
        output::refuse_same_file(compare, &args.output)?;
    }
    let inputs = Inputs::read(&mut file, args.activation)?;
    let config = args.config(&inputs);

    let traced = args.intermediates || expected.is_some();
    let (replayed, passes) = args.execute(config, &inputs, traced)?;
    let outcome = format!("{}{passes}", replayed.summary(&inputs));
    let computed = replayed.into_tensors(inputs, traced);
    let compared = match &mut expected {
        Some(expected) => Some(compare::compare(&computed.tensors, expected, &computed.groups)?),
        None => None,
    };
    // By name: the order in which they were computed depends on the plan.
    let mut written: Vec<&Tensor> = computed
        .tensors
        .iter()
        .filter(|tensor| args.intermediates || operator::is_output(&tensor.name))
        .collect();
    written.sort_by(|a, b| a.name.cmp(&b.name));
    write(&args.output, &written)?;
    let report = compared.as_ref().map_or("", |compared| &compared.report);
    output::print(&format!("{outcome}{report}"))?;
    let (live, rows) = (computed.groups.live_rows(), computed.groups.rows());
    if live < rows {
        output::note(&format!(
            "splits sum to {live} of {rows} rows; rows {live}..{rows} belong to no expert and count as zeros"
        ));
    }
    // Last: the table and the output file are what a wrong tensor is looked into with.
    match compared.and_then(|compared| compared.fault) {
        Some(fault) => bail!(fault),
        None => Ok(()),
    }
}

fn write(path: &PathBuf, tensors: &[&Tensor]) -> Result<()> {
    // Before there is a temporary file that an interrupt could leave behind.
    let interrupted = output::interrupt_flag()?;
    let specs: Vec<_> = tensors.iter().map(|tensor| tensor.spec()).collect();
    let mut writer = TensorWriter::create(path, &specs, &[])?;
    for tensor in tensors {
        if interrupted.load(Ordering::Relaxed) {
            bail!("interrupted at tensor '{}'; nothing was written", tensor.name);
        }
        tensor.write(&mut writer)?;
    }
    Ok(writer.finish()?)
}

impl ReplayArgs {
    /// Options that contradict each other.
    fn check(&self) -> Result<()> {
        let meaningless = |option: &str, needed: &str| bail!("{option} has a meaning only with {needed}");
        if self.precision == PrecisionArg::Bf16 {
            if self.rht.is_some() {
                return meaningless("--rht", "--precision nvfp4");
            }
            if self.dc_amax.is_some() {
                return meaningless("--dc-amax", "--precision nvfp4");
            }
            if self.gradient_rounding.is_some() {
                return meaningless("--gradient-rounding", "--precision nvfp4");
            }
        }
        let stochastic = self.gradient_rounding != Some(RoundingArg::Nearest);
        if self.seed.is_some() && !(stochastic && self.precision == PrecisionArg::Nvfp4) {
            return meaningless("--seed", "--gradient-rounding stochastic in NVFP4");
        }
        if self.threads.is_some() && self.backend == BackendArg::Reference {
            return meaningless("--threads", "--backend cpu");
        }
        Ok(())
    }

    fn config(&self, inputs: &Inputs) -> GroupedMlpConfig {
        let defaults = GroupedMlpConfig::new(inputs.groups.experts(), inputs.hidden, inputs.ffn);
        let rht = self.rht.map_or(defaults.fc1_rht, |rht| rht.0);
        GroupedMlpConfig {
            activation: self.activation,
            glu_layout: self.glu_layout,
            bias: inputs.biases.is_some(),
            precision: self.precision.into(),
            recompute_activation: self.recompute == Switch::On,
            fc1_rht: rht,
            fc2_rht: rht,
            dc_amax: self.dc_amax.map_or(defaults.dc_amax, DcAmax::from),
            gradient_rounding: match self.gradient_rounding {
                Some(RoundingArg::Nearest) => GradientRounding::Nearest,
                Some(RoundingArg::Stochastic) | None => GradientRounding::Stochastic,
            },
            ..defaults
        }
    }

    /// The replay, and the table of passes if asked for.
    fn execute(&self, config: GroupedMlpConfig, inputs: &Inputs, traced: bool) -> Result<(Replayed, String)> {
        if self.backend == BackendArg::Reference {
            return self.execute_on(&Reference, config, inputs, traced);
        }
        let threads = self.threads.map_or(0, usize::from);
        let pool =
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().context("cannot start threads")?;
        pool.install(|| self.execute_on(&Cpu::new(), config, inputs, traced))
    }

    fn execute_on<B: Backend<Memory = Host>>(
        &self,
        backend: &B,
        config: GroupedMlpConfig,
        inputs: &Inputs,
        traced: bool,
    ) -> Result<(Replayed, String)> {
        let seed = self.seed.unwrap_or(0);
        if !self.ledger {
            return Ok((operator::replay(backend, config, inputs, seed, traced)?, String::new()));
        }
        let ledger = Ledger::new(backend);
        let replayed = operator::replay(&ledger, config, inputs, seed, traced)?;
        Ok((replayed, passes(&ledger.take())))
    }
}

fn passes(entries: &[Entry]) -> String {
    let row = |e: &Entry| {
        let Work { read, written, flops } = e.work;
        let ms = format!("{:.3}", e.time.as_secs_f64() * 1e3);
        vec![e.name.to_string(), read.to_string(), written.to_string(), flops.to_string(), ms]
    };
    let heads = ["pass", "bytes read", "bytes written", "FLOP", "ms"];
    output::table(&heads, 1, entries.iter().map(row).collect())
}
