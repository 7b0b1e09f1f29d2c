//! The four grouped products: problems for [`super::gemm`], outputs cut into runs of rows, epilogues.
#![forbid(unsafe_code)]

use super::amax::{columns_amax, columns_hadamard_amax};
use super::epilogue::{self, DactOut, Shape};
use super::gemm::{Cut, Problem, Task, run};
use super::isa::Isa;
use super::matrix::{Along, Matrix, Values};
use super::parallel::{carve, carve_optional, carve_rows, reduce_max};
use crate::kernels::activation::{GluLayout, with_activation};
use crate::kernels::contract::*;
use crate::kernels::memory::Host;
use crate::numerics::hadamard::SignMask;
use crate::numerics::scale::product_alpha;
use crate::tensor::{Groups, Nvfp4, RowBlock};
use half::bf16;
use std::ops::Range;

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

/// Rows in units of which a thread takes them, a multiple of 16, so that it holds whole RHT groups. A bias gradient is
/// the sum of the sums of such blocks.
const BLOCK_ROWS: usize = 128;

/// Blocks of a run: packing B takes as long as some 100 rows' products, and A has to stay in L2.
const RUN_BLOCKS: usize = 4;

/// Blocks of a run, so that there are some runs for each thread. No result depends on it.
fn run_blocks(blocks: usize) -> usize {
    (blocks / (2 * rayon::current_num_threads())).clamp(1, RUN_BLOCKS)
}

/// `len` rows in runs of whole blocks, about equally long.
fn cut_rows(len: usize, run_blocks: usize) -> impl Iterator<Item = Range<usize>> {
    let blocks = len.div_ceil(BLOCK_ROWS);
    let runs = blocks.div_ceil(run_blocks);
    (0..runs).map(move |i| {
        let [start, end] = [i, i + 1].map(|i| i * blocks / runs * BLOCK_ROWS);
        start..end.min(len)
    })
}

/// The runs of all experts.
fn row_runs(groups: &Groups) -> Vec<RowBlock> {
    let length = run_blocks(groups.live_rows() / BLOCK_ROWS);
    let of_expert = |expert: usize| {
        let Range { start, end } = groups.range(expert);
        cut_rows(end - start, length).map(move |rows| RowBlock {
            expert,
            rows: start + rows.start..start + rows.end,
            token: rows.start,
        })
    };
    (0..groups.experts()).flat_map(of_expert).collect()
}

/// Runs as tasks, rows counted within their expert.
fn tasks<O>(runs: &[RowBlock], outs: impl IntoIterator<Item = O>) -> Vec<Task<O>> {
    let task =
        |(b, out): (&RowBlock, O)| Task { problem: b.expert, rows: b.token..b.token + b.rows.len(), out };
    runs.iter().zip(outs).map(task).collect()
}

pub(super) fn grouped_gemm(isa: Isa, pass: GroupedGemm<'_, Host>) {
    let GroupedGemm { a, w, shape, side, groups, bias, out } = pass;
    let (n, _) = side.dims(shape);
    let runs = row_runs(groups);
    let outs = carve_rows(out, n, &runs).into_iter().zip(&runs);
    let problems = row_problems(groups, a, &w, shape, side);
    let (a_amax, w_amax) = (a.amax(), weight_amax(&w));
    run(isa, &problems, tasks(&runs, outs), Cut::Straight, |task, stripe, block, (out, rows)| {
        let e = task.problem;
        let prob = bias.as_ref().and_then(|b| b.prob).map(|p| &p[rows.rows.clone()]);
        let bias = bias.as_ref().map(|b| &b.bias[e * n..(e + 1) * n]);
        epilogue::plain(isa, stripe, block, n, alpha(a_amax, w_amax, e), bias, prob, out);
    });
}

/// Amaxes that an epilogue leaves: before and, if asked for, after the RHT.
#[derive(Clone, Copy)]
struct Amaxes {
    isa: Isa,
    wanted: Option<Option<SignMask>>,
}

impl Amaxes {
    fn new(isa: Isa, out: &Option<AmaxOut<'_, Host>>) -> Self {
        let wanted = out.as_ref().map(|o| match o.rht {
            Some((RhtAmax::Exact(mask), _)) => Some(mask),
            Some((RhtAmax::Bound, _)) | None => None,
        });
        Self { isa, wanted }
    }

    /// Takes columns `of` of `rows [·, cols]` into account.
    fn add(self, found: &mut [f32; 2], rows: &[bf16], cols: usize, of: Range<usize>) {
        let more = match self.wanted {
            None => return,
            Some(None) => [columns_amax(self.isa, rows, cols, of), 0.0],
            Some(Some(mask)) => columns_hadamard_amax(self.isa, rows, cols, of, mask),
        };
        *found = [0, 1].map(|i| found[i].max(more[i]));
    }
}

fn write_amaxes(groups: &Groups, runs: &[RowBlock], found: &[[f32; 2]], out: Option<AmaxOut<'_, Host>>) {
    let Some(AmaxOut { amax, rht }) = out else { return };
    reduce_max(groups, runs, found.iter().map(|a| a[0]), amax);
    match rht {
        Some((RhtAmax::Exact(_), out)) => reduce_max(groups, runs, found.iter().map(|a| a[1]), out),
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
    let runs = row_runs(groups);
    let (c, h) = (carve_rows(c, n1, &runs), carve_rows(h, ffn, &runs));
    let outs = c.into_iter().zip(h).zip(&runs).map(|((c, h), rows)| (c, h, rows, [0.0; 2]));
    let problems = row_problems(groups, x, &w1, WeightShape { n: n1, k: hidden }, Side::Fprop);
    let (x_amax, w_amax, amaxes) = (x.amax(), weight_amax(&w1), Amaxes::new(isa, &h_amax));
    let cut = match activation.is_gated() && layout == GluLayout::Halves {
        true => Cut::Halves,
        false => Cut::Straight,
    };
    let done = run(isa, &problems, tasks(&runs, outs), cut, |task, stripe, block, (c, h, rows, found)| {
        let e = task.problem;
        let bias = b1.map(|b| &b[e * n1..(e + 1) * n1]);
        let (alpha, prob) = (alpha(x_amax, w_amax, e), &prob[rows.rows.clone()]);
        with_activation!(activation, f => epilogue::act(isa, f, shape, stripe, block, alpha, bias, prob, c, h));
        amaxes.add(found, h, ffn, shape.features(stripe));
    });
    let found: Vec<_> = done.into_iter().map(|(.., found)| found).collect();
    write_amaxes(groups, &runs, &found, h_amax);
}

/// What a run of rows of FC2 dgrad writes to.
struct DactRun<'a> {
    rows: &'a RowBlock,
    out: DactOut<'a>,
    /// `[blocks, N1]`: sums of `dc` over the rows of each block; empty if there is no bias.
    sums: Vec<f32>,
    amaxes: [f32; 2],
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
    let runs = row_runs(groups);
    let (h, dh) = (carve_optional(h, ffn, &runs), carve_optional(dh, ffn, &runs));
    let sums = |rows: &RowBlock| match db1 {
        Some(_) => vec![0.0; rows.rows.len().div_ceil(BLOCK_ROWS) * n1],
        None => vec![],
    };
    let outs = carve_rows(dc, n1, &runs)
        .into_iter()
        .zip(carve_rows(dprob, 1, &runs))
        .zip(h.into_iter().zip(dh))
        .zip(&runs)
        .map(|(((dc, dprob), (h, dh)), rows)| DactRun {
            out: DactOut { sums: vec![[0.0; _]; dprob.len()], dc, dprob, h, dh },
            sums: sums(rows),
            rows,
            amaxes: [0.0; 2],
        });
    let problems = row_problems(groups, dy, &w2, WeightShape { n: hidden, k: ffn }, Side::Dgrad);
    let (dy_amax, w_amax, amaxes) = (dy.amax(), weight_amax(&w2), Amaxes::new(isa, &dc_amax));
    let done = run(isa, &problems, tasks(&runs, outs), Cut::Straight, |task, stripe, block, out| {
        let alpha = alpha(dy_amax, w_amax, task.problem);
        let DactRun { rows, out, sums, amaxes: found } = out;
        let c = &c[rows.rows.start * n1..rows.rows.end * n1];
        let prob = &prob[rows.rows.clone()];
        with_activation!(activation, f => epilogue::dact(isa, f, shape, stripe, block, alpha, c, prob, out));
        for of in shape.columns(&stripe.first.cols) {
            for (dc, sums) in out.dc.chunks(BLOCK_ROWS * n1).zip(sums.chunks_exact_mut(n1)) {
                epilogue::column_sums(isa, dc, of.clone(), sums);
            }
            amaxes.add(found, out.dc, n1, of);
        }
    });
    if let Some(db1) = db1 {
        // Blocks in order: the sum does not depend on which thread finished first.
        db1.fill(0.0);
        for run in &done {
            let total = &mut db1[run.rows.expert * n1..(run.rows.expert + 1) * n1];
            for sums in run.sums.chunks_exact(n1) {
                total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
            }
        }
    }
    let found: Vec<_> = done.into_iter().map(|run| run.amaxes).collect();
    write_amaxes(groups, &runs, &found, dc_amax);
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
            run(isa, &problems, tasks, Cut::Straight, |task, stripe, block, out| {
                epilogue::wgrad_f32(isa, stripe, block, k, factor(task.problem), accumulate, out);
            });
        }
        GradBuffers::Bf16(buffers) => {
            let tasks = wgrad_tasks(buffers, n, k, live);
            run(isa, &problems, tasks, Cut::Straight, |task, stripe, block, out| {
                epilogue::wgrad_bf16(isa, stripe, block, k, factor(task.problem), accumulate, out);
            });
        }
    }
}

/// Runs of rows of every expert's gradient `[n, k]`; none for an expert whose buffer is to stay as it is.
fn wgrad_tasks<T>(
    buffers: Vec<&mut [T]>,
    n: usize,
    k: usize,
    live: impl Fn(usize) -> bool,
) -> Vec<Task<&mut [T]>> {
    let length = run_blocks(buffers.len() * n.div_ceil(BLOCK_ROWS));
    let mut tasks = vec![];
    for (problem, buffer) in buffers.into_iter().enumerate().filter(|(e, _)| live(*e)) {
        let (pieces, _) = carve(buffer, cut_rows(n, length).map(|rows| rows.len() * k));
        tasks.extend(cut_rows(n, length).zip(pieces).map(|(rows, out)| Task { problem, rows, out }));
    }
    tasks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cover_every_row_once_in_whole_blocks() {
        for (len, longest) in (0..1400).step_by(37).flat_map(|len| [1, 2, 4].map(|longest| (len, longest))) {
            let runs: Vec<_> = cut_rows(len, longest).collect();
            assert_eq!(runs.iter().map(|r| r.len()).sum::<usize>(), len);
            let mut end = 0;
            for run in runs {
                assert!(run.start == end && run.start.is_multiple_of(BLOCK_ROWS), "{len} {longest}");
                assert!(!run.is_empty() && run.len() <= longest * BLOCK_ROWS, "{len} {longest}");
                end = run.end;
            }
        }
    }
}
