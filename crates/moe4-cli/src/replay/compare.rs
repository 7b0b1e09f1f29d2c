//! `--compare`: what a replay computed against what a training job captured, tensor by tensor in data-flow order.
//!
//! Two correct implementations differ where a sum in FP32 falls on the other side of a BF16 rounding boundary, and
//! wherever that spreads to. The bounds below say how far that reaches; a tensor past its bound is *wrong*, and the
//! first wrong one in data-flow order is the one to look at. `n` is the number of elements, an element *differs* if
//! it is off by more than 1e-5 (`dc`: 1e-4) of its expert's rms, and `flips` are the 4-bit codes that differ in the
//! quantized operand, plus 16 for each block scale.
//!
//! | tensors | bound |
//! |---|---|
//! | inputs; codes, scales, amaxes of x, dy, w1, w2 | equal |
//! | c | `4 + 0.001 n` differ, each by one BF16 ulp |
//! | h, dc | `4 + 0.001 n` differ, `4 + 0.0002 n` by more than one ulp, relative norm 1e-3 |
//! | codes, scales, amaxes of h, dc | `2 + 0.0005 n`, `1 + 0.0005 n`, one BF16 ulp |
//! | dh | relative norm 1e-6 |
//! | y, dx, dw1, dw2, dprob, db1, db2 | relative norm `1e-3 + 0.01 √flips` of h or dc |
//!
//! Codes 0 and 8 are both zero, and codes under a zero scale stand for zero whatever they are. Rows past
//! `sum(splits)` are not compared.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Result, bail};
use half::bf16;
use moe4::checkpoint::{TensorFile, printable};
use moe4::numerics::e2m1;
use moe4::tensor::Groups;

use super::tensor::{Data, Tensor, position};
use crate::output;

/// How far a tensor may be off.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Bound {
    Equal,
    /// Packed codes; the tensor of their block scales; whether a few may differ.
    Codes {
        scales: &'static str,
        few: bool,
    },
    /// E4M3 bytes of h and dc.
    Scales,
    /// One BF16 ulp.
    Ulp,
    /// BF16 straight out of a product.
    OneUlp,
    /// BF16 behind an activation.
    Bf16 {
        floor: f64,
    },
    /// A relative norm, which grows with the flips of an operand (its codes and scales).
    Norm {
        base: f64,
        flips: Option<(&'static str, &'static str)>,
    },
}

const fn codes(scales: &'static str, few: bool) -> Bound {
    Bound::Codes { scales, few }
}

const fn norm(flips: Option<(&'static str, &'static str)>) -> Bound {
    Bound::Norm { base: 1e-3, flips }
}

/// Every tensor that can be compared, in the order in which the operator computes them.
const FLOW: &[(&str, Bound)] = &[
    ("splits", Bound::Equal),
    ("x", Bound::Equal),
    ("w1", Bound::Equal),
    ("w2", Bound::Equal),
    ("b1", Bound::Equal),
    ("b2", Bound::Equal),
    ("prob", Bound::Equal),
    ("dy", Bound::Equal),
    ("x_amax", Bound::Equal),
    ("x_scale", Bound::Equal),
    ("x_fp4", codes("x_scale", false)),
    ("x_amax_col", Bound::Equal),
    ("x_scale_col", Bound::Equal),
    ("x_fp4_col", codes("x_scale_col", false)),
    ("w1_amax", Bound::Equal),
    ("w1_scale", Bound::Equal),
    ("w1_fp4", codes("w1_scale", false)),
    ("c", Bound::OneUlp),
    ("h", Bound::Bf16 { floor: 1e-5 }),
    ("h_amax", Bound::Ulp),
    ("h_scale", Bound::Scales),
    ("h_fp4", codes("h_scale", true)),
    ("h_amax_col", Bound::Ulp),
    ("h_scale_col", Bound::Scales),
    ("h_fp4_col", codes("h_scale_col", true)),
    ("w2_amax", Bound::Equal),
    ("w2_scale", Bound::Equal),
    ("w2_fp4", codes("w2_scale", false)),
    ("y", norm(Some(("h_fp4", "h_scale")))),
    ("dy_amax", Bound::Equal),
    ("dy_scale", Bound::Equal),
    ("dy_fp4", codes("dy_scale", false)),
    ("dy_amax_col", Bound::Equal),
    ("dy_scale_col", Bound::Equal),
    ("dy_fp4_col", codes("dy_scale_col", false)),
    ("dh", Bound::Norm { base: 1e-6, flips: None }),
    ("dprob", norm(None)),
    ("dc", Bound::Bf16 { floor: 1e-4 }),
    ("dc_amax", Bound::Ulp),
    ("dc_bound4", Bound::Ulp),
    ("dc_scale", Bound::Scales),
    ("dc_fp4", codes("dc_scale", true)),
    ("dc_amax_col", Bound::Ulp),
    ("dc_scale_col", Bound::Scales),
    ("dc_fp4_col", codes("dc_scale_col", true)),
    ("dx", norm(Some(("dc_fp4", "dc_scale")))),
    ("dw2", norm(Some(("h_fp4_col", "h_scale_col")))),
    ("dw1", norm(Some(("dc_fp4_col", "dc_scale_col")))),
    ("db2", norm(None)),
    ("db1", norm(None)),
];

/// Tensors with one row a token.
const TOKEN_ROWS: &[&str] = &[
    "x", "prob", "dy", "x_fp4", "x_scale", "c", "h", "h_fp4", "h_scale", "y", "dy_fp4", "dy_scale", "dh",
    "dprob", "dc", "dc_fp4", "dc_scale", "dx",
];

/// Tensors with one slice an expert.
const EXPERT_SLICES: &[&str] = &["dw1", "dw2", "db1", "db2"];

/// How one tensor compares.
#[derive(Debug, PartialEq)]
struct Difference {
    name: &'static str,
    elements: usize,
    /// Elements of other bits, zeros of either sign being equal.
    differing: usize,
    /// Elements past the floor.
    past_floor: usize,
    max_abs: f64,
    /// Largest distance in BF16 steps, if both sides are BF16; and how many are further apart than one.
    ulps: Option<(u32, usize)>,
    relative_norm: f64,
    /// The first element of other bits: its index, computed value, expected value.
    first: Option<(Vec<usize>, f64, f64)>,
    wrong: bool,
}

/// What a comparison found.
pub(super) struct Comparison {
    /// A table of all tensors; its last line is the verdict.
    pub(super) report: String,
    /// The first wrong tensor and how many are wrong, in one line; `None` if none is.
    pub(super) fault: Option<String>,
}

/// Compares `computed` with the tensors of the same names in `expected`.
pub(super) fn compare(computed: &[Tensor], expected: &mut TensorFile, groups: &Groups) -> Result<Comparison> {
    let by_name: HashMap<&str, &Tensor> =
        computed.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let mut differences = Vec::new();
    let mut flips: HashMap<&str, usize> = HashMap::new();
    for &(name, bound) in FLOW {
        let Some(ours) = by_name.get(name) else { continue };
        if !expected.contains(name) {
            continue;
        }
        let theirs = read_like(ours, expected)?;
        let zero_scales = match bound {
            Bound::Codes { scales, .. } => zero_scales(&by_name, expected, scales)?,
            _ => None,
        };
        let mut difference = measure(name, bound, ours, &theirs, groups, zero_scales.as_deref());
        let flipped = |of: (&str, &str)| {
            let count = |name| flips.get(name).copied().unwrap_or(0);
            count(of.0) + 16 * count(of.1)
        };
        difference.wrong = is_wrong(&difference, bound, flipped);
        // A tensor that is wrong itself excuses nothing behind it.
        flips.insert(name, if difference.wrong { 0 } else { difference.differing });
        differences.push(difference);
    }
    if differences.is_empty() {
        bail!(
            "{} has no tensor to compare with; it has: {}",
            expected.path().display(),
            printable(&expected.names().join(", "))
        );
    }
    Ok(Comparison { report: report(&differences), fault: fault(&differences, expected.path()) })
}

/// The expected tensor, which must have our shape and a dtype of the same kind.
fn read_like(ours: &Tensor, expected: &mut TensorFile) -> Result<Tensor> {
    let theirs = Tensor::read(expected, &ours.name)?;
    let place = || format!("tensor '{}' in {}", ours.name, expected.path().display());
    if theirs.shape != ours.shape {
        bail!("{}: expected shape {:?}, got {:?}", place(), ours.shape, theirs.shape);
    }
    let float = |data: &Data| matches!(data, Data::Bf16(_) | Data::F32(_));
    let comparable = float(&ours.data) && float(&theirs.data) || ours.data.dtype() == theirs.data.dtype();
    if !comparable {
        bail!("{}: expected dtype {}, got {}", place(), ours.data.dtype(), theirs.data.dtype());
    }
    Ok(theirs)
}

/// For each block, whether its scale is zero on both sides; `None` if the scales are not there to be read.
fn zero_scales(
    computed: &HashMap<&str, &Tensor>,
    expected: &mut TensorFile,
    scales: &str,
) -> Result<Option<Vec<bool>>> {
    let Some(ours) = computed.get(scales).filter(|_| expected.contains(scales)) else { return Ok(None) };
    let theirs = read_like(ours, expected)?;
    let zero = |data: &Data, index| data.value(index) == 0.0;
    let both = |index| zero(&ours.data, index) && zero(&theirs.data, index);
    Ok(Some((0..ours.data.len()).map(both).collect()))
}

fn measure(
    name: &'static str,
    bound: Bound,
    ours: &Tensor,
    theirs: &Tensor,
    groups: &Groups,
    zero_scales: Option<&[bool]>,
) -> Difference {
    if let (Bound::Codes { .. }, Data::Bytes(a), Data::Bytes(b)) = (bound, &ours.data, &theirs.data) {
        return measure_codes(name, &ours.shape, a, b, live_elements(name, &ours.shape, groups), zero_scales);
    }
    let floor = if let Bound::Bf16 { floor } = bound { floor } else { 1e-5 };
    let mut difference = empty(name);
    let (mut error, mut norm) = (0.0, 0.0);
    let mut steps = Vec::new();
    for range in expert_ranges(name, &ours.shape, groups) {
        let squares: f64 = range.clone().map(|index| theirs.data.value(index).powi(2)).sum();
        let floor = floor * (squares / range.len().max(1) as f64).sqrt();
        norm += squares;
        difference.elements += range.len();
        for index in range {
            let (a, b) = (ours.data.value(index), theirs.data.value(index));
            if a == b {
                continue;
            }
            let distance = (a - b).abs();
            difference.differing += 1;
            error += distance.powi(2);
            // A NaN on one side is as far off as can be.
            difference.max_abs = if distance.is_nan() { f64::NAN } else { difference.max_abs.max(distance) };
            if distance.is_nan() || distance > floor {
                difference.past_floor += 1;
                if let (Data::Bf16(a), Data::Bf16(b)) = (&ours.data, &theirs.data) {
                    steps.push(ulp_distance(a[index], b[index]));
                }
            }
            difference.first.get_or_insert_with(|| (position(index, &ours.shape), a, b));
        }
    }
    if let (Data::Bf16(_), Data::Bf16(_)) = (&ours.data, &theirs.data) {
        let largest = steps.iter().copied().max().unwrap_or(0);
        difference.ulps = Some((largest, steps.iter().filter(|step| **step > 1).count()));
    }
    difference.relative_norm = if error == 0.0 { 0.0 } else { (error / norm).sqrt() };
    difference
}

fn measure_codes(
    name: &'static str,
    shape: &[usize],
    ours: &[u8],
    theirs: &[u8],
    live_bytes: usize,
    zero_scales: Option<&[bool]>,
) -> Difference {
    let mut difference = Difference { elements: 2 * live_bytes, ..empty(name) };
    let code = |bytes: &[u8], index: usize| {
        let code = bytes[index / 2] >> (4 * (index % 2)) & 15;
        if code == 8 { 0 } else { code }
    };
    let mut shape = shape.to_vec();
    if let Some(last) = shape.last_mut() {
        *last *= 2;
    }
    for index in 0..2 * live_bytes {
        let (a, b) = (code(ours, index), code(theirs, index));
        let under_zero = zero_scales.is_some_and(|zero| zero[index / 16]);
        if a == b || under_zero {
            continue;
        }
        difference.differing += 1;
        let [a, b] = [a, b].map(|code| f64::from(e2m1::decode(code)));
        difference.max_abs = difference.max_abs.max((a - b).abs());
        difference.first.get_or_insert_with(|| (position(index, &shape), a, b));
    }
    difference.past_floor = difference.differing;
    difference
}

fn empty(name: &'static str) -> Difference {
    Difference {
        name,
        elements: 0,
        differing: 0,
        past_floor: 0,
        max_abs: 0.0,
        ulps: None,
        relative_norm: 0.0,
        first: None,
        wrong: false,
    }
}

fn is_wrong(difference: &Difference, bound: Bound, flipped: impl Fn((&str, &str)) -> usize) -> bool {
    let n = difference.elements as f64;
    let more_than = |count: usize, base: f64, share: f64| count as f64 > base + share * n;
    let norm_past = |limit: f64| difference.relative_norm.is_nan() || difference.relative_norm > limit;
    let (largest, far) = difference.ulps.unwrap_or((0, 0));
    match bound {
        Bound::Equal | Bound::Codes { few: false, .. } => difference.differing > 0,
        Bound::Codes { few: true, .. } => more_than(difference.differing, 2.0, 5e-4),
        Bound::Scales => more_than(difference.differing, 1.0, 5e-4),
        // One BF16 ulp is at most 2^-7 of the value.
        Bound::Ulp => norm_past(1.0 / 128.0),
        Bound::OneUlp => more_than(difference.past_floor, 4.0, 1e-3) || largest > 1 || norm_past(1e-3),
        Bound::Bf16 { .. } => {
            more_than(difference.past_floor, 4.0, 1e-3) || more_than(far, 4.0, 2e-4) || norm_past(1e-3)
        }
        Bound::Norm { base, flips } => norm_past(base + 0.01 * (flips.map_or(0, flipped) as f64).sqrt()),
    }
}

/// Elements of each expert, for the expert's rms; one range where a tensor is not laid out by experts.
fn expert_ranges(name: &str, shape: &[usize], groups: &Groups) -> Vec<std::ops::Range<usize>> {
    let elements: usize = shape.iter().product();
    let experts = groups.experts();
    if TOKEN_ROWS.contains(&name) {
        let row: usize = shape[1..].iter().product();
        let range = |expert| groups.range(expert).start * row..groups.range(expert).end * row;
        return (0..experts).map(range).collect();
    }
    if EXPERT_SLICES.contains(&name) {
        let slice = elements / experts;
        return (0..experts).map(|expert| expert * slice..(expert + 1) * slice).collect();
    }
    std::iter::once(0..elements).collect()
}

fn live_elements(name: &str, shape: &[usize], groups: &Groups) -> usize {
    let rows =
        if TOKEN_ROWS.contains(&name) { groups.live_rows() } else { shape.first().copied().unwrap_or(1) };
    rows * shape.iter().skip(1).product::<usize>()
}

/// Steps between two BF16 numbers, zero being one number.
fn ulp_distance(a: bf16, b: bf16) -> u32 {
    let ordered = |value: bf16| {
        let magnitude = i32::from(value.to_bits() & 0x7FFF);
        if value.to_bits() >> 15 == 1 { -magnitude } else { magnitude }
    };
    ordered(a).abs_diff(ordered(b))
}

fn fault(differences: &[Difference], expected: &Path) -> Option<String> {
    let first = differences.iter().find(|difference| difference.wrong)?;
    let wrong = differences.iter().filter(|difference| difference.wrong).count();
    Some(format!(
        "{wrong} of {} tensors are off from {} by more than rounding; first to go wrong: {}, where {} of {} elements \
         differ",
        differences.len(),
        expected.display(),
        first.name,
        first.differing,
        first.elements,
    ))
}

fn report(differences: &[Difference]) -> String {
    let heads =
        ["tensor", "verdict", "differing", "of", "max", "relative norm", "first at", "computed", "expected"];
    let row = |difference: &Difference| {
        let verdict = match difference {
            Difference { wrong: true, .. } => "WRONG",
            Difference { differing: 0, .. } => "equal",
            _ => "rounding",
        };
        let max = match difference.ulps {
            // Further than this, the numbers are no neighbours and the distance says more.
            Some((largest, _)) if (1..=256).contains(&largest) => format!("{largest} ulp"),
            _ => short(difference.max_abs),
        };
        let (at, ours, theirs) = match &difference.first {
            Some((at, ours, theirs)) => (output::shape(at), exact(*ours), exact(*theirs)),
            None => Default::default(),
        };
        let counts = [difference.differing.to_string(), difference.elements.to_string()];
        let norm = short(difference.relative_norm);
        [vec![difference.name.into(), verdict.into()], counts.into(), vec![max, norm, at, ours, theirs]]
            .concat()
    };
    let table = output::table(&heads, 2, differences.iter().map(row).collect());
    let verdict = match differences.iter().find(|difference| difference.wrong) {
        Some(difference) => format!("first to go wrong: {}", difference.name),
        None => "no tensor is off by more than rounding".into(),
    };
    format!("{table}{verdict}\n")
}

/// Elements are `f32` at most, and two that differ must look different.
fn exact(value: f64) -> String {
    output::number(value as f32)
}

/// Enough digits to recognise a number, in few characters.
fn short(value: f64) -> String {
    let plain = value == 0.0 || value.is_nan() || value.fract() == 0.0 && value.abs() < 1e6;
    if plain { value.to_string() } else { format!("{value:.3e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(name: &str, shape: &[usize], values: &[f32]) -> Tensor {
        Tensor::new(name, shape, Data::F32(values.to_vec()))
    }

    fn bf16s(name: &str, shape: &[usize], values: &[f32]) -> Tensor {
        Tensor::new(name, shape, Data::Bf16(values.iter().map(|value| bf16::from_f32(*value)).collect()))
    }

    /// The difference of two tensors under the bound that `FLOW` gives their name.
    fn difference(ours: &Tensor, theirs: &Tensor, groups: &Groups) -> Difference {
        let &(name, bound) = FLOW.iter().find(|(name, _)| *name == ours.name).expect("a known tensor");
        let mut difference = measure(name, bound, ours, theirs, groups, None);
        difference.wrong = is_wrong(&difference, bound, |_| 0);
        difference
    }

    #[test]
    fn zeros_of_either_sign_and_codes_are_equal() {
        let groups = Groups::single(2);
        let zeros =
            difference(&bf16s("c", &[2, 1], &[0.0, -0.0]), &bf16s("c", &[2, 1], &[-0.0, 0.0]), &groups);
        assert_eq!((zeros.differing, zeros.wrong), (0, false));
        let packed = |byte| Tensor::new("x_fp4", &[2, 1], Data::Bytes(vec![byte; 2]));
        assert_eq!(difference(&packed(0x80), &packed(0x08), &groups).differing, 0);
        let first = difference(&packed(0x30), &packed(0x20), &groups);
        assert_eq!((first.differing, first.first), (2, Some((vec![0, 1], 1.5, 1.0))));
    }

    #[test]
    fn codes_under_a_zero_scale_do_not_count() {
        let (ours, theirs) = ([0x77_u8; 16], [0x66_u8; 16]);
        let zero = [true, false];
        assert_eq!(measure_codes("h_fp4", &[1, 16], &ours, &theirs, 16, Some(&zero)).differing, 16);
    }

    #[test]
    fn one_ulp_is_rounding_and_two_are_wrong() {
        let groups = Groups::single(4);
        let expected = bf16s("c", &[4, 1], &[1.0, 2.0, 3.0, 4.0]);
        let one = difference(&bf16s("c", &[4, 1], &[1.0, 2.0, 3.0, 4.03125]), &expected, &groups);
        assert_eq!((one.ulps, one.past_floor), (Some((1, 0)), 1));
        let two = difference(&bf16s("c", &[4, 1], &[1.0, 2.0, 3.0, 4.0625]), &expected, &groups);
        assert!(two.wrong && two.ulps == Some((2, 1)));
    }

    #[test]
    fn rows_past_the_splits_are_not_compared() {
        let groups = Groups::new(&[1], 2).unwrap();
        let ours = f32s("dprob", &[2], &[1.0, 0.0]);
        let theirs = f32s("dprob", &[2], &[1.0, f32::NAN]);
        assert_eq!(difference(&ours, &theirs, &groups).differing, 0);
    }

    #[test]
    fn a_nan_is_wrong() {
        let groups = Groups::single(2);
        let nan =
            difference(&f32s("dprob", &[2], &[1.0, f32::NAN]), &f32s("dprob", &[2], &[1.0, 1.0]), &groups);
        assert!(nan.wrong && nan.differing == 1);
    }

    #[test]
    fn the_floor_is_that_of_the_expert() {
        let groups = Groups::new(&[1, 1], 2).unwrap();
        let ours = f32s("dprob", &[2], &[1e6, 1.001]);
        let theirs = f32s("dprob", &[2], &[1e6, 1.0]);
        let difference = difference(&ours, &theirs, &groups);
        assert_eq!((difference.past_floor, difference.wrong), (1, false));
    }
}
