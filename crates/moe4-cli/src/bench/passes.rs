//! Single passes made ready to run: inputs and outputs in a backend's memory, and the descriptors over them.

use anyhow::{Result, bail};
use half::bf16;
use moe4::kernels::contract::{
    ColumnwiseCast, GroupAmax, GroupHadamardAmax, GroupQuantize, Permute, QuantizeWeights, Unpermute,
    WeightShape,
};
use moe4::kernels::{Backend, Buffer, Memory};
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::{RandomStream, Rounding};
use moe4::tensor::OperandShape;

use super::case::{Case, Pass, Quantize, Tensor};
use super::copies::{COLUMNWISE, Copy, Form, ROWWISE};
use super::inputs;
use super::shapes::Shape;
use super::tensors::{Output, download, poisoned};

/// A pass over `[T, cols]` or over weights, with all that it may write.
pub(super) struct SinglePass<M: Memory> {
    pass: Pass,
    shape: Shape,
    tensor: Tensor,
    groups: M::Groups,
    x: Buffer<M, bf16>,
    /// Amaxes before and after the RHT: inputs of a quantization, outputs of the other passes.
    amax: Buffer<M, f32>,
    amax_rht: Buffer<M, f32>,
    row: Copy<M>,
    column: Copy<M>,
    /// Of a permutation.
    index: Buffer<M, u32>,
    weights: Buffer<M, f32>,
    rows_out: Buffer<M, bf16>,
}

impl<M: Memory> SinglePass<M> {
    /// Inputs in place, amaxes for a quantization computed; outputs are still empty.
    pub(super) fn new<B: Backend<Memory = M>>(backend: &B, case: Case, shape: &Shape) -> Result<Self> {
        let cols = case.tensor.cols(shape);
        let len = match case.pass {
            Pass::QuantizeWeights => shape.experts * weight_shape(case.tensor, shape).n * cols,
            Pass::Permute => shape.rows / shape.top_k * cols,
            _ => shape.rows * cols,
        };
        let routing = match case.pass {
            Pass::Permute => inputs::routing(shape).source,
            Pass::Unpermute => inputs::routing(shape).slot,
            _ => vec![],
        };
        let weights = if case.pass == Pass::Unpermute { shape.rows } else { 0 };
        let none = || Copy::poisoned(backend, None, Form::Packed, 0);
        let mut ready = Self {
            pass: case.pass,
            shape: shape.clone(),
            tensor: case.tensor,
            groups: backend.groups(&shape.groups()?)?,
            x: backend.upload(&inputs::normal(1, len, 1.0))?,
            amax: poisoned(backend, shape.experts, 0)?,
            amax_rht: poisoned(backend, shape.experts, 0)?,
            row: none()?,
            column: none()?,
            index: backend.upload(&routing)?,
            weights: backend.upload(&inputs::probabilities(2, weights))?,
            rows_out: poisoned(backend, 0, 0)?,
        };
        if matches!(case.pass, Pass::GroupQuantize(_)) {
            ready.hadamard_amax(backend)?;
        }
        Ok(ready)
    }

    /// Fills every output with `byte`, so that what a pass does not write shows.
    pub(super) fn poison<B: Backend<Memory = M>>(&mut self, backend: &B, byte: u8) -> Result<()> {
        let groups = self.shape.groups()?;
        let cols = self.tensor.cols(&self.shape);
        let row = OperandShape::rowwise(&groups, cols);
        let column = OperandShape::columnwise(&groups, cols);
        let (row, column) = match self.pass {
            Pass::GroupQuantize(Quantize::Rowwise) => (Some(row), None),
            Pass::GroupQuantize(Quantize::Columnwise) => (None, Some(column)),
            Pass::GroupQuantize(Quantize::Both | Quantize::BothStochastic) => (Some(row), Some(column)),
            Pass::QuantizeWeights => {
                let WeightShape { n, k } = weight_shape(self.tensor, &self.shape);
                (Some(OperandShape { rows: self.shape.experts * n, k }), None)
            }
            _ => (None, None),
        };
        self.row = Copy::poisoned(backend, row, Form::Packed, byte)?;
        self.column = Copy::poisoned(backend, column, Form::Packed, byte)?;
        let rows_out = match self.pass {
            Pass::Permute => self.shape.rows * cols,
            Pass::Unpermute => self.shape.rows / self.shape.top_k * cols,
            _ => 0,
        };
        self.rows_out = poisoned(backend, rows_out, byte)?;
        if !matches!(self.pass, Pass::GroupQuantize(_)) {
            self.amax = poisoned(backend, self.shape.experts, byte)?;
            self.amax_rht = poisoned(backend, self.shape.experts, byte)?;
        }
        Ok(())
    }

    fn hadamard_amax<B: Backend<Memory = M>>(&mut self, backend: &B) -> Result<()> {
        Ok(backend.group_hadamard_amax(GroupHadamardAmax {
            x: M::view(&self.x),
            cols: self.tensor.cols(&self.shape),
            groups: &self.groups,
            sign_mask: SignMask::DEFAULT,
            amax: M::view_mut(&mut self.amax),
            amax_rht: M::view_mut(&mut self.amax_rht),
        })?)
    }

    /// One call of the pass.
    pub(super) fn run<B: Backend<Memory = M>>(&mut self, backend: &B) -> Result<()> {
        let cols = self.tensor.cols(&self.shape);
        let x = M::view(&self.x);
        match self.pass {
            Pass::GroupAmax => {
                let amax = M::view_mut(&mut self.amax);
                backend.group_amax(GroupAmax { x, cols, groups: &self.groups, amax })?;
            }
            Pass::GroupHadamardAmax => self.hadamard_amax(backend)?,
            Pass::GroupQuantize(kind) => {
                let rounding = |stream| match kind {
                    Quantize::BothStochastic => Rounding::Stochastic(RandomStream { seed: 1, stream }),
                    _ => Rounding::Nearest,
                };
                let rowwise = (kind != Quantize::Columnwise).then(|| self.row.cast(&self.amax, rounding(0)));
                let columnwise = (kind != Quantize::Rowwise).then(|| ColumnwiseCast {
                    rht: Some(SignMask::DEFAULT),
                    cast: self.column.cast(&self.amax_rht, rounding(1)),
                });
                backend.group_quantize(GroupQuantize {
                    x,
                    cols,
                    groups: &self.groups,
                    rowwise,
                    columnwise,
                })?;
            }
            Pass::QuantizeWeights => backend.quantize_weights(QuantizeWeights {
                w: M::split(x, self.shape.experts),
                shape: weight_shape(self.tensor, &self.shape),
                codes: M::view_mut(&mut self.row.codes),
                scales: M::view_mut(&mut self.row.scales),
                amax: M::view_mut(&mut self.amax),
                unpacked: None,
            })?,
            Pass::Permute => {
                let (source, out) = (M::view(&self.index), M::view_mut(&mut self.rows_out));
                backend.permute(Permute { x, cols, source, out })?;
            }
            Pass::Unpermute => backend.unpermute(Unpermute {
                y: x,
                cols,
                slot: M::view(&self.index),
                top_k: self.shape.top_k,
                weights: Some(M::view(&self.weights)),
                out: M::view_mut(&mut self.rows_out),
            })?,
            Pass::Product(_) | Pass::H(_) | Pass::Forward(_) | Pass::Step(_) => {
                bail!("that is no pass over one tensor; please report this")
            }
        }
        Ok(())
    }

    /// Gives what the pass wrote to `each`, tensor by tensor.
    pub(super) fn outputs<B: Backend<Memory = M>>(
        &self,
        backend: &B,
        each: &mut dyn FnMut(Output) -> Result<()>,
    ) -> Result<()> {
        if !matches!(self.pass, Pass::Permute | Pass::Unpermute) {
            each(download::<_, f32>(backend, "amax", &self.amax)?)?;
        }
        if matches!(self.pass, Pass::GroupHadamardAmax | Pass::GroupQuantize(_)) {
            each(download::<_, f32>(backend, "amax after the RHT", &self.amax_rht)?)?;
        }
        self.row.outputs(backend, ROWWISE, each)?;
        self.column.outputs(backend, COLUMNWISE, each)?;
        each(download::<_, bf16>(backend, "rows", &self.rows_out)?)
    }
}

fn weight_shape(tensor: Tensor, shape: &Shape) -> WeightShape {
    let n = if tensor == Tensor::W1 { shape.config().fc1_rows() } else { shape.hidden };
    WeightShape { n, k: tensor.cols(shape) }
}
