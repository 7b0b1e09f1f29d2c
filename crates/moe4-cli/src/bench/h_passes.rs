//! What reuse of amaxes and recompute save for `h`: every pass over it but the products, forward and backward.
//!
//! ```text
//! h_separate   forward: amaxes, both copies
//! h_reuse      forward: both copies; the amaxes are those of FC1's epilogue
//! h_recompute  forward: rowwise copy          backward: columnwise copy, of h as the dact kernel has built it again
//! ```
//!
//! Copies have the forms that the operator asks for: the columnwise one is packed where it waits for the backward. That the
//! dact kernel writes `h` is the difference of `grouped_gemm_dact recompute` and `grouped_gemm_dact`.

use anyhow::Result;
use half::bf16;
use moe4::kernels::contract::{ColumnwiseCast, GroupHadamardAmax, GroupQuantize};
use moe4::kernels::{Backend, Buffer, Memory, PassName};
use moe4::mlp::{GroupedMlpConfig, Needs, Phase, Plan, PlannedPass};
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::Rounding;
use moe4::tensor::OperandShape;

use super::case::HPasses;
use super::copies::{COLUMNWISE, Copy, Form, ROWWISE};
use super::inputs;
use super::sequence::Part;
use super::shapes::Shape;
use super::tensors::{Output, download, poisoned};

/// `h` in place, and its copies.
pub(super) struct HSequence<M: Memory> {
    kind: HPasses,
    shape: Shape,
    unpacked: bool,
    groups: M::Groups,
    h: Buffer<M, bf16>,
    /// Before and after the RHT.
    amax: [Buffer<M, f32>; 2],
    row: Copy<M>,
    column: Copy<M>,
}

impl<M: Memory> HSequence<M> {
    pub(super) fn new<B: Backend<Memory = M>>(
        backend: &B,
        kind: HPasses,
        shape: &Shape,
        unpacked: bool,
    ) -> Result<Self> {
        let none = || Copy::poisoned(backend, None, Form::Packed, 0);
        let mut ready = Self {
            kind,
            shape: shape.clone(),
            unpacked,
            groups: backend.groups(&shape.groups()?)?,
            h: backend.upload(&inputs::normal(16, shape.rows * shape.ffn, 1.0))?,
            amax: [poisoned(backend, shape.experts, 0)?, poisoned(backend, shape.experts, 0)?],
            row: none()?,
            column: none()?,
        };
        ready.amaxes(backend)?;
        Ok(ready)
    }

    /// Fills every output with `byte`, so that what a pass does not write shows.
    pub(super) fn poison<B: Backend<Memory = M>>(&mut self, backend: &B, byte: u8) -> Result<()> {
        let (groups, ffn) = (self.shape.groups()?, self.shape.ffn);
        let (row, column) = (OperandShape::rowwise(&groups, ffn), OperandShape::columnwise(&groups, ffn));
        self.row = Copy::poisoned(backend, Some(row), Form::operand(self.unpacked), byte)?;
        let read_at_once = self.unpacked && self.kind == HPasses::Recompute;
        self.column = Copy::poisoned(backend, Some(column), Form::operand(read_at_once), byte)?;
        if self.kind == HPasses::Separate {
            let experts = self.shape.experts;
            self.amax = [poisoned(backend, experts, byte)?, poisoned(backend, experts, byte)?];
        }
        Ok(())
    }

    fn amaxes<B: Backend<Memory = M>>(&mut self, backend: &B) -> Result<()> {
        let [amax, rht] = &mut self.amax;
        Ok(backend.group_hadamard_amax(GroupHadamardAmax {
            x: M::view(&self.h),
            cols: self.shape.ffn,
            groups: &self.groups,
            sign_mask: SignMask::DEFAULT,
            amax: M::view_mut(amax),
            amax_rht: M::view_mut(rht),
        })?)
    }

    fn copies<B: Backend<Memory = M>>(&mut self, backend: &B, row: bool, column: bool) -> Result<()> {
        let [amax, rht] = &self.amax;
        let rowwise = row.then(|| self.row.cast(amax, Rounding::Nearest));
        let columnwise = column.then(|| ColumnwiseCast {
            rht: Some(SignMask::DEFAULT),
            cast: self.column.cast(rht, Rounding::Nearest),
        });
        let (x, cols, groups) = (M::view(&self.h), self.shape.ffn, &self.groups);
        Ok(backend.group_quantize(GroupQuantize { x, cols, groups, rowwise, columnwise })?)
    }

    pub(super) fn run<B: Backend<Memory = M>>(&mut self, backend: &B) -> Result<()> {
        match self.kind {
            HPasses::Separate => {
                self.amaxes(backend)?;
                self.copies(backend, true, true)
            }
            HPasses::Reuse => self.copies(backend, true, true),
            HPasses::Recompute => {
                self.copies(backend, true, false)?;
                self.copies(backend, false, true)
            }
        }
    }

    /// The passes of a run.
    pub(super) fn parts(&self) -> Vec<Part> {
        let quantize = |rowwise, columnwise| PassName::GroupQuantize { rowwise, columnwise };
        let part = |phase, name| Part { phase: Some(phase), pass: PlannedPass { name, tensor: "h" } };
        match self.kind {
            HPasses::Separate => vec![
                part(Phase::Forward, PassName::GroupHadamardAmax),
                part(Phase::Forward, quantize(true, true)),
            ],
            HPasses::Reuse => vec![part(Phase::Forward, quantize(true, true))],
            HPasses::Recompute => vec![
                part(Phase::Forward, quantize(true, false)),
                part(Phase::Backward, quantize(false, true)),
            ],
        }
    }

    /// What of `h` waits for the backward.
    pub(super) fn saved_bytes(&self) -> Result<usize> {
        let recompute_activation = self.kind == HPasses::Recompute;
        let config = GroupedMlpConfig { recompute_activation, ..self.shape.config() };
        let saved = Plan::new(&config, Needs::ALL).saved_bytes(self.shape.counts()?);
        Ok(saved.iter().filter(|saved| saved.tensor == "h").map(|saved| saved.bytes).sum())
    }

    /// Gives the amaxes and the copies to `each`.
    pub(super) fn outputs<B: Backend<Memory = M>>(
        &self,
        backend: &B,
        each: &mut dyn FnMut(Output) -> Result<()>,
    ) -> Result<()> {
        each(download::<_, f32>(backend, "amax", &self.amax[0])?)?;
        each(download::<_, f32>(backend, "amax after the RHT", &self.amax[1])?)?;
        self.row.outputs(backend, ROWWISE, each)?;
        self.column.outputs(backend, COLUMNWISE, each)
    }
}
