//! The four grouped products: problems for [`super::gemm`], outputs cut into blocks, epilogues.
#![forbid(unsafe_code)]

use super::amax::{block_amax, block_hadamard_amax};
use super::epilogue::{self, DactOut, Shape};
use super::gemm::{Problem, Task, run};
use super::isa::Isa;
use super::matrix::{Along, Matrix, Values};
use super::micro::BLOCK_ROWS;
use super::parallel::{carve, carve_optional, carve_rows, reduce_max};
use crate::kernels::activation::with_activation;
use crate::kernels::contract::*;
use crate::kernels::memory::Host;
use crate::numerics::hadamard::SignMask;
use crate::numerics::scale::product_alpha;
use crate::tensor::{Groups, Nvfp4, RowBlock};
use half::bf16;

type HostOperand<'a> = Operand<'a, Host>;
type HostWeights<'a> = WeightOperand<'a, Host>;

/// Rows of experts as the A operand, weights as the B operand.
fn row_problems<'a>(
    groups: &Groups,
    a: HostOperand<'a>,
    w: &HostWeights<'a>,
    shape: WeightShape,
    side: Side,
) -> Vec<Problem<'a>> {
    let (n, k) = side.dims(shape);
    let along = match side {
        Side::Fprop => Along::Cols,
        Side::Dgrad => Along::Rows,
    };
    let problem = |e: usize| {
        let row0 = groups.range(e).start;
        let a = Matrix { values: values(a), cols: k, row0, col0: 0, along: Along::Cols };
        let (values, row0) = match w {
            WeightOperand::Bf16(w) => (Values::Bf16(w[e]), 0),
            WeightOperand::Nvfp4 { packed: Nvfp4 { codes, scales, .. }, .. } => {
                (Values::Nvfp4 { codes, scales }, e * shape.n)
            }
        };
        Problem { a, b: Matrix { values, cols: shape.k, row0, col0: 0, along }, n, k }
    };
    (0..groups.experts()).map(problem).collect()
}

fn values(operand: HostOperand<'_>) -> Values<'_> {
    match operand {
        Operand::Bf16(x) => Values::Bf16(x),
        Operand::Nvfp4(Nvfp4 { codes, scales, .. }) => Values::Nvfp4 { codes, scales },
        Operand::Unpacked(u) => Values::Bf16(u.values),
    }
}

/// The factor of expert `e`'s product.
fn alpha(a: Option<&[f32]>, b: Option<&[f32]>, e: usize) -> f32 {
    match (a, b) {
        (Some(a), Some(b)) => product_alpha(a[e], b[e]),
        // An unquantized operand has decode scale 1, which is also that of amax 2688.
        (Some(amax), None) | (None, Some(amax)) => product_alpha(amax[e], crate::numerics::scale::RANGE),
        (None, None) => 1.0,
    }
}

fn weight_amax<'a>(w: &HostWeights<'a>) -> Option<&'a [f32]> {
    match w {
        WeightOperand::Bf16(_) => None,
        WeightOperand::Nvfp4 { packed, .. } => Some(packed.amax),
    }
}

/// Blocks as tasks, rows counted within their expert.
fn tasks<O>(blocks: &[RowBlock], outs: impl IntoIterator<Item = O>) -> Vec<Task<O>> {
    let task =
        |(b, out): (&RowBlock, O)| Task { problem: b.expert, rows: b.token..b.token + b.rows.len(), out };
    blocks.iter().zip(outs).map(task).collect()
}

pub(super) fn grouped_gemm(isa: Isa, pass: GroupedGemm<'_, Host>) {
    let GroupedGemm { a, w, shape, side, groups, bias, out } = pass;
    let (n, _) = side.dims(shape);
    let blocks = groups.row_blocks(BLOCK_ROWS);
    let outs = carve_rows(out, n, &blocks).into_iter().zip(&blocks);
    let problems = row_problems(groups, a, &w, shape, side);
    let (a_amax, w_amax) = (a.amax(), weight_amax(&w));
    run(isa, &problems, tasks(&blocks, outs), |task, block, (out, rows)| {
        let e = task.problem;
        let prob = bias.as_ref().and_then(|b| b.prob).map(|p| &p[rows.rows.clone()]);
        let bias = bias.as_ref().map(|b| &b.bias[e * n..(e + 1) * n]);
        epilogue::plain(isa, block, n, alpha(a_amax, w_amax, e), bias, prob, out);
    });
}

/// Amaxes of a block that an epilogue wrote: before and, if asked for, after the RHT.
fn block_amaxes(isa: Isa, wanted: Option<Option<SignMask>>, rows: &[bf16], cols: usize) -> [f32; 2] {
    match wanted {
        None => [0.0; 2],
        Some(None) => [block_amax(isa, rows), 0.0],
        Some(Some(mask)) => block_hadamard_amax(isa, rows, cols, mask),
    }
}

fn wanted_amaxes(out: &Option<AmaxOut<'_, Host>>) -> Option<Option<SignMask>> {
    out.as_ref().map(|o| match o.rht {
        Some((RhtAmax::Exact(mask), _)) => Some(mask),
        Some((RhtAmax::Bound, _)) | None => None,
    })
}

fn write_amaxes(groups: &Groups, blocks: &[RowBlock], found: &[[f32; 2]], out: Option<AmaxOut<'_, Host>>) {
    let Some(AmaxOut { amax, rht }) = out else { return };
    reduce_max(groups, blocks, found.iter().map(|a| a[0]), amax);
    match rht {
        Some((RhtAmax::Exact(_), out)) => reduce_max(groups, blocks, found.iter().map(|a| a[1]), out),
        Some((RhtAmax::Bound, out)) => {
            out.iter_mut().zip(amax).for_each(|(out, amax)| *out = rht_amax_bound(*amax))
        }
        None => {}
    }
}

pub(super) fn grouped_gemm_act(isa: Isa, pass: GroupedGemmAct<'_, Host>) {
    let GroupedGemmAct { x, w1, b1, hidden, ffn, activation, layout, prob, groups, c, h, h_amax } = pass;
    let n1 = activation.fc1_rows(ffn);
    let shape = Shape { layout, ffn, n1 };
    let blocks = groups.row_blocks(BLOCK_ROWS);
    let (c, h) = (carve_rows(c, n1, &blocks), carve_rows(h, ffn, &blocks));
    let outs = c.into_iter().zip(h).zip(&blocks);
    let problems = row_problems(groups, x, &w1, WeightShape { n: n1, k: hidden }, Side::Fprop);
    let (x_amax, w_amax, wanted) = (x.amax(), weight_amax(&w1), wanted_amaxes(&h_amax));
    let found = run(isa, &problems, tasks(&blocks, outs), |task, block, ((c, h), rows)| {
        let e = task.problem;
        let bias = b1.map(|b| &b[e * n1..(e + 1) * n1]);
        let (alpha, prob) = (alpha(x_amax, w_amax, e), &prob[rows.rows.clone()]);
        with_activation!(activation, f => epilogue::act(isa, f, shape, block, alpha, bias, prob, c, h));
        block_amaxes(isa, wanted, h, ffn)
    });
    write_amaxes(groups, &blocks, &found, h_amax);
}

pub(super) fn grouped_gemm_dact(isa: Isa, pass: GroupedGemmDact<'_, Host>) {
    let GroupedGemmDact {
        dy,
        w2,
        hidden,
        ffn,
        activation,
        layout,
        c,
        prob,
        groups,
        dc,
        dprob,
        db1,
        dc_amax,
        h,
        dh,
    } = pass;
    let n1 = activation.fc1_rows(ffn);
    let shape = Shape { layout, ffn, n1 };
    let blocks = groups.row_blocks(BLOCK_ROWS);
    let (h, dh) = (carve_optional(h, ffn, &blocks), carve_optional(dh, ffn, &blocks));
    let outs = carve_rows(dc, n1, &blocks)
        .into_iter()
        .zip(carve_rows(dprob, 1, &blocks))
        .zip(h.into_iter().zip(dh))
        .zip(&blocks)
        .map(|(((dc, dprob), (h, dh)), rows)| (DactOut { dc, dprob, h, dh }, rows));
    let problems = row_problems(groups, dy, &w2, WeightShape { n: hidden, k: ffn }, Side::Dgrad);
    let (dy_amax, w_amax, wanted) = (dy.amax(), weight_amax(&w2), wanted_amaxes(&dc_amax));
    let sum_columns = db1.is_some();
    let found = run(isa, &problems, tasks(&blocks, outs), |task, block, (mut out, rows)| {
        let alpha = alpha(dy_amax, w_amax, task.problem);
        let c = &c[rows.rows.start * n1..rows.rows.end * n1];
        let prob = &prob[rows.rows.clone()];
        let dc = std::mem::take(&mut out.dc);
        let reborrowed = DactOut { dc: &mut *dc, ..out };
        with_activation!(activation, f => epilogue::dact(isa, f, shape, block, alpha, c, prob, reborrowed));
        let mut sums = vec![];
        if sum_columns {
            sums.resize(n1, 0.0);
            epilogue::column_sums(isa, dc, &mut sums);
        }
        (block_amaxes(isa, wanted, dc, n1), sums)
    });
    if let Some(db1) = db1 {
        // Blocks in order: the sum does not depend on which thread finished first.
        db1.fill(0.0);
        for (block, (_, sums)) in blocks.iter().zip(&found) {
            let total = &mut db1[block.expert * n1..(block.expert + 1) * n1];
            total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
        }
    }
    let amaxes: Vec<_> = found.into_iter().map(|(amaxes, _)| amaxes).collect();
    write_amaxes(groups, &blocks, &amaxes, dc_amax);
}

pub(super) fn grouped_wgrad(isa: Isa, pass: GroupedWgrad<'_, Host>) {
    let GroupedWgrad { a, b, shape: WeightShape { n, k }, groups, dw } = pass;
    let side = |operand: HostOperand<'_>, rows: usize, e: usize| match operand {
        Operand::Bf16(_) => (rows, groups.range(e), Along::Rows),
        Operand::Nvfp4(_) | Operand::Unpacked(_) => {
            (groups.padded_rows(), groups.padded_range(e), Along::Cols)
        }
    };
    let matrix = |operand, rows, e| {
        let (cols, tokens, along) = side(operand, rows, e);
        let (row0, col0) = if along == Along::Rows { (tokens.start, 0) } else { (0, tokens.start) };
        Matrix { values: values(operand), cols, row0, col0, along }
    };
    let problem =
        |e: usize| Problem { a: matrix(a, n, e), b: matrix(b, k, e), n: k, k: side(a, n, e).1.len() };
    let problems: Vec<_> = (0..groups.experts()).map(problem).collect();
    let (a_amax, b_amax) = (a.amax(), b.amax());
    let accumulate = dw.mode == GradMode::Accumulate;
    let live = |e: usize| !(accumulate && groups.range(e).is_empty());
    let factor = |e: usize| alpha(a_amax, b_amax, e);
    match dw.buffers {
        GradBuffers::F32(buffers) => {
            let tasks = wgrad_tasks(buffers, n, k, live);
            run(isa, &problems, tasks, |task, block, out| {
                epilogue::wgrad_f32(isa, block, k, factor(task.problem), accumulate, out);
            });
        }
        GradBuffers::Bf16(buffers) => {
            let tasks = wgrad_tasks(buffers, n, k, live);
            run(isa, &problems, tasks, |task, block, out| {
                epilogue::wgrad_bf16(isa, block, k, factor(task.problem), accumulate, out);
            });
        }
    }
}

/// Blocks of rows of every expert's gradient `[n, k]`; none for an expert whose buffer is to stay as it is.
fn wgrad_tasks<T>(
    buffers: Vec<&mut [T]>,
    n: usize,
    k: usize,
    live: impl Fn(usize) -> bool,
) -> Vec<Task<&mut [T]>> {
    let rows = |first: usize| first..n.min(first + BLOCK_ROWS);
    let mut tasks = vec![];
    for (problem, buffer) in buffers.into_iter().enumerate().filter(|(e, _)| live(*e)) {
        let firsts = || (0..n).step_by(BLOCK_ROWS);
        let (pieces, _) = carve(buffer, firsts().map(|first| rows(first).len() * k));
        tasks.extend(firsts().zip(pieces).map(|(first, out)| Task { problem, rows: rows(first), out }));
    }
    tasks
}
