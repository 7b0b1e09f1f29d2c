//! What kernels find wrong with data that the host never sees, such as an index beyond a tensor.
//!
//! A kernel notes the first place and goes on without touching memory out of bounds. The note is read where the host waits
//! anyway: `download` and [`Cuda::synchronize`](crate::Cuda::synchronize).
#![forbid(unsafe_code)]

use moe4::kernels::{Error, Misuse};

/// Kinds of faults, in the order of `kernels/fault.cuh`.
pub(crate) const KINDS: usize = 4;

/// No fault of a kind.
pub(crate) const NONE: u64 = u64::MAX;

/// The first fault of what a device noted.
pub(crate) fn first(details: &[u64; KINDS]) -> Result<(), Error> {
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
