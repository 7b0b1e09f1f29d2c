//! Expert weights in the names and formats of other programs.
//!
//! | names | tensors of an expert or a layer |
//! |---|---|
//! | Mixtral | `P.experts.0.w1.weight` (gate `[F, H]`), `.w3.weight` (up), `.w2.weight` (down `[H, F]`) |
//! | projections | `P.experts.0.gate_proj.weight`, `.up_proj.weight`, `.down_proj.weight`; no gate if it has none |
//! | fused | `P.experts.gate_up_proj` `[E, 2F, H]`, `P.experts.down_proj` `[E, H, F]`, `…_bias`; both may be transposed |
//!
//! | format | tensors of a weight `[n, k]` |
//! |---|---|
//! | BF16 | `.weight` BF16, F16 or F32 |
//! | ModelOpt NVFP4 | `.weight` U8 `[n, k/2]`, `.weight_scale` F8_E4M3 `[n, k/16]`, `.weight_scale_2` F32 = amax/2688 |
//! | compressed-tensors NVFP4 | `.weight_packed` U8, `.weight_scale` F8_E4M3, `.weight_global_scale` F32 = 2688/amax |
//!
//! The two global scales are reciprocals of each other. Gate and up may have different ones.

mod names;
mod read;

use std::collections::BTreeMap;
use std::fmt;

use safetensors::Dtype;

use super::{CheckpointError, ModelFiles, printable};
use crate::numerics::BLOCK;
use names::{BadNumber, join};

pub(super) use names::ExpertName;
pub(super) use read::global_scale;

/// How the weights of a layer's experts are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertFormat {
    /// Unquantized.
    Bf16,
    /// NVFP4 as ModelOpt writes it.
    ModelOpt,
    /// NVFP4 as compressed-tensors writes it.
    CompressedTensors,
}

impl fmt::Display for ExpertFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ExpertFormat::Bf16 => "bf16",
            ExpertFormat::ModelOpt => "modelopt",
            ExpertFormat::CompressedTensors => "compressed-tensors",
        })
    }
}

/// One of the three matrices of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Projection {
    /// `[F, H]`, absent from activations without a gate.
    Gate,
    /// `[F, H]`.
    Up,
    /// `[H, F]`.
    Down,
}

impl Projection {
    const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];

    fn names(self) -> [&'static str; 2] {
        match self {
            Projection::Gate => ["gate_proj", "w1"],
            Projection::Up => ["up_proj", "w3"],
            Projection::Down => ["down_proj", "w2"],
        }
    }
}

/// How tensors are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    Projections,
    Mixtral,
    /// Gate and up in one tensor of all experts; `transposed`: inputs before outputs.
    Fused {
        transposed: bool,
    },
}

/// The experts of one layer, as found in a model: complete, and of consistent shapes and dtypes.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertLayer {
    /// What stands before `.experts`, such as `model.layers.0.mlp`.
    pub prefix: String,
    /// `E`.
    pub experts: usize,
    /// `H`.
    pub hidden: usize,
    /// `F`.
    pub ffn: usize,
    /// Whether there is a gate.
    pub gated: bool,
    /// Whether there are biases, which only fused names have.
    pub bias: bool,
    /// How weights are stored.
    pub format: ExpertFormat,
    pub(super) naming: Naming,
}

/// A weight in NVFP4, as it lies in a file.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredNvfp4 {
    /// `[n, k/2]`.
    pub codes: Vec<u8>,
    /// `[n, k/16]`, neither NaN nor negative.
    pub scales: Vec<u8>,
    /// Finite, and positive or, for a weight of zeros, 0.
    pub amax: f32,
}

impl ExpertLayer {
    /// The layers of experts in a model, in the order of their prefixes.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::BadExperts`], which names the tensor: an expert that is missing, too many or badly numbered, a wrong
    /// dtype or shape, names of two kinds in one layer.
    pub fn find(files: &ModelFiles) -> Result<Vec<Self>, CheckpointError> {
        let mut layers: BTreeMap<String, Vec<(Option<usize>, String, String)>> = BTreeMap::new();
        for name in files.names() {
            let found = ExpertName::parse(name).map_err(|BadNumber(number)| {
                let problem = format!(
                    "expected an expert's number from 0 to {}, without sign and leading zeros, got {number}; rename \
                     the tensor",
                    u16::MAX
                );
                bad(files, name, problem)
            })?;
            if let Some(found) = found {
                let entry = (found.expert, found.projection.to_owned(), found.part.to_owned());
                layers.entry(found.prefix.to_owned()).or_default().push(entry);
            }
        }
        layers.into_iter().map(|(prefix, names)| Self::examine(files, prefix, &names)).collect()
    }

    fn examine(
        files: &ModelFiles,
        prefix: String,
        names: &[(Option<usize>, String, String)],
    ) -> Result<Self, CheckpointError> {
        let has = |projection: &str| names.iter().any(|(_, p, _)| p == projection);
        let part = |part: &str| names.iter().any(|(_, _, p)| p == part);
        let of_experts = names.iter().filter_map(|(expert, ..)| *expert);
        if names.iter().any(|(expert, ..)| expert.is_none()) {
            if let Some(expert) = of_experts.min() {
                let name = join(&prefix, &format!("experts.{expert}"));
                return Err(bad(
                    files,
                    &name,
                    "one layer has fused and per-expert tensors; keep one kind".into(),
                ));
            }
            return Self::examine_fused(files, prefix, has("gate_up_proj"), has("down_proj_bias"));
        }
        let experts = of_experts.max().map_or(0, |last| last + 1);
        let format = if part("weight_packed") {
            ExpertFormat::CompressedTensors
        } else if part("weight_scale_2") {
            ExpertFormat::ModelOpt
        } else {
            ExpertFormat::Bf16
        };
        let naming = if has("w2") { Naming::Mixtral } else { Naming::Projections };
        let gated = has("gate_proj") || has("w1");
        let mut layer = Self { prefix, experts, hidden: 0, ffn: 0, gated, bias: false, format, naming };
        // Before the shape is known: a missing tensor is told as such.
        let first = layer.weight_name(0, Projection::Down);
        let [hidden, ffn] = layer.shape_in_file(files, &first)?;
        (layer.hidden, layer.ffn) = (hidden, ffn);
        for expert in 0..experts {
            for projection in layer.projections() {
                layer.check(files, expert, projection)?;
            }
        }
        Ok(layer)
    }

    fn examine_fused(
        files: &ModelFiles,
        prefix: String,
        gated: bool,
        bias: bool,
    ) -> Result<Self, CheckpointError> {
        let up = join(&prefix, if gated { "experts.gate_up_proj" } else { "experts.up_proj" });
        let down = join(&prefix, "experts.down_proj");
        let dims = |name: &str| {
            let info = require(files, name)?;
            if !matches!(info.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32) {
                return Err(bad(files, name, format!("expected dtype BF16, F16 or F32, got {}", info.dtype)));
            }
            <[usize; 3]>::try_from(&info.shape[..]).map_err(|_| {
                bad(files, name, format!("expected [experts, rows, columns], got shape {:?}", info.shape))
            })
        };
        let ([experts, a, b], [experts_down, c, d]) = (dims(&up)?, dims(&down)?);
        let factor = if gated { 2 } else { 1 };
        // Without a gate and with F = H both readings fit; then the usual one is taken.
        let (transposed, hidden, ffn) = if a == factor * d && b == c {
            (false, c, d)
        } else if b == factor * c && a == d {
            (true, d, c)
        } else {
            let problem =
                format!("its shape {:?} does not go with {:?} of '{}'", [a, b], [c, d], printable(&down));
            return Err(bad(files, &up, problem));
        };
        if experts != experts_down {
            return Err(bad(files, &down, format!("expected {experts} experts, got {experts_down}")));
        }
        let naming = Naming::Fused { transposed };
        let layer = Self { prefix, experts, hidden, ffn, gated, bias, format: ExpertFormat::Bf16, naming };
        if bias {
            for (name, n) in layer.bias_names().into_iter().zip([factor * ffn, hidden]) {
                let info = require(files, &name)?;
                if info.shape != [experts, n] {
                    let problem = format!("expected shape {:?}, got {:?}", [experts, n], info.shape);
                    return Err(bad(files, &name, problem));
                }
            }
        }
        Ok(layer)
    }

    /// An error unless the layer has this many experts; it names the first tensor that is missing or too many.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::BadExperts`].
    pub fn expect_experts(&self, files: &ModelFiles, experts: usize) -> Result<(), CheckpointError> {
        if self.experts == experts {
            return Ok(());
        }
        let (problem, at) = if self.experts < experts {
            (
                format!(
                    "expert {} is missing: expected {experts} experts, got {}",
                    self.experts, self.experts
                ),
                self.experts,
            )
        } else {
            (format!("one expert too many: expected {experts} experts, got {}", self.experts), experts)
        };
        Err(bad(files, &self.weight_name(at, Projection::Down), problem))
    }

    /// Those that the layer has.
    pub fn projections(&self) -> impl Iterator<Item = Projection> + use<> {
        let gated = self.gated;
        Projection::ALL.into_iter().filter(move |p| gated || *p != Projection::Gate)
    }

    /// `[n, k]` of a weight.
    pub fn shape(&self, projection: Projection) -> [usize; 2] {
        match projection {
            Projection::Gate | Projection::Up => [self.ffn, self.hidden],
            Projection::Down => [self.hidden, self.ffn],
        }
    }

    fn bias_names(&self) -> [String; 2] {
        let up = if self.gated { "experts.gate_up_proj_bias" } else { "experts.up_proj_bias" };
        [join(&self.prefix, up), join(&self.prefix, "experts.down_proj_bias")]
    }

    /// The tensor that holds the weight, or its codes.
    pub(super) fn weight_name(&self, expert: usize, projection: Projection) -> String {
        let part = if self.format == ExpertFormat::CompressedTensors { "weight_packed" } else { "weight" };
        match (self.naming, projection) {
            (Naming::Fused { .. }, Projection::Down) => join(&self.prefix, "experts.down_proj"),
            (Naming::Fused { .. }, _) if self.gated => join(&self.prefix, "experts.gate_up_proj"),
            (Naming::Fused { .. }, _) => join(&self.prefix, "experts.up_proj"),
            _ => self.part_name(expert, projection, part),
        }
    }

    /// `P.experts.3.up_proj.weight_scale`.
    pub(super) fn part_name(&self, expert: usize, projection: Projection, part: &str) -> String {
        let name = projection.names()[usize::from(self.naming == Naming::Mixtral)];
        join(&self.prefix, &format!("experts.{expert}.{name}.{part}"))
    }

    /// `[n, k]` of a stored weight.
    fn shape_in_file(&self, files: &ModelFiles, name: &str) -> Result<[usize; 2], CheckpointError> {
        let shape = &require(files, name)?.shape;
        match (&shape[..], self.format) {
            (&[n, k], ExpertFormat::Bf16) => Ok([n, k]),
            (&[n, half], _) => Ok([n, 2 * half]),
            _ => Err(bad(files, name, format!("expected 2 dimensions, got shape {shape:?}"))),
        }
    }

    fn check(
        &self,
        files: &ModelFiles,
        expert: usize,
        projection: Projection,
    ) -> Result<(), CheckpointError> {
        let [n, k] = self.shape(projection);
        let part = |part: &str| self.part_name(expert, projection, part);
        let expect = |name: &str, dtypes: &[Dtype], shapes: &[&[usize]], hint: &str| {
            let info = require(files, name)?;
            if !dtypes.contains(&info.dtype) {
                let expected: Vec<String> = dtypes.iter().map(Dtype::to_string).collect();
                let problem = format!("expected dtype {}, got {}", expected.join(" or "), info.dtype);
                return Err(bad(files, name, problem));
            }
            if !shapes.iter().any(|shape| info.shape == *shape) {
                let problem = format!("expected shape {:?}, got {:?}{hint}", shapes[0], info.shape);
                return Err(bad(files, name, problem));
            }
            Ok(())
        };
        if self.format == ExpertFormat::Bf16 {
            return expect(&part("weight"), &[Dtype::BF16, Dtype::F16, Dtype::F32], &[&[n, k]], "");
        }
        expect(&self.weight_name(expert, projection), &[Dtype::U8], &[&[n, k / 2]], "")?;
        if !k.is_multiple_of(BLOCK) {
            let problem = format!("expected columns in multiples of 16, got {k}");
            return Err(bad(files, &self.weight_name(expert, projection), problem));
        }
        let scales = part("weight_scale");
        let swizzled = files.info(&scales).is_ok_and(|info| info.shape.len() == 1);
        let hint =
            if swizzled { "; swizzled scales cannot be told apart, write them row by row" } else { "" };
        expect(&scales, &[Dtype::F8_E4M3], &[&[n, k / BLOCK]], hint)?;
        let global =
            if self.format == ExpertFormat::ModelOpt { "weight_scale_2" } else { "weight_global_scale" };
        expect(&part(global), &[Dtype::F32], &[&[1], &[]], "")
    }
}

fn require<'f>(files: &'f ModelFiles, name: &str) -> Result<&'f super::TensorInfo, CheckpointError> {
    if files.contains(name) {
        return files.info(name);
    }
    Err(bad(files, name, "the tensor is missing; every expert needs all of its tensors".into()))
}

pub(super) fn bad(files: &ModelFiles, name: &str, problem: String) -> CheckpointError {
    CheckpointError::BadExperts { path: files.path_of(name).to_path_buf(), name: name.into(), problem }
}
