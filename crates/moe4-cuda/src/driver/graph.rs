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

/// A stream that records. Dropped without [`Recording::end`], the recording is given up.
#[derive(Debug)]
pub struct Recording {
    stream: Option<Stream>,
}

impl Recording {
    /// The recorded sequence; the stream runs again.
    pub fn end(mut self) -> Result<Graph, CallError> {
        let stream = self.stream.take().expect("taken here or when dropped");
        let handle = Handle(raw::end_capture(stream.bound()?)?);
        Ok(Graph { handle, stream })
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            let unused = Recording { stream: Some(stream) }.end();
            drop(unused);
        }
    }
}

impl Graph {
    /// What is enqueued on `stream` from now on is recorded instead of run.
    pub fn record(stream: &Stream) -> Result<Recording, CallError> {
        raw::begin_capture(stream.bound()?)?;
        Ok(Recording { stream: Some(stream.clone()) })
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
