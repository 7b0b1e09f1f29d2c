//! `moe4._moe4`: the library behind the Python package, without opinions of its own.
//!
//! Functions take torch tensors, check them, run without the interpreter's lock, and return torch tensors. What is
//! comfortable (defaults, other array types, autograd, modules) is written in Python, in `python/moe4`.
//!
//! | file | what |
//! |---|---|
//! | `torch` | the objects of torch that are needed, looked up once |
//! | `tensor`, `splits` | a torch tensor, checked: name, dtype, shape, device |
//! | `exchange` | torch's tensors as views of each kind of memory |
//! | `place` | what a function needs of a device: a backend, and results as tensors |
//! | `cpu` | threads, and Ctrl-C while they work; `dlpack` hands over their results |
//! | `cuda` | torch's streams and torch's memory on a GPU |
//! | `options` | the operator's configuration as text |
//! | `quantizers`, `operator`, `delayed`, `checkpoint`, `doctor` | the functions |

mod checkpoint;
mod cpu;
mod cuda;
mod delayed;
mod dlpack;
mod doctor;
mod error;
mod exchange;
mod operator;
mod options;
mod place;
mod quantizers;
mod seed;
mod splits;
mod tensor;
mod torch;

use pyo3::prelude::*;

/// Outputs are large and short-lived, which the system's allocator is slow at.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[pymodule(gil_used = true)]
fn _moe4(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(doctor::doctor, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::compile_kernels, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::raise_faults, module)?)?;
    module.add_function(wrap_pyfunction!(quantizers::hadamard_amax, module)?)?;
    module.add_function(wrap_pyfunction!(quantizers::group_quantize, module)?)?;
    module.add_function(wrap_pyfunction!(quantizers::quantize_weights, module)?)?;
    module.add_function(wrap_pyfunction!(quantizers::dequantize, module)?)?;
    module.add_function(wrap_pyfunction!(operator::check_options, module)?)?;
    module.add_function(wrap_pyfunction!(operator::plan, module)?)?;
    module.add_function(wrap_pyfunction!(operator::saved_forms, module)?)?;
    module.add_function(wrap_pyfunction!(operator::forward, module)?)?;
    module.add_function(wrap_pyfunction!(operator::backward, module)?)?;
    module.add_function(wrap_pyfunction!(delayed::backward_delayed, module)?)?;
    module.add_class::<delayed::DelayedWeightGrads>()?;
    module.add_function(wrap_pyfunction!(checkpoint::find_experts, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint::read_experts, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint::write_experts, module)?)?;
    Ok(())
}
