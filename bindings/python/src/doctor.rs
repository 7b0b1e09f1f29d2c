//! `doctor`: what the package was built with and what runs here.

use moe4::kernels::Backend;
use moe4::kernels::cpu::{Cpu, Isa};
use moe4_cuda::compile::{Arch, Cache, Compiler};
use pyo3::prelude::*;

use crate::cuda::nvrtc_folders;
use crate::torch::Torch;

/// Facts as `(name, value)` pairs, in the order to show them.
#[pyfunction]
pub(crate) fn doctor(py: Python<'_>) -> PyResult<Vec<(String, String)>> {
    let available: Vec<String> = Isa::available().iter().map(Isa::to_string).collect();
    let path = Cpu::new().capabilities().path;
    let isa = path.split(',').next().unwrap_or(&path);
    let threads = Torch::get(py)?.threads(py)?;
    let mut facts = vec![
        ("moe4".into(), env!("CARGO_PKG_VERSION").into()),
        ("cpu kernels".into(), format!("{isa}; the best of {}; same bytes on each", available.join(", "))),
        (
            "threads".into(),
            format!("{threads}, as torch.get_num_threads() says; results do not depend on it"),
        ),
    ];
    facts.extend(gpus(py)?);
    Ok(facts)
}

/// As torch tells of them, so that no GPU is opened for this.
fn gpus(py: Python<'_>) -> PyResult<Vec<(String, String)>> {
    let cuda = py.import("torch")?.getattr("cuda")?;
    if !cuda.call_method0("is_available")?.extract::<bool>()? {
        let why = "none: torch sees no NVIDIA GPU; tensors have to be on the cpu";
        return Ok(vec![("gpu kernels".into(), why.into())]);
    }
    let mut facts = Vec::new();
    for ordinal in 0..cuda.call_method0("device_count")?.extract::<usize>()? {
        let name: String = cuda.call_method1("get_device_name", (ordinal,))?.extract()?;
        let (major, minor) = cuda.call_method1("get_device_capability", (ordinal,))?.extract()?;
        let kernels = match Arch::new(major, minor) {
            Ok(arch) => {
                format!("{arch}, products by {}", if arch.has_wgmma() { "wgmma" } else { "mma.sync" })
            }
            Err(reason) => format!("none: {reason}"),
        };
        facts.push((format!("cuda:{ordinal}"), format!("{name}; {kernels}")));
    }
    let folders = nvrtc_folders(py)?;
    let compiler = py.detach(|| Compiler::load_searching(&folders));
    facts.push(("nvrtc".into(), compiler.map_or_else(|e| e.to_string(), |compiler| format!("{compiler:?}"))));
    let cache = Cache::for_user();
    let folder = cache.folder().map(|folder| format!("{}, compiled kernels", folder.display()));
    facts.push((
        "cache".into(),
        folder.unwrap_or_else(|| "none: kernels are compiled in each process".into()),
    ));
    Ok(facts)
}
