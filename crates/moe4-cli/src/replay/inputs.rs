//! The operator's inputs, read from a capture and checked.
//!
//! | tensor | dtype, shape |
//! |---|---|
//! | `x`, `dy` | BF16 `[T, H]`, rows sorted by expert |
//! | `w1`, `w2` | BF16 `[E, N1, H]`, `[E, H, F]`; `N1 = 2F` for gated activations, else `F` |
//! | `prob` | F32 `[T]` |
//! | `splits` | I64 `[E]`, rows of each expert, a sum of at most `T` |
//! | `b1`, `b2` | F32 `[E, N1]`, `[E, H]`; both or neither |

use anyhow::{Result, bail};
use half::bf16;
use moe4::checkpoint::TensorFile;
use moe4::mlp::Activation;
use moe4::tensor::Groups;

/// Inputs that fit together, all values that will be read finite.
pub(super) struct Inputs {
    pub(super) x: Vec<bf16>,
    pub(super) w1: Vec<bf16>,
    pub(super) w2: Vec<bf16>,
    pub(super) prob: Vec<f32>,
    pub(super) dy: Vec<bf16>,
    pub(super) splits: Vec<i64>,
    pub(super) biases: Option<(Vec<f32>, Vec<f32>)>,
    pub(super) groups: Groups,
    pub(super) hidden: usize,
    pub(super) ffn: usize,
}

impl Inputs {
    pub(super) fn read(file: &mut TensorFile, activation: Activation) -> Result<Self> {
        for name in ["x", "w1", "w2", "prob", "splits", "dy"] {
            file.info(name)?;
        }
        let &[experts, hidden, ffn] = file.info("w2")?.shape.as_slice() else {
            bail!("{}", dims(file, "w2", "[E, H, F]")?);
        };
        let &[tokens, _] = file.info("x")?.shape.as_slice() else {
            bail!("{}", dims(file, "x", "[T, H]")?);
        };
        let fc1_rows = activation.fc1_rows(ffn);
        let w1_shape = &file.info("w1")?.shape;
        if *w1_shape != [experts, fc1_rows, hidden] {
            bail!(
                "tensor 'w1' in {}: expected shape [{experts}, {fc1_rows}, {hidden}], which is [E, N1, H] for w2 \
                 [{experts}, {hidden}, {ffn}] and N1 = {} for {}, got {w1_shape:?}",
                file.path().display(),
                if fc1_rows == ffn { "F" } else { "2F" },
                activation.name(),
            );
        }
        let x = file.read_shaped("x", &[tokens, hidden])?;
        let dy = file.read_shaped("dy", &[tokens, hidden])?;
        let prob = file.read_shaped("prob", &[tokens])?;
        let splits: Vec<i64> = file.read_shaped("splits", &[experts])?;
        let w1 = file.read("w1")?;
        let w2 = file.read("w2")?;
        let biases = match (file.contains("b1"), file.contains("b2")) {
            (false, false) => None,
            (true, true) => {
                let b1 = file.read_shaped("b1", &[experts, fc1_rows])?;
                Some((b1, file.read_shaped("b2", &[experts, hidden])?))
            }
            (b1, _) => {
                let (there, missing) = if b1 { ("b1", "b2") } else { ("b2", "b1") };
                bail!(
                    "{} has tensor '{there}' but not '{missing}'; give both or neither",
                    file.path().display()
                );
            }
        };
        let groups = Groups::from_i64(&splits, tokens)
            .map_err(|error| anyhow::anyhow!("{}: {error}", file.path().display()))?;
        let inputs = Self { x, w1, w2, prob, dy, splits, biases, groups, hidden, ffn };
        inputs.check_finite(file)?;
        Ok(inputs)
    }

    /// Rows past `sum(splits)` may hold anything: they are never read as data.
    fn check_finite(&self, file: &TensorFile) -> Result<()> {
        let live = self.groups.live_rows();
        let wide = |values: &[bf16]| values.iter().map(|value| value.to_f32()).position(|v| !v.is_finite());
        let narrow = |values: &[f32]| values.iter().position(|v| !v.is_finite());
        let (b1, b2) = self.biases.as_ref().map_or((&[][..], &[][..]), |(b1, b2)| (b1, b2));
        let found = [
            ("x", wide(&self.x[..live * self.hidden])),
            ("w1", wide(&self.w1)),
            ("w2", wide(&self.w2)),
            ("prob", narrow(&self.prob[..live])),
            ("dy", wide(&self.dy[..live * self.hidden])),
            ("b1", narrow(b1)),
            ("b2", narrow(b2)),
        ];
        for (name, index) in found {
            let Some(index) = index else { continue };
            let at = super::tensor::position(index, &file.info(name)?.shape);
            bail!(
                "tensor '{name}' in {}: element {at:?} is not finite; the capture was already broken when it \
                 reached the operator",
                file.path().display()
            );
        }
        Ok(())
    }
}

fn dims(file: &TensorFile, name: &str, expected: &str) -> Result<String> {
    let shape = &file.info(name)?.shape;
    Ok(format!("tensor '{name}' in {}: expected shape {expected}, got {shape:?}", file.path().display()))
}
