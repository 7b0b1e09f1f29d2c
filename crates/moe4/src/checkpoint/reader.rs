//! Reading one tensor at a time.

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::{CheckpointError, Element, printable};

/// The format's own limit on the header.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Dtype and shape of a tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its dimensions, slowest first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Position of its first byte in the file.
    start: u64,
}

/// An open safetensors file whose header has been read and checked.
///
/// ```
/// use moe4::checkpoint::{Dtype, TensorFile, TensorSpec, TensorWriter};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("tensors.safetensors");
/// let mut writer = TensorWriter::create(&path, &[TensorSpec::new("prob", Dtype::F32, &[3])], &[])?;
/// writer.write("prob", &[0.5_f32, 0.25, 0.25])?;
/// writer.finish()?;
///
/// let mut file = TensorFile::open(&path)?;
/// assert_eq!(file.names(), ["prob"]);
/// assert_eq!(file.read::<f32>("prob")?, [0.5, 0.25, 0.25]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    names: Vec<String>,
    tensors: HashMap<String, TensorInfo>,
    metadata: HashMap<String, String>,
}

/// The largest dimension of a tensor without elements: sizes derived from it must not overflow.
const MAX_EMPTY_DIM: usize = 1 << 24;

/// The keys of a JSON object, repeated ones included, which a map would merge.
struct Keys(Vec<String>);

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = Keys;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Keys, A::Error> {
                let mut keys = vec![];
                while let Some((key, IgnoredAny)) = map.next_entry()? {
                    keys.push(key);
                }
                Ok(Keys(keys))
            }
        }
        deserializer.deserialize_map(Visit)
    }
}

impl TensorFile {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Open`] or [`CheckpointError::Read`] if the system refuses;
    /// [`CheckpointError::NotSafetensors`] if the header is malformed or contradicts itself;
    /// [`CheckpointError::Length`] if the file is shorter or longer than its header says.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref().to_path_buf();
        let not_safetensors = |reason: String| CheckpointError::NotSafetensors { path: path.clone(), reason };
        let open_error = |source| CheckpointError::Open { path: path.clone(), source };
        // Asked before opening: a pipe without a writer would block.
        if !std::fs::metadata(&path).map_err(open_error)?.is_file() {
            return Err(not_safetensors("it is not a regular file".into()));
        }
        let mut file = File::open(&path).map_err(open_error)?;
        let read_error = |source| CheckpointError::Read { path: path.clone(), source };
        let length = file.metadata().map_err(read_error)?.len();
        let header = read_header(&mut file, length).map_err(read_error)?.map_err(not_safetensors)?;
        let parsed = |error: serde_json::Error| not_safetensors(one_line(&error.to_string()));
        let Keys(keys) = serde_json::from_slice(&header).map_err(parsed)?;
        let mut seen = std::collections::HashSet::new();
        if let Some(twice) = keys.iter().find(|key| !seen.insert(*key)) {
            return Err(not_safetensors(format!("its header names '{}' twice", printable(twice))));
        }
        let metadata: Metadata = serde_json::from_slice(&header).map_err(parsed)?;
        for (name, info) in metadata.tensors() {
            // The size of the file bounds every other tensor.
            let empty = info.shape.contains(&0);
            if let Some(dim) = info.shape.iter().find(|&&dim| empty && dim > MAX_EMPTY_DIM) {
                let reason =
                    format!("tensor '{}' has no elements, but a dimension of {dim}", printable(&name));
                return Err(not_safetensors(reason));
            }
        }

        let data_start = 8 + header.len() as u64;
        let expected = data_start + metadata.data_len() as u64;
        if length != expected {
            return Err(CheckpointError::Length { path, expected, actual: length });
        }
        let names = metadata.offset_keys();
        let tensors = metadata
            .tensors()
            .into_iter()
            .map(|(name, info)| {
                let start = data_start + info.data_offsets.0 as u64;
                (name, TensorInfo { dtype: info.dtype, shape: info.shape.clone(), start })
            })
            .collect();
        let metadata = metadata.metadata().clone().unwrap_or_default();
        Ok(Self { path, file, names, tensors, metadata })
    }

    /// The file's path, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of the tensors, in the order of their data.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Whether the file has a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The free-form text entries of the header.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// Dtype and shape of a tensor.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::MissingTensor`], which lists the names that exist.
    pub fn info(&self, name: &str) -> Result<&TensorInfo, CheckpointError> {
        self.tensors.get(name).ok_or_else(|| CheckpointError::MissingTensor {
            path: self.path.clone(),
            name: name.into(),
            available: self.names.clone(),
        })
    }

    /// Reads a tensor, row-major.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::MissingTensor`]; [`CheckpointError::WrongDtype`] if the tensor's dtype is none of
    /// `T::DTYPES`; [`CheckpointError::Read`] if the system refuses.
    pub fn read<T: Element>(&mut self, name: &str) -> Result<Vec<T>, CheckpointError> {
        self.check::<T>(name, None)?;
        let info = self.info(name)?;
        // The header was checked against the file's length, so this product is bounded by it.
        let mut values = vec![T::zeroed(); info.shape.iter().product()];
        let start = info.start;
        self.read_at(start, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// Reads the bytes of a tensor of any dtype.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::MissingTensor`]; [`CheckpointError::Read`] if the system refuses.
    pub fn read_bytes(&mut self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let info = self.info(name)?;
        let bits = info.shape.iter().product::<usize>() * info.dtype.bitsize();
        let (mut bytes, start) = (vec![0; bits / 8], info.start);
        self.read_at(start, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads one of the equal parts that the first dimension cuts a tensor into, such as one expert.
    ///
    /// # Errors
    ///
    /// Those of [`TensorFile::read_shaped`].
    ///
    /// # Panics
    ///
    /// If there is no such part.
    pub fn read_part<T: Element>(
        &mut self,
        name: &str,
        shape: &[usize],
        part: usize,
    ) -> Result<Vec<T>, CheckpointError> {
        self.check::<T>(name, Some(shape))?;
        let info = self.info(name)?;
        assert!(part < shape[0], "part {part} of {}", shape[0]);
        let len: usize = shape[1..].iter().product();
        let (mut values, start) = (vec![T::zeroed(); len], info.start + (part * len * size_of::<T>()) as u64);
        self.read_at(start, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    fn read_at(&mut self, start: u64, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        self.file
            .seek(SeekFrom::Start(start))
            .and_then(|_| self.file.read_exact(bytes))
            .map_err(|source| CheckpointError::Read { path: self.path.clone(), source })
    }

    fn check<T: Element>(&self, name: &str, shape: Option<&[usize]>) -> Result<(), CheckpointError> {
        let info = self.info(name)?;
        if let Some(expected) = shape.filter(|&shape| info.shape != shape) {
            return Err(CheckpointError::WrongShape {
                path: self.path.clone(),
                name: name.into(),
                expected: expected.to_vec(),
                actual: info.shape.clone(),
            });
        }
        if !T::DTYPES.contains(&info.dtype) {
            return Err(CheckpointError::WrongDtype {
                path: self.path.clone(),
                name: name.into(),
                expected: T::DTYPES.to_vec(),
                actual: info.dtype,
            });
        }
        Ok(())
    }

    /// Reads a tensor that must have a given shape.
    ///
    /// # Errors
    ///
    /// Those of [`TensorFile::read`], and [`CheckpointError::WrongShape`].
    pub fn read_shaped<T: Element>(
        &mut self,
        name: &str,
        shape: &[usize],
    ) -> Result<Vec<T>, CheckpointError> {
        self.check::<T>(name, Some(shape))?;
        self.read(name)
    }
}

/// The header's bytes; the outer error is the system's, the inner one says why this is no header.
fn read_header(file: &mut File, length: u64) -> io::Result<Result<Vec<u8>, String>> {
    if length < 8 {
        return Ok(Err(format!("it has {length} bytes, and the header's length alone takes 8")));
    }
    let mut prefix = [0; 8];
    file.read_exact(&mut prefix)?;
    let header_length = u64::from_le_bytes(prefix);
    if header_length > MAX_HEADER_BYTES {
        return Ok(Err(format!(
            "its first 8 bytes announce a header of {header_length} bytes; the limit is {MAX_HEADER_BYTES}"
        )));
    }
    if header_length > length - 8 {
        return Ok(Err(format!(
            "its first 8 bytes announce a header of {header_length} bytes, but only {} follow",
            length - 8
        )));
    }
    let mut header = vec![0; header_length as usize];
    file.read_exact(&mut header)?;
    Ok(Ok(header))
}

/// Header text can hold anything, so its errors can, too: messages stay on one line.
fn one_line(text: &str) -> String {
    text.replace(char::is_control, " ")
}
