//! Properties over random shapes, splits, values, scales and masks. A failure shrinks to a small example.

use crate::compare::{bf16_bits, bytes, f32_bits};
use crate::data::{self, Kind};
use crate::drive::{
    Bias, Cast, Copy, Gemm, GemmAct, GemmDact, Grads, Quantize, Side, Wgrad, amax, hadamard_amax,
    quantize_weights, quantize_weights_apart,
};
use crate::judge;
use crate::report::{Failure, Outcome};
use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::activation::{Activation, ClampedQgeglu, GluLayout, SituGlu, TanhSrelu};
use moe4::kernels::contract::{self, GradMode, WeightShape};
use moe4::kernels::reference::Reference;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::{RandomStream, Rounding};
use moe4::numerics::scale::GlobalScale;
use moe4::numerics::{bf16 as bf, e2m1};
use moe4::tensor::{Groups, ScaleLayout};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Runs `check` on `cases` examples, the same ones every time.
fn for_all<S: Strategy>(cases: u32, strategy: S, check: impl Fn(S::Value) -> Outcome) -> Outcome {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let run = |value| check(value).map_err(|failure| TestCaseError::fail(failure.to_string()));
    runner.run(&strategy, run).map_err(|e| Failure::new(e.to_string()))
}

fn any_mask() -> impl Strategy<Value = Option<SignMask>> {
    prop_oneof![
        Just(None),
        Just(Some(SignMask::DEFAULT)),
        Just(Some(SignMask::NONE)),
        any::<u16>().prop_map(|m| Some(SignMask(m)))
    ]
}

fn any_rounding() -> impl Strategy<Value = Rounding> {
    prop_oneof![
        Just(Rounding::Nearest),
        (any::<u64>(), any::<u64>())
            .prop_map(|(seed, stream)| Rounding::Stochastic(RandomStream { seed, stream })),
    ]
}

/// Groups with `extra` rows of nobody, and a tensor that is NaN or huge there.
fn grouped((splits, extra): (Vec<usize>, usize), cols: usize, kind: Kind, seed: u64) -> (Groups, Vec<bf16>) {
    let live: usize = splits.iter().sum();
    let groups = Groups::new(&splits, live + extra).expect("the sum fits");
    let mut x = data::tensor(kind, (live + extra) * cols, seed);
    x[live * cols..].fill(if seed.is_multiple_of(2) { bf16::NAN } else { bf16::MAX });
    (groups, x)
}

/// Two copies of one layout, bit by bit.
pub(super) fn same_copy(name: &str, expected: &Copy, got: &Copy, k: usize, layout: ScaleLayout) -> Outcome {
    let (a, b) = (&expected.packed, &got.packed);
    let rows = match &expected.unpacked {
        Some(values) => values.len() / k.max(1),
        None => 2 * a.codes.len() / k.max(1),
    };
    f32_bits(&format!("{name} amax"), &[a.amax.len()], &a.amax, &b.amax)?;
    if a.codes.is_empty() {
        bytes(&format!("{name} codes that nobody asked for"), &[0], &[], &b.codes)?;
    } else {
        let scales = match layout {
            ScaleLayout::Plain => vec![rows, k / 16],
            ScaleLayout::Swizzled128x4 => vec![layout.bytes(rows, k / 16)],
        };
        bytes(&format!("{name} scales, {layout:?}"), &scales, &a.scales, &b.scales)?;
        bytes(&format!("{name} packed codes"), &[rows, k / 2], &a.codes, &b.codes)?;
    }
    match (&expected.unpacked, &got.unpacked) {
        (Some(a), Some(b)) => bf16_bits(&format!("{name} unpacked"), &[rows, k], a, b),
        (None, None) => Ok(()),
        _ => Err(Failure::new(format!("{name}: BF16 values are there in one copy and not in the other"))),
    }
}

fn any_layout_of_scales() -> impl Strategy<Value = ScaleLayout> {
    prop_oneof![Just(ScaleLayout::Plain), Just(ScaleLayout::Swizzled128x4)]
}

/// Whether codes and whether values are written; one of them is.
fn any_form() -> impl Strategy<Value = [bool; 2]> {
    prop_oneof![Just([true, false]), Just([true, true]), Just([false, true])]
}

/// Forms of two copies. Mostly of one form, since a backend may compile each combination.
fn any_forms() -> impl Strategy<Value = [(ScaleLayout, [bool; 2]); 2]> {
    let any = || (any_layout_of_scales(), any_form());
    prop_oneof![31 => any().prop_map(|form| [form; 2]), 1 => [any(), any()]]
}

/// The first invariant: amax and quantize passes give the bytes of the reference, whatever the input.
pub(super) fn quantize<B: Backend>(b: &B) -> Outcome {
    let damage = prop_oneof![4 => Just(None), 1 => any::<u16>().prop_map(Some)];
    let strategy = (
        data::any_splits(),
        1usize..8,
        data::any_kind(),
        any::<u64>(),
        any_mask(),
        (any_rounding(), any_rounding()),
        damage,
        any_forms(),
    );
    for_all(192, strategy, |(splits, blocks, kind, seed, mask, rounding, damage, [of_rows, of_columns])| {
        let cols = 16 * blocks;
        let (groups, mut x) = grouped(splits, cols, kind, seed);
        if let (Some(at), false) = (damage, x.is_empty()) {
            let n = x.len();
            x[at as usize % n] = if at % 2 == 0 { bf16::NEG_INFINITY } else { bf16::NAN };
        }
        let amaxes = |b: &dyn Fn(SignMask) -> Result<(Vec<f32>, Vec<f32>), Failure>| match mask {
            Some(mask) => b(mask),
            None => b(SignMask::DEFAULT).map(|(before, _)| (before.clone(), before)),
        };
        let expected = amaxes(&|m| Ok(hadamard_amax(&Reference, &x, cols, &groups, m)?))?;
        let got = amaxes(&|m| Ok(hadamard_amax(b, &x, cols, &groups, m)?))?;
        let experts = [groups.experts()];
        f32_bits("amax", &experts, &expected.0, &got.0)?;
        f32_bits("amax after RHT", &experts, &expected.1, &got.1)?;
        f32_bits("amax by the plain pass", &experts, &expected.0, &amax(b, &x, cols, &groups)?)?;
        let cast = |amax: &[f32], rounding, (layout, [packed, unpacked]): (ScaleLayout, [bool; 2])| Cast {
            packed,
            layout,
            unpacked,
            ..Cast::new(amax, rounding)
        };
        let both = Quantize {
            x: &x,
            cols,
            groups: &groups,
            rowwise: Some(cast(&expected.0, rounding.0, of_rows)),
            columnwise: Some((mask, cast(&expected.1, rounding.1, of_columns))),
        };
        let row_only = Quantize { columnwise: None, ..both.clone() };
        let col_only = Quantize { rowwise: None, ..both.clone() };
        for case in [both, row_only, col_only] {
            let ((row, col), (got_row, got_col)) = (case.run_copies(&Reference)?, case.run_copies(b)?);
            if let (Some(expected), Some(got)) = (row, got_row) {
                same_copy("rowwise", &expected, &got, cols, of_rows.0)?;
            }
            if let (Some(expected), Some(got)) = (col, got_col) {
                same_copy("columnwise", &expected, &got, groups.padded_rows(), of_columns.0)?;
            }
        }
        Ok(())
    })
}

/// Every finite BF16 value, each exponent under an amax of its own, against the arithmetic of one block.
pub(super) fn every_value<B: Backend>(b: &B) -> Outcome {
    // Expert e holds the 128 values of exponent e of either sign, in 16 blocks.
    let x: Vec<bf16> = (0..255u16 * 256)
        .map(|i| bf16::from_bits((i / 256) << 7 | (i % 128) | (i % 256 / 128) << 15))
        .collect();
    let groups = Groups::new(&[16; 255], 255 * 16).expect("fits");
    let found = amax(b, &x, 16, &groups)?;
    let top: Vec<f32> = (0..255u16).map(|e| bf::to_f32(bf16::from_bits(e << 7 | 127))).collect();
    f32_bits("amax", &[255], &top, &found)?;
    let rowwise = Some(Cast::nearest(&found));
    let (row, _) = Quantize { x: &x, cols: 16, groups: &groups, rowwise, columnwise: None }.run(b)?;
    let (mut codes, mut scales) = (vec![], vec![]);
    for (i, block) in x.chunks(16).enumerate() {
        let global = GlobalScale::from_amax(top[i / 16]);
        let v: Vec<f32> = block.iter().map(|&v| bf::to_f32(v)).collect();
        let scale = global.block_scale(v.iter().fold(0.0, |a, v| a.max(v.abs())));
        let code = |i: usize| e2m1::encode(v[i] * global.multiplier(scale));
        codes.extend((0..8).map(|i| e2m1::pack(code(2 * i), code(2 * i + 1))));
        scales.push(scale);
    }
    let got = row.ok_or_else(|| Failure::new("a rowwise copy was asked for"))?;
    bytes("scale", &[255 * 16, 1], &scales, &got.scales)?;
    bytes("packed codes", &[255 * 16, 8], &codes, &got.codes)
}

/// The same for weights.
pub(super) fn weights<B: Backend>(b: &B) -> Outcome {
    let strategy = (1usize..4, 1usize..6, 1usize..6, data::any_kind(), any::<u64>(), any::<bool>());
    for_all(96, strategy, |(experts, n, k, kind, seed, damaged)| {
        let shape = WeightShape { n: 16 * n, k: 16 * k };
        let mut w = data::tensor(kind, experts * shape.n * shape.k, seed);
        if damaged {
            let at = seed as usize % w.len();
            w[at] = bf16::INFINITY;
        }
        let apart: Vec<&[bf16]> = w.chunks(shape.n * shape.k).collect();
        let expected = quantize_weights_apart(&Reference, &apart, shape, true)?;
        let got = quantize_weights_apart(b, &apart, shape, true)?;
        same_copy("weights", &expected, &got, shape.k, ScaleLayout::Plain)?;
        let together = Copy { packed: quantize_weights(b, &w, experts, shape)?, unpacked: None };
        let expected = Copy { unpacked: None, ..expected };
        same_copy("weights in one tensor", &expected, &together, shape.k, ScaleLayout::Plain)
    })
}

/// An operand of a product, made by the reference.
fn operand(
    x: &[bf16],
    cols: usize,
    groups: &Groups,
    quantized: bool,
    columnwise: bool,
) -> Result<Side, Failure> {
    if !quantized {
        return Ok(Side::Bf16(x.to_vec()));
    }
    let (before, after) = hadamard_amax(&Reference, x, cols, groups, SignMask::DEFAULT)?;
    let case = Quantize {
        x,
        cols,
        groups,
        rowwise: (!columnwise).then(|| Cast::nearest(&before)),
        columnwise: columnwise.then(|| (Some(SignMask::DEFAULT), Cast::nearest(&after))),
    };
    let (row, col) = case.run(&Reference)?;
    row.or(col).map(Side::Nvfp4).ok_or_else(|| Failure::new("no copy was asked for"))
}

fn weight(experts: usize, shape: WeightShape, quantized: bool, seed: u64) -> Result<Side, Failure> {
    let w = data::normal(experts * shape.n * shape.k, 0.5, seed);
    Ok(match quantized {
        true => Side::Nvfp4(quantize_weights(&Reference, &w, experts, shape)?),
        false => Side::Bf16(w),
    })
}

/// Values whose products with others of size 1 stay within the range of BF16 after an activation has squared them.
fn moderate_kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        Just(Kind::Normal),
        Just(Kind::Outlier),
        Just(Kind::Ties),
        Just(Kind::Sparse),
        Just(Kind::Zeros)
    ]
}

/// Plain products, both sides of a weight, both precisions, with and without biases: each element within its bound,
/// each expert as if alone.
pub(super) fn gemm<B: Backend>(b: &B) -> Outcome {
    let strategy = (
        data::any_splits(),
        (1usize..7, 1usize..7),
        data::any_kind(),
        any::<u64>(),
        (any::<bool>(), any::<bool>()),
        0..3,
    );
    for_all(96, strategy, |(splits, (n, k), kind, seed, (quantized, dgrad), bias)| {
        let shape = WeightShape { n: 16 * n, k: 16 * k };
        let side = if dgrad { contract::Side::Dgrad } else { contract::Side::Fprop };
        let (cols, contraction) = side.dims(shape);
        let (groups, x) = grouped(splits, contraction, kind, seed);
        let a = operand(&x, contraction, &groups, quantized, false)?;
        let w = weight(groups.experts(), shape, quantized, seed ^ 1)?;
        let values = data::normal_f32(groups.experts() * cols, seed ^ 2);
        let mut prob = data::probabilities(groups.rows(), seed ^ 3);
        prob[groups.live_rows()..].fill(f32::NAN);
        let bias = (bias > 0).then_some(Bias { bias: &values, prob: (bias > 1).then_some(&prob[..]) });
        let case = Gemm { a: &a, w: &w, shape, side, groups: &groups, bias };
        judge::gemm(&case, &case.run(b)?)
    })
}

fn any_activation() -> impl Strategy<Value = Activation> {
    (0..5usize, 0.5f32..20.0, 0.5f32..20.0, 0.3f32..3.0).prop_map(|(which, a, b, c)| match which {
        0 => Activation::SWIGLU,
        1 => Activation::SRELU,
        2 => Activation::TanhSrelu(TanhSrelu { s: a }),
        3 => Activation::SituGlu(SituGlu { beta1: a, beta2: b }),
        _ => Activation::ClampedQgeglu(ClampedQgeglu { limit: a, alpha: b.min(4.0), offset: c }),
    })
}

fn any_layout() -> impl Strategy<Value = GluLayout> {
    proptest::sample::select(&GluLayout::ALL[..])
}

fn fitting_ffn(activation: Activation, layout: GluLayout, blocks: usize) -> usize {
    let unit = if layout.check(&activation, 16).is_ok() { 16 } else { 32 };
    unit * blocks
}

/// FC1 and FC2's dgrad with their epilogues: every output within its bound, amaxes exact, `h` written again with the
/// same bits.
pub(super) fn epilogues<B: Backend>(b: &B) -> Outcome {
    let strategy = (
        data::any_splits(),
        (1usize..5, 1usize..4),
        (any_activation(), any_layout()),
        (moderate_kind(), any::<u64>(), any::<u16>()),
        (any::<bool>(), any::<bool>()),
    );
    for_all(96, strategy, |(splits, (hidden, blocks), (activation, layout), (kind, seed, mask), flags)| {
        let (quantized, biased) = flags;
        let (hidden, ffn, mask) = (16 * hidden, fitting_ffn(activation, layout, blocks), SignMask(mask));
        let n1 = activation.fc1_rows(ffn);
        let (groups, x) = grouped(splits.clone(), hidden, kind, seed);
        let (_, dy) = grouped(splits, hidden, Kind::Normal, seed ^ 1);
        let mut prob = data::probabilities(groups.rows(), seed ^ 2);
        prob[groups.live_rows()..].fill(f32::NAN);
        let experts = groups.experts();
        let b1 = data::normal_f32(experts * n1, seed ^ 3);
        let act = GemmAct {
            x: &operand(&x, hidden, &groups, quantized, false)?,
            w1: &weight(experts, WeightShape { n: n1, k: hidden }, quantized, seed ^ 4)?,
            b1: biased.then_some(&b1[..]),
            hidden,
            ffn,
            activation,
            layout,
            prob: &prob,
            groups: &groups,
            amax: Some(mask),
        };
        let forward = act.run(b)?;
        judge::gemm_act(&act, &forward)?;
        let mut c = forward.c.clone();
        c[groups.live_rows() * n1..].fill(bf16::NAN);
        let dact = GemmDact {
            dy: &operand(&dy, hidden, &groups, quantized, false)?,
            w2: &weight(experts, WeightShape { n: hidden, k: ffn }, quantized, seed ^ 5)?,
            hidden,
            ffn,
            activation,
            layout,
            c: &c,
            prob: &prob,
            groups: &groups,
            extras: Some(mask),
        };
        let backward = dact.run(b)?;
        judge::gemm_dact(&dact, &backward)?;
        let again = backward.extras.ok_or_else(|| Failure::new("h was asked for"))?.h;
        bf16_bits("h written again", &[groups.rows(), ffn], &forward.h, &again)
    })
}

/// Weight gradients: both precisions, overwritten and accumulated, FP32 and BF16.
pub(super) fn wgrad<B: Backend>(b: &B) -> Outcome {
    let strategy = (
        data::any_splits(),
        (1usize..5, 1usize..5),
        (data::any_kind(), any::<u64>()),
        (any::<bool>(), any::<bool>(), any::<bool>()),
    );
    for_all(96, strategy, |(splits, (n, k), (kind, seed), (quantized, accumulate, narrow))| {
        let shape = WeightShape { n: 16 * n, k: 16 * k };
        let (groups, dy) = grouped(splits.clone(), shape.n, kind, seed);
        let (_, x) = grouped(splits, shape.k, Kind::Normal, seed ^ 1);
        let a = operand(&dy, shape.n, &groups, quantized, true)?;
        let input = operand(&x, shape.k, &groups, quantized, true)?;
        let mode = if accumulate { GradMode::Accumulate } else { GradMode::Overwrite };
        let len = groups.experts() * shape.n * shape.k;
        let before = match (accumulate, narrow) {
            (false, false) => Grads::F32(vec![f32::NAN; len]),
            (false, true) => Grads::Bf16(vec![bf16::NAN; len]),
            (true, false) => Grads::F32(data::normal_f32(len, seed ^ 2)),
            (true, true) => Grads::Bf16(data::normal(len, 1.0, seed ^ 2)),
        };
        let case = Wgrad { a: &a, b: &input, shape, groups: &groups, mode, before };
        judge::wgrad(&case, &case.run(b)?)
    })
}
