//! `doctor`: what the package was built with and what runs here.

use moe4::kernels::Backend;
use moe4::kernels::cpu::{Cpu, Isa};
use pyo3::prelude::*;

use crate::torch::Torch;

/// Facts as `(name, value)` pairs, in the order to show them.
#[pyfunction]
pub(crate) fn doctor(py: Python<'_>) -> PyResult<Vec<(&'static str, String)>> {
    let available: Vec<String> = Isa::available().iter().map(Isa::to_string).collect();
    let path = Cpu::new().capabilities().path;
    let isa = path.split(',').next().unwrap_or(&path);
    let threads = Torch::get(py)?.threads(py)?;
    Ok(vec![
        ("moe4", env!("CARGO_PKG_VERSION").into()),
        ("cpu kernels", format!("{isa}; the best of {}; same bytes on each", available.join(", "))),
        ("threads", format!("{threads}, as torch.get_num_threads() says; results do not depend on it")),
        ("gpu kernels", "none in this build: tensors have to be on the cpu".into()),
    ])
}
