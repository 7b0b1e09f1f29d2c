//! What will be read and written, decided from the header alone, so that a mistake is told before any work.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Result, bail};
use moe4::checkpoint::{Dtype, TensorFile, TensorSpec, printable};
use moe4::numerics::BLOCK;
use moe4::tensor::{Groups, Tile};

use super::{Axis, Settings};

/// One tensor to quantize.
pub(super) struct Job {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) cols: usize,
    /// Bytes in the input, for the progress bar.
    pub(super) bytes: u64,
    pub(super) groups: Vec<Group>,
}

/// Rows that are quantized together, and what their outputs' names start with.
pub(super) struct Group {
    pub(super) prefix: String,
    pub(super) rows: Range<usize>,
}

pub(super) struct Plan {
    pub(super) jobs: Vec<Job>,
    /// Tensors that are skipped, under the reason why.
    skipped: BTreeMap<&'static str, Vec<String>>,
    /// Rows that belong to no expert.
    left_out: Vec<String>,
}

impl Plan {
    pub(super) fn new(input: &TensorFile, settings: &Settings) -> Result<Self> {
        let mut plan = Self { jobs: Vec::new(), skipped: BTreeMap::new(), left_out: Vec::new() };
        for name in input.names() {
            let info = input.info(name)?;
            let float = matches!(info.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16);
            let &[rows, cols] = info.shape.as_slice() else {
                plan.skipped.entry("not 2-D").or_default().push(name.clone());
                continue;
            };
            if !float {
                plan.skipped.entry("not F32, F16 or BF16").or_default().push(name.clone());
                continue;
            }
            check_rht(name, info.dtype, settings)?;
            let groups = groups(name, rows, settings)?;
            for group in &groups {
                check_dims(&group.prefix, group.rows.len(), cols, settings)?;
            }
            let live = groups.last().map_or(0, |group| group.rows.end);
            if live < rows {
                plan.left_out.push(format!("rows {live}..{rows} of {}", printable(name)));
            }
            let bytes = (rows * cols * info.dtype.bitsize() / 8) as u64;
            plan.jobs.push(Job { name: name.clone(), dtype: info.dtype, cols, bytes, groups });
        }
        if plan.jobs.is_empty() {
            bail!(
                "{} has no 2-D tensor of dtype F32, F16 or BF16 to quantize; it has: {}",
                input.path().display(),
                kinds(input)?
            );
        }
        Ok(plan)
    }

    /// Tensors that are not in the output and why, one line each.
    pub(super) fn notices(&self) -> impl Iterator<Item = String> + '_ {
        let skipped = |(reason, names): (&&str, &Vec<String>)| {
            format!("skipped ({reason}): {}", printable(&names.join(", ")))
        };
        self.skipped.iter().map(skipped)
    }

    /// Rows that are not in the output and why, in one line; `None` if all are.
    pub(super) fn note(&self, settings: &Settings) -> Option<String> {
        let splits = settings.splits.as_ref().filter(|_| !self.left_out.is_empty())?;
        let sum: usize = splits.iter().sum();
        let rows = self.left_out.join(", ");
        Some(format!("--splits sum to {sum}; past that no expert has rows, so these are left out: {rows}"))
    }

    pub(super) fn input_bytes(&self) -> u64 {
        self.jobs.iter().map(|job| job.bytes).sum()
    }

    /// Every tensor of the output file.
    pub(super) fn outputs(&self, settings: &Settings) -> Vec<TensorSpec> {
        let mut specs = Vec::new();
        for job in &self.jobs {
            for Group { prefix, rows } in &job.groups {
                let (rows, cols) = output_dims(rows.len(), job.cols, settings.axis);
                specs.push(TensorSpec::new(format!("{prefix}.codes"), Dtype::U8, &[rows, cols / 2]));
                specs.push(TensorSpec::new(
                    format!("{prefix}.scales"),
                    Dtype::F8_E4M3,
                    &[rows, cols / BLOCK],
                ));
                specs.push(TensorSpec::new(format!("{prefix}.amax"), Dtype::F32, &[1]));
                if settings.dequant {
                    specs.push(TensorSpec::new(format!("{prefix}.dequant"), Dtype::F32, &[rows, cols]));
                }
            }
        }
        specs
    }
}

/// Shape of the quantized operand of `[rows, cols]`: the contraction is last and a multiple of 16.
pub(super) fn output_dims(rows: usize, cols: usize, axis: Axis) -> (usize, usize) {
    match axis {
        Axis::Rowwise => (rows, cols),
        Axis::Columnwise => (cols, rows.next_multiple_of(BLOCK)),
    }
}

/// What a file holds, such as `2 of F32 1-D, 1 of U8 2-D`.
fn kinds(input: &TensorFile) -> Result<String> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for name in input.names() {
        let info = input.info(name)?;
        *counts.entry(format!("{} {}-D", info.dtype, info.shape.len())).or_default() += 1;
    }
    let kinds: Vec<_> = counts.iter().map(|(kind, count)| format!("{count} of {kind}")).collect();
    Ok(if kinds.is_empty() { "none".into() } else { kinds.join(", ") })
}

fn groups(name: &str, rows: usize, settings: &Settings) -> Result<Vec<Group>> {
    let Some(splits) = &settings.splits else {
        return Ok(vec![Group { prefix: name.into(), rows: 0..rows }]);
    };
    let groups = Groups::new(splits, rows)
        .map_err(|error| anyhow::anyhow!("tensor '{}': {error}", printable(name)))?;
    let group = |expert| Group { prefix: format!("{name}.{expert}"), rows: groups.range(expert) };
    Ok((0..groups.experts()).map(group).collect())
}

fn check_rht(name: &str, dtype: Dtype, settings: &Settings) -> Result<()> {
    if settings.rht.is_some() && dtype != Dtype::BF16 {
        bail!(
            "tensor '{}' is {dtype}, and the RHT is defined on BF16 only: its result is rounded to BF16, \
             which would lose bits of {dtype} input; pass --rht off, or convert the tensor to BF16",
            printable(name)
        );
    }
    Ok(())
}

/// Only the tokens of a columnwise operand may be ragged: there a zero tail adds nothing to a sum over tokens.
fn check_dims(name: &str, rows: usize, cols: usize, settings: &Settings) -> Result<()> {
    let square = settings.tile == Tile::Square16;
    let check = |dim: usize, size: usize| {
        if size.is_multiple_of(BLOCK) {
            return Ok(());
        }
        let blocks = if square { "16x16 tiles" } else { "blocks of 16" };
        bail!(
            "tensor '{}' [{rows}, {cols}]: dim {dim} is {size}, expected a multiple of 16 for {blocks}; pad it with zeros",
            printable(name)
        );
    };
    if square {
        check(0, rows)?;
    }
    if square || settings.axis == Axis::Rowwise {
        check(1, cols)?;
    }
    Ok(())
}
