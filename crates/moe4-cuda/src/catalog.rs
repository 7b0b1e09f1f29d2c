//! Every kind of variant that the backend launches: what `cargo xtask kernels` checks.
//!
#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use crate::backend::Products;
use crate::compile::Arch;
use crate::launch;
use crate::launch::{Copy, EpilogueAmax, EpilogueChoice, MainLoop};
use crate::variant::Variant;
use moe4::kernels::activation::{Activation, GluLayout};
use moe4::kernels::contract::{Direction, GradMode, Side};
use moe4::numerics::hadamard::SignMask;
use moe4::tensor::ScaleLayout;

/// A variant, and what is asked of its compiled code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogEntry {
    /// The kernel with its choices.
    pub variant: Variant,
    /// Whether the check fails if registers are spilled to memory, on sm_90 and later.
    pub no_spills: bool,
}

impl CatalogEntry {
    /// Whether the backend would launch it on this architecture.
    pub fn runs_on(&self, arch: Arch) -> bool {
        arch.has_wgmma() || !self.variant.kernel.starts_with("hopper_")
    }
}

/// All variants, each once.
pub fn catalog() -> Vec<CatalogEntry> {
    let plain = ["group_offsets", "group_amax", "weights_amax"];
    let of_products = ["unpack", "addresses", "sum_slices", "sum_tiles", "grouped_bias_grad"];
    let mut variants: Vec<_> = plain.into_iter().chain(of_products).map(launch::plain).collect();
    // The third stands for all masks that are given at launch.
    let masks = [SignMask::DEFAULT, SignMask::NONE, SignMask(1)];
    variants.extend(masks.map(|mask| launch::group_hadamard_amax_variant(mask, 4)));
    variants.push(launch::group_hadamard_amax_variant(SignMask::DEFAULT, 1));
    variants.extend(group_quantize());
    variants.extend([false, true].map(launch::quantize_weights_variant));
    variants.extend([false, true].map(launch::quantize_cached_weights_variant));
    for direction in [Direction::Rowwise, Direction::Columnwise] {
        for layout in [ScaleLayout::Plain, ScaleLayout::Swizzled128x4] {
            variants.push(launch::dequantize_variant(direction, layout));
        }
    }
    variants.extend([8, 1].map(launch::permute_variant));
    variants.extend([8, 1].map(launch::unpermute_variant));
    variants.extend(products());
    variants.extend([false, true].map(launch::copy_pages_variant));
    variants
        .into_iter()
        .map(|variant| {
            let no_spills = promises_no_spills(&variant);
            CatalogEntry { variant, no_spills }
        })
        .collect()
}

/// The products with one activation and layout, as the operator runs them on many rows: with exact amaxes, or none in BF16.
pub fn activation_variants(activation: &Activation, layout: GluLayout, products: Products) -> Vec<Variant> {
    let main_loop = if products == Products::Fastest { MainLoop::Hopper } else { MainLoop::Portable };
    let exact = EXACT.map(EpilogueAmax::Exact);
    let amaxes = exact.into_iter().chain([EpilogueAmax::None]);
    amaxes.flat_map(|amax| with_epilogue(EpilogueChoice::new(activation, layout, amax), main_loop)).collect()
}

/// Everything that the operator with one activation and layout may launch on a GPU, whatever its other options, the number
/// of rows and the place of its weights are; and what a layer with a router does around it. Each once.
pub fn operator_variants(
    activation: &Activation,
    layout: GluLayout,
    products: Products,
    arch: Arch,
) -> Vec<Variant> {
    let main_loops = MainLoop::every(products, arch);
    let others = [EpilogueAmax::None, EpilogueAmax::Before, EpilogueAmax::Bound];
    let amaxes = EXACT.map(EpilogueAmax::Exact).into_iter().chain(others);
    let choices = amaxes.map(|amax| EpilogueChoice::new(activation, layout, amax));
    let with_activation = choices
        .flat_map(|choice| main_loops.iter().flat_map(move |&main_loop| with_epilogue(choice, main_loop)));
    // The rest of the catalog has none, and each main loop that it runs on.
    let rest = catalog().into_iter().map(|entry| entry.variant).filter(|variant| {
        let avoided = |kernels: &str, used: bool| variant.kernel.starts_with(kernels) && !used;
        !variant.kernel.ends_with("act")
            && !avoided("hopper_", products.use_wgmma(arch))
            && !avoided("packed_", products.use_packed_weights())
    });
    let distinct: BTreeSet<_> = with_activation.chain(rest).chain(operator_copies()).collect();
    distinct.into_iter().collect()
}

/// Masks, the second of which stands for all that are given at launch.
const EXACT: [SignMask; 2] = [SignMask::DEFAULT, SignMask(1)];

/// Both products of a main loop that have an epilogue with an activation, with `h` made again and without.
fn with_epilogue(choice: EpilogueChoice, main_loop: MainLoop) -> [Variant; 3] {
    let dact = |h_again| launch::grouped_gemm_dact_variant(choice, h_again, main_loop);
    [launch::grouped_gemm_act_variant(choice, main_loop), dact(false), dact(true)]
}

/// The copies of `x` and `h` in the forward, of an `h` that is made again, of `dy` and of `dc`: as BF16 values, but for
/// columnwise ones that wait for the backward.
fn operator_copies() -> Vec<Variant> {
    let none = Copy::default();
    let packed = Copy { made: true, packed: true, ..none };
    let nearest = Copy { made: true, unpacked: true, ..none };
    let stochastic = Copy { stochastic: true, ..nearest };
    let masks = [None, Some(SignMask::DEFAULT), Some(SignMask::NONE), Some(SignMask(1))];
    let mut variants = Vec::new();
    variants.extend([nearest, stochastic].map(|row| launch::group_quantize_variant(row, none, None)));
    let pairs = [
        (nearest, packed),
        (none, nearest),
        (none, stochastic),
        (nearest, nearest),
        (stochastic, stochastic),
    ];
    for (row, col) in pairs {
        variants.extend(masks.map(|rht| launch::group_quantize_variant(row, col, rht)));
    }
    variants
}

/// `group_quantize` with copies of one form in any rounding, with any transform: for tests that draw them.
pub fn copy_variants() -> Vec<Variant> {
    let plain = Copy { made: true, packed: true, ..Copy::default() };
    let forms = [
        plain,
        Copy { swizzled: true, ..plain },
        Copy { unpacked: true, ..plain },
        Copy { swizzled: true, unpacked: true, ..plain },
        Copy { packed: false, unpacked: true, ..plain },
    ];
    let masks = [None, Some(SignMask::DEFAULT), Some(SignMask::NONE), Some(SignMask(1))];
    let mut variants = Vec::new();
    for form in forms {
        let copies = [form, Copy { stochastic: true, ..form }];
        variants.extend(copies.map(|row| launch::group_quantize_variant(row, Copy::default(), None)));
        for (rht, col) in masks.into_iter().flat_map(|rht| copies.map(|col| (rht, col))) {
            let rows = [Copy::default(), copies[0], copies[1]];
            variants.extend(rows.map(|row| launch::group_quantize_variant(row, col, rht)));
        }
    }
    variants
}

/// What runs over whole tensors in every step. Left out: random numbers, whose round keys and words take the last registers;
/// masks that are given at launch; the one thread block of `group_offsets`; and the epilogues of products whose gated
/// activation takes some more than the accumulators leave of 128 registers, with which two blocks share a multiprocessor.
fn promises_no_spills(variant: &Variant) -> bool {
    let chosen = |name: &str, value: u32| variant.defines.contains(&(name, value));
    let random = chosen("ROW_STOCHASTIC", 1) || chosen("COL_STOCHASTIC", 1);
    let large = match variant.kernel {
        "grouped_gemm_act" => chosen("ACTIVATION", 3) || chosen("ACTIVATION", 4),
        "grouped_gemm_dact" | "packed_gemm_dact" => true,
        "hopper_gemm_dact" => !chosen("ACTIVATION", 1) && !chosen("ACTIVATION", 2),
        _ => false,
    };
    variant.kernel != "group_offsets" && !random && !large && !chosen("SIGN_MASK", launch::MASK_AT_LAUNCH)
}

/// Each main loop, and each activation, layout and kind of amax once with both epilogues that have them.
fn products() -> Vec<Variant> {
    let packed: Vec<_> = launch::every_packed_rows().map(|rows| MainLoop::Packed { rows }).collect();
    let mut variants = Vec::new();
    for side in [Side::Fprop, Side::Dgrad] {
        let main_loops = [MainLoop::Portable, MainLoop::Hopper].into_iter().chain(packed.iter().copied());
        variants.extend(main_loops.map(|main_loop| launch::grouped_gemm_variant(side, main_loop)));
    }
    variants.extend([false, true].map(launch::column_sums_variant));
    for mode in [GradMode::Overwrite, GradMode::Accumulate] {
        for (quantized, bf16_gradient) in [(false, false), (false, true), (true, false), (true, true)] {
            variants.push(launch::grouped_wgrad_variant(quantized, bf16_gradient, mode));
        }
    }
    for mode in [GradMode::Overwrite, GradMode::Accumulate] {
        variants
            .extend([false, true].map(|bf16_gradient| launch::hopper::wgrad_variant(bf16_gradient, mode)));
    }
    let of_choice = |choice, h: bool, main_loop| {
        let dact = launch::grouped_gemm_dact_variant(choice, h, main_loop);
        [launch::grouped_gemm_act_variant(choice, main_loop), dact]
    };
    let fewest = packed[0];
    let epilogues = |activation: &Activation, layout, amax, h_again| {
        let choice = EpilogueChoice::new(activation, layout, amax);
        let main_loops = [MainLoop::Portable, MainLoop::Hopper, fewest];
        main_loops.into_iter().flat_map(move |main_loop| of_choice(choice, h_again, main_loop))
    };
    let exact = EpilogueAmax::Exact(SignMask::DEFAULT);
    for activation in Activation::all() {
        variants.extend(epilogues(&activation, GluLayout::Halves, exact, true));
    }
    let swiglu = EpilogueChoice::new(&Activation::SWIGLU, GluLayout::Halves, exact);
    variants.push(launch::grouped_gemm_dact_variant(swiglu, false, MainLoop::Hopper));
    variants.extend(packed[1..].iter().flat_map(|&main_loop| of_choice(swiglu, true, main_loop)));
    for layout in [GluLayout::Interleaved32, GluLayout::Elementwise] {
        variants.extend(epilogues(&Activation::SWIGLU, layout, exact, true));
    }
    for amax in [EpilogueAmax::None, EpilogueAmax::Bound, EpilogueAmax::Exact(SignMask(1))] {
        variants.extend(epilogues(&Activation::SRELU, GluLayout::Halves, amax, false));
    }
    variants
}

/// Directions and roundings, and each further output once.
fn group_quantize() -> Vec<Variant> {
    let none = Copy::default();
    let nearest = Copy { made: true, packed: true, ..none };
    let stochastic = Copy { stochastic: true, ..nearest };
    let mask = Some(SignMask::DEFAULT);
    let swizzled = |copy| Copy { swizzled: true, ..copy };
    let unpacked = |copy| Copy { unpacked: true, ..copy };
    let values = |copy| Copy { packed: false, unpacked: true, ..copy };
    [
        (nearest, none, None),
        (stochastic, none, None),
        (none, nearest, mask),
        (none, stochastic, mask),
        (nearest, nearest, mask),
        (stochastic, stochastic, mask),
        (nearest, stochastic, mask),
        (nearest, nearest, None),
        (stochastic, stochastic, None),
        (nearest, nearest, Some(SignMask::NONE)),
        (nearest, nearest, Some(SignMask(1))),
        (stochastic, stochastic, Some(SignMask(1))),
        (swizzled(nearest), swizzled(nearest), mask),
        (swizzled(stochastic), swizzled(stochastic), mask),
        (unpacked(nearest), unpacked(nearest), mask),
        (unpacked(stochastic), unpacked(stochastic), mask),
        // As the operator asks for them: in the forward, in the backward, and of an h that is made again.
        (values(nearest), nearest, mask),
        (values(nearest), none, None),
        (values(stochastic), values(stochastic), mask),
        (none, values(nearest), mask),
        (values(nearest), values(nearest), mask),
    ]
    .map(|(row, col, rht)| launch::group_quantize_variant(row, col, rht))
    .to_vec()
}

#[cfg(test)]
mod tests;
