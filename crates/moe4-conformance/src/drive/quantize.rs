//! Amax and quantization passes.

use super::{Packed, host, poisoned};
use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::contract::{
    self, ColumnwiseCast, GroupAmax, GroupHadamardAmax, GroupQuantize, QuantizeWeights,
};
use moe4::kernels::{Buffer, Error, Memory, View};
use moe4::numerics::BLOCK;
use moe4::numerics::hadamard::SignMask;
use moe4::numerics::rounding::Rounding;
use moe4::tensor::{Groups, Nvfp4, OperandShape, ScaleLayout};

/// `[E]` amaxes by `group_amax`.
pub fn amax<B: Backend>(b: &B, x: &[bf16], cols: usize, groups: &Groups) -> Result<Vec<f32>, Error> {
    let (x, on_device) = (b.upload(x)?, b.groups(groups)?);
    let mut out = poisoned::<B, f32>(b, groups.experts())?;
    let pass =
        GroupAmax { x: B::Memory::view(&x), cols, groups: &on_device, amax: B::Memory::view_mut(&mut out) };
    b.group_amax(pass)?;
    host(b, &out)
}

/// `[E]` amaxes before and after the transform by `group_hadamard_amax`.
pub fn hadamard_amax<B: Backend>(
    b: &B,
    x: &[bf16],
    cols: usize,
    groups: &Groups,
    sign_mask: SignMask,
) -> Result<(Vec<f32>, Vec<f32>), Error> {
    let (x, on_device) = (b.upload(x)?, b.groups(groups)?);
    let mut amax = poisoned::<B, f32>(b, groups.experts())?;
    let mut amax_rht = poisoned::<B, f32>(b, groups.experts())?;
    b.group_hadamard_amax(GroupHadamardAmax {
        x: B::Memory::view(&x),
        cols,
        groups: &on_device,
        sign_mask,
        amax: B::Memory::view_mut(&mut amax),
        amax_rht: B::Memory::view_mut(&mut amax_rht),
    })?;
    Ok((host(b, &amax)?, host(b, &amax_rht)?))
}

/// How one copy is made.
#[derive(Clone, Debug)]
pub struct Cast {
    /// `[E]`.
    pub amax: Vec<f32>,
    /// Rounding of the elements.
    pub rounding: Rounding,
    /// Codes and scales.
    pub packed: bool,
    /// Of the block scales.
    pub layout: ScaleLayout,
    /// BF16 values.
    pub unpacked: bool,
}

impl Cast {
    /// Plain scales and no BF16 values.
    pub fn new(amax: &[f32], rounding: Rounding) -> Self {
        Self { amax: amax.to_vec(), rounding, packed: true, layout: ScaleLayout::Plain, unpacked: false }
    }

    /// The same, to nearest.
    pub fn nearest(amax: &[f32]) -> Self {
        Self::new(amax, Rounding::Nearest)
    }
}

/// A quantized copy on the host, in the forms that were asked for.
#[derive(Clone, Debug)]
pub struct Copy {
    /// Codes, scales in the layout that was asked for, amaxes. No codes and no scales if they were not asked for.
    pub packed: Packed,
    /// `[rows, k]`.
    pub unpacked: Option<Vec<bf16>>,
}

/// `group_quantize`.
#[derive(Clone, Debug)]
pub struct Quantize<'a> {
    /// `[T, cols]`.
    pub x: &'a [bf16],
    /// Columns.
    pub cols: usize,
    /// Rows of each expert.
    pub groups: &'a Groups,
    /// The rowwise copy.
    pub rowwise: Option<Cast>,
    /// The columnwise copy, with its transform.
    pub columnwise: Option<(Option<SignMask>, Cast)>,
}

struct Output<M: Memory> {
    amax: Buffer<M, f32>,
    packed: Option<PackedBuffers<M>>,
    unpacked: Option<Buffer<M, bf16>>,
}

struct PackedBuffers<M: Memory> {
    codes: Buffer<M, u8>,
    scales: Buffer<M, u8>,
    layout: ScaleLayout,
}

impl<M: Memory> PackedBuffers<M> {
    fn new<B: Backend<Memory = M>>(b: &B, layout: ScaleLayout, shape: OperandShape) -> Result<Self, Error> {
        let scales = poisoned(b, layout.bytes(shape.rows, shape.k / BLOCK))?;
        Ok(Self { codes: poisoned(b, shape.code_bytes())?, scales, layout })
    }
}

impl<M: Memory> Output<M> {
    fn new<B: Backend<Memory = M>>(b: &B, cast: &Cast, shape: OperandShape) -> Result<Self, Error> {
        Ok(Self {
            amax: b.upload(&cast.amax)?,
            packed: cast.packed.then(|| PackedBuffers::new(b, cast.layout, shape)).transpose()?,
            unpacked: cast.unpacked.then(|| poisoned(b, shape.rows * shape.k)).transpose()?,
        })
    }

    fn cast(&mut self, cast: &Cast) -> contract::Cast<'_, M> {
        contract::Cast {
            amax: M::view(&self.amax),
            rounding: cast.rounding,
            packed: self.packed.as_mut().map(|out| contract::PackedOut {
                codes: M::view_mut(&mut out.codes),
                scales: M::view_mut(&mut out.scales),
                layout: out.layout,
            }),
            unpacked: self.unpacked.as_mut().map(M::view_mut),
        }
    }

    fn download<B: Backend<Memory = M>>(&self, b: &B) -> Result<Copy, Error> {
        let (codes, scales) = match &self.packed {
            Some(out) => (host(b, &out.codes)?, host(b, &out.scales)?),
            None => (vec![], vec![]),
        };
        let packed = Nvfp4 { codes, scales, amax: host(b, &self.amax)? };
        Ok(Copy { packed, unpacked: self.unpacked.as_ref().map(|values| host(b, values)).transpose()? })
    }
}

impl Quantize<'_> {
    /// The rowwise and the columnwise copy, as asked for, without BF16 values.
    pub fn run<B: Backend>(&self, b: &B) -> Result<(Option<Packed>, Option<Packed>), Error> {
        let (row, col) = self.run_copies(b)?;
        Ok((row.map(|copy| copy.packed), col.map(|copy| copy.packed)))
    }

    /// The rowwise and the columnwise copy, as asked for.
    pub fn run_copies<B: Backend>(&self, b: &B) -> Result<(Option<Copy>, Option<Copy>), Error> {
        let Quantize { x, cols, groups, rowwise, columnwise } = self;
        let (x, on_device) = (b.upload(x)?, b.groups(groups)?);
        let output = |cast, shape| Output::new(b, cast, shape);
        let rowwise_shape = OperandShape::rowwise(groups, *cols);
        let columnwise_shape = OperandShape::columnwise(groups, *cols);
        let mut row = rowwise.as_ref().map(|c| output(c, rowwise_shape)).transpose()?;
        let mut col = columnwise.as_ref().map(|(_, c)| output(c, columnwise_shape)).transpose()?;
        b.group_quantize(GroupQuantize {
            x: B::Memory::view(&x),
            cols: *cols,
            groups: &on_device,
            rowwise: row.as_mut().zip(rowwise.as_ref()).map(|(out, c)| out.cast(c)),
            columnwise: col
                .as_mut()
                .zip(columnwise.as_ref())
                .map(|(out, (rht, c))| ColumnwiseCast { rht: *rht, cast: out.cast(c) }),
        })?;
        let row = row.map(|out| out.download(b)).transpose()?;
        Ok((row, col.map(|out| out.download(b)).transpose()?))
    }
}

/// `quantize_weights` of `[E, n, k]`, without BF16 values.
pub fn quantize_weights<B: Backend>(
    b: &B,
    w: &[bf16],
    experts: usize,
    shape: contract::WeightShape,
) -> Result<Packed, Error> {
    Ok(quantize_weights_together(b, w, experts, shape, false)?.packed)
}

/// `quantize_weights` of one tensor `[E, n, k]`, with BF16 values if asked for.
pub fn quantize_weights_together<B: Backend>(
    b: &B,
    w: &[bf16],
    experts: usize,
    shape: contract::WeightShape,
    unpacked: bool,
) -> Result<Copy, Error> {
    let w = b.upload(w)?;
    let views = B::Memory::split(B::Memory::view(&w), experts);
    quantize_weight_views(b, views, shape, unpacked)
}

/// `quantize_weights` of tensors `[n, k]` that lie apart, with BF16 values if asked for.
pub fn quantize_weights_apart<B: Backend>(
    b: &B,
    w: &[&[bf16]],
    shape: contract::WeightShape,
    unpacked: bool,
) -> Result<Copy, Error> {
    let w = w.iter().map(|w| b.upload(w)).collect::<Result<Vec<_>, _>>()?;
    quantize_weight_views(b, w.iter().map(B::Memory::view).collect(), shape, unpacked)
}

fn quantize_weight_views<B: Backend>(
    b: &B,
    w: Vec<View<'_, B::Memory, bf16>>,
    shape: contract::WeightShape,
    unpacked: bool,
) -> Result<Copy, Error> {
    let (contract::WeightShape { n, k }, experts) = (shape, w.len());
    let operand = OperandShape { rows: experts * n, k };
    let mut amax = poisoned::<B, f32>(b, experts)?;
    let mut packed = PackedBuffers::new(b, ScaleLayout::Plain, operand)?;
    let mut values = unpacked.then(|| poisoned(b, operand.rows * k)).transpose()?;
    b.quantize_weights(QuantizeWeights {
        w: w.into_iter().map(B::Memory::shorten).collect(),
        shape,
        codes: B::Memory::view_mut(&mut packed.codes),
        scales: B::Memory::view_mut(&mut packed.scales),
        unpacked: values.as_mut().map(B::Memory::view_mut),
        amax: B::Memory::view_mut(&mut amax),
    })?;
    Output { amax, packed: Some(packed), unpacked: values }.download(b)
}
