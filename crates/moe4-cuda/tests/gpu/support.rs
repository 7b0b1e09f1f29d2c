//! The backend under test, and what fails a test.

use half::bf16;
use moe4::kernels::Error;
use moe4::kernels::activation::{Activation, GluLayout};
use moe4_conformance::compare::bf16_bits;
use moe4_conformance::data::Random;
use moe4_conformance::{Failure, Outcome};
use moe4_cuda::catalog::{activation_variants, copy_variants};
use moe4_cuda::driver::CallError;
use moe4_cuda::{Cuda, CudaOptions, Products};
use std::sync::OnceLock;

/// One backend for most tests: kernels are loaded once, and the context stays while others come and go.
pub(crate) fn cuda() -> &'static Cuda {
    static CUDA: OnceLock<Cuda> = OnceLock::new();
    CUDA.get_or_init(|| prepared(another(), Products::Fastest))
}

/// With the kernels that take longest to compile, all at once.
fn prepared(cuda: Cuda, products: Products) -> Cuda {
    let arch = cuda.device().facts().arch;
    let products = if arch.has_wgmma() { products } else { Products::Portable };
    let of_choice = |(activation, layout)| activation_variants(&activation, layout, products);
    let variants: Vec<_> = every_epilogue().flat_map(of_choice).chain(copy_variants()).collect();
    cuda.prepare(&variants).unwrap_or_else(|e| panic!("{e}"));
    cuda
}

/// Activations, each with the layouts that make a difference to it.
pub(crate) fn every_epilogue() -> impl Iterator<Item = (Activation, GluLayout)> {
    Activation::all().into_iter().flat_map(|activation| {
        let layouts = if activation.is_gated() { &GluLayout::ALL[..] } else { &GluLayout::ALL[..1] };
        layouts.iter().map(move |&layout| (activation, layout))
    })
}

/// One whose products are those for any GPU.
pub(crate) fn portable() -> &'static Cuda {
    static PORTABLE: OnceLock<Cuda> = OnceLock::new();
    PORTABLE.get_or_init(|| {
        let options = CudaOptions { products: Products::Portable, ..CudaOptions::default() };
        prepared(Cuda::open(&options).unwrap_or_else(|e| panic!("{e}")), Products::Portable)
    })
}

/// A backend on a stream of its own.
pub(crate) fn another() -> Cuda {
    Cuda::new().unwrap_or_else(|e| panic!("{e}"))
}

/// Fails the test with the message of the failure.
#[track_caller]
pub(crate) fn must(outcome: Outcome) {
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}

/// A failed call as the failure of a test.
pub(crate) fn called<T>(outcome: Result<T, CallError>) -> Result<T, Failure> {
    outcome.map_err(|e| Failure::new(e.to_string()))
}

/// A refusal as misuse whose message holds `text`.
pub(crate) fn refused<T>(outcome: Result<T, Error>, text: &str) -> Outcome {
    match outcome {
        Err(Error::Misuse(e)) if e.to_string().contains(text) => Ok(()),
        Err(e) => Err(Failure::new(format!("expected misuse that says '{text}', got: {e}"))),
        Ok(_) => Err(Failure::new(format!("expected misuse that says '{text}', got none"))),
    }
}

/// Rows of `experts` experts that are as uneven as routing gets: the n-th largest has 1/n of the largest's, in a random
/// order, some have a single one or none.
pub(crate) fn skewed(experts: usize, live: usize, seed: u64) -> Vec<usize> {
    let weight = |e: usize| if e % 5 == 3 { 0.0 } else { 1.0 / (e + 1) as f64 };
    let total: f64 = (0..experts).map(weight).sum();
    let mut splits: Vec<usize> = (0..experts).map(|e| (live as f64 * weight(e) / total) as usize).collect();
    if experts > 4 {
        splits[4] = 1;
    }
    // What rounding lost, or the single row took too much, is the largest expert's.
    let others: usize = splits[1..].iter().sum();
    splits[0] = live - others;
    let mut random = Random::new(seed);
    for i in (1..experts).rev() {
        splits.swap(i, random.below(i + 1));
    }
    splits
}

/// Equal bits, except that any NaN is as good as another: of sums, which NaN comes out is not promised.
pub(crate) fn bf16_values(tensor: &str, shape: &[usize], expected: &[bf16], got: &[bf16]) -> Outcome {
    let one_nan =
        |x: &[bf16]| -> Vec<bf16> { x.iter().map(|&v| if v.is_nan() { bf16::NAN } else { v }).collect() };
    bf16_bits(tensor, shape, &one_nan(expected), &one_nan(got))
}
