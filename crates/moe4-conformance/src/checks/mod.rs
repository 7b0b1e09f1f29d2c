//! The list of checks.

mod golden_mlp;
mod golden_mlp_end_to_end;
mod golden_mlp_stages;
mod golden_other;
mod golden_quantize;

use crate::report::Outcome;
use crate::subject::Subject;

/// A named check of a backend.
#[derive(Clone, Copy, Debug)]
pub struct Check<B> {
    /// Its name, which says what must hold.
    pub name: &'static str,
    /// What it does.
    pub run: fn(&B) -> Outcome,
}

/// Every check, in the order in which a new backend would want to pass them.
pub fn all<B: Subject>() -> Vec<Check<B>> {
    fn check<B>(name: &'static str, run: fn(&B) -> Outcome) -> Check<B> {
        Check { name, run }
    }
    vec![
        check("golden/q1d_row", golden_quantize::q1d_row),
        check("golden/q1d_sweep and q1d_ordertie", golden_quantize::q1d_sweep_and_ordertie),
        check("golden/q1d_rowcol", golden_quantize::q1d_rowcol),
        check("golden/q1d_rht and q1d_rht_nosign", golden_quantize::q1d_rht),
        check("golden/q2d", golden_quantize::q2d),
        check("golden/group", golden_quantize::group),
        check("golden/f32 numerics", golden_quantize::f32_numerics),
        check("golden/edge", golden_other::edge),
        check("golden/sr", golden_other::sr),
        check("golden/swizzle", golden_other::swizzle),
        check("golden/gemm", golden_other::gemm),
        check("golden/mlp, stage: x h dy dc quantized", golden_mlp_stages::quantize),
        check("golden/mlp, stage: w1 w2 quantized", golden_mlp_stages::weights),
        check("golden/mlp, stage: c h", golden_mlp_stages::gemm_act),
        check("golden/mlp, stage: y dx", golden_mlp_stages::gemm),
        check("golden/mlp, stage: dh dc dprob", golden_mlp_stages::gemm_dact),
        check("golden/mlp, stage: dw1 dw2", golden_mlp_stages::wgrad),
        check("golden/mlp, dgrad is fprop of the transpose", golden_mlp_stages::dgrad_is_fprop_of_the_transpose),
        check("golden/mlp, end to end", golden_mlp_end_to_end::operator),
    ]
}
