//! CUDA graphs: a sequence of passes recorded once and launched as one.

use super::error::CallError;
use super::module::Kernel;
use super::raw::{self, CUgraphExec, Handle};
use super::stream::Stream;
use std::sync::Arc;

/// A recorded sequence, ready to launch. It reads and writes the addresses that it was recorded with; what they hold may
/// change between launches, splits included. Seeds of stochastic rounding are part of the record.
#[derive(Debug)]
pub struct Graph {
    handle: Handle<CUgraphExec>,
    stream: Stream,
    /// Kernels that it may launch.
    kernels: Vec<Arc<Kernel>>,
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
        Ok(Graph { handle, stream, kernels: Vec::new() })
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

    /// Keeps kernels loaded for as long as the graph is there.
    pub(crate) fn holding(mut self, kernels: Vec<Arc<Kernel>>) -> Self {
        self.kernels = kernels;
        self
    }

    /// Enqueues the sequence on the stream that it was recorded on.
    ///
    /// # Safety
    /// The buffers and views that it was recorded with are still there, until the stream has run it, and nobody else uses
    /// what it writes.
    pub unsafe fn launch(&self) -> Result<(), CallError> {
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
