//! A model in safetensors: one file, or a folder of shards with an index.
//!
//! ```text
//! model.safetensors                  one file, given itself or by its folder
//! model.safetensors.index.json       {"weight_map": {"layers.0.w": "model-00001-of-00002.safetensors", …}}
//! ```

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::Dtype;
use serde::Deserialize;

use super::{CheckpointError, Element, TensorFile, TensorInfo, printable};

pub(super) const INDEX: &str = "model.safetensors.index.json";
pub(super) const SINGLE: &str = "model.safetensors";

/// The files of a model, their headers read.
#[derive(Debug)]
pub struct ModelFiles {
    path: PathBuf,
    files: Vec<TensorFile>,
    /// Which file has a tensor.
    of: HashMap<String, usize>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl ModelFiles {
    /// Opens a file, or all files of a folder: those of its index, else its `model.safetensors`.
    ///
    /// # Errors
    ///
    /// Those of [`TensorFile::open`]; [`CheckpointError::BadModel`] if the folder has neither, the index is malformed,
    /// or index and files disagree on where a tensor is.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref().to_path_buf();
        let bad = |problem: String| CheckpointError::BadModel { path: path.clone(), problem };
        if !path.is_dir() {
            return Self::of_files(path.clone(), vec![TensorFile::open(&path)?]);
        }
        let index = path.join(INDEX);
        if !index.exists() {
            if !path.join(SINGLE).exists() {
                return Err(bad(format!("expected {INDEX} or {SINGLE} in this folder, found neither")));
            }
            return Self::of_files(path.clone(), vec![TensorFile::open(path.join(SINGLE))?]);
        }
        let text =
            fs::read(&index).map_err(|source| CheckpointError::Read { path: index.clone(), source })?;
        let Index { weight_map } =
            serde_json::from_slice(&text).map_err(|e| bad(format!("{INDEX} is malformed: {e}")))?;
        let mut names: Vec<&String> = weight_map.values().collect();
        names.sort();
        names.dedup();
        if let Some(outside) = names.iter().find(|name| Path::new(name).components().count() != 1) {
            return Err(bad(format!("{INDEX} names the file '{outside}', which is not in this folder")));
        }
        let files =
            names.iter().map(|name| TensorFile::open(path.join(name))).collect::<Result<Vec<_>, _>>()?;
        let model = Self::of_files(path.clone(), files)?;
        for (tensor, file) in &weight_map {
            let found = model.of.get(tensor).map(|&at| model.file_name(at));
            if found.as_deref() != Some(file) {
                let found = found.unwrap_or_else(|| "no file".into());
                let tensor = printable(tensor);
                return Err(bad(format!("{INDEX} says that '{tensor}' is in {file}, but {found} has it")));
            }
        }
        Ok(model)
    }

    fn of_files(path: PathBuf, files: Vec<TensorFile>) -> Result<Self, CheckpointError> {
        let mut of = HashMap::new();
        for (at, file) in files.iter().enumerate() {
            for name in file.names() {
                if of.insert(name.clone(), at).is_some() {
                    let problem = format!("two of its files have a tensor '{}'", printable(name));
                    return Err(CheckpointError::BadModel { path, problem });
                }
            }
        }
        Ok(Self { path, files, of })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files, in the order of their names.
    pub fn files(&self) -> &[TensorFile] {
        &self.files
    }

    /// The name of a file without its folder.
    pub(super) fn file_name(&self, at: usize) -> String {
        self.files[at].path().file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Names of all tensors, file after file.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().flat_map(|file| file.names()).map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.of.contains_key(name)
    }

    /// The file that has a tensor, or the path opened if none has.
    pub fn path_of(&self, name: &str) -> &Path {
        self.of.get(name).map_or(&self.path, |&at| self.files[at].path())
    }

    /// Dtype and shape of a tensor.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::MissingTensor`].
    pub fn info(&self, name: &str) -> Result<&TensorInfo, CheckpointError> {
        self.files[self.place(name)?].info(name)
    }

    /// Reads a tensor; see [`TensorFile::read_shaped`].
    ///
    /// # Errors
    ///
    /// Those of [`TensorFile::read_shaped`].
    pub fn read_shaped<T: Element>(
        &mut self,
        name: &str,
        shape: &[usize],
    ) -> Result<Vec<T>, CheckpointError> {
        let at = self.place(name)?;
        self.files[at].read_shaped(name, shape)
    }

    /// The bytes of a tensor of any dtype.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::MissingTensor`], [`CheckpointError::Read`].
    pub fn read_bytes(&mut self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let at = self.place(name)?;
        self.files[at].read_bytes(name)
    }

    /// A BF16, F16 or F32 tensor, rounded to BF16.
    ///
    /// # Errors
    ///
    /// Those of [`TensorFile::read_shaped`].
    pub fn read_bf16(&mut self, name: &str, shape: &[usize]) -> Result<Vec<bf16>, CheckpointError> {
        Ok(match self.info(name)?.dtype {
            Dtype::F32 => self.read_shaped::<f32>(name, shape)?.into_iter().map(bf16::from_f32).collect(),
            Dtype::F16 => {
                let values = self.read_shaped::<f16>(name, shape)?;
                values.into_iter().map(|v| bf16::from_f32(v.to_f32())).collect()
            }
            _ => self.read_shaped::<bf16>(name, shape)?,
        })
    }

    /// One of the equal parts of a BF16, F16 or F32 tensor, rounded to BF16; see [`TensorFile::read_part`].
    ///
    /// # Errors
    ///
    /// Those of [`TensorFile::read_part`].
    pub fn read_bf16_part(
        &mut self,
        name: &str,
        shape: &[usize],
        part: usize,
    ) -> Result<Vec<bf16>, CheckpointError> {
        let (dtype, at) = (self.info(name)?.dtype, self.place(name)?);
        let file = &mut self.files[at];
        Ok(match dtype {
            Dtype::F32 => file.read_part::<f32>(name, shape, part)?.into_iter().map(bf16::from_f32).collect(),
            Dtype::F16 => {
                let values = file.read_part::<f16>(name, shape, part)?;
                values.into_iter().map(|v| bf16::from_f32(v.to_f32())).collect()
            }
            _ => file.read_part::<bf16>(name, shape, part)?,
        })
    }

    fn place(&self, name: &str) -> Result<usize, CheckpointError> {
        self.of.get(name).copied().ok_or_else(|| CheckpointError::MissingTensor {
            path: self.path.clone(),
            name: name.into(),
            available: self.names().map(str::to_owned).collect(),
        })
    }
}
