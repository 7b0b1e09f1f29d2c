//! Many compilations on a few threads, with progress.
//!
//! NVRTC may be called by several threads at once as long as each has its own program. The kernels' check compares
//! cubins from several threads with those from one, byte for byte.
#![forbid(unsafe_code)]

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use super::{Arch, Compiling};
use crate::variant::Variant;

/// One compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The kernel with its choices.
    pub variant: Variant,
    /// The architecture.
    pub arch: Arch,
}

/// How far a list of compilations is, told after each.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Compilations that are done, with this one.
    pub done: usize,
    /// All of them.
    pub total: usize,
    /// The one just done.
    pub job: &'a Job,
}

/// Does `work` for each job on up to `threads` threads; the results are in the jobs' order, `progress` is called on
/// the caller's thread in the order in which they end.
pub fn compile_jobs<R: Send>(
    jobs: &[Job],
    threads: usize,
    work: impl Fn(&Job) -> R + Sync,
    mut progress: impl FnMut(Progress<'_>),
) -> Vec<R> {
    let told = |event: Event<'_>| {
        if let Event::Done(done) = event {
            progress(done);
        }
        ControlFlow::Continue(())
    };
    watched_jobs(jobs, threads, |job, _| work(job), told).expect("nobody stops them")
}

/// What [`watched_jobs`] tells.
pub(super) enum Event<'a> {
    /// What a job's work said.
    Compiling(Compiling<'a>),
    /// A job is done.
    Done(Progress<'a>),
}

/// What a worker sends to the caller's thread.
enum Message<'a, R> {
    Compiling(Compiling<'a>),
    Done(usize, R),
}

/// As [`compile_jobs`], for work that says when it compiles. All is told on the caller's thread, whose signals and locals
/// the one who is told may need. If that breaks off, no other job begins, and there are no results when those that have
/// begun are done.
pub(super) fn watched_jobs<'a, R: Send>(
    jobs: &'a [Job],
    threads: usize,
    work: impl Fn(&'a Job, &dyn Fn(Compiling<'a>)) -> R + Sync,
    mut told: impl FnMut(Event<'_>) -> ControlFlow<()>,
) -> Option<Vec<R>> {
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    let mut results: Vec<(usize, R)> = std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, jobs.len().max(1)) {
            let (sender, next, work) = (sender.clone(), &next, &work);
            scope.spawn(move || {
                while let Some((index, job)) = numbered(jobs, next.fetch_add(1, Ordering::Relaxed)) {
                    // The receiver is gone only if the caller's `told` panicked: then nobody wants the rest.
                    let result = work(job, &|event| drop(sender.send(Message::Compiling(event))));
                    if sender.send(Message::Done(index, result)).is_err() {
                        break;
                    }
                }
            });
        }
        // The workers hold the other senders: the loop ends when the last of them does.
        drop(sender);
        let mut results = Vec::with_capacity(jobs.len());
        let mut flow = ControlFlow::Continue(());
        for message in receiver {
            let event = match message {
                Message::Compiling(event) => Event::Compiling(event),
                Message::Done(index, result) => {
                    results.push((index, result));
                    Event::Done(Progress { done: results.len(), total: jobs.len(), job: &jobs[index] })
                }
            };
            if flow.is_continue() {
                flow = told(event);
                if flow.is_break() {
                    next.store(jobs.len(), Ordering::Relaxed);
                }
            }
        }
        flow.is_continue().then_some(results)
    })?;
    results.sort_unstable_by_key(|(index, _)| *index);
    Some(results.into_iter().map(|(_, result)| result).collect())
}

fn numbered(jobs: &[Job], index: usize) -> Option<(usize, &Job)> {
    jobs.get(index).map(|job| (index, job))
}

/// Writes progress to the log; the default of whoever has no better place to show it.
pub fn log_progress(progress: Progress<'_>) {
    let Progress { done, total, job } = progress;
    log::info!("kernels {done}/{total}: {} for {}", job.variant, job.arch);
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::{Arch, Compiling, Event, Job, compile_jobs, watched_jobs};
    use crate::variant::Variant;

    fn jobs(count: u32) -> Vec<Job> {
        let arch = Arch::new(9, 0).unwrap();
        let variant = |n| Variant { kernel: "k", defines: vec![("N", n)] };
        (0..count).map(|n| Job { variant: variant(n), arch }).collect()
    }

    #[test]
    fn results_keep_the_order_and_progress_counts_up() {
        for threads in [0, 1, 2, 7] {
            let mut counts = Vec::new();
            let work = |job: &Job| job.variant.defines[0].1;
            let results = compile_jobs(&jobs(5), threads, work, |progress| {
                assert_eq!(progress.total, 5);
                counts.push(progress.done);
            });
            assert_eq!(results, [0, 1, 2, 3, 4]);
            assert_eq!(counts, [1, 2, 3, 4, 5]);
        }
        assert!(compile_jobs(&[], 2, |_| (), |_| panic!("no job")).is_empty());
    }

    #[test]
    fn two_threads_work_at_once() {
        let both = Barrier::new(2);
        compile_jobs(&jobs(2), 2, |_| both.wait(), |_| ());
    }

    #[test]
    fn all_is_told_on_the_callers_thread() {
        let (jobs, caller) = (jobs(4), std::thread::current().id());
        let (mut begun, mut done) = (0, 0);
        let work = |variant: &Variant| {
            assert_ne!(std::thread::current().id(), caller);
            variant.defines[0].1
        };
        let results = watched_jobs(
            &jobs,
            2,
            |job, tell| {
                tell(Compiling::Begins(&job.variant));
                work(&job.variant)
            },
            |event| {
                assert_eq!(std::thread::current().id(), caller);
                match event {
                    Event::Compiling(_) => begun += 1,
                    Event::Done(_) => done += 1,
                }
                ControlFlow::Continue(())
            },
        );
        assert_eq!((results, begun, done), (Some(vec![0, 1, 2, 3]), 4, 4));
    }

    #[test]
    fn no_job_begins_once_it_is_broken_off() {
        let (jobs, begun) = (jobs(1000), AtomicUsize::new(0));
        let mut told = 0;
        let work = || {
            begun.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(1));
        };
        let results = watched_jobs(
            &jobs,
            2,
            |_, _| work(),
            |_| {
                told += 1;
                ControlFlow::Break(())
            },
        );
        assert!(results.is_none());
        assert_eq!(told, 1, "nothing is told after that");
        assert!(begun.into_inner() < 1000);
    }
}
