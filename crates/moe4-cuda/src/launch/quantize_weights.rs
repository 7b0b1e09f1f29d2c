//! Launches `kernels/weights_amax.cu` and `kernels/quantize_weights.cu`, or `kernels/quantize_cached_weights.cu` for small
//! experts.

use super::{OutArgument, THREADS, aligned, blocks, narrow, plain, quantize_cached_weights};
use crate::backend::Cuda;
use crate::driver::{Arguments, Grid};
use crate::memory::{DeviceMemory, DeviceView};
use crate::variant::Variant;
use half::bf16;
use moe4::kernels::contract::{QuantizeWeights, WeightShape};
use moe4::kernels::{Error, Misuse};
use moe4::numerics::BLOCK;
use std::ops::Range;

/// BF16 elements that a thread block takes at a time for the amax.
const CHUNK: usize = 8 * 8 * THREADS as usize;
/// Tiles of a thread block side by side; `TILES` of the kernel.
const TILES: usize = 32;
/// Thread blocks in the second and the third dimension of a grid.
const MOST_BLOCKS: usize = 65535;

pub(crate) fn variant(unpacked: bool) -> Variant {
    Variant { kernel: "quantize_weights", defines: vec![("UNPACKED", u32::from(unpacked))] }
}

pub(crate) fn quantize_weights(cuda: &Cuda, pass: QuantizeWeights<'_, DeviceMemory>) -> Result<(), Error> {
    pass.check()?;
    let QuantizeWeights { w, shape: WeightShape { n, k }, codes, scales, unpacked, amax } = pass;
    let name = "quantize_weights";
    w.iter().try_for_each(|w| aligned(name, "w", w.address(), 16).map(drop))?;
    let first_amax = aligned(name, "amax", amax.address(), 4)?;
    let codes = aligned(name, "codes", codes.address(), 8)?;
    let values = match &unpacked {
        Some(values) => aligned(name, "unpacked", values.address(), 16)?,
        None => 0,
    };
    // Bands of 16 rows are the second dimension of a grid.
    if n / BLOCK > MOST_BLOCKS {
        let expected = "at most 1048560";
        return Err(Misuse::Value { what: "rows of a weight".into(), expected, got: n.to_string() }.into());
    }
    let [rows, cols] = [narrow("rows of a weight", n)?, narrow("columns of a weight", k)?];
    cuda.clear(&amax)?;
    let count = (n * k) as u64;
    for Strided { experts, stride } in runs(&w) {
        let first = experts.start as u64;
        let weights = Weights {
            experts: experts.len() as u32,
            rows,
            cols,
            base: w[experts.start].address(),
            stride,
            amax: first_amax + first * size_of::<f32>() as u64,
            out: OutArgument {
                codes: codes + first * count / 2,
                scales: scales.address() + first * count / BLOCK as u64,
                unpacked: if values == 0 { 0 } else { values + first * count * 2 },
            },
            unpacked: unpacked.is_some(),
        };
        if quantize_cached_weights::suits(experts.len(), n * k, cuda.device().facts().l2_cache) {
            quantize_cached_weights::launch(cuda, &weights)?;
        } else {
            launch(cuda, &weights)?;
        }
    }
    Ok(())
}

/// The weights `[E, n, k]` of a run, and where their first expert's results go. Amaxes are cleared.
pub(super) struct Weights {
    pub(super) experts: u32,
    /// `n`.
    pub(super) rows: u32,
    /// `k`.
    pub(super) cols: u32,
    pub(super) base: u64,
    /// From an expert to the next one, in elements.
    pub(super) stride: u64,
    pub(super) amax: u64,
    pub(super) out: OutArgument,
    /// Whether BF16 values are wanted.
    pub(super) unpacked: bool,
}

impl Weights {
    /// Sizes of `[E, n, k]`.
    pub(super) fn sizes(&self) -> [usize; 3] {
        [self.experts, self.rows, self.cols].map(|size| size as usize)
    }
}

/// In two passes, each of which reads all experts.
fn launch(cuda: &Cuda, weights: &Weights) -> Result<(), Error> {
    let amax_kernel = cuda.kernel(&plain("weights_amax"))?;
    let kernel = cuda.kernel(&variant(weights.unpacked))?;
    let Weights { experts, rows, cols, base, stride, amax, out, .. } = weights;
    let [_, n, k] = weights.sizes();
    let count = (n * k) as u64;
    let arguments =
        Arguments::of("[E, n, k]", weights.sizes()).with(base).with(stride).with(&count).with(amax);
    let grid = Grid::new([blocks(n * k, CHUNK, 512), *experts, 1], THREADS);
    // SAFETY: `check` compared lengths with shapes, and the run's weights lie `stride` elements apart.
    cuda.on(unsafe { amax_kernel.launch(cuda.stream(), grid, arguments) })?;
    let arguments = Arguments::of("[E, n, k]", weights.sizes())
        .with(base)
        .with(stride)
        .with(rows)
        .with(cols)
        .with(amax)
        .with(out);
    let grid = Grid::new([(k / BLOCK).div_ceil(TILES) as u32, (n / BLOCK) as u32, *experts], THREADS);
    // SAFETY: as above; outputs begin at the run's first expert.
    cuda.on(unsafe { kernel.launch(cuda.stream(), grid, arguments) })
}

/// Experts whose weights lie at equal distances, in elements.
#[derive(Debug, PartialEq, Eq)]
struct Strided {
    experts: Range<usize>,
    stride: u64,
}

/// One tensor for all experts is one run; weights apart from each other are as many as needed.
fn runs(w: &[DeviceView<'_, bf16>]) -> Vec<Strided> {
    let distance = |e: usize| w[e + 1].address().checked_sub(w[e].address()).filter(|d| d.is_multiple_of(16));
    let mut runs = Vec::new();
    let mut start = 0;
    while start < w.len() {
        let mut end = start + 1;
        let stride = if end < w.len() { distance(start) } else { None };
        while stride.is_some() && end < w.len() && end - start < MOST_BLOCKS && distance(end - 1) == stride {
            end += 1;
        }
        runs.push(Strided { experts: start..end, stride: stride.unwrap_or(0) / size_of::<bf16>() as u64 });
        start = end;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_in_one_tensor_are_one_run() {
        // SAFETY: the views are never used on a GPU.
        let view = |address| unsafe { DeviceView::from_raw(address, 8) };
        let run = |experts, stride| Strided { experts, stride };
        assert_eq!(runs(&[0, 32, 64].map(view)), [run(0..3, 16)]);
        assert_eq!(runs(&[0, 32, 96, 160].map(view)), [run(0..2, 16), run(2..4, 32)]);
        assert_eq!(runs(&[64, 32].map(view)), [run(0..1, 0), run(1..2, 0)]);
        assert_eq!(runs(&[]), []);
    }
}
