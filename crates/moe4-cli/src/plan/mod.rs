//! `moe4 plan`: what the operator will do for a shape, before anything runs: copies, passes, bytes, savings.

mod measure;
mod report;
mod text;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use moe4::mlp::{Activation, DcAmax, GluLayout, GroupedMlp, GroupedMlpConfig, Needs};
use moe4::tensor::Groups;

use crate::options::{DcAmaxArg, PrecisionArg, RhtArg, Switch};
use crate::output;
use report::Report;

/// Arguments of `moe4 plan`. The defaults are one layer of Mixtral 8x7B.
#[derive(Args)]
pub(crate) struct PlanArgs {
    /// Number of experts.
    #[arg(long, default_value_t = 8)]
    experts: usize,
    /// Tokens of a micro-batch, before they are copied to their experts.
    #[arg(long, default_value_t = 8192)]
    tokens: usize,
    /// Experts of each token.
    #[arg(long, default_value_t = 2)]
    top_k: usize,
    /// Hidden size.
    #[arg(long, default_value_t = 4096)]
    hidden: usize,
    /// Width of an expert.
    #[arg(long, default_value_t = 14336)]
    ffn: usize,
    /// swiglu, srelu, tanh_srelu:s=16, situ_glu:beta1=4,beta2=25 or clamped_qgeglu:limit=7,alpha=1.702,offset=1.
    #[arg(long, default_value = "swiglu")]
    activation: Activation,
    /// Order of gate and up rows in w1: halves, interleaved32 or elementwise.
    #[arg(long, default_value_t, value_name = "LAYOUT")]
    glu_layout: GluLayout,
    /// Biases in both products.
    #[arg(long)]
    bias: bool,
    /// Rebuild h in the backward instead of saving it.
    #[arg(long, value_enum, default_value = "off")]
    recompute: Switch,
    /// Operands of the matrix products.
    #[arg(long, value_enum, default_value = "nvfp4")]
    precision: PrecisionArg,
    /// Where the amaxes of dc come from [default: exact].
    #[arg(long, value_enum)]
    dc_amax: Option<DcAmaxArg>,
    /// Sign mask of the random Hadamard transform along tokens, or `off` [default: 0xD7E8].
    #[arg(long, value_name = "MASK|off")]
    rht: Option<RhtArg>,
    /// Which gradients are wanted.
    #[arg(long, value_enum, default_value = "all")]
    needs: NeedsArg,
    /// Run the plan on this machine and add times.
    #[arg(long)]
    measure: bool,
    /// Print JSON instead of tables.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum NeedsArg {
    /// Every gradient.
    All,
    /// dx and dprob: frozen experts.
    Input,
    /// dW and dprob: a first layer.
    Weights,
    /// None: inference.
    None,
}

impl From<NeedsArg> for Needs {
    fn from(needs: NeedsArg) -> Self {
        match needs {
            NeedsArg::All => Needs::ALL,
            NeedsArg::Input => Needs::INPUT,
            NeedsArg::Weights => Needs::WEIGHTS,
            NeedsArg::None => Needs::NONE,
        }
    }
}

/// Runs the command.
pub(crate) fn run(args: PlanArgs) -> Result<()> {
    args.check()?;
    let mlp = GroupedMlp::new(args.config())?;
    let groups = args.groups()?;
    let needs = args.needs.into();
    let mut report = Report::new(&mlp, needs, &groups, args.tokens, args.top_k);
    if args.measure {
        report.add_times(measure::run(&mlp, needs, &groups)?);
    }
    if args.json {
        let json = serde_json::to_string_pretty(&report).context("the plan cannot be written as JSON")?;
        output::print(&format!("{json}\n"))
    } else {
        output::print(&text::format(&report))
    }
}

impl PlanArgs {
    /// Sizes far beyond any model, up to which no count of bytes or operations overflows.
    fn check(&self) -> Result<()> {
        if self.precision == PrecisionArg::Bf16 && (self.rht.is_some() || self.dc_amax.is_some()) {
            bail!("--rht and --dc-amax have a meaning only with --precision nvfp4");
        }
        for (option, size) in [("--experts", self.experts), ("--hidden", self.hidden), ("--ffn", self.ffn)] {
            if !(1..=1 << 16).contains(&size) {
                bail!("{option}: expected 1 to {}, got {size}", 1 << 16);
            }
        }
        if self.top_k == 0 || self.top_k > self.experts {
            bail!(
                "--top-k: expected 1 to the number of experts, got {} with {} experts",
                self.top_k,
                self.experts
            );
        }
        if self.tokens.checked_mul(self.top_k).is_none_or(|rows| rows > 1 << 26) {
            let most = (1 << 26) / self.top_k;
            bail!("--tokens: expected at most {most} with top {}, got {}", self.top_k, self.tokens);
        }
        Ok(())
    }

    fn config(&self) -> GroupedMlpConfig {
        let mut config = GroupedMlpConfig {
            activation: self.activation,
            glu_layout: self.glu_layout,
            bias: self.bias,
            precision: self.precision.into(),
            recompute_activation: self.recompute == Switch::On,
            dc_amax: self.dc_amax.map(DcAmax::from).unwrap_or_default(),
            ..GroupedMlpConfig::new(self.experts, self.hidden, self.ffn)
        };
        if let Some(RhtArg(rht)) = self.rht {
            (config.fc1_rht, config.fc2_rht) = (rht, rht);
        }
        config
    }

    /// A balanced router: every expert gets its share of the rows.
    fn groups(&self) -> Result<Groups> {
        let rows = self.tokens * self.top_k;
        let split = |e: usize| rows / self.experts + usize::from(e < rows % self.experts);
        Ok(Groups::new(&(0..self.experts).map(split).collect::<Vec<_>>(), rows)?)
    }
}
