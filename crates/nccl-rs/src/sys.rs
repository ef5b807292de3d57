//! The constants, structures and functions of NCCL that this crate uses.
//!
//! Names and meanings are those of NVIDIA's `nccl.h`; see the NCCL documentation.

#![expect(missing_docs, reason = "the names and their documentation are NVIDIA's")]

use crate::result::Error;
use std::ffi::{c_char, c_int, c_void};
use std::path::PathBuf;

pub use cuda_driver::sys::CUstream;

/// `ncclResult_t`.
pub type Status = c_int;

pub const SUCCESS: Status = 0;
pub const IN_PROGRESS: Status = 7;

/// The opaque communicator of NCCL.
pub type Comm = *mut c_void;

/// `ncclDataType_t`.
pub type DataType = c_int;

pub const FLOAT32: DataType = 7;
pub const BFLOAT16: DataType = 9;

/// `ncclRedOp_t`.
pub type RedOp = c_int;

pub const SUM: RedOp = 0;
pub const MAX: RedOp = 2;
pub const AVG: RedOp = 4;

/// `ncclUniqueId`: the identifier of a new communicator.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

/// The value of an integer of [`Config`] that NCCL chooses.
pub const UNDEFINED: c_int = c_int::MIN;
const MAGIC: u32 = 0xcafe_beef;
/// Version 2.18.0, whose `ncclConfig_t` is [`Config`]. Newer versions treat the fields added since as undefined.
const CONFIG_VERSION: u32 = 21800;

/// `ncclConfig_t` of version 2.18.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    pub blocking: c_int,
    pub cga_cluster_size: c_int,
    pub min_ctas: c_int,
    pub max_ctas: c_int,
    pub net_name: *const c_char,
    pub split_share: c_int,
    /// Padding, in which later versions have a field.
    padding: c_int,
}

impl Config {
    /// Returns a configuration in which calls do not block. NCCL chooses everything else.
    pub fn non_blocking() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: MAGIC,
            version: CONFIG_VERSION,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            padding: UNDEFINED,
        }
    }
}

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions of the opened library. It is never closed, because its threads and kernels stay loaded.
        pub struct Functions {
            $(pub $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            /// The file of the library.
            pub path: PathBuf,
        }

        impl Functions {
            pub(crate) fn bind(found: cuda_driver::library::Found) -> Result<Self, Error> {
                let library = std::mem::ManuallyDrop::new(found.library);
                let path = found.path;
                $(
                    // SAFETY: the signature is that of nccl.h, which is the same in all versions 2.
                    let $field = unsafe { library.get($name) }
                        .map(|symbol| *symbol)
                        .map_err(|_| Error::NoFunction { path: path.clone(), function: $name })?;
                )*
                Ok(Self { $($field,)* path })
            }
        }
    };
}

functions! {
    version = "ncclGetVersion": fn(*mut c_int) -> Status;
    unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> Status;
    init_rank_config = "ncclCommInitRankConfig": fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Status;
    split = "ncclCommSplit": fn(Comm, c_int, c_int, *mut Comm, *mut Config) -> Status;
    finalize = "ncclCommFinalize": fn(Comm) -> Status;
    destroy = "ncclCommDestroy": fn(Comm) -> Status;
    abort = "ncclCommAbort": fn(Comm) -> Status;
    async_error = "ncclCommGetAsyncError": fn(Comm, *mut Status) -> Status;
    last_error = "ncclGetLastError": fn(Comm) -> *const c_char;
    all_reduce = "ncclAllReduce":
        fn(*const c_void, *mut c_void, usize, DataType, RedOp, Comm, CUstream) -> Status;
    reduce_scatter = "ncclReduceScatter":
        fn(*const c_void, *mut c_void, usize, DataType, RedOp, Comm, CUstream) -> Status;
    all_gather = "ncclAllGather": fn(*const c_void, *mut c_void, usize, DataType, Comm, CUstream) -> Status;
    broadcast = "ncclBroadcast":
        fn(*const c_void, *mut c_void, usize, DataType, c_int, Comm, CUstream) -> Status;
    send = "ncclSend": fn(*const c_void, usize, DataType, c_int, Comm, CUstream) -> Status;
    receive = "ncclRecv": fn(*mut c_void, usize, DataType, c_int, Comm, CUstream) -> Status;
    group_start = "ncclGroupStart": fn() -> Status;
    group_end = "ncclGroupEnd": fn() -> Status;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_match_the_sizes_of_the_header() {
        assert_eq!(size_of::<UniqueId>(), 128);
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(std::mem::offset_of!(Config, split_share), 40);
    }
}
