//! A layer's forward and backward, pass by pass in NVFP4, recorded once and launched with other splits: bit for bit what
//! the same passes give by themselves.

use crate::products::tensor;
use crate::support::{called, cuda, must, skewed};
use half::bf16;
use moe4::kernels::activation::{Activation, GluLayout};
use moe4::kernels::contract::*;
use moe4::kernels::{Backend, Error, Extent, Memory};
use moe4::numerics::BLOCK;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::{RandomStream, Rounding};
use moe4::tensor::{Groups, Nvfp4, ScaleLayout};
use moe4_conformance::compare::{alive, bf16_bits, f32_bits};
use moe4_conformance::drive::Poison;
use moe4_conformance::{InCase, Outcome, data};
use moe4_cuda::{Cuda, DeviceBuffer, DeviceGroups, DeviceMemory, DeviceView};

const MASK: SignMask = SignMask::DEFAULT;
const HIDDEN: usize = 176;
const FFN: usize = 96;
const N1: usize = 2 * FFN;

/// A quantized copy; its amaxes lie elsewhere.
struct Copy {
    codes: DeviceBuffer<u8>,
    scales: DeviceBuffer<u8>,
}

impl Copy {
    fn new(cuda: &Cuda, elements: usize) -> Result<Self, Error> {
        Ok(Self { codes: cuda.empty(elements / 2)?, scales: cuda.empty(elements / BLOCK)? })
    }

    fn out(&mut self) -> PackedOut<'_, DeviceMemory> {
        let layout = ScaleLayout::Plain;
        PackedOut { codes: self.codes.view_mut(), scales: self.scales.view_mut(), layout }
    }

    fn operand<'a>(&'a self, amax: &'a DeviceBuffer<f32>) -> Nvfp4<DeviceView<'a, u8>, DeviceView<'a, f32>> {
        Nvfp4 { codes: self.codes.view(), scales: self.scales.view(), amax: amax.view() }
    }
}

/// A tensor of tokens, its amaxes, and its copies.
struct Quantized {
    cols: usize,
    values: DeviceBuffer<bf16>,
    amax: DeviceBuffer<f32>,
    amax_rht: DeviceBuffer<f32>,
    row: Copy,
    col: Copy,
}

impl Quantized {
    fn new(cuda: &Cuda, groups: &DeviceGroups, cols: usize) -> Result<Self, Error> {
        let (rows, experts) = (groups.rows(), groups.experts());
        Ok(Self {
            cols,
            values: cuda.empty(rows * cols)?,
            amax: cuda.empty(experts)?,
            amax_rht: cuda.empty(experts)?,
            row: Copy::new(cuda, rows * cols)?,
            col: Copy::new(cuda, groups.padded_rows() * cols)?,
        })
    }

    fn amaxes(&mut self, cuda: &Cuda, groups: &DeviceGroups) -> Result<(), Error> {
        cuda.group_hadamard_amax(GroupHadamardAmax {
            x: self.values.view(),
            cols: self.cols,
            groups,
            sign_mask: MASK,
            amax: self.amax.view_mut(),
            amax_rht: self.amax_rht.view_mut(),
        })
    }

    fn quantize(&mut self, cuda: &Cuda, groups: &DeviceGroups, rounding: [Rounding; 2]) -> Result<(), Error> {
        let Self { cols, values, amax, amax_rht, row, col } = self;
        cuda.group_quantize(GroupQuantize {
            x: values.view(),
            cols: *cols,
            groups,
            rowwise: Some(Cast {
                amax: amax.view(),
                rounding: rounding[0],
                packed: Some(row.out()),
                unpacked: None,
            }),
            columnwise: Some(ColumnwiseCast {
                rht: Some(MASK),
                cast: Cast {
                    amax: amax_rht.view(),
                    rounding: rounding[1],
                    packed: Some(col.out()),
                    unpacked: None,
                },
            }),
        })
    }

    fn rowwise(&self) -> Operand<'_, DeviceMemory> {
        Operand::Nvfp4(self.row.operand(&self.amax))
    }

    fn columnwise(&self) -> Operand<'_, DeviceMemory> {
        Operand::Nvfp4(self.col.operand(&self.amax_rht))
    }
}

struct Weight {
    shape: WeightShape,
    copy: Copy,
    amax: DeviceBuffer<f32>,
    gradient: DeviceBuffer<f32>,
}

impl Weight {
    fn new(cuda: &Cuda, experts: usize, shape: WeightShape, seed: u64) -> Result<Self, Error> {
        let count = experts * shape.n * shape.k;
        let w = cuda.upload(&data::normal(count, 0.2, seed))?;
        let (mut copy, mut amax) = (Copy::new(cuda, count)?, cuda.empty(experts)?);
        cuda.quantize_weights(QuantizeWeights {
            w: DeviceMemory::split(w.view(), experts),
            shape,
            codes: copy.codes.view_mut(),
            scales: copy.scales.view_mut(),
            unpacked: None,
            amax: amax.view_mut(),
        })?;
        Ok(Self { shape, copy, amax, gradient: cuda.empty(count)? })
    }

    fn operand(&self) -> WeightOperand<'_, DeviceMemory> {
        WeightOperand::Nvfp4 { packed: self.copy.operand(&self.amax), unpacked: None }
    }
}

/// All that the passes read and write.
struct Layer {
    splits: DeviceBuffer<i64>,
    groups: DeviceGroups,
    prob: DeviceBuffer<f32>,
    x: Quantized,
    c: DeviceBuffer<bf16>,
    h: Quantized,
    y: DeviceBuffer<bf16>,
    dy: Quantized,
    dc: Quantized,
    dx: DeviceBuffer<bf16>,
    dprob: DeviceBuffer<f32>,
    db1: DeviceBuffer<f32>,
    b2: DeviceBuffer<f32>,
    db2: DeviceBuffer<f32>,
    w1: Weight,
    w2: Weight,
}

fn poison<T: Poison>(cuda: &Cuda, buffer: &mut DeviceBuffer<T>) -> Result<(), Error> {
    let len = buffer.view().len();
    cuda.write(buffer, &vec![T::POISON; len])
}

/// What the passes left: BF16, then FP32.
type Outputs = (Vec<Vec<bf16>>, Vec<Vec<f32>>);

impl Layer {
    fn new(cuda: &Cuda, experts: usize, rows: usize) -> Result<Self, Error> {
        let groups = cuda.empty_groups(experts, rows)?;
        let tokens = |cols| Quantized::new(cuda, &groups, cols);
        Ok(Self {
            splits: cuda.upload_plain(&vec![0; experts])?,
            prob: cuda.upload(&data::probabilities(rows, 970))?,
            x: tokens(HIDDEN)?,
            c: cuda.empty(rows * N1)?,
            h: tokens(FFN)?,
            y: cuda.empty(rows * HIDDEN)?,
            dy: tokens(HIDDEN)?,
            dc: tokens(N1)?,
            dx: cuda.empty(rows * HIDDEN)?,
            dprob: cuda.empty(rows)?,
            db1: cuda.empty(experts * N1)?,
            b2: cuda.upload(&data::normal_f32(experts * HIDDEN, 971))?,
            db2: cuda.empty(experts * HIDDEN)?,
            w1: Weight::new(cuda, experts, WeightShape { n: N1, k: HIDDEN }, 972)?,
            w2: Weight::new(cuda, experts, WeightShape { n: HIDDEN, k: FFN }, 973)?,
            groups,
        })
    }

    /// Inputs for these splits, and outputs that no pass would leave.
    fn fill(&mut self, cuda: &Cuda, splits: &[i64]) -> Result<(), Error> {
        let groups = Groups::from_i64(splits, self.groups.rows())?;
        cuda.write(&mut self.splits, splits)?;
        cuda.write(&mut self.x.values, &tensor(&groups, HIDDEN, 974))?;
        cuda.write(&mut self.dy.values, &tensor(&groups, HIDDEN, 975))?;
        for buffer in [&mut self.c, &mut self.h.values, &mut self.y, &mut self.dc.values, &mut self.dx] {
            poison(cuda, buffer)?;
        }
        for buffer in [&mut self.dprob, &mut self.db1, &mut self.db2] {
            poison(cuda, buffer)?;
        }
        [&mut self.w1.gradient, &mut self.w2.gradient].into_iter().try_for_each(|b| poison(cuda, b))
    }

    fn forward(&mut self, cuda: &Cuda) -> Result<(), Error> {
        let nearest = [Rounding::Nearest; 2];
        cuda.compute_groups(self.splits.view(), &mut self.groups)?;
        self.x.amaxes(cuda, &self.groups)?;
        self.x.quantize(cuda, &self.groups, nearest)?;
        cuda.grouped_gemm_act(GroupedGemmAct {
            x: self.x.rowwise(),
            w1: self.w1.operand(),
            b1: None,
            hidden: HIDDEN,
            ffn: FFN,
            activation: Activation::SWIGLU,
            layout: GluLayout::Halves,
            prob: self.prob.view(),
            groups: &self.groups,
            c: self.c.view_mut(),
            h: self.h.values.view_mut(),
            h_amax: Some(AmaxOut {
                amax: self.h.amax.view_mut(),
                rht: Some((RhtAmax::Exact(MASK), self.h.amax_rht.view_mut())),
            }),
        })?;
        self.h.quantize(cuda, &self.groups, nearest)?;
        cuda.grouped_gemm(GroupedGemm {
            a: self.h.rowwise(),
            w: self.w2.operand(),
            shape: self.w2.shape,
            side: Side::Fprop,
            groups: &self.groups,
            bias: Some(Bias { bias: self.b2.view(), prob: Some(self.prob.view()) }),
            out: self.y.view_mut(),
        })
    }

    fn backward(&mut self, cuda: &Cuda) -> Result<(), Error> {
        let stochastic = |stream| Rounding::Stochastic(RandomStream { seed: 97, stream });
        self.dy.amaxes(cuda, &self.groups)?;
        self.dy.quantize(cuda, &self.groups, [0, 1].map(stochastic))?;
        cuda.grouped_gemm_dact(GroupedGemmDact {
            dy: self.dy.rowwise(),
            w2: self.w2.operand(),
            hidden: HIDDEN,
            ffn: FFN,
            activation: Activation::SWIGLU,
            layout: GluLayout::Halves,
            c: self.c.view(),
            prob: self.prob.view(),
            groups: &self.groups,
            dc: self.dc.values.view_mut(),
            dprob: self.dprob.view_mut(),
            db1: Some(self.db1.view_mut()),
            dc_amax: Some(AmaxOut {
                amax: self.dc.amax.view_mut(),
                rht: Some((RhtAmax::Exact(MASK), self.dc.amax_rht.view_mut())),
            }),
            h: None,
            dh: None,
        })?;
        cuda.grouped_bias_grad(GroupedBiasGrad {
            dy: self.dy.values.view(),
            hidden: HIDDEN,
            b2: self.b2.view(),
            prob: self.prob.view(),
            groups: &self.groups,
            dprob: self.dprob.view_mut(),
            db2: Some(self.db2.view_mut()),
        })?;
        self.dc.quantize(cuda, &self.groups, [2, 3].map(stochastic))?;
        cuda.grouped_gemm(GroupedGemm {
            a: self.dc.rowwise(),
            w: self.w1.operand(),
            shape: self.w1.shape,
            side: Side::Dgrad,
            groups: &self.groups,
            bias: None,
            out: self.dx.view_mut(),
        })?;
        let Self { groups, x, h, dy, dc, w1, w2, .. } = self;
        for (a, b, w) in [(dy, h, w2), (dc, x, w1)] {
            cuda.grouped_wgrad(GroupedWgrad {
                a: a.columnwise(),
                b: b.columnwise(),
                shape: w.shape,
                groups,
                dw: WeightGrad::packed_f32(w.gradient.view_mut(), groups.experts(), GradMode::Overwrite),
            })?;
        }
        Ok(())
    }

    fn step(&mut self, cuda: &Cuda) -> Result<(), Error> {
        self.forward(cuda)?;
        self.backward(cuda)
    }

    fn download(&self, cuda: &Cuda) -> Result<Outputs, Error> {
        let narrow = [&self.c, &self.h.values, &self.y, &self.dc.values, &self.dx];
        let (h, dc) = ([&self.h.amax, &self.h.amax_rht], [&self.dc.amax, &self.dc.amax_rht]);
        let wide = [&self.dprob, &self.db1, &self.db2, &self.w1.gradient, &self.w2.gradient];
        Ok((
            narrow.into_iter().map(|b| cuda.download(b.view())).collect::<Result<_, _>>()?,
            wide.into_iter().chain(h).chain(dc).map(|b| cuda.download(b.view())).collect::<Result<_, _>>()?,
        ))
    }
}

fn same(expected: &Outputs, got: &Outputs) -> Outcome {
    for (name, (expected, got)) in ["c", "h", "y", "dc", "dx"].iter().zip(expected.0.iter().zip(&got.0)) {
        bf16_bits(name, &[expected.len()], expected, got)?;
    }
    let names =
        ["dprob", "db1", "db2", "dw1", "dw2", "amax of h", "and after RHT", "amax of dc", "and after RHT"];
    for (name, (expected, got)) in names.iter().zip(expected.1.iter().zip(&got.1)) {
        f32_bits(name, &[expected.len()], expected, got)?;
    }
    Ok(())
}

fn replays(experts: usize, rows: usize, launches: &[Vec<i64>]) -> Outcome {
    let cuda = cuda();
    let mut layer = Layer::new(cuda, experts, rows)?;
    // Loads the kernels, with splits that no launch of the graph has.
    layer.fill(cuda, &vec![1; experts])?;
    layer.step(cuda)?;
    cuda.synchronize()?;
    let mut graph = cuda.capture(|| layer.step(cuda))?;
    for splits in launches {
        let mut compared = || -> Outcome {
            layer.fill(cuda, splits)?;
            // SAFETY: the buffers of the capture are alive, and only this thread uses them.
            called(unsafe { graph.launch() })?;
            cuda.synchronize()?;
            let launched = layer.download(cuda)?;
            layer.fill(cuda, splits)?;
            layer.step(cuda)?;
            let expected = layer.download(cuda)?;
            if splits.iter().any(|&split| split > 0) {
                alive("y", &expected.0[2])?;
                alive("dx", &expected.0[4])?;
            }
            same(&expected, &launched)
        };
        compared().in_case(format!("splits {splits:?} of {rows} rows"))?;
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn a_step_with_other_splits() {
    let launches = [
        vec![100, 0, 37, 113, 1, 16, 200],
        vec![0; 7],
        vec![0, 0, 0, 0, 0, 0, 600],
        vec![600, 0, 0, 0, 0, 0, 0],
        vec![85; 7],
        vec![0, 129, 127, 128, 0, 200, 0],
    ];
    must(replays(7, 600, &launches));
    let many = |live, seed| skewed(64, live, seed).into_iter().map(|split| split as i64).collect::<Vec<_>>();
    must(replays(64, 1024, &[many(1024, 1), many(1000, 2), many(70, 3), vec![0; 64]]));
}
