//! Weights quantized in tensors apart and in one, whose experts are read once or twice by their size and number: byte for
//! byte as on the CPU.

use crate::cases::same_copy;
use crate::support::{called, cuda, must};
use half::bf16;
use moe4::kernels::contract::{QuantizeWeights, WeightShape};
use moe4::kernels::cpu::Cpu;
use moe4::kernels::{Backend, Error};
use moe4::numerics::BLOCK;
use moe4::tensor::ScaleLayout;
use moe4_conformance::compare::{bf16_bits, bytes, f32_bits};
use moe4_conformance::data::{self, Kind};
use moe4_conformance::drive::{Poison, quantize_weights_apart, quantize_weights_together};
use moe4_conformance::{InCase, Outcome};
use moe4_cuda::DeviceBuffer;

/// `[n, k]` of each expert, in tensors apart and in one, of which a GPU reads small experts once.
fn weights(experts: usize, shape: WeightShape, kind: Kind, seed: u64) -> Outcome {
    let WeightShape { n, k } = shape;
    let together = data::tensor(kind, experts * n * k, seed);
    let apart: Vec<&[bf16]> = together.chunks_exact(n * k).collect();
    for unpacked in [false, true] {
        let expected = quantize_weights_apart(&Cpu::new(), &apart, shape, unpacked)?;
        let of_apart = quantize_weights_apart(cuda(), &apart, shape, unpacked)?;
        let of_one = quantize_weights_together(cuda(), &together, experts, shape, unpacked)?;
        for (place, got) in [("apart", of_apart), ("together", of_one)] {
            same_copy("weights", [experts * n, k], ScaleLayout::Plain, &expected, &got)
                .in_case(format!("{experts} weights of {n} x {k} {place}, {kind:?}, unpacked {unpacked}"))?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn weights_of_many_shapes() {
    let shapes = [(8, 512, 1024), (3, 2688, 560), (128, 48, 272), (1, 16, 16), (4, 16, 16), (300, 16, 80)];
    for (i, (experts, n, k)) in shapes.into_iter().enumerate() {
        for kind in Kind::ALL {
            must(weights(experts, WeightShape { n, k }, kind, 600 + i as u64));
        }
    }
}

/// More pieces than thread blocks are at, of experts that stay in the cache of an H200; and of experts that do not.
#[test]
#[ignore = "needs a GPU"]
fn weights_beyond_the_cache() {
    must(weights(12, WeightShape { n: 1024, k: 2048 }, Kind::Normal, 606));
    must(weights(4, WeightShape { n: 2048, k: 4096 }, Kind::Normal, 607));
}

/// Elements of nobody between experts that lie at equal distances.
const GAP: usize = 48;

/// All that a pass reads and writes.
struct Buffers {
    /// Each expert's weight, and a gap.
    w: DeviceBuffer<bf16>,
    codes: DeviceBuffer<u8>,
    scales: DeviceBuffer<u8>,
    unpacked: DeviceBuffer<bf16>,
    amax: DeviceBuffer<f32>,
}

impl Buffers {
    /// Outputs that no pass would leave.
    fn fill(&mut self, w: &[bf16]) -> Result<(), Error> {
        let (cuda, len, experts) = (cuda(), w.len(), self.amax.view().len());
        // The gaps would change amaxes.
        let spaced: Vec<_> = w.chunks_exact(len / experts).map(|w| [w, &[bf16::MAX; GAP]].concat()).collect();
        cuda.write(&mut self.w, &spaced.concat())?;
        cuda.write(&mut self.codes, &vec![u8::POISON; len / 2])?;
        cuda.write(&mut self.scales, &vec![u8::POISON; len / BLOCK])?;
        cuda.write(&mut self.unpacked, &vec![bf16::POISON; len])?;
        cuda.write(&mut self.amax, &vec![f32::POISON; experts])
    }

    fn enqueue(&mut self, shape: WeightShape) -> Result<(), Error> {
        let (count, w) = (shape.n * shape.k, self.w.view());
        let begins = (0..w.len()).step_by(count + GAP);
        cuda().quantize_weights(QuantizeWeights {
            w: begins.map(|begin| w.slice(begin..begin + count)).collect(),
            shape,
            codes: self.codes.view_mut(),
            scales: self.scales.view_mut(),
            unpacked: Some(self.unpacked.view_mut()),
            amax: self.amax.view_mut(),
        })
    }
}

/// Launched again and again: what one launch leaves of its counters is nothing to the next.
fn replayed(experts: usize, shape: WeightShape) -> Outcome {
    let (cuda, rows, len) = (cuda(), experts * shape.n, experts * shape.n * shape.k);
    let mut buffers = Buffers {
        w: cuda.empty(len + experts * GAP)?,
        codes: cuda.empty(len / 2)?,
        scales: cuda.empty(len / BLOCK)?,
        unpacked: cuda.empty(len)?,
        amax: cuda.empty(experts)?,
    };
    // Loads the kernels.
    buffers.fill(&vec![bf16::ONE; len])?;
    buffers.enqueue(shape)?;
    let mut graph = cuda.capture(|| buffers.enqueue(shape))?;
    for (i, kind) in Kind::ALL.into_iter().enumerate() {
        let w = data::tensor(kind, len, 620 + i as u64);
        buffers.fill(&w)?;
        // SAFETY: the buffers of the capture are alive, and only this thread uses them.
        called(unsafe { graph.launch() })?;
        cuda.synchronize()?;
        let expected = quantize_weights_together(&Cpu::new(), &w, experts, shape, true)?;
        let (packed, values) = (&expected.packed, expected.unpacked.expect("asked for"));
        f32_bits("amax", &[experts], &packed.amax, &cuda.download(buffers.amax.view())?)?;
        let [of_scales, of_codes] = [BLOCK, 2].map(|per| [rows, shape.k / per]);
        bytes("scales", &of_scales, &packed.scales, &cuda.download(buffers.scales.view())?)?;
        bytes("packed codes", &of_codes, &packed.codes, &cuda.download(buffers.codes.view())?)?;
        bf16_bits("unpacked", &[rows, shape.k], &values, &cuda.download(buffers.unpacked.view())?)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn a_graph_with_other_weights() {
    for (experts, shape) in [(2, WeightShape { n: 48, k: 272 }), (20, WeightShape { n: 256, k: 336 })] {
        must(replayed(experts, shape).in_case(format!("{experts} experts, {shape:?}")));
    }
}
