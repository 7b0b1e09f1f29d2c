//! The visible NVIDIA GPUs: what they are, and whether kernels can be compiled for them.

use moe4_cuda::Cuda;
use moe4_cuda::compile::{Cache, Compiler};
use moe4_cuda::driver::{Device, Unavailable};

use crate::cuda;

/// One GPU.
pub(super) struct Gpu {
    /// What it is, or why it is not used.
    pub(super) text: String,
    /// Its backend, if it is used.
    pub(super) backend: Option<Cuda>,
}

/// All of them, or why there are none.
pub(super) fn find() -> Result<Vec<Gpu>, Unavailable> {
    match Device::count()? {
        0 => Err(Unavailable::NoDevice { ordinal: 0, count: 0 }),
        count => Ok((0..count).map(open).collect()),
    }
}

fn open(ordinal: usize) -> Gpu {
    // The backend knows the device as well, but not where it has no compiler.
    let device = match Device::open(ordinal) {
        Ok(device) => device,
        Err(why) => return Gpu { text: format!("GPU {ordinal} is off: {}", in_a_line(&why)), backend: None },
    };
    match cuda::open(ordinal) {
        Ok(backend) => Gpu { text: device.facts().to_string(), backend: Some(backend) },
        Err(why) => Gpu { text: format!("{}; off: {}", device.facts(), in_a_line(&why)), backend: None },
    }
}

/// The lines about CUDA, by name and value.
pub(super) fn lines(found: &Result<Vec<Gpu>, Unavailable>) -> Vec<(&'static str, String)> {
    let gpus = match found {
        Ok(gpus) => gpus,
        Err(why) => return vec![("cuda backend", format!("off: {}", in_a_line(why)))],
    };
    let nvrtc = match Compiler::load() {
        Ok(compiler) => format!("{} from {}", compiler.version(), compiler.path().display()),
        Err(why) => in_a_line(&why),
    };
    let cache = Cache::for_user();
    let cache = cache.folder().map_or_else(
        || "nowhere: neither XDG_CACHE_HOME nor HOME is set to an absolute path".into(),
        |folder| folder.display().to_string(),
    );
    let gpus = gpus.iter().map(|gpu| ("cuda backend", gpu.text.clone()));
    gpus.chain([("NVRTC", nvrtc), ("compiled kernels in", cache)]).collect()
}

/// A reason may be a list.
pub(super) fn in_a_line(reason: &impl ToString) -> String {
    reason.to_string().lines().map(str::trim).collect::<Vec<_>>().join(" ")
}
