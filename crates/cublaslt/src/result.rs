//! Errors and owned descriptors.

use crate::sys::{self, Functions, Status};
use gpu::matmul::gemm::Gemm;
use std::ffi::{c_int, c_void};
use std::path::PathBuf;

/// `Result` with the error type [`Error`] by default.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of cuBLASLt or of a check before a call.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The library was not found.
    #[error(
        "{0}; GEMMs on a GPU need cuBLASLt: `pip install nvidia-cublas` (CUDA 13, driver 580 or later) or \
         `pip install nvidia-cublas-cu12`, or install the CUDA toolkit, or set LD_LIBRARY_PATH to the library's directory"
    )]
    Missing(#[from] cuda_driver::library::NotFound),

    /// The library lacks a function.
    #[error("{}: expected cuBLASLt 12 or later, found a library without {function}; install a newer one", path.display())]
    TooOld {
        /// The file of the library.
        path: PathBuf,
        /// The missing function.
        function: &'static str,
    },

    /// A call failed.
    #[error("{call}: {} ({status}){}", name(*status), advice(*status))]
    Call {
        /// The call and the matmul.
        call: String,
        /// The status that cuBLASLt returned.
        status: Status,
    },

    /// cuBLASLt has no algorithm for a matmul.
    #[error("cuBLASLt has no algorithm for {gemm}{}", advice(15))]
    NoAlgorithm {
        /// The matmul.
        gemm: Gemm,
    },

    /// The operands do not fit the matmul.
    #[error("{gemm}: {what}")]
    Operand {
        /// The GEMM.
        gemm: Gemm,
        /// The violated rule.
        what: String,
    },

    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] cuda_driver::Error),
}

impl Error {
    /// Returns whether cuBLASLt does not support the matmul, or this algorithm for it. Algorithms of the heuristic may be
    /// refused when they run.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Self::NoAlgorithm { .. } | Self::Call { status: NOT_SUPPORTED, .. })
    }
}

/// The status of a matmul that is not supported.
pub(crate) const NOT_SUPPORTED: Status = 15;

fn name(status: Status) -> &'static str {
    match status {
        1 => "CUBLAS_STATUS_NOT_INITIALIZED",
        3 => "CUBLAS_STATUS_ALLOC_FAILED",
        7 => "CUBLAS_STATUS_INVALID_VALUE",
        8 => "CUBLAS_STATUS_ARCH_MISMATCH",
        11 => "CUBLAS_STATUS_MAPPING_ERROR",
        13 => "CUBLAS_STATUS_EXECUTION_FAILED",
        14 => "CUBLAS_STATUS_INTERNAL_ERROR",
        15 => "CUBLAS_STATUS_NOT_SUPPORTED",
        16 => "CUBLAS_STATUS_LICENSE_ERROR",
        _ => "unknown cuBLAS status",
    }
}

fn advice(status: Status) -> &'static str {
    match status {
        1 => "; the driver may be too old for this cuBLASLt: version 13 needs R580, version 12 R525",
        3 => "; the GPU or the host is out of memory: choose a smaller batch",
        13 => "; a kernel failed at or before this matmul, and the GPU context may be lost: run again",
        15 => "; channels and rows that are multiples of 8 are always supported",
        _ => "",
    }
}

pub(crate) fn check(status: Status, call: &str) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(Error::Call { call: call.into(), status }) }
}

/// A descriptor of cuBLASLt, destroyed on drop.
pub(crate) struct Owned {
    raw: *mut c_void,
    set: unsafe extern "C" fn(*mut c_void, c_int, *const c_void, usize) -> Status,
    destroy: unsafe extern "C" fn(*mut c_void) -> Status,
}

// SAFETY: a descriptor is plain host memory, and modifying it takes `&mut self`.
unsafe impl Send for Owned {}

impl Owned {
    /// Creates the descriptor of a matmul that is computed in f32, with TF32 tensor cores if `tf32`.
    pub fn matmul(lt: &Functions, tf32: bool) -> Result<Self> {
        let compute = if tf32 { sys::COMPUTE_32F_FAST_TF32 } else { sys::COMPUTE_32F };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the call writes one handle.
        check(unsafe { (lt.desc_create)(&raw mut raw, compute, sys::R_32F) }, "cublasLtMatmulDescCreate")?;
        Ok(Self { raw, set: lt.desc_set, destroy: lt.desc_destroy })
    }

    /// Creates the layout of a contiguous column-major matrix.
    pub fn layout(lt: &Functions, element: c_int, rows: usize, columns: usize) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the call writes one handle.
        let status =
            unsafe { (lt.layout_create)(&raw mut raw, element, rows as u64, columns as u64, rows.max(1) as i64) };
        check(status, "cublasLtMatrixLayoutCreate")?;
        Ok(Self { raw, set: lt.layout_set, destroy: lt.layout_destroy })
    }

    /// Creates empty preferences of the heuristic.
    pub fn preference(lt: &Functions) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the call writes one handle.
        check(unsafe { (lt.preference_create)(&raw mut raw) }, "cublasLtMatmulPreferenceCreate")?;
        Ok(Self { raw, set: lt.preference_set, destroy: lt.preference_destroy })
    }

    pub fn raw(&self) -> *mut c_void {
        self.raw
    }

    /// Sets an attribute to `value`. `T` must have the size of the attribute's type in cublasLt.h; cuBLASLt rejects other sizes.
    pub fn set<T: Copy>(&mut self, attribute: c_int, value: T) -> Result<()> {
        // SAFETY: the handle is live, and the call reads at most the size of `value`.
        let status = unsafe { (self.set)(self.raw, attribute, (&raw const value).cast(), size_of::<T>()) };
        if status == 0 {
            return Ok(());
        }
        Err(Error::Call { call: format!("setting attribute {attribute} of a cuBLASLt descriptor"), status })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the handle is live and not used again.
        unsafe { (self.destroy)(self.raw) };
    }
}
