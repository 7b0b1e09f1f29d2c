//! Who is told of a compilation: seconds in which nothing else happens want a word on the screen.
#![forbid(unsafe_code)]

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::Arch;
use crate::variant::Variant;

/// A compilation that the cache did not spare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compiling<'a> {
    /// It begins.
    Begins(&'a Variant),
    /// It is over, well or not.
    Ended(&'a Variant),
}

/// Called before and after each compilation, on the thread that asked for it; of several at once
/// ([`Compiler::load_all`](super::Compiler::load_all)) as well, though others compile.
#[derive(Clone)]
pub struct Watch(Arc<dyn Fn(Compiling<'_>) -> ControlFlow<()> + Send + Sync>);

impl Watch {
    /// Tells `told`.
    pub fn new(told: impl Fn(Compiling<'_>) + Send + Sync + 'static) -> Self {
        Self::stopping(move |event| {
            told(event);
            ControlFlow::Continue(())
        })
    }

    /// Tells `told`. If that breaks off, no other of several compilations begins; one alone goes on.
    pub fn stopping(told: impl Fn(Compiling<'_>) -> ControlFlow<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(told))
    }

    pub(super) fn tell(&self, event: Compiling<'_>) -> ControlFlow<()> {
        (self.0)(event)
    }
}

impl Default for Watch {
    /// Tells nobody; the log has a line in any case.
    fn default() -> Self {
        Self::new(|_| ())
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}

/// Compiles by `work`, and tells of it.
pub(super) fn watched<'a, T>(
    tell: &dyn Fn(Compiling<'a>),
    variant: &'a Variant,
    arch: Arch,
    work: impl FnOnce() -> T,
) -> T {
    log::info!("compiling {variant} for {arch}");
    tell(Compiling::Begins(variant));
    let outcome = work();
    tell(Compiling::Ended(variant));
    outcome
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::{Arch, Compiling, Watch, watched};
    use crate::variant::Variant;

    #[test]
    fn a_compilation_is_told_of_before_and_after() {
        let told = std::sync::Arc::new(Mutex::new(Vec::new()));
        let keep = told.clone();
        let watch = Watch::new(move |event| {
            keep.lock().unwrap().push(match event {
                Compiling::Begins(variant) => format!("begins {variant}"),
                Compiling::Ended(variant) => format!("ended {variant}"),
            });
        });
        let variant = Variant { kernel: "k", defines: vec![("N", 1)] };
        let tell = |event: Compiling<'_>| assert!(watch.tell(event).is_continue());
        let during = watched(&tell, &variant, Arch::new(9, 0).unwrap(), || told.lock().unwrap().len());
        assert_eq!(during, 1);
        assert_eq!(*told.lock().unwrap(), ["begins k N=1", "ended k N=1"]);
    }
}
