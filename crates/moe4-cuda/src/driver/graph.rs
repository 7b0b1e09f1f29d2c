//! CUDA graphs: a sequence of passes recorded once and launched as one.
#![forbid(unsafe_code)]

use super::error::CallError;
use super::raw::{self, CUgraphExec, Handle};
use super::stream::Stream;

/// A recorded sequence, ready to launch. It reads and writes the addresses that it was recorded with, so the buffers
/// must outlive it; what they hold may change between launches, splits included.
#[derive(Debug)]
pub struct Graph {
    handle: Handle<CUgraphExec>,
    stream: Stream,
}

impl Graph {
    /// Records what `work` enqueues on `stream` instead of running it.
    pub fn capture<E: From<CallError>>(
        stream: &Stream,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        raw::begin_capture(stream.bound()?)?;
        let outcome = work();
        // Ended in any case: a stream left in capture would be of no more use.
        let ready = stream.bound().and_then(raw::end_capture);
        outcome?;
        Ok(Self { handle: Handle(ready?), stream: stream.clone() })
    }

    /// Enqueues the sequence on the stream that it was recorded on.
    pub fn launch(&self) -> Result<(), CallError> {
        raw::launch_graph(self.handle.0, self.stream.bound()?)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let destroyed = self.stream.bound().and_then(|_| raw::destroy_graph(self.handle.0));
        if let Err(e) = destroyed {
            log::warn!("{e}");
        }
    }
}
