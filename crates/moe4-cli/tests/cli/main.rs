//! The `moe4` program from outside: files in, files, text and exit code out.

mod bench;
mod common;
mod convert;
mod doctor;
mod how_it_works;
mod plan;
mod quantize;
mod readme;
mod replay;
mod train;
