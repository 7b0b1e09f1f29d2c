//! Facts about this machine, as the system tells them.

use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};

const UNKNOWN: &str = "unknown";

/// What the system knows of itself; `None` where it does not tell.
pub(crate) struct Machine {
    /// Name and version of the operating system.
    pub(crate) system: String,
    /// The processor's name.
    pub(crate) processor: Option<String>,
    /// Cores that this process may use.
    pub(crate) cores: Option<usize>,
    /// Main memory.
    pub(crate) memory: Option<MainMemory>,
}

/// Bytes of main memory.
pub(crate) struct MainMemory {
    pub(crate) total: u64,
    pub(crate) available: u64,
}

impl Machine {
    /// As it is now.
    pub(crate) fn detect() -> Self {
        let wanted = RefreshKind::nothing()
            .with_cpu(CpuRefreshKind::nothing())
            .with_memory(MemoryRefreshKind::nothing().with_ram());
        let system = System::new_with_specifics(wanted).ok();
        let model = system.as_ref().and_then(|s| s.cpus().first()).map(|cpu| cpu.brand().trim().to_owned());
        let memory = |s: &System| MainMemory { total: s.total_memory(), available: s.available_memory() };
        Self {
            system: System::long_os_version().unwrap_or_else(|_| std::env::consts::OS.into()),
            processor: model.filter(|name| !name.is_empty()),
            cores: std::thread::available_parallelism().ok().map(Into::into),
            memory: system.as_ref().map(memory),
        }
    }
}

/// Processor, memory and system.
pub(super) fn facts() -> Vec<(&'static str, String)> {
    let Machine { system, processor, cores, memory } = Machine::detect();
    let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64);
    let memory = memory.map(|m| format!("{}, {} available", gib(m.total), gib(m.available)));
    let unknown = || UNKNOWN.to_owned();
    vec![
        ("system", system),
        ("processor", format!("{} ({})", processor.unwrap_or_else(unknown), std::env::consts::ARCH)),
        ("cores to use", cores.map_or_else(unknown, |n| n.to_string())),
        ("vector extensions", extensions()),
        ("memory", memory.unwrap_or_else(unknown)),
    ]
}

#[cfg(target_arch = "x86_64")]
fn extensions() -> String {
    let known = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512dq", is_x86_feature_detected!("avx512dq")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512vbmi", is_x86_feature_detected!("avx512vbmi")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ];
    let found: Vec<_> = known.iter().filter(|(_, found)| *found).map(|(name, _)| *name).collect();
    if found.is_empty() { "none beyond sse2".into() } else { found.join(" ") }
}

#[cfg(not(target_arch = "x86_64"))]
fn extensions() -> String {
    "those of the compiler's target".into()
}
