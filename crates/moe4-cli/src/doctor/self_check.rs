//! A few seconds of comparing bytes: every instruction set and every GPU against golden data that is part of this program,
//! and against the scalar reference.

use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, bail, ensure};
use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::contract::WeightShape;
use moe4::kernels::cpu::{Cpu, Isa};
use moe4::kernels::reference::Reference;
use moe4::numerics::philox::philox4x32;
use moe4::numerics::rounding::{RandomStream, Rounding};
use moe4::tensor::Groups;
use safetensors::{Dtype, SafeTensors};

use super::copies::{quantize, quantize_tiles};
use super::gpus::{Gpu, in_a_line};

/// Result for one set of kernels.
pub(super) struct Outcome {
    pub(super) backend: String,
    pub(super) comparisons: usize,
    pub(super) time: Duration,
    /// `WRONG` bytes, or a call that `FAILED`.
    pub(super) problem: Option<String>,
}

/// Golden files: rowwise and transformed columnwise blocks, and square tiles.
const BLOCKS: [(&str, &[u8]); 4] = [
    ("normal", include_bytes!("../../../moe4-conformance/golden/q1d_rht__normal__e.safetensors")),
    ("outlier", include_bytes!("../../../moe4-conformance/golden/q1d_rht__outlier__e.safetensors")),
    ("ties", include_bytes!("../../../moe4-conformance/golden/q1d_rht__ties__e.safetensors")),
    ("subnormal", include_bytes!("../../../moe4-conformance/golden/q1d_rht__subnormal__e.safetensors")),
];
const TILES: (&str, &[u8]) =
    ("tiles", include_bytes!("../../../moe4-conformance/golden/q2d__normal__e.safetensors"));

/// The reference, every instruction set that this machine has, and every GPU that is used.
pub(super) fn run(gpus: &[Gpu]) -> Vec<Outcome> {
    let mut all = vec![check("reference".into(), &Reference)];
    all.extend(Isa::available().into_iter().map(|isa| check(format!("cpu, {isa}"), &Cpu::with_isa(isa))));
    let backends = gpus.iter().filter_map(|gpu| gpu.backend.as_ref());
    all.extend(backends.map(|cuda| check(format!("cuda, GPU {}", cuda.device().facts().ordinal), cuda)));
    all
}

fn check<B: Backend>(backend: String, kernels: &B) -> Outcome {
    let start = Instant::now();
    let mut comparisons = 0;
    let told = |error: Error| match error.downcast_ref::<moe4::kernels::Error>() {
        Some(failed) => format!("FAILED: {}", in_a_line(failed)),
        None => format!("WRONG: {error:#}"),
    };
    let problem = compare_all(kernels, &mut comparisons).err().map(told);
    Outcome { backend, comparisons, time: start.elapsed(), problem }
}

fn compare_all<B: Backend>(kernels: &B, comparisons: &mut usize) -> Result<()> {
    let mut same = |what: &str, got: &[u8], expected: &[u8]| -> Result<()> {
        *comparisons += 1;
        match got.iter().zip(expected).position(|(a, b)| a != b) {
            None if got.len() == expected.len() => Ok(()),
            None => bail!("{what}: {} bytes instead of {}", got.len(), expected.len()),
            Some(at) => bail!("{what}[{at}]: {:#04x} instead of {:#04x}", got[at], expected[at]),
        }
    };
    for (name, file) in BLOCKS {
        let golden = Golden::new(file)?;
        let (x, [rows, cols]) = golden.x()?;
        let [row, column] = quantize(kernels, &x, &Groups::single(rows), cols, [Rounding::Nearest; 2])?;
        for (copy, suffix) in [(row, ""), (column, "_col")] {
            let codes = golden.bytes(&format!("fp4{suffix}"), Dtype::U8)?;
            // The golden data drops the sign of zero, which the hardware and moe4 keep.
            let unsigned: Vec<u8> = copy.codes.iter().map(|&byte| without_negative_zeros(byte)).collect();
            let expected: Vec<u8> = codes.iter().map(|&byte| without_negative_zeros(byte)).collect();
            same(&format!("golden {name}: codes{suffix}"), &unsigned, &expected)?;
            let scales = golden.bytes(&format!("scale{suffix}"), Dtype::U8)?;
            same(&format!("golden {name}: scales{suffix}"), &copy.scales, scales)?;
            let amax = golden.bytes(&format!("amax{suffix}"), Dtype::F32)?;
            same(&format!("golden {name}: amax{suffix}"), &copy.amax[0].to_le_bytes(), amax)?;
        }
    }
    let golden = Golden::new(TILES.1)?;
    let (w, [n, k]) = golden.x()?;
    let tiles = quantize_tiles(kernels, &w, WeightShape { n, k })?;
    same("golden tiles: codes", &tiles.codes, golden.bytes("fp4", Dtype::U8)?)?;
    same("golden tiles: scales", &tiles.scales, golden.bytes("scale", Dtype::U8)?)?;

    // Ragged and empty experts, stochastic rounding: what the golden files do not hold, against the reference.
    let groups = Groups::new(&[37, 0, 1, 64, 15], 120)?;
    let cols = 160;
    let x: Vec<bf16> = (0..120 * cols as u64)
        .map(|i| bf16::from_f32((philox4x32(7, 0, i)[0] as f32 / u32::MAX as f32 - 0.5) * 8.0))
        .collect();
    let random = |stream| Rounding::Stochastic(RandomStream { seed: 1, stream });
    let ours = quantize(kernels, &x, &groups, cols, [random(0), random(1)])?;
    let oracle = quantize(&Reference, &x, &groups, cols, [random(0), random(1)])?;
    for (ours, oracle) in ours.iter().zip(&oracle) {
        same("stochastic: codes", &ours.codes, &oracle.codes)?;
        same("stochastic: scales", &ours.scales, &oracle.scales)?;
    }
    Ok(())
}

fn without_negative_zeros(byte: u8) -> u8 {
    let clear = |nibble: u8| if nibble == 8 { 0 } else { nibble };
    clear(byte & 15) | clear(byte >> 4) << 4
}

/// One golden file.
struct Golden<'a>(SafeTensors<'a>);

impl<'a> Golden<'a> {
    fn new(file: &'a [u8]) -> Result<Self> {
        Ok(Self(SafeTensors::deserialize(file).context("golden data")?))
    }

    fn bytes(&self, name: &str, dtype: Dtype) -> Result<&'a [u8]> {
        let view = self.0.tensor(name).with_context(|| format!("golden data: {name}"))?;
        ensure!(view.dtype() == dtype, "golden data: {name} is {:?}", view.dtype());
        Ok(view.data())
    }

    /// The quantized tensor and its shape.
    fn x(&self) -> Result<(Vec<bf16>, [usize; 2])> {
        let shape =
            self.0.tensor("x").context("golden data: x")?.shape().try_into().context("golden data: x")?;
        let pair = |b: &[u8]| bf16::from_le_bytes([b[0], b[1]]);
        Ok((self.bytes("x", Dtype::BF16)?.chunks_exact(2).map(pair).collect(), shape))
    }
}
