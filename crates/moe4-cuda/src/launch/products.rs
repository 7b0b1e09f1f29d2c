//! What the products share: operands as BF16 values, one tensor an expert wherever it lies, amaxes, checks.
//!
//! The kernels of the products read BF16. A packed operand is unpacked before, to memory that is freed behind the product.
//! On Hopper they are kernels of their own, see `hopper.rs`; so are those of few rows an expert, which read packed weights, see
//! `packed.rs`.
#![forbid(unsafe_code)]

use super::addresses::addresses;
use super::unpack::unpack;
use super::{MASK_AT_LAUNCH, aligned, narrow, packed};
use crate::backend::{Cuda, Products};
use crate::compile::Arch;
use crate::driver::DeviceBytes;
use crate::groups::DeviceGroups;
use crate::memory::{DeviceBuffer, DeviceMemory, DeviceView};
use crate::variant::Variant;
use bytemuck::{Pod, Zeroable};
use half::bf16;
use moe4::kernels::activation::{Activation, GluLayout};
use moe4::kernels::contract::{AmaxOut, Operand, RhtAmax, WeightOperand};
use moe4::kernels::{Error, Misuse};
use moe4::numerics::BLOCK;
use moe4::numerics::hadamard::SignMask;

/// Columns of a portable kernel's tile; `TILE_COLS` of `kernels/mma_loop.cuh`.
pub(super) const TILE_COLS: usize = 128;
/// Features of a slice of dprob; `GROUP_COLS` of `kernels/fragment.cuh`.
pub(super) const SLICE_FEATURES: usize = 32;
/// Thread blocks in the second and the third dimension of a grid.
const MOST_BLOCKS: usize = 65535;

/// An operand as the products read it.
pub(super) struct Bf16Operand<'a> {
    pub(super) address: u64,
    /// What it was quantized with.
    amax: Option<DeviceView<'a, f32>>,
    /// Its values, if they were unpacked for this product.
    _unpacked: Option<DeviceBuffer<bf16>>,
}

impl<'a> Bf16Operand<'a> {
    pub(super) fn new(
        cuda: &Cuda,
        kernel: &'static str,
        name: &'static str,
        operand: Operand<'a, DeviceMemory>,
    ) -> Result<Self, Error> {
        match operand {
            Operand::Bf16(x) => {
                Ok(Self { address: aligned(kernel, name, x.address(), 16)?, amax: None, _unpacked: None })
            }
            Operand::Unpacked(u) => {
                let address = aligned(kernel, name, u.values.address(), 16)?;
                Ok(Self { address, amax: Some(u.amax), _unpacked: None })
            }
            Operand::Nvfp4(q) => {
                let values = unpack(cuda, kernel, name, q.codes, q.scales)?;
                Ok(Self { address: values.view().address(), amax: Some(q.amax), _unpacked: Some(values) })
            }
        }
    }
}

/// The weights of all experts as the products read them.
pub(super) struct Bf16Weights<'a> {
    pub(super) argument: TensorsArgument,
    pub(super) amax: Option<DeviceView<'a, f32>>,
    _unpacked: Option<DeviceBuffer<bf16>>,
    _table: Option<DeviceBytes>,
}

impl<'a> Bf16Weights<'a> {
    pub(super) fn new(
        cuda: &Cuda,
        kernel: &'static str,
        name: &'static str,
        w: WeightOperand<'a, DeviceMemory>,
        elements: usize,
    ) -> Result<Self, Error> {
        match w {
            WeightOperand::Bf16(w) => {
                let places: Vec<u64> = w.iter().map(DeviceView::address).collect();
                let (argument, table) = tensors(cuda, kernel, name, &places, size_of::<bf16>())?;
                Ok(Self { argument, amax: None, _unpacked: None, _table: table })
            }
            WeightOperand::Nvfp4 { packed, unpacked } => {
                let (base, values) = match unpacked {
                    Some(values) => (aligned(kernel, name, values.address(), 16)?, None),
                    None => {
                        let values = unpack(cuda, kernel, name, packed.codes, packed.scales)?;
                        (values.view().address(), Some(values))
                    }
                };
                let argument = TensorsArgument { base, stride: elements as u64, table: 0 };
                Ok(Self { argument, amax: Some(packed.amax), _unpacked: values, _table: None })
            }
        }
    }
}

/// `Weights` of `kernels/mma_loop.cuh` and `Gradients` of `kernels/grouped_wgrad.cu`: a tensor of each expert, `stride`
/// elements apart, or, if `table` is not 0, at the addresses there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct TensorsArgument {
    pub(super) base: u64,
    pub(super) stride: u64,
    pub(super) table: u64,
}

/// Tensors at these addresses; the table, if they need one, lives until it is dropped.
pub(super) fn tensors(
    cuda: &Cuda,
    kernel: &'static str,
    name: &'static str,
    places: &[u64],
    element: usize,
) -> Result<(TensorsArgument, Option<DeviceBytes>), Error> {
    places.iter().try_for_each(|&place| aligned(kernel, name, place, 16).map(drop))?;
    if let Some(argument) = strided(places, element) {
        return Ok((argument, None));
    }
    let table = addresses(cuda, places)?;
    Ok((TensorsArgument { base: 0, stride: 0, table: table.address() }, Some(table)))
}

/// Tensors at equal distances.
fn strided(places: &[u64], element: usize) -> Option<TensorsArgument> {
    let base = places.first().copied().unwrap_or(0);
    let distance = places.get(1).map_or(Some(0), |second| second.checked_sub(base))?;
    let equal = places.windows(2).all(|pair| pair[1].checked_sub(pair[0]) == Some(distance));
    equal.then_some(TensorsArgument { base, stride: distance / element as u64, table: 0 })
}

/// `Scales` of `kernels/epilogue.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ScalesArgument {
    a: u64,
    b: u64,
}

impl ScalesArgument {
    fn new(kernel: &'static str, amaxes: [Option<DeviceView<'_, f32>>; 2]) -> Result<Self, Misuse> {
        let address = |amax: Option<DeviceView<'_, f32>>| match amax {
            Some(amax) => aligned(kernel, "amax of an operand", amax.address(), 4),
            None => Ok(0),
        };
        let [a, b] = amaxes;
        Ok(Self { a: address(a)?, b: address(b)? })
    }

    pub(super) fn of_weights(
        kernel: &'static str,
        a: &Bf16Operand<'_>,
        w_amax: Option<DeviceView<'_, f32>>,
    ) -> Result<Self, Misuse> {
        Self::new(kernel, [a.amax, w_amax])
    }

    pub(super) fn of_operands(
        kernel: &'static str,
        a: &Bf16Operand<'_>,
        b: &Bf16Operand<'_>,
    ) -> Result<Self, Misuse> {
        Self::new(kernel, [a.amax, b.amax])
    }
}

/// A dimension of a product: rows of 16 bytes, and whole steps of the matrix units.
pub(super) fn dimension(what: &'static str, value: usize) -> Result<u32, Misuse> {
    if value == 0 || !value.is_multiple_of(BLOCK) {
        let fix = "pad the dimension with zeros";
        return Err(Misuse::Multiple { what, multiple: BLOCK, got: value, fix });
    }
    narrow(what, value)
}

/// What is one dimension of a grid.
pub(super) fn grid_dimension(what: &'static str, blocks: usize) -> Result<u32, Misuse> {
    match u32::try_from(blocks) {
        Ok(narrow) if blocks <= MOST_BLOCKS => Ok(narrow),
        _ => Err(Misuse::Value { what: what.into(), expected: "at most 65535", got: blocks.to_string() }),
    }
}

/// The main loops that multiply rows by weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MainLoop {
    /// `kernels/mma_loop.cuh`.
    Portable,
    /// `kernels/hopper_rows.cuh`.
    Hopper,
    /// `kernels/packed_loop.cuh`, of so many rows at once.
    Packed { rows: usize },
}

impl MainLoop {
    /// Every one that a product may run on, by its shapes and by where its operands are; see `row_product.rs`.
    pub(crate) fn every(products: Products, arch: Arch) -> Vec<Self> {
        let hopper = products.use_wgmma(arch).then_some(Self::Hopper);
        let packed = packed::every_rows().filter(|_| products.use_packed_weights());
        let packed = packed.map(|rows| Self::Packed { rows });
        [Self::Portable].into_iter().chain(hopper).chain(packed).collect()
    }

    /// The kernel of `kernels`, in the order above, with the choices of its epilogue.
    pub(super) fn variant(
        self,
        [portable, hopper, packed]: [&'static str; 3],
        mut defines: Vec<(&'static str, u32)>,
    ) -> Variant {
        let kernel = match self {
            MainLoop::Portable => portable,
            MainLoop::Hopper => hopper,
            MainLoop::Packed { rows } => {
                defines.push(("ROWS", rows as u32));
                packed
            }
        };
        Variant { kernel, defines }
    }
}

/// `ActivationParameters` of `kernels/activation.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ActivationArgument {
    values: [f32; 3],
    reciprocals: [f32; 2],
}

impl ActivationArgument {
    pub(super) fn new(activation: &Activation) -> Self {
        let values = match *activation {
            Activation::SwiGlu(_) | Activation::Srelu(_) => [1.0; 3],
            Activation::TanhSrelu(p) => [p.s, 1.0, 1.0],
            Activation::SituGlu(p) => [p.beta1, p.beta2, 1.0],
            Activation::ClampedQgeglu(p) => [p.limit, p.alpha, p.offset],
        };
        Self { values, reciprocals: [0, 1].map(|i| (1.0 / values[i]).min(f32::MAX)) }
    }
}

/// What an epilogue with an activation is compiled for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EpilogueChoice {
    activation: u32,
    layout: u32,
    amax: EpilogueAmax,
}

impl EpilogueChoice {
    pub(crate) fn new(activation: &Activation, layout: GluLayout, amax: EpilogueAmax) -> Self {
        let activation_choice = match activation {
            Activation::SwiGlu(_) => 0,
            Activation::Srelu(_) => 1,
            Activation::TanhSrelu(_) => 2,
            Activation::SituGlu(_) => 3,
            Activation::ClampedQgeglu(_) => 4,
        };
        let layout = match layout {
            _ if !activation.is_gated() => 0,
            GluLayout::Halves => 0,
            GluLayout::Interleaved32 => 1,
            GluLayout::Elementwise => 2,
        };
        Self { activation: activation_choice, layout, amax }
    }

    pub(crate) fn defines(self) -> Vec<(&'static str, u32)> {
        let (amax, mask) = match self.amax {
            EpilogueAmax::None => (0, 0),
            EpilogueAmax::Before => (1, 0),
            // The usual mask is worth kernels of its own; these take longest to compile.
            EpilogueAmax::Exact(SignMask::DEFAULT) => (2, u32::from(SignMask::DEFAULT.0)),
            EpilogueAmax::Exact(_) => (2, MASK_AT_LAUNCH),
            EpilogueAmax::Bound => (3, 0),
        };
        vec![("ACTIVATION", self.activation), ("LAYOUT", self.layout), ("AMAX", amax), ("SIGN_MASK", mask)]
    }
}

/// Which amaxes an epilogue finds; numbered as in `kernels/fragment_amax.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EpilogueAmax {
    None,
    Before,
    Exact(SignMask),
    Bound,
}

/// `AmaxOut` of `kernels/fragment_amax.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct AmaxArgument {
    amax: u64,
    amax_rht: u64,
    sign_mask: u32,
    padding: u32,
}

impl AmaxArgument {
    /// Also clears what the epilogue takes maxima into: the last thing before the launch that may refuse.
    pub(super) fn new(
        cuda: &Cuda,
        kernel: &'static str,
        out: &Option<AmaxOut<'_, DeviceMemory>>,
    ) -> Result<(Self, EpilogueAmax), Error> {
        let Some(AmaxOut { amax, rht }) = out else { return Ok((Self::zeroed(), EpilogueAmax::None)) };
        let mut argument = Self { amax: aligned(kernel, "amax", amax.address(), 4)?, ..Self::zeroed() };
        let choice = match rht {
            None => EpilogueAmax::Before,
            Some((how, after)) => {
                argument.amax_rht = aligned(kernel, "amax after RHT", after.address(), 4)?;
                cuda.clear(after)?;
                match how {
                    RhtAmax::Bound => EpilogueAmax::Bound,
                    RhtAmax::Exact(mask) => {
                        argument.sign_mask = u32::from(mask.0);
                        EpilogueAmax::Exact(*mask)
                    }
                }
            }
        };
        cuda.clear(amax)?;
        Ok((argument, choice))
    }
}

/// The address of a tensor that may be absent, then 0.
pub(super) fn optional(
    kernel: &'static str,
    tensor: &'static str,
    address: Option<u64>,
    bytes: u64,
) -> Result<u64, Misuse> {
    address.map_or(Ok(0), |address| aligned(kernel, tensor, address, bytes))
}

/// The shape of a launch, for messages.
pub(super) fn shape_of(groups: &DeviceGroups, cols: u32) -> [usize; 3] {
    [groups.extent().rows, cols as usize, groups.extent().experts]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_at_equal_distances_need_no_table() {
        let at = |base, stride| Some(TensorsArgument { base, stride, table: 0 });
        assert_eq!(strided(&[], 2), at(0, 0));
        assert_eq!(strided(&[64], 2), at(64, 0));
        assert_eq!(strided(&[64, 96, 128], 2), at(64, 16));
        assert_eq!(strided(&[64, 96, 128], 4), at(64, 8));
        assert_eq!(strided(&[64, 96, 160], 2), None);
        assert_eq!(strided(&[64, 32], 2), None);
    }

    #[test]
    fn main_loops_follow_the_gpu_and_the_option() {
        let [hopper, ampere] = [Arch::new(9, 0).unwrap(), Arch::new(8, 0).unwrap()];
        let packed = [16, 32, 64].map(|rows| MainLoop::Packed { rows });
        let every = |products, arch| MainLoop::every(products, arch);
        // On Hopper too some products are the portable kernel's: `Weights` in many places, weight gradients in BF16.
        let fastest = [&[MainLoop::Portable, MainLoop::Hopper], &packed[..]].concat();
        assert_eq!(every(Products::Fastest, hopper), fastest);
        assert_eq!(every(Products::Fastest, ampere), [&[MainLoop::Portable], &packed[..]].concat());
        assert_eq!(every(Products::Portable, hopper), [MainLoop::Portable]);
    }

    #[test]
    fn dimensions_are_whole_blocks() {
        assert_eq!(dimension("hidden", 48), Ok(48));
        for wrong in [0, 8, 17, 1 << 28] {
            assert!(dimension("hidden", wrong).is_err(), "{wrong}");
        }
    }
}
