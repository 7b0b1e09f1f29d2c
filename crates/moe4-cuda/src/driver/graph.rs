//! CUDA graphs: a sequence of passes recorded once and launched as one.

use super::error::CallError;
use super::raw::{self, CUgraphExec, Handle};
use super::stream::Stream;
use std::any::Any;
use std::sync::Arc;

/// A recorded sequence, ready to launch. It reads and writes the addresses that it was recorded with; what they hold may
/// change between launches, splits included. Seeds of stochastic rounding are part of the record.
#[derive(Debug)]
pub struct Graph {
    handle: Handle<CUgraphExec>,
    stream: Stream,
    /// Kernels that it may launch, and memory of the backend that they write.
    held: Vec<Arc<dyn Any + Send + Sync>>,
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
        Ok(Graph { handle, stream, held: Vec::new() })
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

    /// Keeps what it needs for as long as it is there.
    pub(crate) fn holding(mut self, held: Vec<Arc<dyn Any + Send + Sync>>) -> Self {
        self.held = held;
        self
    }

    /// Enqueues the sequence on the stream that it was recorded on.
    ///
    /// # Safety
    /// The buffers and views that it was recorded with are still there, until the stream has run it, and nobody else uses
    /// what it writes.
    pub unsafe fn launch(&mut self) -> Result<(), CallError> {
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
