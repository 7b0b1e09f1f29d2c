//! Who is told of a compilation: seconds in which nothing else happens want a word on the screen.
#![forbid(unsafe_code)]

use std::fmt;
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

/// Called before and after each compilation, on the thread that compiles.
#[derive(Clone)]
pub struct Watch(Arc<dyn Fn(Compiling<'_>) + Send + Sync>);

impl Watch {
    /// Tells `told`.
    pub fn new(told: impl Fn(Compiling<'_>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(told))
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
pub(super) fn watched<T>(watch: &Watch, variant: &Variant, arch: Arch, work: impl FnOnce() -> T) -> T {
    log::info!("compiling {variant} for {arch}");
    (watch.0)(Compiling::Begins(variant));
    let outcome = work();
    (watch.0)(Compiling::Ended(variant));
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
        let during = watched(&watch, &variant, Arch::new(9, 0).unwrap(), || told.lock().unwrap().len());
        assert_eq!(during, 1);
        assert_eq!(*told.lock().unwrap(), ["begins k N=1", "ended k N=1"]);
    }
}
