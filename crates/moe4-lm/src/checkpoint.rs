//! A run's state in one safetensors file: every parameter under its name (FP32), and AdamW's state as the byte
//! tensor `optimizer.burnpack`, so that both change together.
//!
//! The file's metadata holds a [`Header`] as TOML under `moe4_lm`. Nothing else is needed to go on: batches and
//! stochastic rounding follow from the seed and the step.

use std::collections::HashMap;
use std::path::Path;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, Tensor, TensorData};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::config::{Precision, RunConfig};
use crate::files::{fnv1a, write_whole};
use crate::model::Transformer;

const HEADER: &str = "moe4_lm";
const OPTIMIZER: &str = "optimizer.burnpack";
/// FNV-1a over all tensors' bytes and names, in hexadecimal: burn trusts what it is given.
const CHECKSUM: &str = "moe4_lm_checksum";

/// What a checkpoint belongs to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Header {
    /// Of this layout of the file.
    pub(crate) version: u32,
    pub(crate) precision: Precision,
    /// Steps done.
    pub(crate) step: usize,
    pub(crate) config: RunConfig,
}

impl Header {
    pub(crate) fn new(precision: Precision, step: usize, config: &RunConfig) -> Self {
        Self { version: 1, precision, step, config: config.clone() }
    }
}

pub(crate) fn save(
    path: &Path,
    header: &Header,
    model: &Transformer,
    optimizer: &ModuleOptimizer,
) -> Result<(), Error> {
    let failed = |error: String| Error::io("write", path)(std::io::Error::other(error));
    let mut parameters = Collect::default();
    model.visit(&mut parameters);
    let optimizer = optimizer.into_bytes().map_err(|error| failed(error.to_string()))?;

    let mut views = Vec::with_capacity(parameters.tensors.len() + 1);
    for (name, shape, values) in &parameters.tensors {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytemuck::cast_slice(values));
        views.push((name.as_str(), view.map_err(|error| failed(error.to_string()))?));
    }
    let view = TensorView::new(Dtype::U8, vec![optimizer.len()], &optimizer);
    views.push((OPTIMIZER, view.map_err(|error| failed(error.to_string()))?));
    let text = toml::to_string(header).map_err(|error| failed(error.to_string()))?;
    let checksum = checksum(views.iter().map(|(name, view)| (*name, view.data())));
    let metadata = HashMap::from([(HEADER.to_owned(), text), (CHECKSUM.to_owned(), checksum)]);
    let file = safetensors::serialize(views, Some(metadata)).map_err(|error| failed(error.to_string()))?;
    write_whole(path, &file)
}

/// Fills `model` and `optimizer`, made for the same configuration, and returns the steps done.
pub(crate) fn load(
    path: &Path,
    expected: &Header,
    model: Transformer,
    optimizer: ModuleOptimizer,
) -> Result<(usize, Transformer, ModuleOptimizer), Error> {
    let foreign = |reason: String| Error::foreign(path, reason);
    let file = std::fs::read(path).map_err(Error::io("read", path))?;
    let (_, metadata) = SafeTensors::read_metadata(&file).map_err(|error| foreign(error.to_string()))?;
    let header = metadata.metadata().as_ref().and_then(|fields| fields.get(HEADER));
    let header = header.ok_or_else(|| foreign(format!("its metadata has no {HEADER}")))?;
    let header: Header = toml::from_str(header).map_err(|error| foreign(error.message().to_owned()))?;
    let step = header.step;
    if header != (Header { step, ..expected.clone() }) {
        return Err(foreign("it was saved by a run with other settings".to_owned()));
    }
    if step > header.config.training.steps {
        return Err(foreign(format!("it is at step {step}, past the run's last")));
    }

    let tensors = SafeTensors::deserialize(&file).map_err(|error| foreign(error.to_string()))?;
    let found = checksum(tensors.iter().map(|(name, view)| (name, view.data())));
    if metadata.metadata().as_ref().and_then(|fields| fields.get(CHECKSUM)) != Some(&found) {
        return Err(foreign("its contents do not match their checksum; the file is damaged".to_owned()));
    }
    let mut restore = Restore { path: Vec::new(), tensors: &tensors, missing: None };
    let model = model.map(&mut restore);
    if let Some(reason) = restore.missing {
        return Err(foreign(reason));
    }
    let state = tensors.tensor(OPTIMIZER).map_err(|error| foreign(error.to_string()))?;
    let state = Bytes::from_bytes_vec(state.data().to_vec());
    let optimizer = optimizer.from_bytes(state).map_err(|error| foreign(error.to_string()))?;
    Ok((step, model, optimizer))
}

/// Over all tensors in the order of their names, which the file's own order does not enter.
fn checksum<'a>(tensors: impl Iterator<Item = (&'a str, &'a [u8])>) -> String {
    let mut tensors: Vec<_> = tensors.collect();
    tensors.sort_by_key(|(name, _)| *name);
    let parts = tensors.into_iter().flat_map(|(name, data)| [name.as_bytes(), data]);
    format!("{:016x}", fnv1a(parts))
}

/// Collects every parameter with its dotted name.
#[derive(Default)]
struct Collect {
    path: Vec<String>,
    tensors: Vec<(String, Vec<usize>, Vec<f32>)>,
}

impl ModuleVisitor for Collect {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.val();
        let shape = tensor.dims().to_vec();
        self.tensors.push((self.path.join("."), shape, crate::model::values(tensor)));
    }
}

/// Replaces every parameter by the tensor of its name, keeping its identity.
struct Restore<'a> {
    path: Vec<String>,
    tensors: &'a SafeTensors<'a>,
    /// Why the first unusable parameter is unusable.
    missing: Option<String>,
}

impl ModuleMapper for Restore<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let name = self.path.join(".");
        let shape = param.val().dims();
        match self.tensors.tensor(&name) {
            Ok(view) if view.dtype() == Dtype::F32 && view.shape() == shape => {
                let values: Vec<f32> = bytemuck::pod_collect_to_vec(view.data());
                let data = TensorData::new(values, shape);
                let value = Tensor::from_data(data, &param.val().device()).require_grad();
                Param::initialized(param.id, value)
            }
            found => {
                let got = found
                    .map_or("missing".to_owned(), |view| format!("{:?} {:?}", view.dtype(), view.shape()));
                self.missing.get_or_insert(format!("{name} is {got}, expected F32 {shape:?}"));
                param
            }
        }
    }
}
