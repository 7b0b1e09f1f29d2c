//! A GPU and its primary context.
#![forbid(unsafe_code)]

use super::error::{CallError, Unavailable};
use super::raw::{self, CUcontext, CUdevice, Handle};
use crate::compile::Arch;
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use std::fmt;

/// What a GPU says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its number among the visible ones.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Its compute capability, as asked of the driver.
    pub arch: Arch,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of the L2 cache.
    pub l2_cache: usize,
    /// Bytes of device memory.
    pub memory: usize,
    /// The driver's CUDA version, as 13000 for 13.0.
    pub driver: i32,
}

impl fmt::Display for DeviceFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = self.memory as f64 / (1u64 << 30) as f64;
        let (major, minor) = (self.driver / 1000, self.driver % 1000 / 10);
        let DeviceFacts { ordinal, name, arch, multiprocessors, .. } = self;
        write!(
            f,
            "GPU {ordinal}: {name}, {arch}, {multiprocessors} multiprocessors, {gib:.0} GiB, CUDA {major}.{minor}"
        )
    }
}

/// A GPU in use: its primary context is retained, so that memory of other frameworks in this process can be shared.
#[derive(Debug)]
pub struct Device {
    facts: DeviceFacts,
    device: CUdevice,
    context: Handle<CUcontext>,
}

impl Device {
    /// How many GPUs are visible.
    pub fn count() -> Result<usize, Unavailable> {
        if !raw::is_present() {
            return Err(Unavailable::NoDriver);
        }
        raw::init().map_err(Unavailable::Init)?;
        Ok(raw::device_count().map_err(Unavailable::Init)?.max(0) as usize)
    }

    /// Opens one.
    pub fn open(ordinal: usize) -> Result<Self, Unavailable> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(Unavailable::NoDevice { ordinal, count });
        }
        let name = format!("GPU {ordinal}");
        let setup = |e: CallError| Unavailable::Setup { device: name.clone(), reason: e.to_string() };
        let device = raw::device(ordinal as i32).map_err(setup)?;
        let name = raw::device_name(device).map_err(setup)?;
        let attribute = |a| raw::attribute(device, a).map_err(setup);
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let arch = Arch::new(major as u32, minor as u32)
            .map_err(|reason| Unavailable::Arch { device: name.clone(), reason })?;
        let facts = DeviceFacts {
            ordinal,
            name,
            arch,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            l2_cache: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.max(0) as usize,
            memory: raw::device_memory(device).map_err(setup)?,
            driver: raw::driver_version().map_err(setup)?,
        };
        let context = Handle(raw::primary_context(device).map_err(setup)?);
        let opened = Self { facts, device, context };
        opened.bind().map_err(setup)?;
        raw::keep_freed_memory(device).map_err(setup)?;
        Ok(opened)
    }

    /// What it says of itself.
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Bytes of device memory that are free now, with those that were freed and kept for the next allocation.
    pub fn free_memory(&self) -> Result<usize, CallError> {
        self.bind()?;
        Ok(raw::memory_info()?.0 + raw::kept_memory(self.device)? as usize)
    }

    /// Makes its context that of this thread; every call of the driver below comes after this.
    pub(super) fn bind(&self) -> Result<(), CallError> {
        raw::set_current(self.context.0)
    }
}

#[cfg(test)]
impl Device {
    /// One that no call of the driver may be made for; it is never closed.
    pub(crate) fn for_tests() -> std::sync::Arc<Self> {
        let facts = DeviceFacts {
            ordinal: 0,
            name: "none".into(),
            arch: Arch::new(9, 0).expect("is known"),
            multiprocessors: 1,
            l2_cache: 0,
            memory: 0,
            driver: 0,
        };
        let device = std::sync::Arc::new(Self { facts, device: 0, context: Handle(std::ptr::null_mut()) });
        std::mem::forget(device.clone());
        device
    }
}

/// The context that a thread had, made current again when this is dropped. Every call of the backend makes the context
/// of its GPU current; another framework on the same thread may count on its own.
#[derive(Debug)]
pub struct CurrentContext {
    context: Handle<CUcontext>,
    /// Of the thread that made it.
    thread: std::marker::PhantomData<*const ()>,
}

impl CurrentContext {
    /// That of this thread, or none. The driver is there: a [`Device`] was opened.
    pub fn keep(_: &Device) -> Result<Self, CallError> {
        Ok(Self { context: Handle(raw::current()?), thread: std::marker::PhantomData })
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        if let Err(e) = raw::set_current(self.context.0) {
            log::warn!("the context of another framework: {e}");
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Err(e) = raw::release_primary_context(self.device) {
            log::warn!("{}: {e}", self.facts.name);
        }
    }
}
