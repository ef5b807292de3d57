//! Ownership of driver objects.

use crate::Gpu;
use crate::error::Result;
use std::ops::{Deref, DerefMut};

/// A driver object and the GPU in whose context it was created.
///
/// Dropping it makes the context current in the calling thread, drops the object, and then releases the GPU.
pub(crate) struct InContext<T> {
    object: T,
    // Declared after the object, so that the context outlives it.
    gpu: Gpu,
}

impl<T> InContext<T> {
    /// Makes the context of `gpu` current and calls `create` in it.
    pub fn create(gpu: &Gpu, create: impl FnOnce() -> Result<T>) -> Result<Self> {
        gpu.make_current()?;
        Ok(Self { object: create()?, gpu: gpu.clone() })
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }
}

impl<T> Deref for InContext<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.object
    }
}

impl<T> DerefMut for InContext<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.object
    }
}

impl<T> Drop for InContext<T> {
    fn drop(&mut self) {
        // This fails only if the context is lost, and then its objects are lost with it.
        let _ = self.gpu.make_current();
    }
}
