//! Marks for a [`Ledger`](moe4::kernels::Ledger): events on the backend's stream.
//!
//! Between the two marks of a pass lies what the device does for it, and, where it is done sooner than the host enqueues
//! the next launch, the wait for the host.
#![forbid(unsafe_code)]

use crate::backend::Cuda;
use crate::driver::Event;
use moe4::kernels::{Error, Marks};
use std::time::Duration;

impl Marks for Cuda {
    type Mark = Event;

    fn mark(&self) -> Result<Event, Error> {
        self.on(Event::record(self.stream()))
    }
    fn elapsed(&self, start: &Event, end: &Event) -> Result<Duration, Error> {
        let ms = self.on(start.elapsed_ms(end))?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }
}
