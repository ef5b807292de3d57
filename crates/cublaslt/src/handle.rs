//! The opened library and its context on a device.

use crate::result::{Result, check};
use crate::sys::{Functions, LtHandle};
use cuda_driver::Gpu;
use cuda_driver::library::SearchPath;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Opens cuBLASLt. Later calls return the result of the first.
pub(crate) fn library() -> Result<&'static Functions> {
    static LIBRARY: OnceLock<Result<Functions>> = OnceLock::new();
    let open = || Functions::bind(SearchPath::detect().open(names(cuda_driver::driver_version().ok()))?);
    LIBRARY.get_or_init(open).as_ref().map_err(Clone::clone)
}

/// Returns the file names in order of preference. cuBLASLt 13 needs a driver of CUDA 13.
fn names(driver: Option<(u32, u32)>) -> &'static [&'static str] {
    match driver {
        Some((major, _)) if major < 13 => &["libcublasLt.so.12"],
        _ => &["libcublasLt.so.13", "libcublasLt.so.12"],
    }
}

/// Returns the path of cuBLASLt and its version: 130100 is 13.1.0.
pub fn find() -> Result<(PathBuf, usize)> {
    let library = library()?;
    // SAFETY: the call takes no arguments.
    Ok((library.path.clone(), unsafe { (library.version)() }))
}

/// The context of cuBLASLt on one device. One handle serves all streams of the device.
pub struct Handle {
    pub(crate) raw: LtHandle,
    pub(crate) lt: &'static Functions,
    gpu: Gpu,
}

// SAFETY: a cuBLASLt handle may be used by any thread at any time.
unsafe impl Send for Handle {}
// SAFETY: see `Send`.
unsafe impl Sync for Handle {}

impl Handle {
    /// Opens cuBLASLt and creates a context. Returns [`Error::Missing`](crate::Error::Missing) if the library is not found.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        let lt = library()?;
        gpu.make_current()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the device's context is current. The call writes one handle.
        check(unsafe { (lt.create)(&raw mut raw) }, &format!("cublasLtCreate in {}", lt.path.display()))?;
        Ok(Self { raw, lt, gpu: gpu.clone() })
    }

    /// Returns the GPU of this context.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_of_cuda_12_selects_cublaslt_12() {
        assert_eq!(names(Some((12, 8))), ["libcublasLt.so.12"]);
        assert_eq!(names(Some((13, 0)))[0], "libcublasLt.so.13");
        assert_eq!(names(None).len(), 2);
    }
}
