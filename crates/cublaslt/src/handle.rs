//! The opened library, its context on a device, and its scratch memory.

use crate::result::{Error, Result, check};
use crate::sys::{Functions, LtHandle};
use cuda_driver::library::SearchPath;
use cuda_driver::{DeviceMemory, Gpu};
use std::path::PathBuf;
use std::sync::OnceLock;

/// Opens the library once a process; the outcome is kept.
pub(crate) fn library() -> Result<&'static Functions> {
    static LIBRARY: OnceLock<Result<Functions>> = OnceLock::new();
    let open = || Functions::of(SearchPath::detect().open(names(cuda_driver::driver_version().ok()))?);
    LIBRARY.get_or_init(open).as_ref().map_err(Clone::clone)
}

/// File names in order of preference: cuBLASLt 13 needs a driver of CUDA 13.
fn names(driver: Option<(u32, u32)>) -> &'static [&'static str] {
    match driver {
        Some((major, _)) if major < 13 => &["libcublasLt.so.12"],
        _ => &["libcublasLt.so.13", "libcublasLt.so.12"],
    }
}

/// Where the library is, and its version: 130100 is 13.1.0.
pub fn find() -> Result<(PathBuf, usize)> {
    let library = library()?;
    // SAFETY: no arguments.
    Ok((library.path.clone(), unsafe { (library.version)() }))
}

/// cuBLASLt's context on one device. One is enough for all of a device's streams.
pub struct Handle {
    pub(crate) raw: LtHandle,
    pub(crate) lt: &'static Functions,
    gpu: Gpu,
}

// SAFETY: the library's handle may be used from any thread at any time.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// A missing library is [`Error::Missing`], which says what to install and where it was looked for.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        let lt = library()?;
        gpu.make_current()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the device's context is current; writes one handle.
        check(unsafe { (lt.create)(&raw mut raw) }, &format!("cublasLtCreate of {}", lt.path.display()))?;
        Ok(Self { raw, lt, gpu: gpu.clone() })
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: the handle is live and not used again.
            unsafe { (self.lt.destroy)(self.raw) };
        }
    }
}

/// Scratch memory of matrix products. Products that share one must follow one another on one stream.
pub struct Workspace(DeviceMemory);

impl Workspace {
    /// What NVIDIA recommends for compute capability 9.0; more than enough below.
    pub const BYTES: usize = 32 << 20;

    pub fn new(gpu: &Gpu) -> Result<Self> {
        DeviceMemory::new(gpu, Self::BYTES).map(Self).map_err(Error::from)
    }

    pub(crate) fn address(&self) -> u64 {
        self.0.address()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_driver_gets_the_library_that_it_can_run() {
        assert_eq!(names(Some((12, 8))), ["libcublasLt.so.12"]);
        assert_eq!(names(Some((13, 0)))[0], "libcublasLt.so.13");
        assert_eq!(names(None).len(), 2);
    }
}
