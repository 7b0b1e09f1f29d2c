//! Many compilations on a few threads, with progress.
//!
//! NVRTC may be called by several threads at once as long as each has its own program. The kernels' check compares
//! cubins from several threads with those from one, byte for byte.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use super::Arch;
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
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    let mut results: Vec<(usize, R)> = std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, jobs.len().max(1)) {
            let (sender, next, work) = (sender.clone(), &next, &work);
            scope.spawn(move || {
                while let Some((index, job)) = numbered(jobs, next.fetch_add(1, Ordering::Relaxed)) {
                    // The receiver is gone only if the caller's `progress` panicked: then nobody wants the rest.
                    if sender.send((index, work(job))).is_err() {
                        break;
                    }
                }
            });
        }
        // The workers hold the other senders: the loop ends when the last of them does.
        drop(sender);
        let mut results = Vec::with_capacity(jobs.len());
        for (index, result) in receiver {
            results.push((index, result));
            progress(Progress { done: results.len(), total: jobs.len(), job: &jobs[index] });
        }
        results
    });
    results.sort_unstable_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
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
    use std::sync::Barrier;

    use super::{Arch, Job, compile_jobs};
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
}
