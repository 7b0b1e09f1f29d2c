//! Events: marks in a stream, for order between streams and for times.
#![forbid(unsafe_code)]

use super::error::CallError;
use super::raw::{self, CUevent, Handle};
use super::stream::Stream;

/// A mark that a stream reaches.
#[derive(Debug)]
pub struct Event {
    handle: Handle<CUevent>,
    stream: Stream,
}

impl Event {
    /// Behind all work enqueued on `stream` so far.
    pub fn record(stream: &Stream) -> Result<Self, CallError> {
        let bound = stream.bound()?;
        let event = Self { handle: Handle(raw::create_event()?), stream: stream.clone() };
        raw::record_event(event.handle.0, bound)?;
        Ok(event)
    }

    /// Milliseconds on the device between two marks, once both are reached.
    pub fn elapsed_ms(&self, end: &Event) -> Result<f32, CallError> {
        self.stream.bound()?;
        raw::synchronize_event(end.handle.0)?;
        raw::elapsed_ms(self.handle.0, end.handle.0)
    }

    pub(super) fn handle(&self) -> CUevent {
        self.handle.0
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let destroyed = self.stream.bound().and_then(|_| raw::destroy_event(self.handle.0));
        if let Err(e) = destroyed {
            log::warn!("{e}");
        }
    }
}
