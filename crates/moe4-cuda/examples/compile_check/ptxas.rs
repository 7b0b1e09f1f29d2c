//! The compiler's log with `--ptxas-options=-v`, read into numbers and complaints.
//!
//! ```text
//! ptxas info    : Compiling entry function 'probe' for 'sm_90a'
//! ptxas info    : Function properties for probe
//! ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
//! ptxas info    : Used 12 registers, used 1 barriers, 1024 bytes smem
//! ```
//!
//! Functions that are not inlined have properties of their own. Whatever line is not the assembler's information is a
//! complaint; so is information on a potential loss of performance.
#![forbid(unsafe_code)]

/// What a compiled kernel needs, in bytes except the registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Registers of a thread.
    pub registers: u32,
    /// Static shared memory of a block.
    pub shared: u32,
    /// Stack of a thread: the kernel's and that of the functions it calls.
    pub stack: u32,
    /// Registers stored to memory, over all functions.
    pub spill_stores: u32,
    /// Registers loaded back.
    pub spill_loads: u32,
}

impl Usage {
    /// Whether any register is spilled.
    pub(crate) fn spills(&self) -> bool {
        self.spill_stores > 0 || self.spill_loads > 0
    }
}

/// A log, read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Report {
    pub usage: Usage,
    /// Lines that a clean compilation does not have.
    pub complaints: Vec<String>,
}

impl Report {
    /// Reads the log of a program whose only entry point must be `kernel`.
    pub(crate) fn of(log: &str, kernel: &str) -> Result<Self, String> {
        let mut usage = Usage::default();
        let (mut entries, mut uses, mut properties) = (Vec::new(), 0, 0);
        let mut complaints = Vec::new();
        for line in log.lines().filter(|line| !line.trim().is_empty()) {
            let info = line.strip_prefix("ptxas info").and_then(|rest| rest.trim_start().strip_prefix(':'));
            let info = info.map(str::trim);
            if line.contains(" bytes stack frame,") {
                properties += 1;
                usage.stack = usage.stack.max(before(line, " bytes stack frame")?);
                usage.spill_stores += before(line, " bytes spill stores")?;
                usage.spill_loads += before(line, " bytes spill loads")?;
            } else if let Some(rest) = info.and_then(|info| info.strip_prefix("Compiling entry function '")) {
                entries.push(rest.split('\'').next().unwrap_or_default());
            } else if let Some(info) = info.filter(|info| info.starts_with("Used ")) {
                uses += 1;
                usage.registers = before(info, " registers")?;
                usage.shared = before_or_zero(info, " bytes smem")?;
                usage.stack = usage.stack.max(before_or_zero(info, " bytes cumulative stack size")?);
            } else if info.is_none_or(|info| info.contains("Potential Performance Loss")) {
                complaints.push(line.trim_end().to_owned());
            }
        }
        if entries != [kernel] {
            return Err(format!(
                "expected one entry point '{kernel}', got {entries:?}; declare it extern \"C\""
            ));
        }
        if uses != 1 || properties == 0 {
            return Err(format!("the assembler's lines on resources are not as expected in:\n{log}"));
        }
        Ok(Self { usage, complaints })
    }
}

/// The number right before `unit`.
fn before(line: &str, unit: &str) -> Result<u32, String> {
    let number = line.find(unit).map(|end| line[..end].rsplit(' ').next().unwrap_or_default());
    number
        .and_then(|number| number.parse().ok())
        .ok_or_else(|| format!("expected a number before '{}' in '{}'", unit.trim(), line.trim()))
}

/// As [`before`], for a unit that is left out where the number is zero.
fn before_or_zero(line: &str, unit: &str) -> Result<u32, String> {
    if line.contains(unit) { before(line, unit) } else { Ok(0) }
}

#[cfg(test)]
mod tests {
    use super::{Report, Usage};

    /// NVRTC 13.0.88, a kernel with static shared memory.
    const CLEAN: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'probe' for 'sm_90a'
ptxas info    : Function properties for probe
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compile time = 11.806 ms
";

    /// NVRTC 13.0.88, more values alive than registers.
    const SPILLED: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 's' for 'sm_90a'
ptxas info    : Function properties for s
ptxas         .     48 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 254 registers, used 1 barriers, 48 bytes cumulative stack size
ptxas info    : Compile time = 328.480 ms
";

    /// NVRTC 13.0.88, a function that is not inlined; its spills are made up.
    const CALLS: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 's' for 'sm_120a'
ptxas info    : Function properties for s
ptxas         .     256 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers, used 0 barriers, 264 bytes cumulative stack size
ptxas info    : Compile time = 8.127 ms
ptxas info    : Function properties for _Z1gfPf
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
";

    /// NVRTC 13.0.88, a variable that nothing reads.
    const WARNED: &str = "\
w.cu(1): warning #177-D: variable \"unused\" was declared but never referenced
  extern \"C\" __global__ void w(float*x){int unused=3; x[0]=1;}
                                            ^

Remark: The warnings can be suppressed with \"-diag-suppress <warning-number>\"

ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'w' for 'sm_90a'
ptxas info    : Function properties for w
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compile time = 1.568 ms
";

    /// CUDA 12 prints the properties without a prefix, and constant memory.
    const OLDER: &str = "\
ptxas info    : 0 bytes gmem, 24 bytes cmem[4]
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, 16 bytes smem, 544 bytes cmem[0], 16 bytes cmem[2]
";

    fn usage(log: &str, kernel: &str) -> [u32; 5] {
        let Report { usage, complaints } = Report::of(log, kernel).unwrap();
        assert!(complaints.is_empty(), "{complaints:?}");
        let Usage { registers, shared, stack, spill_stores, spill_loads } = usage;
        [registers, shared, stack, spill_stores, spill_loads]
    }

    #[test]
    fn numbers_are_read() {
        assert_eq!(usage(CLEAN, "probe"), [12, 1024, 0, 0, 0]);
        assert_eq!(usage(SPILLED, "s"), [254, 0, 48, 40, 44]);
        assert_eq!(usage(CALLS, "s"), [38, 0, 264, 4, 4]);
        assert_eq!(usage(OLDER, "k"), [40, 16, 16, 4, 8]);
    }

    #[test]
    fn lines_that_are_not_information_are_complaints() {
        let complaints = Report::of(WARNED, "w").unwrap().complaints;
        assert!(complaints[0].contains("warning #177-D"), "{complaints:?}");
        for line in [
            "ptxas warning : Value of threads per SM for entry probe is out of range",
            "ptxas info    : (C7508) Potential Performance Loss: wgmma.mma_async instructions are serialized",
        ] {
            let log = format!("{line}\n{CLEAN}");
            assert_eq!(Report::of(&log, "probe").unwrap().complaints, [line]);
        }
    }

    #[test]
    fn a_log_of_another_shape_is_an_error() {
        assert!(Report::of("", "probe").is_err());
        assert!(Report::of(CLEAN, "other").unwrap_err().contains("expected one entry point 'other'"));
        assert!(Report::of(&format!("{CLEAN}{CLEAN}"), "probe").is_err());
        assert!(Report::of(&CLEAN.replace("Used 12", "Used many"), "probe").is_err());
        let without_properties = CLEAN.replace("bytes stack frame", "bytes of stack");
        assert!(Report::of(&without_properties, "probe").is_err());
        let without_use: String = CLEAN.lines().filter(|line| !line.contains("Used")).collect();
        assert!(Report::of(&without_use, "probe").is_err());
    }
}
