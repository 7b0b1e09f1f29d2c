//! Products and their epilogues on shapes that span several tiles in every dimension, uneven experts: each element
//! within its bound, and bit for bit what the design promises of an epilogue.

use crate::support::{cuda, must, refused, skewed};
use half::bf16;
use moe4::kernels::activation::{Activation, GluLayout};
use moe4::kernels::contract::{
    AmaxOut, GradMode, GroupedGemm, GroupedGemmAct, Operand, RhtAmax, Side, WeightOperand, WeightShape,
    rht_amax_bound,
};
use moe4::kernels::cpu::Cpu;
use moe4::kernels::{Backend, Error, Memory};
use moe4::numerics::hadamard::SignMask;
use moe4::tensor::Groups;
use moe4_conformance::compare::{alive, bf16_bits, f32_bits};
use moe4_conformance::drive::{self, Bias, BiasGrad, Cast, Gemm, GemmAct, GemmDact, Grads, Quantize, Wgrad};
use moe4_conformance::{Failure, InCase, Outcome, data, judge};
use moe4_cuda::DeviceMemory;

/// Rows of nobody behind the experts'.
const NOBODY: usize = 37;

fn ragged(splits: &[usize]) -> Groups {
    Groups::new(splits, splits.iter().sum::<usize>() + NOBODY).expect("fits")
}

/// Uneven experts, tiny and empty ones, and whole tiles.
fn splits() -> Vec<Vec<usize>> {
    vec![vec![1, 0, 129, 16, 300, 0, 127, 128], skewed(40, 700, 9), vec![0, 500], vec![257]]
}

/// NaN in the rows of nobody.
pub(crate) fn tensor(groups: &Groups, cols: usize, seed: u64) -> Vec<bf16> {
    let mut x = data::normal(groups.rows() * cols, 1.0, seed);
    x[groups.live_rows() * cols..].fill(bf16::NAN);
    x
}

fn probabilities(groups: &Groups, seed: u64) -> Vec<f32> {
    let mut prob = data::probabilities(groups.rows(), seed);
    prob[groups.live_rows()..].fill(f32::NAN);
    prob
}

/// An operand of a product, quantized by the CPU.
pub(crate) fn operand(
    x: &[bf16],
    cols: usize,
    groups: &Groups,
    quantized: bool,
    columnwise: bool,
) -> Result<drive::Side, Error> {
    if !quantized {
        return Ok(drive::Side::Bf16(x.to_vec()));
    }
    let (before, after) = drive::hadamard_amax(&Cpu::new(), x, cols, groups, SignMask::DEFAULT)?;
    let rowwise = (!columnwise).then(|| Cast::nearest(&before));
    let columnwise = columnwise.then(|| (Some(SignMask::DEFAULT), Cast::nearest(&after)));
    let (row, col) = Quantize { x, cols, groups, rowwise, columnwise }.run(&Cpu::new())?;
    Ok(drive::Side::Nvfp4(row.or(col).expect("one copy was asked for")))
}

pub(crate) fn weights(
    experts: usize,
    shape: WeightShape,
    quantized: bool,
    seed: u64,
) -> Result<drive::Side, Error> {
    let w = data::normal(experts * shape.n * shape.k, 0.2, seed);
    Ok(match quantized {
        true => drive::Side::Nvfp4(drive::quantize_weights(&Cpu::new(), &w, experts, shape)?),
        false => drive::Side::Bf16(w),
    })
}

#[test]
#[ignore = "needs a GPU"]
fn plain_products() {
    let shape = WeightShape { n: 272, k: 208 };
    for (i, splits) in splits().into_iter().enumerate() {
        for (quantized, side) in
            [(false, Side::Fprop), (false, Side::Dgrad), (true, Side::Fprop), (true, Side::Dgrad)]
        {
            let checked = || -> Outcome {
                let groups = ragged(&splits);
                let (cols, contraction) = side.dims(shape);
                let x = tensor(&groups, contraction, 900 + i as u64);
                let a = operand(&x, contraction, &groups, quantized, false)?;
                let w = weights(groups.experts(), shape, quantized, 910)?;
                let bias = data::normal_f32(groups.experts() * cols, 911);
                let prob = probabilities(&groups, 912);
                for bias in [
                    None,
                    Some(Bias { bias: &bias, prob: None }),
                    Some(Bias { bias: &bias, prob: Some(&prob) }),
                ] {
                    let case = Gemm { a: &a, w: &w, shape, side, groups: &groups, bias };
                    let out = case.run(cuda())?;
                    judge::gemm(&case, &out)?;
                    alive("out", &out)?;
                    bf16_bits("out of a second run", &[groups.rows(), cols], &out, &case.run(cuda())?)?;
                }
                Ok(())
            };
            must(checked().in_case(format!("{splits:?}, {side:?}, quantized {quantized}")));
        }
    }
}

/// Inputs of FC1 and of FC2's backward.
struct Epilogues {
    groups: Groups,
    hidden: usize,
    ffn: usize,
    activation: Activation,
    layout: GluLayout,
    quantized: bool,
    mask: SignMask,
}

impl Epilogues {
    fn run(&self) -> Outcome {
        let Self { groups, hidden, ffn, activation, layout, quantized, mask } = self;
        let (hidden, ffn, quantized, experts) = (*hidden, *ffn, *quantized, groups.experts());
        let n1 = activation.fc1_rows(ffn);
        let x = operand(&tensor(groups, hidden, 920), hidden, groups, quantized, false)?;
        let dy = operand(&tensor(groups, hidden, 921), hidden, groups, quantized, false)?;
        let w1 = weights(experts, WeightShape { n: n1, k: hidden }, quantized, 922)?;
        let w2 = weights(experts, WeightShape { n: hidden, k: ffn }, quantized, 923)?;
        let (prob, b1) = (probabilities(groups, 924), data::normal_f32(experts * n1, 925));
        let act = GemmAct {
            x: &x,
            w1: &w1,
            b1: quantized.then_some(&b1),
            hidden,
            ffn,
            activation: *activation,
            layout: *layout,
            prob: &prob,
            groups,
            amax: Some(*mask),
        };
        let forward = act.run(cuda())?;
        judge::gemm_act(&act, &forward)?;
        alive("h", &forward.h)?;
        let again = act.run(cuda())?;
        if again != forward {
            return Err(Failure::new("FC1: two runs differ"));
        }
        self.same_amaxes("h", &forward.h, ffn, forward.amax.as_ref())?;

        let mut c = forward.c;
        c[groups.live_rows() * n1..].fill(bf16::NAN);
        let dact = GemmDact {
            dy: &dy,
            w2: &w2,
            hidden,
            ffn,
            activation: *activation,
            layout: *layout,
            c: &c,
            prob: &prob,
            groups,
            extras: Some(*mask),
        };
        let backward = dact.run(cuda())?;
        judge::gemm_dact(&dact, &backward)?;
        if dact.run(cuda())? != backward {
            return Err(Failure::new("FC2's dgrad: two runs differ"));
        }
        let extras = backward.extras.ok_or_else(|| Failure::new("everything was asked for"))?;
        bf16_bits("h written again", &[groups.rows(), ffn], &forward.h, &extras.h)?;
        self.same_amaxes("dc", &backward.dc, n1, Some(&extras.amax))
    }

    /// What an epilogue found, and what the pass by itself finds.
    fn same_amaxes(
        &self,
        name: &str,
        x: &[bf16],
        cols: usize,
        found: Option<&(Vec<f32>, Vec<f32>)>,
    ) -> Outcome {
        let (before, after) = found.ok_or_else(|| Failure::new("amaxes were asked for"))?;
        let expected = drive::hadamard_amax(cuda(), x, cols, &self.groups, self.mask)?;
        f32_bits(&format!("amax of {name}"), &[before.len()], &expected.0, before)?;
        f32_bits(&format!("amax of {name} after RHT"), &[after.len()], &expected.1, after)
    }
}

#[test]
#[ignore = "needs a GPU"]
fn epilogues() {
    for (i, splits) in splits().into_iter().enumerate() {
        for activation in Activation::all() {
            for (layout, ffn) in
                [(GluLayout::Halves, 208), (GluLayout::Interleaved32, 224), (GluLayout::Elementwise, 176)]
            {
                let case = Epilogues {
                    groups: ragged(&splits),
                    hidden: 144,
                    ffn,
                    activation,
                    layout,
                    quantized: i % 2 == 1,
                    mask: [SignMask::DEFAULT, SignMask::NONE, SignMask(0x1234)][i % 3],
                };
                must(case.run().in_case(format!("{splits:?}, {activation:?}, {layout}, {ffn} features")));
            }
        }
    }
}

/// The other ways to give amaxes: only before the transform, or with its bound.
#[test]
#[ignore = "needs a GPU"]
fn amaxes_without_a_transform() {
    let (hidden, ffn, groups) = (64, 96, ragged(&[70, 0, 19]));
    let found = |rht: Option<RhtAmax>| {
        let cuda = cuda();
        let (x, w1) = (
            cuda.upload(&tensor(&groups, hidden, 930))?,
            cuda.upload(&data::normal(3 * 2 * ffn * hidden, 0.2, 931))?,
        );
        let (prob, on_device) = (cuda.upload(&probabilities(&groups, 932))?, cuda.groups(&groups)?);
        let (mut c, mut h) = (cuda.empty(groups.rows() * 2 * ffn)?, cuda.empty(groups.rows() * ffn)?);
        let (mut amax, mut after) = (cuda.upload(&[f32::NAN; 3])?, cuda.upload(&[f32::NAN; 3])?);
        cuda.grouped_gemm_act(GroupedGemmAct {
            x: Operand::Bf16(x.view()),
            w1: WeightOperand::Bf16(DeviceMemory::split(w1.view(), 3)),
            b1: None,
            hidden,
            ffn,
            activation: Activation::SWIGLU,
            layout: GluLayout::Halves,
            prob: prob.view(),
            groups: &on_device,
            c: c.view_mut(),
            h: h.view_mut(),
            h_amax: Some(AmaxOut { amax: amax.view_mut(), rht: rht.map(|rht| (rht, after.view_mut())) }),
        })?;
        Ok::<_, Error>((cuda.download(amax.view())?, cuda.download(after.view())?, cuda.download(h.view())?))
    };
    let checked = || -> Outcome {
        let (amax, _, h) = found(None)?;
        f32_bits("amax", &[3], &drive::amax(cuda(), &h, ffn, &groups)?, &amax)?;
        let (amax, bound, _) = found(Some(RhtAmax::Bound))?;
        let expected: Vec<f32> = amax.iter().map(|&amax| rht_amax_bound(amax)).collect();
        f32_bits("bound", &[3], &expected, &bound)
    };
    must(checked());
}

#[test]
#[ignore = "needs a GPU"]
fn weight_gradients() {
    let shape = WeightShape { n: 208, k: 272 };
    for splits in splits() {
        let groups = ragged(&splits);
        let count = groups.experts() * shape.n * shape.k;
        for quantized in [false, true] {
            for (mode, before) in [
                (GradMode::Overwrite, Grads::poison(groups.experts(), shape)),
                (GradMode::Overwrite, Grads::Bf16(vec![bf16::NAN; count])),
                (GradMode::Accumulate, Grads::F32(data::normal_f32(count, 940))),
                (GradMode::Accumulate, Grads::Bf16(data::normal(count, 1.0, 941))),
            ] {
                let checked = || -> Outcome {
                    let a = operand(&tensor(&groups, shape.n, 942), shape.n, &groups, quantized, true)?;
                    let b = operand(&tensor(&groups, shape.k, 943), shape.k, &groups, quantized, true)?;
                    let before = before.clone();
                    let case = Wgrad { a: &a, b: &b, shape, groups: &groups, mode, before };
                    let dw = case.run(cuda())?;
                    judge::wgrad(&case, &dw)?;
                    match case.run(cuda())? == dw {
                        true => Ok(()),
                        false => Err(Failure::new("two runs differ")),
                    }
                };
                must(checked().in_case(format!("{splits:?}, quantized {quantized}, {mode:?}")));
            }
        }
    }
}

/// Each expert alone in the world gives the bits that it gives among others.
#[test]
#[ignore = "needs a GPU"]
fn neighbours_do_not_matter() {
    let (shape, all) = (WeightShape { n: 160, k: 144 }, ragged(&[130, 1, 0, 300, 15]));
    let checked = || -> Outcome {
        let x = tensor(&all, shape.k, 950);
        let (dy, b2) = (tensor(&all, shape.n, 951), data::normal_f32(all.experts() * shape.n, 952));
        let w = data::normal(all.experts() * shape.n * shape.k, 0.2, 953);
        let prob = probabilities(&all, 954);
        let run = |groups: &Groups, rows: std::ops::Range<usize>, experts: std::ops::Range<usize>| {
            let cut = |x: &[bf16], cols| drive::Side::Bf16(x[rows.start * cols..rows.end * cols].to_vec());
            let slab = shape.n * shape.k;
            let w = drive::Side::Bf16(w[experts.start * slab..experts.end * slab].to_vec());
            let (a, dy_side) = (cut(&x, shape.k), cut(&dy, shape.n));
            let out = Gemm { a: &a, w: &w, shape, side: Side::Fprop, groups, bias: None }.run(cuda())?;
            let before = Grads::poison(experts.len(), shape);
            let (mode, b) = (GradMode::Overwrite, &a);
            let dw = Wgrad { a: &dy_side, b, shape, groups, mode, before }.run(cuda())?.into_f32();
            let zeros = vec![0.0; rows.len()];
            let bias = BiasGrad {
                dy: &dy[rows.start * shape.n..rows.end * shape.n],
                hidden: shape.n,
                b2: &b2[experts.start * shape.n..experts.end * shape.n],
                prob: &prob[rows.clone()],
                groups,
                dprob: &zeros,
            };
            let (dprob, db2) = bias.run(cuda())?;
            Ok::<_, Error>((out, dw, dprob, db2))
        };
        let (out, dw, dprob, db2) = run(&all, 0..all.rows(), 0..all.experts())?;
        for e in 0..all.experts() {
            let rows = all.range(e);
            let alone = run(&Groups::single(rows.len()), rows.clone(), e..e + 1)?;
            let (n, slab) = (shape.n, shape.n * shape.k);
            let case = || -> Outcome {
                bf16_bits("out", &[rows.len(), n], &alone.0, &out[rows.start * n..rows.end * n])?;
                f32_bits("dw", &[n, shape.k], &alone.1, &dw[e * slab..(e + 1) * slab])?;
                f32_bits("dprob", &[rows.len()], &alone.2, &dprob[rows.clone()])?;
                f32_bits("db2", &[n], &alone.3, &db2[e * n..(e + 1) * n])
            };
            case().in_case(format!("expert {e}"))?;
        }
        Ok(())
    };
    must(checked());
}

/// Weights that lie anywhere, more of them than one launch carries addresses for.
pub(crate) fn scattered_weights(experts: usize) -> Outcome {
    let (cuda, shape) = (cuda(), WeightShape { n: 32, k: 48 });
    let groups = Groups::new(&vec![2; experts], 2 * experts).expect("fits");
    let (x, w) = (tensor(&groups, shape.k, 960), data::normal(experts * shape.n * shape.k, 0.2, 961));
    let (on_device, x, w) = (cuda.groups(&groups)?, cuda.upload(&x)?, cuda.upload(&w)?);
    let together = DeviceMemory::split(w.view(), experts);
    let product = |w: Vec<_>| -> Result<Vec<bf16>, Error> {
        let mut out = cuda.upload(&vec![bf16::NAN; groups.rows() * shape.n])?;
        cuda.grouped_gemm(GroupedGemm {
            a: Operand::Bf16(x.view()),
            w: WeightOperand::Bf16(w),
            shape,
            side: Side::Fprop,
            groups: &on_device,
            bias: None,
            out: out.view_mut(),
        })?;
        cuda.download(out.view())
    };
    let expected = product(together.clone())?;
    alive("out", &expected)?;
    // Each expert has its own weight still, but every other one lies somewhere else.
    let apart = together.iter().map(|&w| cuda.duplicate(w)).collect::<Result<Vec<_>, _>>()?;
    let scattered: Vec<_> =
        (0..experts).map(|e| if e % 2 == 0 { together[e] } else { apart[e].view() }).collect();
    bf16_bits("out", &[groups.rows(), shape.n], &expected, &product(scattered)?)
}

#[test]
#[ignore = "needs a GPU"]
fn weights_anywhere() {
    for experts in [2, 3, 256, 300] {
        must(scattered_weights(experts).in_case(format!("{experts} experts")));
    }
}

/// What the kernels cannot read is refused before anything is written.
#[test]
#[ignore = "needs a GPU"]
fn shapes_and_addresses_that_do_not_fit() {
    let checked = || -> Outcome {
        let (cuda, groups) = (cuda(), Groups::single(20));
        let on_device = cuda.groups(&groups)?;
        let (x, w) = (cuda.upload(&vec![bf16::ONE; 20 * 48 + 1])?, cuda.upload(&vec![bf16::ONE; 48 * 48])?);
        let mut out = cuda.empty(20 * 48)?;
        let mut product = |at: usize, n: usize, k: usize| {
            cuda.grouped_gemm(GroupedGemm {
                a: Operand::Bf16(x.view().slice(at..at + 20 * k)),
                w: WeightOperand::Bf16(vec![w.view().slice(0..n * k)]),
                shape: WeightShape { n, k },
                side: Side::Fprop,
                groups: &on_device,
                bias: None,
                out: DeviceMemory::split_mut(out.view_mut(), 48 / n).swap_remove(0),
            })
        };
        refused(product(0, 48, 40), "multiple of 16, got 40")?;
        refused(product(0, 24, 48), "multiple of 16, got 24")?;
        refused(product(1, 48, 48), "a: expected an address that is a multiple of 16")?;
        Ok(product(0, 48, 48)?)
    };
    must(checked());
}
