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
use moe4::kernels::{Backend, Error, Host, Interruptible};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::raise;
use crate::exchange::Exchange;
use crate::torch::Torch;

const POLL: Duration = Duration::from_millis(50);

/// A kind of device: where tensors are, and the backend that works on them there.
///
/// The functions of this module are written for any place; which one a call is for, its tensors say.
pub(crate) trait Place {
    type Memory: Exchange;
    type Backend<'b>: Backend<Memory = Self::Memory>;

    /// Runs `work` without the interpreter's lock.
    fn run<R: Send>(
        py: Python<'_>,
        work: impl FnOnce(&Self::Backend<'_>) -> Result<R, Failure> + Send,
    ) -> PyResult<R>;
}

/// What can go wrong in work: in the library, or in a check of a tensor.
pub(crate) enum Failure {
    Library(Error),
    Python(PyErr),
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure::Library(error.into())
    }
}

impl Failure {
    fn raise(self) -> PyErr {
        match self {
            Failure::Library(error) => raise(error),
            Failure::Python(error) => error,
        }
    }
}

/// Lets a check of a tensor fail within work.
pub(crate) trait Checked<T> {
    fn checked(self) -> Result<T, Failure>;
}

impl<T> Checked<T> for PyResult<T> {
    fn checked(self) -> Result<T, Failure> {
        self.map_err(Failure::Python)
    }
}

/// Host memory and the CPU backend.
pub(crate) struct OnCpu;

impl Place for OnCpu {
    type Memory = Host;
    type Backend<'b> = Interruptible<'b, Cpu>;

    fn run<R: Send>(
        py: Python<'_>,
        work: impl FnOnce(&Interruptible<'_, Cpu>) -> Result<R, Failure> + Send,
    ) -> PyResult<R> {
        on_cpu(py, work)
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
