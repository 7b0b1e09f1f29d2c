//! Several backends on one GPU, and several threads with one: the right bytes, and memory that does not leak.

use crate::cases::{Case, Made, Setting, settings};
use crate::support::{another, called, cuda, must, skewed};
use half::bf16;
use moe4::kernels::Backend;
use moe4::kernels::cpu::Cpu;
use moe4::tensor::Groups;
use moe4_conformance::data::{self, Kind};
use moe4_conformance::{Failure, InCase, Outcome};
use moe4_cuda::Cuda;
use std::thread;

/// A tensor with its settings and what the CPU makes of it.
struct Task {
    x: Vec<bf16>,
    cols: usize,
    groups: Groups,
    expected: Vec<(Setting, Made)>,
}

impl Task {
    fn new(seed: usize) -> Result<Self, Failure> {
        let (cols, rows) = ([272, 2048][seed % 2], 700);
        let groups =
            Groups::new(&skewed(8, rows - 3, seed as u64), rows).expect("all rows are some expert's");
        let x = data::tensor(Kind::ALL[seed % 4], rows * cols, 1100 + seed as u64);
        let made = |setting| Ok((setting, Case::new(&x, cols, &groups, setting).run(&Cpu::new())?));
        let expected = settings(110).into_iter().step_by(5).map(made).collect::<Result<_, Failure>>()?;
        Ok(Self { x, cols, groups, expected })
    }

    fn repeated(&self, cuda: &Cuda, times: usize) -> Outcome {
        for i in 0..times {
            for (setting, expected) in &self.expected {
                let case = Case::new(&self.x, self.cols, &self.groups, *setting);
                case.same(expected, &case.run(cuda)?).in_case(format!("run {i}, {setting:?}"))?;
            }
        }
        Ok(())
    }
}

fn at_once(backends: [&Cuda; 4]) -> Outcome {
    let tasks = (0..4).map(Task::new).collect::<Result<Vec<_>, Failure>>()?;
    thread::scope(|scope| {
        let running: Vec<_> = tasks
            .iter()
            .zip(backends)
            .map(|(task, cuda)| scope.spawn(move || task.repeated(cuda, 5)))
            .collect();
        let outcomes = running.into_iter().map(|thread| thread.join().expect("comparisons do not panic"));
        outcomes.enumerate().try_for_each(|(i, outcome)| outcome.in_case(format!("thread {i}")))
    })
}

#[test]
#[ignore = "needs a GPU"]
fn backends_of_several_threads() {
    let backends = [another(), another(), another(), another()];
    must(at_once(backends.each_ref()));
}

#[test]
#[ignore = "needs a GPU"]
fn one_backend_for_several_threads() {
    let one = another();
    must(at_once([&one; 4]));
}

/// Kernels that several threads need at the same time for the first time.
#[test]
#[ignore = "needs a GPU"]
fn a_first_use_by_several_threads() {
    let task = Task::new(5).unwrap_or_else(|e| panic!("{e}"));
    for _ in 0..5 {
        let fresh = another();
        thread::scope(|scope| {
            (0..4).for_each(|_| drop(scope.spawn(|| must(task.repeated(&fresh, 1)))));
        });
    }
}

/// The pool of the device keeps what was freed, so free memory settles at a level and stays there. The backend of the
/// other tests stays open, and with it the context.
#[test]
#[ignore = "needs a GPU"]
fn backends_that_come_and_go() {
    let task = Task::new(0).unwrap_or_else(|e| panic!("{e}"));
    let cycle = |i: usize| -> Outcome {
        let cuda = another();
        task.repeated(&cuda, 1)?;
        let x = cuda.upload(&task.x)?;
        let mut graph = cuda.capture(|| Ok(()))?;
        // SAFETY: the buffers of the capture are alive, and only this thread uses them.
        called(unsafe { graph.launch() })?;
        // Every other time, work is still on its way when everything is dropped.
        for _ in 0..20 * (i % 2) {
            cuda.duplicate(x.view())?;
        }
        Ok(())
    };
    let free = || {
        cuda().synchronize().unwrap_or_else(|e| panic!("{e}"));
        cuda().device().free_memory().unwrap_or_else(|e| panic!("{e}"))
    };
    (0..20).for_each(|i| must(cycle(i)));
    let settled = free();
    (0..200).for_each(|i| must(cycle(i).in_case(format!("cycle {i}"))));
    let (after, slack) = (free(), 8 << 20);
    assert!(
        after + slack >= settled,
        "free memory: expected about {settled} bytes after 200 cycles, got {after}"
    );
}
