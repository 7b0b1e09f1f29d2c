//! Small kernels whose outcome is known: that a fault is found is checked before its absence counts.
#![forbid(unsafe_code)]

use std::ops::ControlFlow;

use anyhow::{Result, anyhow, ensure};
use moe4_cuda::compile::{Arch, Cache, CompileError, Compiler, Job, Sources, Watch};
use moe4_cuda::variant::Variant;

use crate::compile_timed;
use crate::ptxas::Report;

const SOURCES: Sources = Sources {
    kernels: &[
        ("clean", include_str!("probes/clean.cu")),
        ("warns", include_str!("probes/warns.cu")),
        ("spills", include_str!("probes/spills.cu")),
        ("broken", include_str!("probes/broken.cu")),
    ],
    headers: &[
        ("probe.cuh", include_str!("probes/probe.cuh")),
        ("inner.cuh", include_str!("probes/inner.cuh")),
    ],
};

/// Runs the probes on every checked architecture and gives the compiler back with the embedded sources.
pub(crate) fn run(compiler: Compiler) -> Result<Compiler> {
    let compiler = compiler.with_sources(SOURCES);
    let jobs: Vec<Job> = ["clean", "warns", "spills", "broken"]
        .into_iter()
        .flat_map(|kernel| {
            let variant = Variant { kernel, defines: vec![("BIAS", 3)] };
            Arch::CHECKED.map(|arch| Job { variant: variant.clone(), arch })
        })
        .collect();
    println!("probes:");
    let results = compile_timed(&compiler, &jobs);
    for (job, (result, time)) in jobs.iter().zip(results) {
        let name = format!("probe {} for {}", job.variant.kernel, job.arch);
        if job.variant.kernel == "broken" {
            let found = matches!(&result, Err(CompileError::Nvrtc { log, .. }) if log.contains("undeclared"));
            ensure!(found, "{name}: expected the compiler's message on 'undeclared', got {result:?}");
            continue;
        }
        let compiled = result?;
        ensure!(compiled.cubin.starts_with(b"\x7fELF"), "{name}: the cubin is not an ELF file");
        let report =
            Report::of(&compiled.log, job.variant.kernel).map_err(|reason| anyhow!("{name}: {reason}"))?;
        let (warned, spilled) = (!report.complaints.is_empty(), report.usage.spills());
        let expected = (job.variant.kernel == "warns", job.variant.kernel == "spills");
        ensure!(
            (warned, spilled) == expected,
            "{name}: expected (warned, spilled) = {expected:?}, got {:?}:\n{}",
            (warned, spilled),
            compiled.log
        );
        if job.variant.kernel == "clean" {
            ensure!(report.usage.shared == 1024, "{name}: expected 1024 bytes shared, got {report:?}");
            let (registers, bytes) = (report.usage.registers, compiled.cubin.len());
            println!("  {}: {registers} registers, {bytes} bytes, {} ms", job.arch, time.as_millis());
        }
    }
    println!("probes: warnings, spills and errors are found");
    cached(&compiler)?;
    let compiler = stopped(compiler)?;
    Ok(compiler.with_sources(Sources::EMBEDDED))
}

/// Two compilations give the same bytes, and so does the cache, which then compiles no more.
fn cached(compiler: &Compiler) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let cache = Cache::at(folder.path());
    let variants = [3, 4].map(|bias| Variant { kernel: "clean", defines: vec![("BIAS", bias)] });
    for arch in Arch::CHECKED {
        let first = compiler.load_all(&cache, &variants, arch, |_| ())?;
        ensure!(first[0] != first[1], "cache: two variants for {arch} have the same cubin");
        for (variant, cubin) in variants.iter().zip(&first) {
            let kept = cache.get_or_compile(&compiler.key(variant, arch)?, || {
                Err(anyhow!("cache: {variant} for {arch} was not kept"))
            })?;
            ensure!(*cubin == kept, "cache: {variant} for {arch} was kept with other bytes");
            let again = compiler.compile(variant, arch)?.cubin;
            ensure!(*cubin == again, "{variant} for {arch}: two compilations differ");
        }
    }
    println!("probes: compilations repeat to the byte and are kept");
    Ok(())
}

/// A watch is told on the thread that asked, and can break a list off.
fn stopped(compiler: Compiler) -> Result<Compiler> {
    const COUNT: usize = 64;
    let folder = tempfile::tempdir()?;
    let variant = |bias| Variant { kernel: "clean", defines: vec![("BIAS", bias)] };
    let variants: Vec<_> = (0..COUNT as u32).map(variant).collect();
    let asking = std::thread::current().id();
    let compiler =
        compiler.with_watch(Watch::stopping(move |_| match std::thread::current().id() == asking {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }));
    let outcome = compiler.load_all(&Cache::at(folder.path()), &variants, Arch::CHECKED[0], |_| ());
    let stopped = matches!(outcome, Err(CompileError::Stopped { total: COUNT, .. }));
    ensure!(
        stopped,
        "watch: expected a list that is broken off, got {:?}",
        outcome.map(|cubins| cubins.len())
    );
    let compiled = std::fs::read_dir(folder.path())?.count();
    ensure!(compiled < COUNT, "watch: all {COUNT} variants were compiled nevertheless");
    println!("probes: a watch breaks a list off, after {compiled} of {COUNT}");
    Ok(compiler.with_watch(Watch::default()))
}
