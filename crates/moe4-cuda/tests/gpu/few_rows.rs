//! Products of few rows an expert, which read weights as packed codes: the same bits as from BF16 weights, and whatever the
//! rest of the batch makes the backend choose.

use crate::products::{operand, tensor};
use crate::support::{another, bf16_values, cuda, must, portable, skewed};
use half::bf16;
use moe4::kernels::Error;
use moe4::kernels::activation::{Activation, GluLayout};
use moe4::kernels::contract::{Side, WeightShape};
use moe4::kernels::cpu::Cpu;
use moe4::numerics::hadamard::SignMask;
use moe4::tensor::Groups;
use moe4_conformance::compare::{alive, bf16_bits, f32_bits};
use moe4_conformance::drive::{self, Bias, Gemm, GemmAct, GemmDact};
use moe4_conformance::{InCase, Outcome, data, judge};
use moe4_cuda::Cuda;

/// On average up to 8, up to 24 and up to 32 rows an expert, for each of which there is a kernel; of one expert more than
/// each takes at once, and of another more than a tile.
fn splits() -> Vec<Vec<usize>> {
    let with_empty = |splits: &[usize], empty: usize| [splits, &vec![0; empty]].concat();
    vec![
        with_empty(&[0, 3, 1, 37, 16, 0, 17, 131], 24),
        with_empty(&[70, 0, 1, 15, 33, 130], 6),
        skewed(12, 340, 9),
        vec![64, 0, 0, 0],
    ]
}

/// With rows of nobody, which count for the average.
fn ragged(splits: &[usize]) -> Groups {
    Groups::new(splits, splits.iter().sum::<usize>() + 37).expect("fits")
}

/// With a tile that holds a NaN, and tiles whose scales are subnormal or zero.
fn weights(experts: usize, WeightShape { n, k }: WeightShape, seed: u64) -> Result<drive::Side, Error> {
    let mut w = data::normal(experts * n * k, 0.2, seed);
    w[n * k - 1] = bf16::NAN;
    for (tile, factor) in [1e-3, 2e-4, 1e-9].into_iter().enumerate() {
        for row in 0..16 {
            for v in &mut w[row * k + 16 * tile..row * k + 16 * (tile + 1)] {
                *v = bf16::from_f32(v.to_f32() * factor);
            }
        }
    }
    drive::quantize_weights(&Cpu::new(), &w, experts, WeightShape { n, k }).map(drive::Side::Nvfp4)
}

/// Tails of columns and of the contraction, in steps of 16 and of 32.
const SHAPES: [WeightShape; 3] =
    [WeightShape { n: 272, k: 352 }, WeightShape { n: 48, k: 96 }, WeightShape { n: 544, k: 64 }];

#[test]
#[ignore = "needs a GPU"]
fn plain_products_have_the_bits_of_bf16_weights() {
    let cuda = another();
    for splits in splits() {
        for (shape, side) in SHAPES.into_iter().flat_map(|s| [(s, Side::Fprop), (s, Side::Dgrad)]) {
            let checked = || -> Outcome {
                let groups = ragged(&splits);
                let (cols, contraction) = side.dims(shape);
                let a = operand(&tensor(&groups, contraction, 970), contraction, &groups, true, false)?;
                let packed = weights(groups.experts(), shape, 971)?;
                let both = packed.clone().unpacked();
                let bias = data::normal_f32(groups.experts() * cols, 972);
                for bias in [None, Some(Bias { bias: &bias, prob: None })] {
                    let case = |w| Gemm { a: &a, w, shape, side, groups: &groups, bias };
                    let out = case(&packed).run(&cuda)?;
                    alive("out", &out)?;
                    let len = [groups.rows(), cols];
                    bf16_values("out", &len, &case(&packed).run(portable())?, &out)?;
                    bf16_bits("out with both forms of weights", &len, &out, &case(&both).run(&cuda)?)?;
                }
                Ok(())
            };
            must(checked().in_case(format!("{splits:?}, {shape:?}, {side:?}")));
        }
    }
    // Both sides with each number of rows at once.
    assert_eq!(loaded(&cuda, "packed_gemm"), 6, "{:?}", cuda.loaded());
}

/// How many variants of a kernel `cuda` has run.
fn loaded(cuda: &Cuda, kernel: &str) -> usize {
    cuda.loaded().iter().filter(|variant| variant.kernel == kernel).count()
}

/// FC1 and FC2's backward on `cuda`, of quantized operands.
struct Epilogues {
    groups: Groups,
    activation: Activation,
    layout: GluLayout,
    ffn: usize,
}

impl Epilogues {
    const HIDDEN: usize = 160;

    fn run(&self, cuda: &Cuda) -> Result<(drive::GemmActOut, drive::GemmDactOut), moe4_conformance::Failure> {
        let Self { groups, activation, layout, ffn } = self;
        let (hidden, ffn, experts) = (Self::HIDDEN, *ffn, groups.experts());
        let n1 = activation.fc1_rows(ffn);
        let x = operand(&tensor(groups, hidden, 980), hidden, groups, true, false)?;
        let dy = operand(&tensor(groups, hidden, 981), hidden, groups, true, false)?;
        let w1 = crate::products::weights(experts, WeightShape { n: n1, k: hidden }, true, 982)?;
        let w2 = crate::products::weights(experts, WeightShape { n: hidden, k: ffn }, true, 983)?;
        let prob = data::probabilities(groups.rows(), 984);
        let (activation, layout) = (*activation, *layout);
        let (b1, prob, mask) = (None, &prob, Some(SignMask::DEFAULT));
        let (x, w1, w2, dy) = (&x, &w1, &w2, &dy);
        let act = GemmAct { x, w1, b1, hidden, ffn, activation, layout, prob, groups, amax: mask };
        let forward = act.run(cuda)?;
        judge::gemm_act(&act, &forward)?;
        let c = &forward.c;
        let dact = GemmDact { dy, w2, hidden, ffn, activation, layout, c, prob, groups, extras: mask };
        let backward = dact.run(cuda)?;
        judge::gemm_dact(&dact, &backward)?;
        Ok((forward, backward))
    }

    fn as_portable(&self, cuda: &Cuda) -> Outcome {
        let ((forward, backward), (expected, expected_backward)) = (self.run(cuda)?, self.run(portable())?);
        bf16_bits("c", &[forward.c.len()], &expected.c, &forward.c)?;
        bf16_bits("h", &[forward.h.len()], &expected.h, &forward.h)?;
        bf16_bits("dc", &[backward.dc.len()], &expected_backward.dc, &backward.dc)?;
        f32_bits("dprob", &[backward.dprob.len()], &expected_backward.dprob, &backward.dprob)?;
        let same = expected == forward && expected_backward == backward;
        same.then_some(()).ok_or_else(|| moe4_conformance::Failure::new("amaxes, db1, dh or h again differ"))
    }
}

#[test]
#[ignore = "needs a GPU"]
fn epilogues_have_the_bits_of_bf16_weights() {
    let cuda = cuda();
    for (i, splits) in splits().into_iter().enumerate() {
        for activation in Activation::all() {
            for (layout, ffn) in
                [(GluLayout::Halves, 224), (GluLayout::Interleaved32, 192), (GluLayout::Elementwise, 288)]
            {
                // All activations with the first kernel, and all kernels with the first activation.
                if i > 0 && activation != Activation::SWIGLU {
                    continue;
                }
                let case = Epilogues { groups: ragged(&splits), activation, layout, ffn };
                must(
                    case.as_portable(cuda)
                        .in_case(format!("{splits:?}, {activation:?}, {layout}, {ffn} features")),
                );
            }
        }
    }
    let kernels = ["packed_gemm_act", "packed_gemm_dact"].map(|kernel| loaded(cuda, kernel));
    assert!(kernels.iter().all(|&variants| variants > Activation::all().len()), "loaded: {kernels:?}");
}

/// An expert whose rows are few for the kernels that read BF16, but not alone: the rest of the batch decides what
/// multiplies, and must not show.
#[test]
#[ignore = "needs a GPU"]
fn the_rest_of_the_batch_does_not_show() {
    let (shape, splits) = (WeightShape { n: 320, k: 2048 }, [100, 0, 3, 8]);
    for side in [Side::Fprop, Side::Dgrad] {
        let cuda = another();
        let checked = || -> Outcome {
            let (cols, contraction) = side.dims(shape);
            let (all, alone) = (Groups::new(&splits, 111).expect("fits"), Groups::single(100));
            let x = data::normal(111 * contraction, 1.0, 990);
            let w = data::normal(4 * shape.n * shape.k, 0.2, 991);
            let run = |x: &[bf16], w: &[bf16], groups: &Groups| -> Result<Vec<bf16>, Error> {
                let a = operand(x, contraction, groups, true, false)?;
                let w = drive::quantize_weights(&Cpu::new(), w, groups.experts(), shape)?;
                let w = &drive::Side::Nvfp4(w);
                Gemm { a: &a, w, shape, side, groups, bias: None }.run(&cuda)
            };
            let among_others = run(&x, &w, &all)?;
            alive("out", &among_others)?;
            assert_eq!((loaded(&cuda, "packed_gemm"), loaded(&cuda, "hopper_gemm")), (1, 0));
            let alone = run(&x[..100 * contraction], &w[..shape.n * shape.k], &alone)?;
            assert_eq!(loaded(&cuda, "packed_gemm"), 1, "100 rows are not few");
            bf16_bits("out", &[100, cols], &alone, &among_others[..100 * cols])
        };
        must(checked().in_case(format!("{side:?}")));
    }
}
