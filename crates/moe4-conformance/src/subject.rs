//! A backend as the suite sees it.

use crate::alter::{Alter, Altered};
use moe4::kernels::cpu::Cpu;
use moe4::kernels::reference::Reference;
use moe4::kernels::{Backend, Error, Memory};
use moe4::tensor::Groups;

/// A backend that can be handed groups known on the host: the one thing that the contract leaves to each memory.
pub trait Subject: Backend {
    /// `groups` where this backend's passes read them.
    fn groups(&self, groups: &Groups) -> Result<<Self::Memory as Memory>::Groups, Error>;
}

impl Subject for Reference {
    fn groups(&self, groups: &Groups) -> Result<Groups, Error> {
        Ok(groups.clone())
    }
}

impl Subject for Cpu {
    fn groups(&self, groups: &Groups) -> Result<Groups, Error> {
        Ok(groups.clone())
    }
}

impl<B: Subject, A: Alter<B>> Subject for Altered<'_, B, A> {
    fn groups(&self, groups: &Groups) -> Result<<Self::Memory as Memory>::Groups, Error> {
        self.inner.groups(groups)
    }
}
