//! Host data through the quantization passes of any backend.

use anyhow::{Result, ensure};
use half::bf16;
use moe4::kernels::contract::{
    Cast, ColumnwiseCast, GroupAmax, GroupHadamardAmax, GroupQuantize, PackedOut, QuantizeWeights,
    WeightShape,
};
use moe4::kernels::{Backend, Buffer, Memory};
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::Rounding;
use moe4::tensor::{Groups, OperandShape, ScaleLayout};

/// What a pass left, on the host.
pub(super) struct Copy {
    pub(super) amax: Vec<f32>,
    pub(super) codes: Vec<u8>,
    pub(super) scales: Vec<u8>,
}

/// The same in a backend's memory.
struct Packed<M: Memory> {
    amax: Buffer<M, f32>,
    codes: Buffer<M, u8>,
    scales: Buffer<M, u8>,
}

impl<M: Memory> Packed<M> {
    fn new<B: Backend<Memory = M>>(kernels: &B, shape: OperandShape, amaxes: usize) -> Result<Self> {
        Ok(Self {
            amax: kernels.empty(amaxes)?,
            codes: kernels.empty(shape.code_bytes())?,
            scales: kernels.empty(shape.scale_bytes())?,
        })
    }

    fn cast(&mut self, rounding: Rounding) -> Cast<'_, M> {
        Cast {
            amax: M::view(&self.amax),
            rounding,
            packed: Some(PackedOut {
                codes: M::view_mut(&mut self.codes),
                scales: M::view_mut(&mut self.scales),
                layout: ScaleLayout::Plain,
            }),
            unpacked: None,
        }
    }

    fn download<B: Backend<Memory = M>>(&self, kernels: &B) -> Result<Copy> {
        Ok(Copy {
            amax: kernels.download(M::view(&self.amax))?,
            codes: kernels.download(M::view(&self.codes))?,
            scales: kernels.download(M::view(&self.scales))?,
        })
    }
}

/// The rowwise and the transformed columnwise copy of `x`, with amaxes of their own pass.
pub(super) fn quantize<B: Backend>(
    kernels: &B,
    x: &[bf16],
    groups: &Groups,
    cols: usize,
    [row_rounding, column_rounding]: [Rounding; 2],
) -> Result<[Copy; 2]> {
    let mut row = Packed::new(kernels, OperandShape::rowwise(groups, cols), groups.experts())?;
    let mut column = Packed::new(kernels, OperandShape::columnwise(groups, cols), groups.experts())?;
    let sign_mask = SignMask::DEFAULT;
    let (x, groups) = (kernels.upload(x)?, &kernels.groups(groups)?);
    kernels.group_amax(GroupAmax {
        x: B::Memory::view(&x),
        cols,
        groups,
        amax: B::Memory::view_mut(&mut row.amax),
    })?;
    let alone = kernels.download::<f32>(B::Memory::view(&row.amax))?;
    kernels.group_hadamard_amax(GroupHadamardAmax {
        x: B::Memory::view(&x),
        cols,
        groups,
        sign_mask,
        amax: B::Memory::view_mut(&mut row.amax),
        amax_rht: B::Memory::view_mut(&mut column.amax),
    })?;
    kernels.group_quantize(GroupQuantize {
        x: B::Memory::view(&x),
        cols,
        groups,
        rowwise: Some(row.cast(row_rounding)),
        columnwise: Some(ColumnwiseCast { rht: Some(sign_mask), cast: column.cast(column_rounding) }),
    })?;
    let copies = [row.download(kernels)?, column.download(kernels)?];
    ensure!(alone == copies[0].amax, "two passes disagree about an amax");
    Ok(copies)
}

/// One weight in square tiles.
pub(super) fn quantize_tiles<B: Backend>(kernels: &B, w: &[bf16], shape: WeightShape) -> Result<Copy> {
    let mut tiles = Packed::new(kernels, OperandShape { rows: shape.n, k: shape.k }, 1)?;
    let w = kernels.upload(w)?;
    kernels.quantize_weights(QuantizeWeights {
        w: vec![B::Memory::view(&w)],
        shape,
        codes: B::Memory::view_mut(&mut tiles.codes),
        scales: B::Memory::view_mut(&mut tiles.scales),
        unpacked: None,
        amax: B::Memory::view_mut(&mut tiles.amax),
    })?;
    tiles.download(kernels)
}
