//! The CUDA backend as commands open it: a kernel that has to be compiled first shows on a terminal.

use std::sync::{Mutex, PoisonError};

use indicatif::ProgressBar;
use moe4_cuda::compile::{Compiling, Watch};
use moe4_cuda::driver::Unavailable;
use moe4_cuda::{Cuda, CudaOptions};

use crate::output;

/// The backend on one of the visible GPUs.
pub(crate) fn open(ordinal: usize) -> Result<Cuda, Unavailable> {
    Cuda::open(&CudaOptions { ordinal, watch: watch(), ..CudaOptions::default() })
}

fn watch() -> Watch {
    let spinner = Mutex::new(None::<ProgressBar>);
    Watch::new(move |event| {
        let mut spinner = spinner.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(former) = spinner.take() {
            former.finish_and_clear();
        }
        if let Compiling::Begins(variant) = event {
            *spinner = Some(output::spinner(format!("compiling {variant}")));
        }
    })
}

/// CUDA's way to write a version as a number, told as people do: 13.0 of 13000.
pub(crate) fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::version;

    #[test]
    fn versions() {
        assert_eq!(version(13_000), "13.0");
        assert_eq!(version(12_080), "12.8");
    }
}
