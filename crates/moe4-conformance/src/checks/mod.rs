//! The list of checks.

mod defects_activation;
mod defects_products;
mod defects_quantize;
mod defects_rounding;
mod dequantize;
mod forms;
mod golden_mlp;
mod golden_mlp_end_to_end;
mod golden_mlp_stages;
mod golden_other;
mod golden_quantize;
mod invariants;
mod operands;
mod properties;
mod quantizers;
mod rows;
mod savings;

pub use invariants::{large_steps, same_steps};
pub use savings::paged_stash_over;

use crate::report::Outcome;
use moe4::kernels::{Backend, Capabilities, Host};

/// What a check needs of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Nothing: it looks at numerics and layouts that every backend shares, and passes on any.
    Nothing,
    /// Amax, quantization, weights, dequantization, permutation: every backend has them.
    Quantizers,
    /// [`Capabilities::products`] as well.
    Products,
}

impl Need {
    /// Why a check with this need cannot run on such a backend.
    pub fn missing(self, capabilities: &Capabilities) -> Option<&'static str> {
        (self == Need::Products && !capabilities.products).then_some("backend has no products")
    }
}

/// A named check of a backend.
#[derive(Clone, Copy, Debug)]
pub struct Check<B> {
    /// Its name, which says what must hold.
    pub name: &'static str,
    /// What it does.
    pub run: fn(&B) -> Outcome,
    /// What it needs.
    pub needs: Need,
}

/// The names of the checks that would pass on any backend.
pub fn host_only() -> Vec<&'static str> {
    needing(Need::Nothing)
}

/// The names of the checks with this need, those for host memory left out.
pub fn needing(need: Need) -> Vec<&'static str> {
    let checks = all::<moe4::kernels::reference::Reference>();
    checks.into_iter().filter(|check| check.needs == need).map(|check| check.name).collect()
}

/// Every check, in the order in which a new backend would want to pass them.
pub fn all<B: Backend>() -> Vec<Check<B>> {
    fn check<B>(name: &'static str, run: fn(&B) -> Outcome) -> Check<B> {
        Check { name, run, needs: Need::Quantizers }
    }
    fn products<B>(name: &'static str, run: fn(&B) -> Outcome) -> Check<B> {
        Check { name, run, needs: Need::Products }
    }
    fn host<B>(name: &'static str, run: fn(&B) -> Outcome) -> Check<B> {
        Check { name, run, needs: Need::Nothing }
    }
    vec![
        check("golden/q1d_row", golden_quantize::q1d_row),
        check("golden/q1d_sweep and q1d_ordertie", golden_quantize::q1d_sweep_and_ordertie),
        check("golden/q1d_rowcol", golden_quantize::q1d_rowcol),
        check("golden/q1d_rht and q1d_rht_nosign", golden_quantize::q1d_rht),
        check("golden/q2d", golden_quantize::q2d),
        check("golden/group", golden_quantize::group),
        host("golden/f32 numerics", golden_quantize::f32_numerics),
        check("golden/edge", golden_other::edge),
        host("golden/sr", golden_other::sr),
        host("golden/swizzle", golden_other::swizzle),
        products("golden/gemm", golden_other::gemm),
        check("golden/mlp, stage: x h dy dc quantized", golden_mlp_stages::quantize),
        check("golden/mlp, stage: w1 w2 quantized", golden_mlp_stages::weights),
        products("golden/mlp, stage: c h", golden_mlp_stages::gemm_act),
        products("golden/mlp, stage: y dx", golden_mlp_stages::gemm),
        products("golden/mlp, stage: dh dc dprob", golden_mlp_stages::gemm_dact),
        products("golden/mlp, stage: dw1 dw2", golden_mlp_stages::wgrad),
        products(
            "golden/mlp, dgrad is fprop of the transpose",
            golden_mlp_stages::dgrad_is_fprop_of_the_transpose,
        ),
        products("golden/mlp, end to end", golden_mlp_end_to_end::operator),
        check("invariant 1/bytes of amax and quantize passes", properties::quantize),
        check("invariant 1/bytes of weights", properties::weights),
        check("invariant 1/bytes of every BF16 value", properties::every_value),
        check("layout/swizzled scales", forms::swizzled),
        check("layout/unpacked values", forms::unpacked),
        check("layout/unpacked weights", forms::unpacked_weights),
        check("dequantize/values", dequantize::values),
        check("dequantize/rows of nobody", dequantize::rows_of_nobody),
        check("dequantize/overflow and NaN", dequantize::overflow),
        check("dequantize/weights", dequantize::weights),
        products("operands/unpacked, grouped_gemm", operands::gemm),
        products("operands/unpacked, epilogues", operands::epilogues),
        products("operands/unpacked, grouped_wgrad", operands::wgrad),
        products("operands/unpacked, the whole operator", operands::operator),
        products("invariant 2/recompute on equals off", invariants::recompute),
        products("invariant 2/delayed weight gradients", invariants::delayed),
        products("invariant 2/partial needs and separate amaxes", invariants::needs_and_separate_pass),
        products("invariant 3/epilogue amaxes equal their pass", invariants::epilogue_amaxes),
        products("invariant 4/two runs are equal", invariants::two_runs),
        check("invariant 4/two quantizations are equal", quantizers::two_runs),
        products("invariant 5/experts alone equal grouped", invariants::experts_alone),
        check("invariant 5/experts quantized alone equal grouped", quantizers::experts_alone),
        products("invariant 6/rows of nobody", invariants::rows_of_nobody),
        check("invariant 6/quantized rows of nobody", quantizers::rows_of_nobody),
        products("invariant 7/empty expert", invariants::empty_expert),
        check("invariant 7/quantized empty experts", quantizers::empty_experts),
        check("defect 1/zero blocks", defects_quantize::zero_blocks),
        check("defect 2/scale underflow", defects_quantize::scale_underflow),
        products("defect 2/products with an underflowed scale", defects_products::scale_underflow),
        check("defect 3/reciprocals", defects_quantize::reciprocals),
        check("defect 4/large inputs", defects_quantize::large_inputs),
        check("defect 5/negation", defects_quantize::negation),
        check("defect 6/scale midpoints", defects_quantize::scale_midpoints),
        check("defect 7/padding", defects_quantize::padding),
        check("defect 8/odd shapes", defects_quantize::odd_shapes),
        host("defect 9/large offsets", defects_quantize::large_offsets),
        check("defect 10/E2M1 edges and non-finite blocks", defects_quantize::e2m1_edges),
        products("defect 10/non-finite blocks show in products", defects_products::non_finite_blocks),
        check("defect 11/amax of the signed transform", defects_rounding::signed_amax),
        check("defect 12/amax after RHT is bounded", defects_rounding::amax_bound),
        check("defect 13/order of additions in the RHT", defects_rounding::addition_order),
        check("defect 14/stochastic rounding is unbiased", defects_rounding::unbiased),
        check("defect 15/random bytes of each element", defects_rounding::random_bytes),
        products("defect 15/streams of the operator", defects_rounding::operator_streams),
        products("defect 16/reported splits", defects_products::reported_splits),
        products("defect 17/accumulation", defects_products::accumulation),
        products("defect 18/all splits zero", defects_products::all_empty),
        check("defect 18/quantization with all splits zero", quantizers::all_empty),
        products("defect 19/boundaries inside a tile", defects_products::boundaries),
        products("defect 20/weights in one tensor or apart", defects_products::weights_apart),
        products("defect 21/batches of growing size", defects_products::growing_batches),
        check("defect 21/quantization of growing batches", quantizers::growing_batches),
        products("defect 22/gradients at clamps", defects_activation::clamp_gradient),
        products("defect 23/activation parameters", defects_activation::parameters),
        products("defect 24/clamps act", defects_activation::clamp_acts),
        products("savings/bound of dc's amax", savings::bound),
        products("savings/passes left out", savings::passes_left_out),
        products("savings/counted bytes", savings::counted_bytes),
        check("property/amax of ragged groups", defects_rounding::plain_amax),
        check("property/many tiny experts", quantizers::tiny_experts),
        check("property/tiles and their edges", quantizers::tile_edges),
        products("property/products", properties::gemm),
        products("property/epilogues", properties::epilogues),
        products("property/weight gradients", properties::wgrad),
        products("property/bias gradients", defects_products::bias_grad),
        check("property/permutation round trip", rows::round_trip),
        check("property/weighted unpermutation", rows::weighted),
        check("property/routing and its adjoint", rows::routing),
    ]
}

/// Checks of what exists for host memory only, so far.
pub fn host_memory<B: Backend<Memory = Host>>() -> Vec<Check<B>> {
    vec![Check { name: "savings/paged stash", run: savings::paged_stash, needs: Need::Products }]
}
