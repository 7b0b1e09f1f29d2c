//! The `moe4` program from outside: files in, files, text and exit code out.

mod common;
mod quantize;
mod readme;
mod replay;
