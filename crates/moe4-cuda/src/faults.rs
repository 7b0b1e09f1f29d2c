//! What kernels find wrong with data that the host never sees, such as an index beyond a tensor.
//!
//! A kernel notes the first place and goes on without touching memory out of bounds. The note is read where the host waits
//! anyway: `download` and [`Cuda::synchronize`](crate::Cuda::synchronize). A word of host memory tells that there is one, for
//! [`Cuda::check_faults`](crate::Cuda::check_faults), which does not wait.

use crate::driver::{CallError, DeviceBytes, PinnedBytes, Stream, fill, read};
use moe4::kernels::{Error, Misuse};
use std::sync::atomic::Ordering;

/// Kinds of faults, in the order of `kernels/fault.cuh`.
const KINDS: usize = 4;

/// No fault of a kind.
const NONE: u64 = u64::MAX;

type Details = [u64; KINDS];

/// The notes of one GPU.
#[derive(Debug)]
pub(crate) struct Faults {
    /// The smallest detail of each kind, and behind them the address of `noticed`.
    details: DeviceBytes,
    /// Not 0 once a kernel has noted something: what the host can see without waiting.
    noticed: PinnedBytes,
}

impl Faults {
    /// No notes. Waits for `stream`.
    pub(crate) fn new(stream: &Stream) -> Result<Self, CallError> {
        let noticed = PinnedBytes::new(stream, size_of::<u64>())?;
        noticed.word().store(0, Ordering::Relaxed);
        let mut details = DeviceBytes::new(stream, size_of::<Details>() + size_of::<u64>())?;
        let mut words = [NONE; KINDS + 1];
        words[KINDS] = noticed.address();
        details.write(bytemuck::bytes_of(&words))?;
        stream.synchronize()?;
        Ok(Self { details, noticed })
    }

    /// Where kernels find it.
    pub(crate) fn address(&self) -> u64 {
        self.details.address()
    }

    /// Whether there is a note that the host can see by now.
    pub(crate) fn noticed(&self) -> bool {
        self.noticed.word().load(Ordering::Acquire) != 0
    }

    /// The first fault, after all work on `stream`; all notes are gone then. The detail of a fault that another stream
    /// causes in between may be lost with them.
    pub(crate) fn take(&self, stream: &Stream) -> Result<Result<(), Error>, CallError> {
        // Before the details are read: a fault from now on is noticed again, if for nothing.
        self.noticed.word().store(0, Ordering::Release);
        let mut details: Details = [NONE; KINDS];
        // SAFETY: the buffer has as many bytes and one word more.
        unsafe { read(stream, self.address(), bytemuck::bytes_of_mut(&mut details))? };
        let found = first(&details);
        if found.is_err() {
            // SAFETY: the same range.
            unsafe { fill(stream, self.address(), 0xFF, size_of::<Details>())? };
        }
        Ok(found)
    }
}

/// The first fault of what a device noted.
fn first(details: &Details) -> Result<(), Error> {
    let Some(kind) = details.iter().position(|&d| d != NONE) else { return Ok(()) };
    let detail = details[kind];
    let index = "the index of a row, or u32::MAX for none";
    let (what, expected, got) = match kind {
        0 => (format!("splits[{detail}]"), "0 to the rows of the tensor", "a value outside".to_owned()),
        1 => ("sum of splits".to_owned(), "at most the rows of the tensor", detail.to_string()),
        2 => (format!("permute: source[{detail}]"), index, "an index beyond the tensor".to_owned()),
        _ => (format!("unpermute: slot[{detail}]"), index, "an index beyond the tensor".to_owned()),
    };
    Err(Misuse::Value { what, expected, got }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_name_their_place() {
        assert_eq!(first(&[NONE; KINDS]), Ok(()));
        let message = |kind: usize, detail| {
            let mut details = [NONE; KINDS];
            details[kind] = detail;
            first(&details).unwrap_err().to_string()
        };
        assert!(message(0, 3).starts_with("splits[3]: expected 0 to"));
        assert!(message(1, 99).contains("got 99"));
        assert!(message(2, 1).starts_with("permute: source[1]"));
        assert!(message(3, 7).starts_with("unpermute: slot[7]"));
    }
}
