//! Writing one tensor at a time, and all or nothing.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use tempfile::NamedTempFile;

use super::{CheckpointError, Element};

/// A tensor to be written: declared before any data, because the header comes first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name, unique in the file.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its dimensions, slowest first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// A tensor of this name, dtype and shape.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: &[usize]) -> Self {
        Self { name: name.into(), dtype, shape: shape.to_vec() }
    }

    fn bytes(&self) -> Option<u64> {
        let elements = self.shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim as u64))?;
        let bits = elements.checked_mul(self.dtype.bitsize() as u64)?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

/// A safetensors file in the making.
///
/// The data goes to a temporary file beside the target; [`finish`](Self::finish) syncs it and renames it. A
/// writer that is dropped before that removes it and leaves the target as it was.
#[derive(Debug)]
pub struct TensorWriter {
    target: PathBuf,
    temporary: NamedTempFile,
    tensors: HashMap<String, Slot>,
}

#[derive(Debug)]
struct Slot {
    spec: TensorSpec,
    start: u64,
    bytes: u64,
    written: bool,
}

impl TensorWriter {
    /// Starts a file with these tensors and free-form text entries (`key`, `value`), and writes its header.
    ///
    /// Tensors with wider elements come first in the file, so that each is aligned to its element; among equals
    /// the given order is kept. The same arguments give the same bytes.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::BadName`] for a name that occurs twice, is reserved by the format, or whose size
    /// overflows; [`CheckpointError::NotAFile`] if the target exists and is a folder or a device;
    /// [`CheckpointError::Write`] if the system refuses.
    pub fn create(
        target: impl AsRef<Path>,
        tensors: &[TensorSpec],
        metadata: &[(&str, String)],
    ) -> Result<Self, CheckpointError> {
        let target = resolve(target.as_ref())?;
        let (slots, data_bytes) = lay_out(&target, tensors)?;
        let header = header(&slots, metadata);
        let data_start = 8 + header.len() as u64;
        let start_file = || {
            let mut temporary = temporary_beside(&target)?;
            temporary.write_all(&(header.len() as u64).to_le_bytes())?;
            temporary.write_all(header.as_bytes())?;
            // Zero-sized tensors at the end are not written, and the length must be right nevertheless.
            temporary.as_file().set_len(data_start + data_bytes)?;
            Ok(temporary)
        };
        let temporary =
            start_file().map_err(|source| CheckpointError::Write { path: target.clone(), source })?;
        let tensors = slots
            .into_iter()
            .map(|slot| (slot.spec.name.clone(), Slot { start: data_start + slot.start, ..slot }))
            .collect();
        Ok(Self { target, temporary, tensors })
    }

    /// Writes the data of one declared tensor, row-major; tensors may come in any order.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::DataMismatch`] if the tensor was not declared, was declared with another dtype or
    /// number of elements, or was written before; [`CheckpointError::Write`] if the system refuses, for example
    /// because the disk is full.
    pub fn write<T: Element>(&mut self, name: &str, data: &[T]) -> Result<(), CheckpointError> {
        let given = || format!("{} elements of {:?}", data.len(), T::DTYPES);
        self.write_if(name, bytemuck::cast_slice(data), |dtype| T::DTYPES.contains(&dtype), given)
    }

    /// [`write`](Self::write) for a tensor of any dtype, as its bytes.
    ///
    /// # Errors
    ///
    /// Those of [`write`](Self::write).
    pub fn write_bytes(&mut self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.write_if(name, bytes, |_| true, || format!("{} bytes", bytes.len()))
    }

    fn write_if(
        &mut self,
        name: &str,
        bytes: &[u8],
        fits: impl Fn(Dtype) -> bool,
        given: impl Fn() -> String,
    ) -> Result<(), CheckpointError> {
        let path = &self.target;
        let mismatch = |declared: String, given: String| CheckpointError::DataMismatch {
            path: path.clone(),
            name: name.into(),
            declared,
            given,
        };
        let Some(slot) = self.tensors.get_mut(name) else {
            return Err(mismatch("nothing".into(), given()));
        };
        if slot.written {
            return Err(mismatch("one tensor".into(), "a second one".into()));
        }
        if !fits(slot.spec.dtype) || bytes.len() as u64 != slot.bytes {
            return Err(mismatch(format!("{} {:?}", slot.spec.dtype, slot.spec.shape), given()));
        }
        self.temporary
            .seek(SeekFrom::Start(slot.start))
            .and_then(|_| self.temporary.write_all(bytes))
            .map_err(|source| CheckpointError::Write { path: path.clone(), source })?;
        slot.written = true;
        Ok(())
    }

    /// Syncs the data to disk and gives the file its name, replacing a file of that name.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Unwritten`] if a declared tensor misses; [`CheckpointError::Write`] if the system
    /// refuses. In both cases the target stays as it was.
    pub fn finish(self) -> Result<(), CheckpointError> {
        let mut missing: Vec<String> =
            self.tensors.into_values().filter(|slot| !slot.written).map(|slot| slot.spec.name).collect();
        if !missing.is_empty() {
            missing.sort();
            return Err(CheckpointError::Unwritten { path: self.target, names: missing });
        }
        let target = self.target;
        let publish = |temporary: NamedTempFile| {
            temporary.as_file().sync_all()?;
            temporary.persist(&target).map_err(|error| error.error)?;
            sync_folder(folder_of(&target));
            Ok(())
        };
        publish(self.temporary).map_err(|source| CheckpointError::Write { path: target.clone(), source })
    }
}

/// The regular file to replace, or a name that is free. A symbolic link stands for the file it points to.
fn resolve(target: &Path) -> Result<PathBuf, CheckpointError> {
    let write_error = |source| CheckpointError::Write { path: target.to_path_buf(), source };
    if target.is_symlink() {
        return resolve(&fs::canonicalize(target).map_err(write_error)?);
    }
    match fs::metadata(target) {
        Ok(status) if !status.is_file() => Err(CheckpointError::NotAFile { path: target.to_path_buf() }),
        Ok(_) => Ok(target.to_path_buf()),
        Err(error) if error.kind() == io::ErrorKind::NotFound && target.file_name().is_some() => {
            Ok(target.to_path_buf())
        }
        Err(error) => Err(write_error(error)),
    }
}

/// Places of the tensors in the data section, and its length.
fn lay_out(target: &Path, tensors: &[TensorSpec]) -> Result<(Vec<Slot>, u64), CheckpointError> {
    let bad = |name: &str, reason| CheckpointError::BadName {
        path: target.to_path_buf(),
        name: name.into(),
        reason,
    };
    let mut ordered: Vec<&TensorSpec> = tensors.iter().collect();
    // Dtypes are ordered by alignment; the sort is stable.
    ordered.sort_by_key(|spec| std::cmp::Reverse(spec.dtype));
    let mut names = std::collections::HashSet::new();
    let mut slots = Vec::with_capacity(tensors.len());
    let mut end = 0u64;
    for spec in ordered {
        if spec.name == "__metadata__" {
            return Err(bad(&spec.name, "the format keeps this name for itself"));
        }
        if !names.insert(&spec.name) {
            return Err(bad(&spec.name, "two tensors would have this name"));
        }
        let too_large = "its size in bytes is not a 64-bit number";
        let bytes = spec.bytes().ok_or_else(|| bad(&spec.name, too_large))?;
        slots.push(Slot { spec: spec.clone(), start: end, bytes, written: false });
        end = end.checked_add(bytes).ok_or_else(|| bad(&spec.name, too_large))?;
    }
    Ok((slots, end))
}

/// The JSON header, padded with blanks so that the data starts at a multiple of 8 bytes.
fn header(slots: &[Slot], metadata: &[(&str, String)]) -> String {
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let mut entries = Vec::with_capacity(slots.len() + 1);
    if !metadata.is_empty() {
        let pairs: Vec<_> =
            metadata.iter().map(|(key, value)| format!("{}:{}", quoted(key), quoted(value))).collect();
        entries.push(format!("\"__metadata__\":{{{}}}", pairs.join(",")));
    }
    for Slot { spec, start, bytes, .. } in slots {
        let shape: Vec<_> = spec.shape.iter().map(usize::to_string).collect();
        entries.push(format!(
            "{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{start},{}]}}",
            quoted(&spec.name),
            spec.dtype,
            shape.join(","),
            start + bytes
        ));
    }
    let mut text = format!("{{{}}}", entries.join(","));
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    text
}

fn temporary_beside(target: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    // A short name: the target's own may already be as long as the system allows.
    builder.prefix(".moe4-").suffix(".tmp");
    // Temporary files are private by default; the finished one is as readable as any new file.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder_of(target))
}

fn folder_of(target: &Path) -> &Path {
    match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Brings the rename itself to the disk. Systems that cannot sync a folder lose the new name in a power cut at
/// worst, never half of a file, so their refusal is no error.
fn sync_folder(folder: &Path) {
    if let Ok(folder) = File::open(folder) {
        folder.sync_all().ok();
    }
}
