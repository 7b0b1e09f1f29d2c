//! Work on threads of our own while the interpreter is free, and Ctrl-C while it lasts.
//!
//! ```text
//! release the interpreter's lock
//! pool: work(backend)            this thread: wait; every 50 ms run Python's signal handlers
//!                                a handler raised: set the flag; the work ends before its next pass
//! take the lock again, return the result or raise what the handler raised
//! ```
//!
//! The pool is made for the number of threads that torch is set to, and made anew in a forked child, which inherits
//! no threads.

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moe4::kernels::cpu::Cpu;
use moe4::kernels::{Host, Interruptible};
use moe4::mlp::RandomSeed;
use moe4::tensor::Groups;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::dlpack;
use crate::place::{Checked, Failure, Place};
use crate::seed::Seed;
use crate::splits::Splits;
use crate::tensor::{Device, misplaced};
use crate::torch::{Handed, Torch};

const POLL: Duration = Duration::from_millis(50);

/// Host memory and the CPU backend.
pub(crate) struct OnCpu;

impl Place for OnCpu {
    type Memory = Host;
    type Backend<'b> = Interruptible<'b, Cpu>;

    fn run<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Interruptible<'_, Cpu>) -> Result<R, Failure> + Send,
    ) -> PyResult<R> {
        on_cpu(py, work)
    }

    fn groups(_: &Interruptible<'_, Cpu>, splits: &Splits) -> Result<Groups, Failure> {
        Ok(splits.on_host()?.clone())
    }

    fn groups_for_any(backend: &Interruptible<'_, Cpu>, splits: &Splits) -> Result<Groups, Failure> {
        Self::groups(backend, splits)
    }

    fn seeded<R>(
        _: &Interruptible<'_, Cpu>,
        seed: &Seed,
        work: impl FnOnce(RandomSeed) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        match seed {
            Seed::Host(seed) => work(*seed),
            Seed::Gpu(tensor) => Err(misplaced("seed", tensor.device(), Device::Cpu)).checked(),
        }
    }

    fn hand_over<'py, T: Handed>(
        &self,
        py: Python<'py>,
        mut buffer: Vec<T>,
        shape: &[usize],
    ) -> PyResult<Bound<'py, PyAny>> {
        assert_eq!(buffer.len(), shape.iter().product::<usize>(), "a buffer of shape {shape:?}");
        let data = buffer.as_mut_ptr().cast();
        // SAFETY: the elements of a vector stay where they are when the vector moves into its box, which owns them
        // alone from now on; the length was checked.
        let capsule = unsafe { dlpack::capsule::<T>(py, data, shape, dlpack::CPU, Box::new(buffer))? };
        Torch::get(py)?.unpack(capsule)
    }
}

fn on_cpu<R: Send>(
    py: Python<'_>,
    work: impl FnOnce(&Interruptible<'_, Cpu>) -> Result<R, Failure> + Send,
) -> PyResult<R> {
    let pool = pool(Torch::get(py)?.threads(py)?.max(1))?;
    let outcome = py.detach(|| {
        let (stop, backend) = (AtomicBool::new(false), Cpu::new());
        let (sender, receiver) = sync_channel(1);
        let mut raised = None;
        let mut result = None;
        pool.in_place_scope(|scope| {
            let backend = Interruptible::new(&backend, &stop);
            scope.spawn(move |_| {
                // Nobody listens only if this thread's caller panicked.
                sender.send(work(&backend)).ok();
            });
            loop {
                match receiver.recv_timeout(POLL) {
                    Ok(outcome) => result = Some(outcome),
                    Err(RecvTimeoutError::Timeout) => {
                        if raised.is_none() {
                            raised = Python::attach(|py| py.check_signals()).err();
                            stop.store(raised.is_some(), Ordering::Relaxed);
                        }
                        continue;
                    }
                    // The work panicked, and the scope will go on with that.
                    Err(RecvTimeoutError::Disconnected) => {}
                }
                break;
            }
        });
        (raised, result)
    });
    match outcome {
        (Some(raised), _) => Err(raised),
        (None, Some(result)) => result.map_err(Failure::raise),
        (None, None) => Err(PyRuntimeError::new_err("the work ended without a result")),
    }
}

struct Made {
    process: u32,
    threads: usize,
    pool: Arc<ThreadPool>,
}

/// Locked only under the interpreter's lock, which a fork also takes: a child never finds it locked.
static POOL: Mutex<Option<Made>> = Mutex::new(None);

fn pool(threads: usize) -> PyResult<Arc<ThreadPool>> {
    let mut made = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    match made.take() {
        Some(kept) if kept.process == process && kept.threads == threads => {
            let pool = Arc::clone(&kept.pool);
            *made = Some(kept);
            return Ok(pool);
        }
        // Its threads stayed in the parent: there is nothing to end.
        Some(inherited) if inherited.process != process => mem::forget(inherited),
        _ => {}
    }
    let pool =
        ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|at| format!("moe4-{at}"))
            .build()
            .map_err(|error| PyRuntimeError::new_err(format!("cannot start {threads} threads: {error}")))?;
    let pool = Arc::new(pool);
    *made = Some(Made { process, threads, pool: Arc::clone(&pool) });
    Ok(pool)
}
