//! The examples run.

#![cfg(feature = "cpu")]

#[path = "../examples/micro_batches.rs"]
mod micro_batches;

#[test]
fn micro_batches_runs() {
    micro_batches::main().expect("the example runs");
}
