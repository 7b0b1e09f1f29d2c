//! NVRTC with its sources: a variant and an architecture in, a cubin and the compiler's messages out.
#![forbid(unsafe_code)]

use std::ffi::CString;
use std::fmt;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use super::error::{CompileError, LoadError};
use super::jobs::{Event, Job, Progress, watched_jobs};
use super::key::{Inputs, Key};
use super::library::{self, Library, Place, Version};
use super::raw::Input;
use super::watch::{Compiling, Watch, watched};
use super::{Arch, Cache};
use crate::sources::{HEADERS, SOURCES};
use crate::variant::Variant;

/// Options of every kernel. Those on arithmetic repeat the defaults, except `--fmad`: bytes are promised, so they
/// are said aloud. `--no-source-include` keeps the current folder out of the include path.
const OPTIONS: &[&str] = &[
    "--std=c++17",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--no-source-include",
    "-lineinfo",
];

/// Kernels and headers, by name: see [`crate::sources`].
#[derive(Clone, Copy, Debug)]
pub struct Sources {
    /// Base name and text of each kernel's file.
    pub kernels: &'static [(&'static str, &'static str)],
    /// Name, as an `#include` says it, and text of each header.
    pub headers: &'static [(&'static str, &'static str)],
}

impl Sources {
    /// Those of this crate.
    pub const EMBEDDED: Self = Self { kernels: SOURCES, headers: HEADERS };
}

/// A compiled variant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// The code, for one architecture.
    pub cubin: Vec<u8>,
    /// The compiler's warnings and remarks; empty if there are none.
    pub log: String,
}

/// NVRTC and the sources that it compiles. Several threads may compile at once.
pub struct Compiler {
    library: Library,
    sources: Sources,
    watch: Watch,
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NVRTC {} at {}", self.version(), self.path().display())
    }
}

impl Compiler {
    /// Loads NVRTC from where the loader looks or where the CUDA toolkit puts it.
    ///
    /// # Errors
    ///
    /// [`LoadError`] with every place tried.
    pub fn load() -> Result<Self, LoadError> {
        Self::load_searching(&[])
    }

    /// Loads NVRTC from `folders`, in order, or else as [`Compiler::load`]; for folders that may hold it, as those of
    /// Python wheels.
    ///
    /// # Errors
    ///
    /// [`LoadError`] with every place tried.
    pub fn load_searching(folders: &[PathBuf]) -> Result<Self, LoadError> {
        Self::from_places(&library::all_places(folders))
    }

    /// Loads NVRTC from `folder` and from nowhere else: a compiler chosen by name is not replaced silently.
    ///
    /// # Errors
    ///
    /// [`LoadError`] with what is wrong with the folder.
    pub fn load_from(folder: &Path) -> Result<Self, LoadError> {
        Self::from_places(&[Place::Folder(folder.into())])
    }

    fn from_places(places: &[Place]) -> Result<Self, LoadError> {
        Ok(Self { library: library::find(places)?, sources: Sources::EMBEDDED, watch: Watch::default() })
    }

    /// The same compiler with other sources.
    #[must_use]
    pub fn with_sources(self, sources: Sources) -> Self {
        Self { sources, ..self }
    }

    /// The same compiler, whose compilations through a cache are told to `watch`.
    #[must_use]
    pub fn with_watch(self, watch: Watch) -> Self {
        Self { watch, ..self }
    }

    /// Version of NVRTC.
    pub fn version(&self) -> Version {
        self.library.version
    }

    /// Path of NVRTC, or the bare name that the loader resolved.
    pub fn path(&self) -> &Path {
        &self.library.path
    }

    /// Compiles a variant, without the cache.
    ///
    /// # Errors
    ///
    /// [`CompileError`] with the variant, the architecture and the compiler's messages.
    pub fn compile(&self, variant: &Variant, arch: Arch) -> Result<Compiled, CompileError> {
        self.compile_with(variant, arch, &[])
    }

    /// As [`Compiler::compile`], with more options, such as `--ptxas-options=-v`.
    ///
    /// # Errors
    ///
    /// As [`Compiler::compile`].
    pub fn compile_with(
        &self,
        variant: &Variant,
        arch: Arch,
        extra: &[&str],
    ) -> Result<Compiled, CompileError> {
        let source = self.source(variant, arch)?;
        let c_string = |text: &str, place: &str| {
            let nul = |_| CompileError::Nul { variant: variant.clone(), arch, place: place.into() };
            CString::new(text).map_err(nul)
        };
        let headers = self.sources.headers.iter();
        let headers = headers.map(|(name, text)| Ok((c_string(name, name)?, c_string(text, name)?)));
        let options = options(variant, arch, extra);
        let options = options.iter().map(|option| c_string(option, option));
        let input = Input {
            name: &c_string(&file_name(variant), "the kernel's name")?,
            source: &c_string(source, "the source")?,
            headers: &headers.collect::<Result<Vec<_>, CompileError>>()?,
            options: &options.collect::<Result<Vec<_>, CompileError>>()?,
        };
        let nvrtc = &self.library.nvrtc;
        let (cubin, log) = nvrtc.compile(&input).map_err(|failure| CompileError::Nvrtc {
            variant: variant.clone(),
            arch,
            call: failure.call,
            code: failure.code,
            reason: nvrtc.error_string(failure.code),
            log: failure.log,
        })?;
        Ok(Compiled { cubin, log })
    }

    /// The cubin of a variant, from the cache or compiled into it. The compiler's messages go to the log.
    ///
    /// # Errors
    ///
    /// As [`Compiler::compile`]; a cache that does not work is none.
    pub fn compile_cached(
        &self,
        cache: &Cache,
        variant: &Variant,
        arch: Arch,
    ) -> Result<Vec<u8>, CompileError> {
        // What it may break off is a list: this one has been asked for by itself.
        self.cubin(cache, variant, arch, &|event| {
            let _ = self.watch.tell(event);
        })
    }

    fn cubin<'a>(
        &self,
        cache: &Cache,
        variant: &'a Variant,
        arch: Arch,
        tell: &dyn Fn(Compiling<'a>),
    ) -> Result<Vec<u8>, CompileError> {
        cache.get_or_compile(&self.key(variant, arch)?, || {
            let compiled = watched(tell, variant, arch, || self.compile(variant, arch))?;
            if !compiled.log.trim().is_empty() {
                log::warn!("{variant} for {arch}:\n{}", compiled.log.trim_end());
            }
            Ok(compiled.cubin)
        })
    }

    /// The cubins of all `variants` for one architecture, in their order, through the cache.
    /// `progress` is called after each; [`super::log_progress`] writes it to the log. The [`Watch`] is told on this thread,
    /// and may stop it.
    ///
    /// # Errors
    ///
    /// The first variant's that fails, as [`Compiler::compile`]; [`CompileError::Stopped`].
    pub fn load_all(
        &self,
        cache: &Cache,
        variants: &[Variant],
        arch: Arch,
        mut progress: impl FnMut(Progress<'_>),
    ) -> Result<Vec<Vec<u8>>, CompileError> {
        let jobs: Vec<Job> = variants.iter().map(|variant| Job { variant: variant.clone(), arch }).collect();
        let threads = std::thread::available_parallelism().map_or(1, Into::into);
        let mut done = 0;
        let cubins = watched_jobs(
            &jobs,
            threads,
            |job, tell| self.cubin(cache, &job.variant, job.arch, tell),
            |event| match event {
                Event::Compiling(event) => self.watch.tell(event),
                Event::Done(job) => {
                    done = job.done;
                    progress(job);
                    ControlFlow::Continue(())
                }
            },
        );
        cubins.ok_or(CompileError::Stopped { done, total: jobs.len() })?.into_iter().collect()
    }

    /// The key of a variant's cubin in a [`Cache`].
    ///
    /// # Errors
    ///
    /// [`CompileError`] if the kernel has no source or NVRTC does not know the architecture.
    pub fn key(&self, variant: &Variant, arch: Arch) -> Result<Key, CompileError> {
        Ok(Key::of(&Inputs {
            name: &file_name(variant),
            source: self.source(variant, arch)?,
            headers: self.sources.headers,
            version: self.version(),
            arch,
            options: &options(variant, arch, &[]),
        }))
    }

    /// The source of a variant that this compiler can compile for `arch`.
    fn source(&self, variant: &Variant, arch: Arch) -> Result<&'static str, CompileError> {
        if !self.library.archs.contains(&arch.number()) {
            let (version, supported) = (self.version(), self.library.archs.clone());
            return Err(CompileError::UnsupportedArch { arch, version, supported });
        }
        let kernels = self.sources.kernels;
        kernels.iter().find(|(name, _)| *name == variant.kernel).map(|(_, text)| *text).ok_or_else(|| {
            let known = kernels.iter().map(|(name, _)| *name).collect();
            CompileError::UnknownKernel { kernel: variant.kernel, known }
        })
    }
}

fn file_name(variant: &Variant) -> String {
    format!("{}.cu", variant.kernel)
}

fn options(variant: &Variant, arch: Arch, extra: &[&str]) -> Vec<String> {
    let defines = variant.defines.iter().map(|(name, value)| format!("-D{name}={value}"));
    std::iter::once(format!("--gpu-architecture={arch}"))
        .chain(OPTIONS.iter().map(ToString::to_string))
        .chain(defines)
        .chain(extra.iter().map(ToString::to_string))
        .collect()
}
