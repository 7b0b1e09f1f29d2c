//! The tolerance rule of the golden operator data, as its manifest states it.
//!
//! `n` is the number of elements of a tensor in its file. An element differs if it is off by more than a floor: 1e-5
//! (`dc`: 1e-4) of the root mean square of its expert's elements. -0 equals +0, code 8 equals code 0, and codes are
//! not compared where the stored scale byte is 0.
//!
//! | | stage, fed with stored inputs | end to end |
//! |---|---|---|
//! | codes, scales, amaxes of `x dy w1 w2`, of `h dc` from the stored `h dc` | exact | exact for `x dy w1 w2` |
//! | `c` | at most 4 + n/1000 differ, each by one BF16 unit | the same |
//! | `h dc` | the same | 4 + n/1000 differ, 4 + n/5000 by more than one unit, relative norm 1e-3 |
//! | codes, scales, amaxes of `h dc` | exact | 2 + n/2000 codes, 1 + n/2000 scales differ; amaxes equal |
//! | `y dx` | as `c` | 4 + n/1000 differ, and a row for each flipped row code, 16 for each flipped row scale |
//! | `y dx dw1 dw2 dprob` | FP32: off by at most 3e-5 of the expert's rms | relative norm 1e-3 + 0.01 √(flipped codes + 16 · flipped scales) |
//! | `dh` | as FP32 | relative norm 1e-6 |

use crate::compare::{bytes, ensure, equal, f32_bits, position, unpack};
use crate::drive::Packed;
use crate::report::{Failure, Outcome};
use half::bf16;
use moe4::numerics::{BLOCK, bf16 as bf};
use std::ops::Range;

/// A tensor of the operator: its name, its shape, and which flat range belongs to which expert.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The name in the manifest's legend.
    pub name: &'static str,
    /// The shape.
    pub shape: Vec<usize>,
    /// Each expert's flat range.
    pub experts: Vec<Range<usize>>,
}

fn rms(x: &[f64]) -> f64 {
    if x.is_empty() { 0.0 } else { (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64).sqrt() }
}

/// BF16 bit patterns in numerical order, both zeros at 0: neighbours differ by 1.
fn ordinal(v: bf16) -> i32 {
    let magnitude = (v.to_bits() & 0x7FFF) as i32;
    if v.to_bits() & 0x8000 != 0 { -magnitude } else { magnitude }
}

fn values(x: &[bf16]) -> Vec<f64> {
    x.iter().map(|&v| bf::to_f32(v) as f64).collect()
}

/// An element that is off by more than the floor.
struct Difference {
    at: usize,
    units: i32,
}

impl Tensor {
    fn floor(&self) -> f64 {
        if self.name == "dc" { 1e-4 } else { 1e-5 }
    }

    fn differences(&self, expected: &[bf16], got: &[bf16]) -> Result<Vec<Difference>, Failure> {
        self.same_length(expected.len(), got.len())?;
        let mut out = vec![];
        let (wide, found) = (values(expected), values(got));
        for range in &self.experts {
            let floor = self.floor() * rms(&wide[range.clone()]);
            for at in range.clone() {
                let close = (wide[at] - found[at]).abs() <= floor; // false for NaN
                if !close {
                    let units = (ordinal(expected[at]) - ordinal(got[at])).abs();
                    out.push(Difference { at, units: if found[at].is_nan() { i32::MAX } else { units } });
                }
            }
        }
        Ok(out)
    }

    fn same_length(&self, expected: usize, got: usize) -> Outcome {
        let n: usize = self.shape.iter().product();
        ensure(expected == n && got == n, || {
            format!("{}: {n} elements wanted, the file has {expected}, got {got}", self.name)
        })
    }

    fn show(&self, at: usize, expected: &[bf16], got: &[bf16]) -> String {
        let Tensor { name, shape, .. } = self;
        format!("{name}{}: expected {:e}, got {:e}", position(shape, at), expected[at], got[at])
    }

    /// A BF16 tensor of a stage: at most `4 + n/1000` differ, each by one unit.
    pub fn stage_bf16(&self, expected: &[bf16], got: &[bf16]) -> Outcome {
        let differences = self.differences(expected, got)?;
        if let Some(far) = differences.iter().find(|d| d.units > 1) {
            return Err(Failure::new(format!(
                "{}, {} units apart",
                self.show(far.at, expected, got),
                far.units
            )));
        }
        self.at_most(&differences, 4.0 + 0.001 * got.len() as f64, "", expected, got)
    }

    fn at_most(
        &self,
        differences: &[Difference],
        allowed: f64,
        what: &str,
        expected: &[bf16],
        got: &[bf16],
    ) -> Outcome {
        ensure(differences.len() as f64 <= allowed, || {
            let first = self.show(differences[0].at, expected, got);
            format!("{first}; {} of {} differ{what}, {allowed:.1} allowed", differences.len(), got.len())
        })
    }

    /// An FP32 tensor of a stage: off by at most 3e-5 of the expert's rms.
    pub fn stage_f32(&self, expected: &[f32], got: &[f32]) -> Outcome {
        self.same_length(expected.len(), got.len())?;
        for (e, range) in self.experts.iter().enumerate() {
            let wide: Vec<f64> = expected[range.clone()].iter().map(|&v| v as f64).collect();
            let bound = 3e-5 * rms(&wide);
            for at in range.clone() {
                let off = (expected[at] as f64 - got[at] as f64).abs();
                ensure(off <= bound, || {
                    let at_index = position(&self.shape, at);
                    let Tensor { name, .. } = self;
                    format!(
                        "{name}{at_index}, expert {e}: expected {:e} ± {bound:.1e}, got {:e}",
                        expected[at], got[at]
                    )
                })?;
            }
        }
        Ok(())
    }

    /// `h` or `dc` end to end.
    pub fn chained_bf16(&self, expected: &[bf16], got: &[bf16]) -> Outcome {
        let n = got.len() as f64;
        let mut differences = self.differences(expected, got)?;
        self.at_most(&differences, 4.0 + 0.001 * n, "", expected, got)?;
        differences.retain(|d| d.units > 1);
        self.at_most(&differences, 4.0 + 0.0002 * n, " by more than one unit", expected, got)?;
        self.relative_norm(&values(expected), &values(got), 1e-3)
    }

    /// `y` or `dx` end to end: a flipped code of the operand touches a row.
    pub fn chained_product(&self, expected: &[bf16], got: &[bf16], flips: Flips) -> Outcome {
        let row = self.shape[self.shape.len() - 1] as f64;
        let allowed = 4.0 + 0.001 * got.len() as f64 + row * flips.weight();
        self.at_most(&self.differences(expected, got)?, allowed, "", expected, got)?;
        self.relative_norm(&values(expected), &values(got), flips.norm())
    }

    /// Relative norm of the difference over the whole tensor; and within four times the bound for each expert, so that
    /// none hides behind the others.
    pub fn relative_norm(&self, expected: &[f64], got: &[f64], bound: f64) -> Outcome {
        self.same_length(expected.len(), got.len())?;
        let within = |range: Range<usize>, bound: f64, what: &str| {
            let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
            let size = norm(&mut expected[range.clone()].iter().copied());
            let off = norm(&mut range.map(|i| expected[i] - got[i]));
            ensure(off <= bound * size, || {
                let relative = off / size;
                format!(
                    "{}, {what}: relative norm {relative:.2e} of the difference, {bound:.1e} allowed",
                    self.name
                )
            })
        };
        within(0..expected.len(), bound, "all experts")?;
        let each =
            |(e, range): (usize, &Range<usize>)| within(range.clone(), 4.0 * bound, &format!("expert {e}"));
        self.experts.iter().enumerate().try_for_each(each)
    }
}

/// Codes and scales that came out differently.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flips {
    codes: usize,
    scales: usize,
}

impl Flips {
    fn weight(self) -> f64 {
        (self.codes + 16 * self.scales) as f64
    }

    /// What a product of such an operand may be off by, in relative norm.
    pub fn norm(self) -> f64 {
        1e-3 + 0.01 * self.weight().sqrt()
    }
}

/// The comparable codes of `codes`: 8 is 0, and so is everything under a scale byte that is 0 in `scales`.
fn comparable(codes: &[u8], k: usize, scales: &[u8]) -> Vec<u8> {
    let canonical = |(i, code): (usize, u8)| {
        let block = i / k * (k / BLOCK) + i % k / BLOCK;
        if code & 7 == 0 || scales[block] == 0 { 0 } else { code }
    };
    unpack(codes).into_iter().enumerate().map(canonical).collect()
}

fn same_amaxes(name: &str, k: usize, expected: &Packed, got: &Packed) -> Outcome {
    f32_bits(&format!("{name}_amax"), &[expected.amax.len()], &expected.amax, &got.amax)?;
    ensure(
        expected.codes.len() == got.codes.len()
            && expected.scales.len() == got.scales.len()
            && 2 * expected.codes.len() == BLOCK * expected.scales.len()
            && expected.scales.len().is_multiple_of(k / BLOCK),
        || format!("{name}: lengths differ"),
    )
}

/// Equal codes, scales and amaxes of a `[rows, k]` operand.
pub fn exact_copy(name: &str, k: usize, expected: &Packed, got: &Packed) -> Outcome {
    same_amaxes(name, k, expected, got)?;
    let rows = 2 * expected.codes.len() / k;
    bytes(&format!("{name}_scale"), &[rows, k / BLOCK], &expected.scales, &got.scales)?;
    let codes = |q: &Packed| comparable(&q.codes, k, &expected.scales);
    equal(&format!("{name}_fp4"), &[rows, k], &codes(expected), &codes(got))
}

/// At most `2 + n/2000` codes and `1 + n/2000` scales, `n` the stored bytes of either.
pub fn few_flips(name: &str, k: usize, expected: &Packed, got: &Packed) -> Result<Flips, Failure> {
    same_amaxes(name, k, expected, got)?;
    let codes = |q: &Packed| comparable(&q.codes, k, &expected.scales);
    let differ = |a: &[u8], b: &[u8]| a.iter().zip(b).filter(|(a, b)| a != b).count();
    let found =
        Flips { codes: differ(&codes(expected), &codes(got)), scales: differ(&expected.scales, &got.scales) };
    let allowed = |base: f64, n: usize| base + 5e-4 * n as f64;
    let (codes, scales) = (allowed(2.0, expected.codes.len()), allowed(1.0, expected.scales.len()));
    ensure(found.codes as f64 <= codes && found.scales as f64 <= scales, || {
        format!("{name}: {found:?}, allowed {codes:.1} codes and {scales:.1} scales")
    })?;
    Ok(found)
}
