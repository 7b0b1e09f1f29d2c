//! Backends that are wrong on purpose. The suite must catch each, in the checks that are there for it.

mod dequantize;
mod forms;
mod products;
mod quantize;
mod rows;

use crate::alter::{Alter, Altered};
use crate::report::Report;
use moe4::kernels::contract::*;
use moe4::kernels::reference::Reference;
use moe4::kernels::{Backend, Error, Host};
use std::sync::atomic::AtomicUsize;

/// One mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "`Fault::all` says what each does")]
pub enum Fault {
    SignsDropped,
    UnsignedAmax,
    UnsignedEpilogueAmax,
    AmaxOfNeighbours,
    AmaxOfNobody,
    AmaxOfEmptyExpertStale,
    ReversedButterfly,
    ReciprocalOfScale,
    ReciprocalOfAmax,
    ScaleTiesAway,
    NonFiniteIgnored,
    SignOfZeroDropped,
    StalePadding,
    SwizzledTilesDownColumns,
    SwizzledTileByRows,
    SwizzledPaddingStale,
    UnpackedZeroPositive,
    UnpackedNanAsZero,
    UnpackedNanOfHardware,
    UnpackedNobodyStale,
    UnpackedAloneLeftOut,
    WeightsUnpackedOfFirstExpert,
    DequantizedInAnotherOrder,
    DequantizedByPlainScales,
    DequantizedWithoutPadding,
    DequantizedNobody,
    DequantizedNanOfHardware,
    WeightsByRow,
    StreamShared,
    StreamOfLaunch,
    StreamUnsteady,
    StreamTruncated,
    ExpertsPast256Ignored,
    LastColumnTileDropped,
    QuantizedFirstBatchOnly,
    WeightsAssumedAdjacent,
    NearestForStochastic,
    ZerosForStochastic,
    ZeroedQuantize,
    ZeroedGemm,
    ZeroedAct,
    ZeroedDact,
    ZeroedWgrad,
    ZeroedEverything,
    ExpertZeroOnly,
    NeighbourRowOverwritten,
    NobodysRowsComputed,
    OneBadRow,
    BiasIgnored,
    BiasNotScaled,
    FirstExpertsScale,
    UnpackedScaleIgnored,
    UnpackedWeightScaleIgnored,
    FirstBatchOnly,
    LayoutIgnored,
    ClampGradientPasses,
    DefaultParametersInBackward,
    RebuiltActivationOff,
    ProbabilityGradientOfOneRow,
    BiasGradientWithoutLastRow,
    AccumulateIgnored,
    EmptyExpertLeftDirty,
    EmptyExpertCleared,
    LastTileIgnored,
    AbsentRowStale,
    WeightsOfUnpermuteIgnored,
    ProbabilityGradientOverwritten,
}

/// What must catch a fault.
#[derive(Clone, Copy, Debug)]
pub struct Expectation {
    /// The mistake.
    pub fault: Fault,
    /// What it does.
    pub what: &'static str,
    /// Checks that must all fail.
    pub caught_by: &'static [&'static str],
}

/// A backend with a fault.
#[derive(Debug)]
struct Broken {
    fault: Fault,
    calls: AtomicUsize,
}

impl Fault {
    /// The report of these checks on the reference backend with this fault.
    pub fn run(self, checks: &[&str]) -> Report {
        let alteration = Broken { fault: self, calls: AtomicUsize::new(0) };
        crate::run_only(&Altered { inner: &Reference, alteration }, checks)
    }

    /// The report of all checks on the reference backend with this fault.
    pub fn run_all(self) -> Report {
        let alteration = Broken { fault: self, calls: AtomicUsize::new(0) };
        crate::run(&Altered { inner: &Reference, alteration })
    }

    fn is(self, any: &[Fault]) -> bool {
        any.contains(&self)
    }

    /// Every fault with the checks that are there for it.
    pub fn all() -> Vec<Expectation> {
        use Fault::*;
        let expect = |fault, what, caught_by| Expectation { fault, what, caught_by };
        const EPILOGUES: &[&str] =
            &["golden/mlp, stage: c h", "golden/mlp, stage: dh dc dprob", "property/epilogues"];
        const DACT: &[&str] = &["golden/mlp, stage: dh dc dprob", "property/epilogues"];
        vec![
            expect(
                SignsDropped,
                "the unsigned transform whatever the mask",
                &["golden/q1d_rht and q1d_rht_nosign", "golden/group", "golden/mlp, end to end", BYTES],
            ),
            expect(
                UnsignedAmax,
                "an amax pass of the unsigned transform, fed to a signed cast",
                &["defect 11/amax of the signed transform", "golden/group", "golden/mlp, end to end", BYTES],
            ),
            expect(
                UnsignedEpilogueAmax,
                "the same in the products' epilogues",
                &[
                    "golden/mlp, stage: c h",
                    "invariant 3/epilogue amaxes equal their pass",
                    "property/epilogues",
                ],
            ),
            expect(
                AmaxOfNeighbours,
                "one amax for all experts",
                &["golden/group", "invariant 5/experts alone equal grouped", ALONE, TINY, AMAX, BYTES],
            ),
            expect(
                AmaxOfNobody,
                "rows of nobody counted for the last expert",
                &[AMAX, BYTES, NOBODY, "invariant 6/quantized rows of nobody"],
            ),
            expect(
                AmaxOfEmptyExpertStale,
                "nothing written for an empty expert",
                &[
                    "defect 12/amax after RHT is bounded",
                    "invariant 7/empty expert",
                    "invariant 7/quantized empty experts",
                    "defect 18/quantization with all splits zero",
                    TINY,
                    AMAX,
                ],
            ),
            expect(
                ReversedButterfly,
                "the transform's additions in another order",
                &["defect 13/order of additions in the RHT"],
            ),
            expect(ReciprocalOfScale, "S_enc/s for 1/(s · S_dec)", &["defect 3/reciprocals"]),
            expect(ReciprocalOfAmax, "2688 · (1/amax) for 2688/amax", &["defect 3/reciprocals"]),
            expect(ScaleTiesAway, "scales at a midpoint rounded up", &["defect 6/scale midpoints"]),
            expect(
                NonFiniteIgnored,
                "a damaged block with a finite scale",
                &[
                    "golden/edge",
                    "defect 10/E2M1 edges and non-finite blocks",
                    "defect 10/non-finite blocks show in products",
                    BYTES,
                ],
            ),
            expect(
                SignOfZeroDropped,
                "code 0 for -0",
                &["golden/q1d_row", "defect 10/E2M1 edges and non-finite blocks", "defect 5/negation"],
            ),
            expect(
                StalePadding,
                "padding left as it was",
                &["defect 7/padding", "invariant 6/quantized rows of nobody", EDGES, BYTES],
            ),
            expect(
                SwizzledTilesDownColumns,
                "tiles of scales down the columns first",
                &["layout/swizzled scales"],
            ),
            expect(SwizzledTileByRows, "a tile of scales row by row", &["layout/swizzled scales", BYTES]),
            expect(
                SwizzledPaddingStale,
                "padding of swizzled scales left as it was",
                &["layout/swizzled scales", BYTES],
            ),
            expect(UnpackedZeroPositive, "+0 for code 8 in BF16 values", &["layout/unpacked values", BYTES]),
            expect(
                UnpackedNanAsZero,
                "0 for a damaged block in BF16 values",
                &["layout/unpacked values", BYTES],
            ),
            expect(
                UnpackedNanOfHardware,
                "a BF16 NaN with all bits of its mantissa set",
                &["layout/unpacked values", "layout/unpacked weights", BYTES],
            ),
            expect(
                UnpackedNobodyStale,
                "BF16 values of nobody's rows left as they were",
                &["layout/unpacked values", BYTES],
            ),
            expect(
                UnpackedAloneLeftOut,
                "BF16 values written beside codes only",
                &["layout/unpacked values", "operands/unpacked, the whole operator", BYTES],
            ),
            expect(
                WeightsUnpackedOfFirstExpert,
                "BF16 values of expert 0 alone",
                &["layout/unpacked weights", "invariant 1/bytes of weights"],
            ),
            expect(
                DequantizedInAnotherOrder,
                "(code · scale) · (amax/2688) for ((scale · amax) · 1/2688) · code",
                &["dequantize/values", "dequantize/overflow and NaN", "dequantize/weights"],
            ),
            expect(
                DequantizedNanOfHardware,
                "a NaN with all bits of its mantissa set",
                &["dequantize/values", "dequantize/overflow and NaN"],
            ),
            expect(DequantizedByPlainScales, "swizzled scales read as plain ones", &["dequantize/values"]),
            expect(
                DequantizedWithoutPadding,
                "token positions counted without the padding of experts before",
                &["dequantize/values"],
            ),
            expect(
                DequantizedNobody,
                "rows of nobody dequantized with the last expert's amax",
                &["dequantize/values", "dequantize/rows of nobody"],
            ),
            expect(
                WeightsByRow,
                "blocks of 16 for tiles of 16 x 16",
                &["golden/q2d", "golden/mlp, stage: w1 w2 quantized", "invariant 1/bytes of weights"],
            ),
            expect(
                StreamShared,
                "one random stream for the rowwise and the columnwise copy",
                &["defect 15/random bytes of each element", BYTES],
            ),
            expect(
                StreamOfLaunch,
                "random numbers that depend on the number of rows",
                &[
                    "defect 15/random bytes of each element",
                    "invariant 5/experts alone equal grouped",
                    ALONE,
                    BYTES,
                ],
            ),
            expect(
                StreamUnsteady,
                "other random numbers in each call",
                &[
                    "defect 15/random bytes of each element",
                    "invariant 4/two runs are equal",
                    "invariant 4/two quantizations are equal",
                ],
            ),
            expect(
                StreamTruncated,
                "the lower halves of seed and stream",
                &["defect 15/random bytes of each element", EDGES, BYTES],
            ),
            expect(ExpertsPast256Ignored, "amaxes of 256 experts at most", &[TINY]),
            expect(LastColumnTileDropped, "columns past the last whole tile of 128 left zero", &[EDGES]),
            expect(
                QuantizedFirstBatchOnly,
                "as many rows quantized as in the first call",
                &["defect 21/quantization of growing batches"],
            ),
            expect(
                WeightsAssumedAdjacent,
                "weights of experts that lie apart read as if they were one tensor",
                &["invariant 1/bytes of weights"],
            ),
            expect(
                NearestForStochastic,
                "no stochastic rounding",
                &["defect 14/stochastic rounding is unbiased", "defect 15/random bytes of each element"],
            ),
            expect(
                ZerosForStochastic,
                "zeros where the instruction is missing",
                &["defect 14/stochastic rounding is unbiased", "defect 15/random bytes of each element"],
            ),
            expect(
                ZeroedQuantize,
                "codes and scales zero",
                &[
                    "golden/q1d_row",
                    "golden/mlp, stage: x h dy dc quantized",
                    BYTES,
                    "golden/mlp, end to end",
                ],
            ),
            expect(
                ZeroedGemm,
                "out zero",
                &[
                    "golden/gemm",
                    "golden/mlp, stage: y dx",
                    "golden/mlp, end to end",
                    "defect 2/products with an underflowed scale",
                    "property/products",
                    GROWTH,
                ],
            ),
            expect(ZeroedAct, "c and h zero", &["golden/mlp, stage: c h", "property/epilogues", CLAMPS]),
            expect(ZeroedDact, "dc and dprob zero", DACT),
            expect(
                ZeroedWgrad,
                "dw zero",
                &[
                    "golden/gemm",
                    "golden/mlp, stage: dw1 dw2",
                    SPLITS,
                    ACCUMULATION,
                    "property/weight gradients",
                ],
            ),
            expect(
                ExpertZeroOnly,
                "products of expert 0 alone",
                &[
                    "golden/mlp, stage: y dx",
                    "golden/mlp, stage: dw1 dw2",
                    SPLITS,
                    "property/products",
                    BOUNDARY,
                ],
            ),
            expect(
                NeighbourRowOverwritten,
                "a tile that runs into the next expert",
                &["golden/mlp, stage: y dx", "property/products", BOUNDARY, GROWTH],
            ),
            expect(
                NobodysRowsComputed,
                "rows of nobody multiplied like others",
                &[NOBODY, "property/products"],
            ),
            expect(
                OneBadRow,
                "one row of a product 2 % too large",
                &["golden/gemm", "golden/mlp, stage: y dx", "property/products", GROWTH],
            ),
            expect(BiasIgnored, "no bias", &["property/products"]),
            expect(BiasNotScaled, "a bias not scaled by the probability", &["property/products"]),
            expect(
                FirstExpertsScale,
                "the global scale of expert 0 for all",
                &["golden/mlp, stage: y dx", "property/products"],
            ),
            expect(
                UnpackedScaleIgnored,
                "unpacked operands without their global scale",
                &[
                    "operands/unpacked, grouped_gemm",
                    "operands/unpacked, epilogues",
                    "operands/unpacked, grouped_wgrad",
                    "operands/unpacked, the whole operator",
                ],
            ),
            expect(
                UnpackedWeightScaleIgnored,
                "unpacked weights without their global scale",
                &[
                    "operands/unpacked, grouped_gemm",
                    "operands/unpacked, epilogues",
                    "operands/unpacked, the whole operator",
                ],
            ),
            expect(FirstBatchOnly, "as many rows as in the first call", &[GROWTH]),
            expect(LayoutIgnored, "gate and up rows always in halves", EPILOGUES),
            expect(
                ClampGradientPasses,
                "a gradient beyond the clamp",
                &["defect 22/gradients at clamps", "golden/mlp, stage: dh dc dprob"],
            ),
            expect(
                DefaultParametersInBackward,
                "an activation's defaults in the backward",
                &["defect 23/activation parameters", "golden/mlp, stage: dh dc dprob", "property/epilogues"],
            ),
            expect(
                RebuiltActivationOff,
                "one BF16 unit in one element of the rebuilt h",
                &["invariant 3/epilogue amaxes equal their pass", "property/epilogues"],
            ),
            expect(ProbabilityGradientOfOneRow, "one row's dprob 1 % too large", DACT),
            expect(BiasGradientWithoutLastRow, "db1 without an expert's last row", &["property/epilogues"]),
            expect(
                AccumulateIgnored,
                "overwriting for accumulation",
                &[ACCUMULATION, "invariant 7/empty expert", "property/weight gradients"],
            ),
            expect(
                EmptyExpertLeftDirty,
                "nothing written for an empty expert on overwrite",
                &[SPLITS, ACCUMULATION, "invariant 7/empty expert", "defect 18/all splits zero"],
            ),
            expect(
                EmptyExpertCleared,
                "zeros for an empty expert on accumulation",
                &[ACCUMULATION, "invariant 7/empty expert"],
            ),
            expect(
                LastTileIgnored,
                "tokens past the last whole tile of 16 left out of dw",
                &["golden/mlp, stage: dw1 dw2", SPLITS, "property/weight gradients"],
            ),
            expect(
                AbsentRowStale,
                "nothing written for a slot of no row",
                &["property/permutation round trip"],
            ),
            expect(
                WeightsOfUnpermuteIgnored,
                "choices summed without their weights",
                &["property/weighted unpermutation"],
            ),
            expect(
                ProbabilityGradientOverwritten,
                "dprob replaced for added to",
                &["property/bias gradients"],
            ),
        ]
    }
}

const BYTES: &str = "invariant 1/bytes of amax and quantize passes";
const AMAX: &str = "property/amax of ragged groups";
const ALONE: &str = "invariant 5/experts quantized alone equal grouped";
const TINY: &str = "property/many tiny experts";
const EDGES: &str = "property/tiles and their edges";
const NOBODY: &str = "invariant 6/rows of nobody";
const SPLITS: &str = "defect 16/reported splits";
const ACCUMULATION: &str = "defect 17/accumulation";
const BOUNDARY: &str = "defect 19/boundaries inside a tile";
const GROWTH: &str = "defect 21/batches of growing size";
const CLAMPS: &str = "defect 24/clamps act";

impl<B: Backend<Memory = Host>> Alter<B> for Broken {
    fn group_amax(&self, inner: &B, pass: GroupAmax<'_, Host>) -> Result<(), Error> {
        quantize::group_amax(self.fault, inner, pass)
    }
    fn group_hadamard_amax(&self, inner: &B, pass: GroupHadamardAmax<'_, Host>) -> Result<(), Error> {
        quantize::group_hadamard_amax(self.fault, inner, pass)
    }
    fn group_quantize(&self, inner: &B, pass: GroupQuantize<'_, Host>) -> Result<(), Error> {
        quantize::group_quantize(self.fault, &self.calls, inner, pass)
    }
    fn quantize_weights(&self, inner: &B, pass: QuantizeWeights<'_, Host>) -> Result<(), Error> {
        quantize::quantize_weights(self.fault, inner, pass)
    }
    fn dequantize(&self, inner: &B, pass: Dequantize<'_, Host>) -> Result<(), Error> {
        dequantize::dequantize(self.fault, inner, pass)
    }
    fn grouped_gemm(&self, inner: &B, pass: GroupedGemm<'_, Host>) -> Result<(), Error> {
        products::gemm(self.fault, &self.calls, inner, pass)
    }
    fn grouped_gemm_act(&self, inner: &B, pass: GroupedGemmAct<'_, Host>) -> Result<(), Error> {
        products::gemm_act(self.fault, inner, pass)
    }
    fn grouped_gemm_dact(&self, inner: &B, pass: GroupedGemmDact<'_, Host>) -> Result<(), Error> {
        products::gemm_dact(self.fault, inner, pass)
    }
    fn grouped_wgrad(&self, inner: &B, pass: GroupedWgrad<'_, Host>) -> Result<(), Error> {
        products::wgrad(self.fault, inner, pass)
    }
    fn grouped_bias_grad(&self, inner: &B, pass: GroupedBiasGrad<'_, Host>) -> Result<(), Error> {
        rows::bias_grad(self.fault, inner, pass)
    }
    fn permute(&self, inner: &B, pass: Permute<'_, Host>) -> Result<(), Error> {
        rows::permute(self.fault, inner, pass)
    }
    fn unpermute(&self, inner: &B, pass: Unpermute<'_, Host>) -> Result<(), Error> {
        rows::unpermute(self.fault, inner, pass)
    }
}
