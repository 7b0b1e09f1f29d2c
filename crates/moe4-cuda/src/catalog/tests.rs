//! Every variant of the catalog has a source, and every plan of the operator its variants in the list.

use std::collections::BTreeSet;

use super::{Arch, Copy, EpilogueChoice, MainLoop, catalog, operator_variants};
use crate::backend::Products;
use crate::launch::{self, EpilogueAmax};
use crate::sources::SOURCES;
use crate::variant::Variant;
use moe4::kernels::activation::{Activation, GluLayout};
use moe4::kernels::contract::{GradMode, Side};
use moe4::kernels::{self, PassName};
use moe4::mlp::{
    CopyPlan, DcAmax, GradientRounding, GroupedMlpConfig, Needs, OperandPlan, Phase, Plan, Precision,
};
use moe4::numerics::hadamard::SignMask;

#[test]
fn variants_differ_and_have_a_source() {
    let entries = catalog();
    let distinct: BTreeSet<_> = entries.iter().map(|entry| &entry.variant).collect();
    assert_eq!(distinct.len(), entries.len());
    let kernels: BTreeSet<_> = entries.iter().map(|entry| entry.variant.kernel).collect();
    let sources: BTreeSet<_> = SOURCES.iter().map(|(name, _)| *name).collect();
    assert_eq!(kernels, sources, "kernels of the catalog and sources");
}

/// All plans of an operator with this activation and layout that differ in their kernels.
fn plans(activation: Activation, layout: GluLayout) -> Vec<Plan> {
    let masks = [Some(SignMask::DEFAULT), Some(SignMask(0x1234)), Some(SignMask::NONE), None];
    let mut plans = Vec::new();
    for at in 0..2 * 2 * 2 * 3 * 4 * 4 {
        let (flags, dc_amax, mask) = (at % 8, at / 8 % 3, at / 24);
        let config = GroupedMlpConfig {
            activation,
            glu_layout: layout,
            precision: [Precision::Nvfp4, Precision::Bf16][flags & 1],
            recompute_activation: flags & 2 != 0,
            gradient_rounding: [GradientRounding::Nearest, GradientRounding::Stochastic][flags >> 2],
            dc_amax: [DcAmax::Exact, DcAmax::Bound, DcAmax::SeparatePass][dc_amax],
            fc1_rht: masks[mask % 4],
            fc2_rht: masks[mask / 4],
            bias: true,
            ..GroupedMlpConfig::new(8, 64, 64)
        };
        let needs = [Needs::ALL, Needs::INPUT, Needs::WEIGHTS, Needs::NONE];
        plans.extend(needs.map(|needs| Plan::new(&config, needs)));
    }
    plans
}

fn copies(plan: &OperandPlan, phase: Phase) -> Option<Variant> {
    let made = |copy: Option<CopyPlan>| copy.filter(|copy| copy.made == phase);
    let copy = |copy: Option<CopyPlan>, packed: bool| {
        copy.map_or(Copy::default(), |copy| Copy {
            made: true,
            stochastic: copy.rounding == GradientRounding::Stochastic,
            packed,
            swizzled: false,
            unpacked: !packed,
        })
    };
    let (row, col) = (made(plan.rowwise), made(plan.columnwise));
    let rht = col.and_then(|col| col.rht);
    let waits = phase == Phase::Forward;
    (row.is_some() || col.is_some())
        .then(|| launch::group_quantize_variant(copy(row, false), copy(col, waits), rht))
}

fn epilogue(plan: &Plan, operand: &OperandPlan, amax: kernels::EpilogueAmax) -> EpilogueChoice {
    let amax = match (amax, operand.rht()) {
        (kernels::EpilogueAmax::None, _) => EpilogueAmax::None,
        (kernels::EpilogueAmax::Bound, _) => EpilogueAmax::Bound,
        (kernels::EpilogueAmax::Rowwise, _) | (_, None) => EpilogueAmax::Before,
        (kernels::EpilogueAmax::Rht, Some(mask)) => EpilogueAmax::Exact(mask),
    };
    EpilogueChoice::new(&plan.config.activation, plan.config.glu_layout, amax)
}

/// What the passes of a plan launch on a main loop.
fn launched(plan: &Plan, main_loop: MainLoop) -> Vec<Variant> {
    let mut variants = Vec::new();
    for phase in [Phase::Forward, Phase::Backward] {
        variants.extend([plan.x, plan.h, plan.dy, plan.dc].iter().flat_map(|o| copies(o, phase)));
    }
    for pass in plan.forward.iter().chain(&plan.backward) {
        match pass.name {
            PassName::GroupAmax => variants.push(launch::plain("group_amax")),
            PassName::GroupHadamardAmax => {
                let masks = [plan.config.fc1_rht, plan.config.fc2_rht].into_iter().flatten();
                variants.extend(masks.map(|mask| launch::group_hadamard_amax_variant(mask, 4)));
            }
            PassName::GroupQuantize { .. } => {}
            PassName::GroupedGemmAct { amax } => {
                let choice = epilogue(plan, &plan.h, amax);
                variants.push(launch::grouped_gemm_act_variant(choice, main_loop));
            }
            PassName::GroupedGemmDact { amax, recompute } => {
                let choice = epilogue(plan, &plan.dc, amax);
                variants.push(launch::grouped_gemm_dact_variant(choice, recompute, main_loop));
                variants.extend(["sum_slices", "sum_tiles"].map(launch::plain));
                variants.push(launch::column_sums_variant(false));
            }
            PassName::GroupedGemm => {
                let sides = [Side::Fprop, Side::Dgrad];
                variants.extend(sides.map(|side| launch::grouped_gemm_variant(side, main_loop)));
            }
            PassName::GroupedWgrad => {
                let quantized = plan.config.precision == Precision::Nvfp4;
                for mode in [GradMode::Overwrite, GradMode::Accumulate] {
                    for bf16 in [false, true] {
                        variants.push(launch::grouped_wgrad_variant(quantized, bf16, mode));
                        if quantized && main_loop == MainLoop::Hopper {
                            variants.push(launch::hopper::wgrad_variant(bf16, mode));
                        }
                    }
                }
            }
            PassName::GroupedBiasGrad => {
                variants.push(launch::plain("grouped_bias_grad"));
                variants.push(launch::column_sums_variant(true));
            }
            other => panic!("{other}: which kernels?"),
        }
    }
    variants
}

#[test]
fn whatever_an_operator_launches_is_listed() {
    let [hopper, ampere] = [Arch::new(9, 0).unwrap(), Arch::new(8, 0).unwrap()];
    for (products, arch) in
        [(Products::Fastest, hopper), (Products::Fastest, ampere), (Products::Portable, hopper)]
    {
        for activation in Activation::all() {
            for layout in GluLayout::ALL {
                let listed = operator_variants(&activation, layout, products, arch);
                let listed: BTreeSet<_> = listed.into_iter().collect();
                for plan in plans(activation, layout) {
                    for main_loop in MainLoop::every(products, arch) {
                        for variant in launched(&plan, main_loop) {
                            assert!(listed.contains(&variant), "{variant} of {main_loop:?}:\n{plan}");
                        }
                    }
                }
                let avoided = |kernels, used| used || !listed.iter().any(|v| v.kernel.starts_with(kernels));
                assert!(avoided("hopper_", products == Products::Fastest && arch == hopper));
                assert!(avoided("packed_", products == Products::Fastest));
            }
        }
    }
}
