//! Expert weights of a whole model from one format to another, one tensor at a time.
//!
//! ```text
//! find the layers of experts; everything else is copied byte for byte
//! BF16 → NVFP4   pass 1: the amax of each expert's gate and up together, and of its down
//!                pass 2: quantize and write; fused tensors become one an expert and projection
//! NVFP4 → NVFP4  codes and scales byte for byte, only the global scale changes its form
//! NVFP4 → BF16   the values that the codes stand for, rounded once
//! ```
//!
//! Gate and up share a global scale, as `W1` does in training: programs that serve them as one matrix want it.
//! Files keep their names and their division; a folder's other files (configuration, tokenizer) are copied. The target
//! gets its name only when all of it is written.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::Dtype;

use super::experts::{ExpertName, Naming, bad, global_scale};
use super::model::INDEX;
use super::{
    CheckpointError, ExpertFormat, ExpertLayer, ModelFiles, Projection, StoredNvfp4, TensorSpec, TensorWriter,
};
use crate::numerics::scale::GlobalScale;
use crate::numerics::{BLOCK, e2m1};
use crate::tensor::Tile;

/// What a conversion did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted {
    /// Layers of experts.
    pub layers: usize,
    /// Their weights.
    pub weights: usize,
    /// Tensors that were copied.
    pub copied: usize,
}

/// How far a conversion is.
#[derive(Clone, Copy, Debug)]
pub struct ConvertProgress<'a> {
    /// Bytes of the input that are done with, those read twice counted twice.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
    /// The tensor that comes next.
    pub tensor: &'a str,
}

/// What becomes of one tensor of the input.
enum Job {
    Copy(String),
    /// The scale of an activation, and its new name.
    InputScale {
        from: String,
        to: String,
    },
    Weight {
        layer: usize,
        expert: usize,
        projection: Projection,
    },
}

impl ExpertLayer {
    /// The layer in another format; fused names become names of projections where a format needs one tensor an expert.
    fn converted(&self, to: ExpertFormat) -> Self {
        let naming = match self.naming {
            Naming::Fused { .. } if to != ExpertFormat::Bf16 => Naming::Projections,
            other => other,
        };
        Self { format: to, naming, ..self.clone() }
    }

    /// The tensors of one weight.
    fn specs(&self, expert: usize, projection: Projection) -> Vec<TensorSpec> {
        let ([n, k], part) = (self.shape(projection), |part| self.part_name(expert, projection, part));
        let quantized = |codes, global| {
            vec![
                TensorSpec::new(part(codes), Dtype::U8, &[n, k / 2]),
                TensorSpec::new(part("weight_scale"), Dtype::F8_E4M3, &[n, k / BLOCK]),
                // ModelOpt writes a scalar, compressed-tensors a vector of one.
                TensorSpec::new(
                    part(global),
                    Dtype::F32,
                    if global == "weight_scale_2" { &[] } else { &[1] },
                ),
            ]
        };
        match self.format {
            ExpertFormat::Bf16 => vec![TensorSpec::new(part("weight"), Dtype::BF16, &[n, k])],
            ExpertFormat::ModelOpt => quantized("weight", "weight_scale_2"),
            ExpertFormat::CompressedTensors => quantized("weight_packed", "weight_global_scale"),
        }
    }
}

/// Converts the experts of `files` to the format `to`, into the file or folder `target`, which must not exist.
///
/// `tile` is what a block scale covers where BF16 is quantized: [`Tile::Square16`] gives the operands of training,
/// [`Tile::Row16`] smaller errors. `progress` is told of each tensor; if it returns false the conversion ends.
///
/// # Errors
///
/// Those of [`ExpertLayer::find`] and of reading and writing; [`CheckpointError::BadModel`] if there are no experts or
/// the target exists; [`CheckpointError::BadExperts`] for a weight that cannot be quantized;
/// [`CheckpointError::Interrupted`].
pub fn convert(
    files: &mut ModelFiles,
    target: &Path,
    to: ExpertFormat,
    tile: Tile,
    progress: &mut dyn FnMut(ConvertProgress<'_>) -> bool,
) -> Result<Converted, CheckpointError> {
    let layers = ExpertLayer::find(files)?;
    let refuse = |path: &Path, problem: &str| CheckpointError::BadModel {
        path: path.to_path_buf(),
        problem: problem.into(),
    };
    if layers.is_empty() {
        return Err(refuse(files.path(), "expected experts (tensors named '….experts.…'), found none"));
    }
    if target.exists() {
        return Err(refuse(target, "it exists; choose another name"));
    }
    let outputs: Vec<ExpertLayer> = layers.iter().map(|layer| layer.converted(to)).collect();
    let jobs = (0..files.files().len()).map(|at| jobs(files, at, &layers, to)).collect::<Vec<_>>();
    let quantizes = |layer: &ExpertLayer| layer.format == ExpertFormat::Bf16 && to != ExpertFormat::Bf16;
    let mut clock = Clock { done: 0, total: 0, progress };
    for job in jobs.iter().flatten() {
        let passes = match job {
            Job::Weight { layer, .. } if quantizes(&layers[*layer]) => 2,
            _ => 1,
        };
        clock.total += passes * job.bytes(files, &layers);
    }

    let mut amaxes = BTreeMap::new();
    for job in jobs.iter().flatten() {
        let &Job::Weight { layer: at, expert, projection } = job else { continue };
        let layer = &layers[at];
        if !quantizes(layer) {
            continue;
        }
        let name = layer.weight_name(expert, projection);
        clock.next(&name)?;
        let [n, k] = layer.shape(projection);
        let rows = if tile == Tile::Square16 { BLOCK } else { 1 };
        if !n.is_multiple_of(rows) || !k.is_multiple_of(BLOCK) {
            let problem =
                format!("expected rows in multiples of {rows} and columns of 16, got shape {:?}", [n, k]);
            return Err(bad(files, &name, problem));
        }
        let weight = layer.read_bf16(files, expert, projection)?;
        if let Some(index) = weight.iter().position(|v| !v.is_finite()) {
            let problem = format!(
                "element {:?} of expert {expert} is {}; expected finite values",
                [index / k, index % k],
                weight[index]
            );
            return Err(bad(files, &name, problem));
        }
        let amax = weight.iter().fold(0.0_f32, |amax, v| amax.max(v.to_f32().abs()));
        let shared = amaxes.entry((at, expert, projection == Projection::Down)).or_insert(0.0_f32);
        *shared = shared.max(amax);
        clock.done += job.bytes(files, &layers);
    }

    let place = Place::new(files, target)?;
    let mut weight_map = BTreeMap::new();
    let mut summary = Converted { layers: layers.len(), weights: 0, copied: 0 };
    for (at, jobs) in jobs.iter().enumerate() {
        let file = place.file(files, at);
        let specs =
            jobs.iter().map(|job| job.specs(files, &outputs)).collect::<Result<Vec<_>, _>>()?.concat();
        let metadata = files.files()[at].metadata().clone();
        let metadata: BTreeMap<&str, String> =
            metadata.iter().map(|(k, v)| (k.as_str(), v.clone())).collect();
        let metadata: Vec<(&str, String)> = metadata.into_iter().collect();
        let mut writer = TensorWriter::create(&file, &specs, &metadata)?;
        for job in jobs {
            match job {
                Job::Copy(name) => {
                    clock.next(name)?;
                    writer.write_bytes(name, &files.read_bytes(name)?)?;
                    summary.copied += 1;
                }
                Job::InputScale { from, to } => {
                    let shape = files.info(from)?.shape.clone();
                    let scales: Vec<f32> = files.read_shaped::<f32>(from, &shape)?;
                    writer.write(to, &scales.into_iter().map(|s| 1.0 / s).collect::<Vec<_>>())?;
                    summary.copied += 1;
                }
                &Job::Weight { layer, expert, projection } => {
                    let (from, into) = (&layers[layer], &outputs[layer]);
                    clock.next(&from.weight_name(expert, projection))?;
                    let specs = into.specs(expert, projection);
                    if to == ExpertFormat::Bf16 {
                        writer.write(&specs[0].name, &from.read_bf16(files, expert, projection)?)?;
                    } else {
                        let stored = match from.read_nvfp4(files, expert, projection)? {
                            Some(stored) => stored,
                            None => {
                                let amax = amaxes[&(layer, expert, projection == Projection::Down)];
                                let weight = from.read_bf16(files, expert, projection)?;
                                quantize(&weight, from.shape(projection), amax, tile)
                            }
                        };
                        writer.write(&specs[0].name, &stored.codes)?;
                        writer.write(&specs[1].name, &stored.scales)?;
                        writer.write(&specs[2].name, &[global_scale(to, stored.amax)])?;
                    }
                    summary.weights += 1;
                }
            }
            clock.done += job.bytes(files, &layers);
        }
        writer.finish()?;
        let name = files.file_name(at);
        weight_map.extend(specs.into_iter().map(|spec| (spec.name.clone(), (name.clone(), spec))));
    }
    place.finish(files, &weight_map)?;
    Ok(summary)
}

/// Tells how far the work is, and ends it if asked to.
struct Clock<'p> {
    done: u64,
    total: u64,
    progress: &'p mut dyn FnMut(ConvertProgress<'_>) -> bool,
}

impl Clock<'_> {
    fn next(&mut self, tensor: &str) -> Result<(), CheckpointError> {
        let Self { done, total, .. } = *self;
        if (self.progress)(ConvertProgress { done, total, tensor }) {
            return Ok(());
        }
        Err(CheckpointError::Interrupted { name: tensor.into() })
    }
}

impl Job {
    fn bytes(&self, files: &ModelFiles, layers: &[ExpertLayer]) -> u64 {
        let size = |name: &str| {
            let bits = |info: &super::TensorInfo| info.shape.iter().product::<usize>() * info.dtype.bitsize();
            files.info(name).map_or(0, |info| bits(info) as u64 / 8)
        };
        match self {
            Job::Copy(name) => size(name),
            Job::InputScale { .. } => 0,
            Job::Weight { layer, expert, projection } => {
                let layer = &layers[*layer];
                let whole = size(&layer.weight_name(*expert, *projection));
                match layer.naming {
                    Naming::Fused { .. } => {
                        let [n, k] = layer.shape(*projection);
                        (n * k * 2) as u64
                    }
                    _ => whole,
                }
            }
        }
    }

    fn specs(&self, files: &ModelFiles, outputs: &[ExpertLayer]) -> Result<Vec<TensorSpec>, CheckpointError> {
        match self {
            Job::Copy(name) => {
                let info = files.info(name)?;
                Ok(vec![TensorSpec::new(name, info.dtype, &info.shape)])
            }
            Job::InputScale { from, to } => {
                Ok(vec![TensorSpec::new(to, Dtype::F32, &files.info(from)?.shape)])
            }
            Job::Weight { layer, expert, projection } => Ok(outputs[*layer].specs(*expert, *projection)),
        }
    }
}

/// What becomes of each tensor of one file.
fn jobs(files: &ModelFiles, at: usize, layers: &[ExpertLayer], to: ExpertFormat) -> Vec<Job> {
    let mut jobs = vec![];
    for name in files.files()[at].names() {
        let copy = || Job::Copy(name.clone());
        // A number that is none was refused when the layers were found.
        let Ok(Some(found)) = ExpertName::parse(name) else {
            jobs.push(copy());
            continue;
        };
        let position = layers.iter().position(|layer| layer.prefix == found.prefix);
        let Some(index) = position.filter(|&at| layers[at].format != to) else {
            jobs.push(copy());
            continue;
        };
        let (layer, into) = (&layers[index], layers[index].converted(to));
        let of_weight = |expert, projection| Job::Weight { layer: index, expert, projection };
        let wanted =
            |expert: usize| layer.projections().filter(move |p| layer.weight_name(expert, *p) == *name);
        match (found.expert, found.part) {
            (None, _) if found.projection.ends_with("bias") => jobs.push(copy()),
            (None, _) => {
                jobs.extend((0..layer.experts).flat_map(|e| wanted(e).map(move |p| of_weight(e, p))))
            }
            (Some(expert), "weight" | "weight_packed") => {
                jobs.extend(wanted(expert).map(|p| of_weight(expert, p)))
            }
            (Some(_), "weight_scale" | "weight_scale_2" | "weight_global_scale") => {} // go with the weight
            (Some(expert), "input_scale" | "input_global_scale") => {
                let part = match into.format {
                    ExpertFormat::Bf16 => continue,
                    ExpertFormat::ModelOpt => "input_scale",
                    ExpertFormat::CompressedTensors => "input_global_scale",
                };
                let to = match name.rsplit_once('.') {
                    Some((stem, _)) => format!("{stem}.{part}"),
                    None => continue,
                };
                debug_assert!(expert < layer.experts);
                jobs.push(Job::InputScale { from: name.clone(), to });
            }
            _ => jobs.push(copy()),
        }
    }
    jobs
}

/// Codes and block scales of a finite weight under a given amax.
fn quantize(weight: &[bf16], [n, k]: [usize; 2], amax: f32, tile: Tile) -> StoredNvfp4 {
    let (global, blocks) = (GlobalScale::from_amax(amax), k / BLOCK);
    let block = |row: usize, at: usize| &weight[row * k + at * BLOCK..row * k + (at + 1) * BLOCK];
    let largest = |values: &[bf16]| values.iter().fold(0.0_f32, |amax, v| amax.max(v.to_f32().abs()));
    let (mut codes, mut scales) = (vec![0; n * k / 2], vec![0; n * blocks]);
    for row in 0..n {
        for at in 0..blocks {
            let amax = match tile {
                Tile::Row16 => largest(block(row, at)),
                // The same for all rows of a tile: taken from the first.
                Tile::Square16 if row % BLOCK == 0 => {
                    (row..row + BLOCK).map(|row| largest(block(row, at))).fold(0.0, f32::max)
                }
                Tile::Square16 => 0.0,
            };
            let scale = match tile {
                Tile::Square16 if row % BLOCK != 0 => scales[(row - 1) * blocks + at],
                _ => global.block_scale(amax),
            };
            scales[row * blocks + at] = scale;
            let multiplier = global.multiplier(scale);
            let code = |v: bf16| e2m1::encode(v.to_f32() * multiplier);
            let out = &mut codes[(row * k + at * BLOCK) / 2..];
            for (byte, pair) in out.iter_mut().zip(block(row, at).as_chunks::<2>().0) {
                *byte = e2m1::pack(code(pair[0]), code(pair[1]));
            }
        }
    }
    StoredNvfp4 { codes, scales, amax }
}

/// Where the output is made: a file beside the target, or a folder that is renamed at the end.
enum Place {
    File(PathBuf),
    Folder { making: tempfile::TempDir, target: PathBuf },
}

impl Place {
    fn new(files: &ModelFiles, target: &Path) -> Result<Self, CheckpointError> {
        if !files.path().is_dir() {
            return Ok(Self::File(target.to_path_buf()));
        }
        let parent = match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let making = tempfile::Builder::new()
            .prefix(".moe4-")
            .tempdir_in(parent)
            .map_err(|source| write_error(target, source))?;
        Ok(Self::Folder { making, target: target.to_path_buf() })
    }

    fn file(&self, files: &ModelFiles, at: usize) -> PathBuf {
        match self {
            Self::File(target) => target.clone(),
            Self::Folder { making, .. } => making.path().join(files.file_name(at)),
        }
    }

    /// The index, the folder's other files, and the target's name.
    fn finish(
        self,
        files: &ModelFiles,
        weight_map: &BTreeMap<String, (String, TensorSpec)>,
    ) -> Result<(), CheckpointError> {
        let Self::Folder { making, target } = self else { return Ok(()) };
        let finish = || -> io::Result<()> {
            let tensors =
                |name: &str| files.files().iter().any(|f| f.path().file_name() == Some(name.as_ref()));
            for entry in fs::read_dir(files.path())? {
                let entry = entry?;
                let name = entry.file_name().to_string_lossy().into_owned();
                if entry.file_type()?.is_file() && name != INDEX && !tensors(&name) {
                    fs::copy(entry.path(), making.path().join(&name))?;
                }
            }
            if files.path().join(INDEX).exists() {
                let bytes =
                    |spec: &TensorSpec| spec.shape.iter().product::<usize>() * spec.dtype.bitsize() / 8;
                let total: usize = weight_map.values().map(|(_, spec)| bytes(spec)).sum();
                let map: BTreeMap<_, _> = weight_map.iter().map(|(name, (file, _))| (name, file)).collect();
                let index = serde_json::json!({"metadata": {"total_size": total}, "weight_map": map});
                fs::write(making.path().join(INDEX), serde_json::to_string_pretty(&index)?)?;
            }
            Ok(())
        };
        finish().map_err(|source| write_error(&target, source))?;
        #[cfg(unix)]
        {
            // Temporary folders are private.
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            fs::set_permissions(making.path(), mode).map_err(|source| write_error(&target, source))?;
        }
        fs::rename(making.path(), &target).map_err(|source| write_error(&target, source))?;
        let _ = making.keep(); // it has another name now
        Ok(())
    }
}

fn write_error(target: &Path, source: io::Error) -> CheckpointError {
    CheckpointError::Write { path: target.to_path_buf(), source }
}
