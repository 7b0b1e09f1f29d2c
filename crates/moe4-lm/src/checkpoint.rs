//! A run's state in one safetensors file: every parameter under its name (FP32), and AdamW's state as the byte
//! tensor `optimizer.burnpack`, so that both change together.
//!
//! The file's metadata says what it is: `format`, `precision`, `step` and the whole `config` as TOML. Nothing
//! else is needed to go on: batches and stochastic rounding follow from the seed and the step.

use std::collections::HashMap;
use std::path::Path;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, Tensor, TensorData};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::Error;
use crate::config::Precision;
use crate::files::write_whole;
use crate::model::Transformer;

const FORMAT: &str = "moe4-lm checkpoint 1";
const OPTIMIZER: &str = "optimizer.burnpack";

/// What identifies a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) precision: Precision,
    /// Steps done.
    pub(crate) step: usize,
    /// The run's `config.toml`.
    pub(crate) config: String,
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
    let metadata = HashMap::from([
        ("format".to_owned(), FORMAT.to_owned()),
        ("precision".to_owned(), header.precision.name().to_owned()),
        ("step".to_owned(), header.step.to_string()),
        ("config".to_owned(), header.config.clone()),
    ]);
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
    let field = |name: &str| {
        let value = metadata.metadata().as_ref().and_then(|fields| fields.get(name));
        value.ok_or_else(|| foreign(format!("its metadata has no {name}")))
    };
    for (name, value) in
        [("format", FORMAT), ("precision", expected.precision.name()), ("config", &expected.config)]
    {
        if field(name)? != value {
            return Err(foreign(format!("its {name} is not this run's")));
        }
    }
    let step = field("step")?.parse().map_err(|_| foreign("its step is no number".to_owned()))?;

    let tensors = SafeTensors::deserialize(&file).map_err(|error| foreign(error.to_string()))?;
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
