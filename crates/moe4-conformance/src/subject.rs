//! A backend as the suite sees it.

use moe4::kernels::{Backend, Error, Host, Memory};
use moe4::tensor::Groups;

/// A backend that can be handed groups known on the host. Backends in host memory are subjects as they are.
pub trait Subject: Backend {
    /// `groups` where this backend's passes read them.
    fn groups(&self, groups: &Groups) -> Result<<Self::Memory as Memory>::Groups, Error>;
}

impl<B: Backend<Memory = Host>> Subject for B {
    fn groups(&self, groups: &Groups) -> Result<Groups, Error> {
        Ok(groups.clone())
    }
}
