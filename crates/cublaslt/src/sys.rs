//! The constants, opaque structures and functions of cuBLASLt that this crate uses.
//!
//! Names and meanings are those of NVIDIA's `cublasLt.h`; see the cuBLAS documentation.

#![expect(missing_docs, reason = "the names and their documentation are NVIDIA's")]

use crate::result::Error;
use std::ffi::{c_int, c_void};
use std::path::PathBuf;

pub type Status = c_int;

/// The opaque context of cuBLASLt.
pub type LtHandle = *mut c_void;
pub type MatmulDesc = *mut c_void;
pub type MatrixLayout = *mut c_void;
pub type MatmulPreference = *mut c_void;
pub use cuda_driver::sys::CUstream;

pub const R_32F: c_int = 0;
pub const R_16BF: c_int = 14;
pub const R_8F_E4M3: c_int = 28;
pub const R_8F_E5M2: c_int = 29;

pub const COMPUTE_32F: c_int = 68;
pub const COMPUTE_32F_FAST_TF32: c_int = 77;

pub const OP_N: i32 = 0;
pub const OP_T: i32 = 1;

pub const DESC_TRANSA: c_int = 3;
pub const DESC_TRANSB: c_int = 4;
pub const DESC_EPILOGUE: c_int = 7;
pub const DESC_BIAS_POINTER: c_int = 8;
pub const DESC_EPILOGUE_AUX_POINTER: c_int = 11;
pub const DESC_EPILOGUE_AUX_LD: c_int = 12;
pub const DESC_A_SCALE_POINTER: c_int = 17;
pub const DESC_B_SCALE_POINTER: c_int = 18;
pub const DESC_EPILOGUE_AUX_DATA_TYPE: c_int = 22;
pub const DESC_FAST_ACCUM: c_int = 25;
pub const DESC_BIAS_DATA_TYPE: c_int = 26;

pub const LAYOUT_BATCH_COUNT: c_int = 5;
pub const LAYOUT_STRIDED_BATCH_OFFSET: c_int = 6;

pub const PREF_MAX_WORKSPACE_BYTES: c_int = 1;
pub const PREF_REDUCTION_SCHEME_MASK: c_int = 3;
pub const PREF_MIN_ALIGNMENT_A_BYTES: c_int = 5;
pub const PREF_MIN_ALIGNMENT_B_BYTES: c_int = 6;
pub const PREF_MIN_ALIGNMENT_C_BYTES: c_int = 7;
pub const PREF_MIN_ALIGNMENT_D_BYTES: c_int = 8;

pub const REDUCTION_SCHEME_NONE: u32 = 0;
/// Split-K keeps partial sums in the compute type and adds them in a fixed order.
pub const REDUCTION_SCHEME_COMPUTE_TYPE: u32 = 2;

pub const EPILOGUE_DEFAULT: u32 = 1;
pub const EPILOGUE_BIAS: u32 = 4;
pub const EPILOGUE_GELU_AUX_BIAS: u32 = 32 | 128 | 4;
pub const EPILOGUE_DGELU: u32 = 64 | 128;

/// An algorithm. Its content is opaque and valid for one version of cuBLASLt.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct MatmulAlgo(pub [u64; 8]);

/// One result of the heuristic.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct HeuristicResult {
    pub algo: MatmulAlgo,
    pub workspace_bytes: usize,
    pub state: Status,
    pub waves: f32,
    pub reserved: [c_int; 4],
}

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of the opened library. It is never closed, because its kernels stay loaded in the driver.
        pub struct Functions {
            $(pub $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// The file of the library.
            pub path: PathBuf,
        }

        impl Functions {
            pub(crate) fn bind(found: cuda_driver::library::Found) -> Result<Self, Error> {
                let library = std::mem::ManuallyDrop::new(found.library);
                let path = found.path;
                $(
                    // SAFETY: the signature is that of cublasLt.h, which is the same in versions 12 and 13.
                    let $field = unsafe { library.get($name) }
                        .map(|symbol| *symbol)
                        .map_err(|_| Error::TooOld { path: path.clone(), function: $name })?;
                )*
                Ok(Self { $($field,)* path })
            }
        }
    };
}

functions! {
    version = "cublasLtGetVersion": fn() -> usize;
    create = "cublasLtCreate": fn(*mut LtHandle) -> Status;
    destroy = "cublasLtDestroy": fn(LtHandle) -> Status;
    desc_create = "cublasLtMatmulDescCreate": fn(*mut MatmulDesc, c_int, c_int) -> Status;
    desc_destroy = "cublasLtMatmulDescDestroy": fn(MatmulDesc) -> Status;
    desc_set = "cublasLtMatmulDescSetAttribute": fn(MatmulDesc, c_int, *const c_void, usize) -> Status;
    layout_create = "cublasLtMatrixLayoutCreate": fn(*mut MatrixLayout, c_int, u64, u64, i64) -> Status;
    layout_destroy = "cublasLtMatrixLayoutDestroy": fn(MatrixLayout) -> Status;
    layout_set = "cublasLtMatrixLayoutSetAttribute": fn(MatrixLayout, c_int, *const c_void, usize) -> Status;
    preference_create = "cublasLtMatmulPreferenceCreate": fn(*mut MatmulPreference) -> Status;
    preference_destroy = "cublasLtMatmulPreferenceDestroy": fn(MatmulPreference) -> Status;
    preference_set = "cublasLtMatmulPreferenceSetAttribute":
        fn(MatmulPreference, c_int, *const c_void, usize) -> Status;
    heuristic = "cublasLtMatmulAlgoGetHeuristic":
        fn(LtHandle, MatmulDesc, MatrixLayout, MatrixLayout, MatrixLayout, MatrixLayout, MatmulPreference, c_int,
            *mut HeuristicResult, *mut c_int) -> Status;
    check = "cublasLtMatmulAlgoCheck":
        fn(LtHandle, MatmulDesc, MatrixLayout, MatrixLayout, MatrixLayout, MatrixLayout, *const MatmulAlgo,
            *mut HeuristicResult) -> Status;
    matmul = "cublasLtMatmul":
        fn(LtHandle, MatmulDesc, *const c_void, *const c_void, MatrixLayout, *const c_void, MatrixLayout,
            *const c_void, *const c_void, MatrixLayout, *mut c_void, MatrixLayout, *const MatmulAlgo, *mut c_void,
            usize, CUstream) -> Status;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_match_the_sizes_of_the_header() {
        assert_eq!(size_of::<MatmulAlgo>(), 64);
        assert_eq!(size_of::<HeuristicResult>(), 64 + 8 + 4 + 4 + 16);
        assert_eq!(std::mem::offset_of!(HeuristicResult, state), 72);
    }
}
