//! The backend on a GPU: one binary, so that a single file can be carried to a machine that has one.
//!
//! These tests are left out where there is no GPU. Run them one after the other, since some of them look at the memory
//! of the whole device:
//!
//! ```text
//! cargo test -p moe4-cuda --test gpu -- --ignored --test-threads 1
//! ```
//!
//! | module | what |
//! |---|---|
//! | `conformance` | the suite that every backend passes |
//! | `bytes`, `ranges` | large tensors and rare values, byte for byte as on the CPU |
//! | `quantize_weights` | weights in many shapes, in tensors apart and in one; in a graph |
//! | `products`, `few_rows` | products and their epilogues over several tiles; of few rows, from packed weights |
//! | `graphs`, `product_graphs` | passes recorded once and launched with other splits |
//! | `faults` | what is wrong with splits, indices, addresses, captures, and small shapes |
//! | `large` | more than 2^31 elements |
//! | `threads`, `borrowed` | several backends at once; memory and streams of others |
//! | `pages` | pages of a paged stash, beside the stream of the passes |
//! | `cache` | compiled kernels on disk |
//! | `sanitizer` | each kernel variant once, on small shapes |
//! | `soak` | ten thousand steps twice, with the same bits, in the same memory |
//! | `no_driver` | a machine without a driver; needs no GPU |
//! | `cases`, `support` | what the tests share |

mod borrowed;
mod bytes;
mod cache;
mod cases;
mod conformance;
mod faults;
mod few_rows;
mod graphs;
mod large;
mod no_driver;
mod pages;
mod product_graphs;
mod products;
mod quantize_weights;
mod ranges;
mod sanitizer;
mod soak;
mod support;
mod threads;
