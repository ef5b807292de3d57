//! The table of late-bound driver functions, and the library that fills it.

use crate::Error;
use crate::sys::{CU_STREAM_NON_BLOCKING, CUstream};
use std::arch::naked_asm;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

type Slot = AtomicPtr<c_void>;

const NOT_INITIALIZED: u32 = 3;
const NOT_FOUND: u32 = 500;

extern "C" fn not_initialized() -> u32 {
    NOT_INITIALIZED
}

/// Replaces a function that the driver is too old to have.
extern "C" fn not_found() -> u32 {
    NOT_FOUND
}

/// Calls the driver's `cuGetErrorString`, and gives a general text where that fails: cust's `CudaError::to_string` panics on
/// a failure.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(code: u32, text: *mut *const c_char) -> u32 {
    type ErrorString = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;
    // SAFETY: the slot holds the driver's cuGetErrorString or a fallback that reads no argument.
    let real: ErrorString = unsafe { std::mem::transmute(slot::ERROR_STRING.load(Relaxed)) };
    let mut found: *const c_char = std::ptr::null();
    // SAFETY: `found` is valid for a write.
    if unsafe { real(code, &raw mut found) } != 0 || found.is_null() {
        found = c"CUDA error without a description".as_ptr();
    }
    // SAFETY: the caller passes a pointer that is valid for a write, as cuGetErrorString requires.
    unsafe { *text = found };
    0
}

/// Calls the driver's `cuStreamCreateWithPriority` with the non-blocking flag, which `cust::stream::Stream::new` removes.
///
/// cust removes it because its synchronous copies run on the legacy default stream, which does not wait for non-blocking
/// streams. This crate makes no such copies.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: u32, priority: c_int) -> u32 {
    type Create = unsafe extern "C" fn(*mut CUstream, u32, c_int) -> u32;
    // SAFETY: the slot holds the driver's cuStreamCreateWithPriority or a fallback that reads no argument.
    let real: Create = unsafe { std::mem::transmute(slot::STREAM_CREATE.load(Relaxed)) };
    // SAFETY: the caller passes a pointer that is valid for a write, as cuStreamCreateWithPriority requires.
    unsafe { real(stream, flags | CU_STREAM_NON_BLOCKING, priority) }
}

macro_rules! late_bound {
    ($($name:ident)*) => {
        #[expect(non_upper_case_globals, reason = "these are the driver's names")]
        mod slot {
            use super::{Slot, not_initialized};
            pub static ERROR_STRING: Slot = Slot::new(not_initialized as *mut _);
            pub static STREAM_CREATE: Slot = Slot::new(not_initialized as *mut _);
            $(pub static $name: Slot = Slot::new(not_initialized as *mut _);)*
        }

        mod jump {
            $(
                #[unsafe(no_mangle)]
                #[unsafe(naked)]
                unsafe extern "C" fn $name() {
                    #[cfg(target_arch = "x86_64")]
                    super::naked_asm!("jmp qword ptr [rip + {}]", sym super::slot::$name);
                    #[cfg(target_arch = "aarch64")]
                    super::naked_asm!(
                        "adrp x16, {0}", "ldr x16, [x16, :lo12:{0}]", "br x16", sym super::slot::$name
                    );
                }
            )*
        }

        static TABLE: &[(&CStr, &Slot)] = &[
            (c"cuGetErrorString", &slot::ERROR_STRING),
            (c"cuStreamCreateWithPriority", &slot::STREAM_CREATE),
            $((
                // The name as a C string, ended by a NUL.
                match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => unreachable!(),
                },
                &slot::$name,
            )),*
        ];
    };
}

// The functions that cust 0.3.2 refers to, then those that `beyond_cust::sys` adds.
late_bound! {
    cuArray3DCreate_v2 cuArray3DGetDescriptor_v2 cuArrayDestroy cuCtxCreate_v2 cuCtxDestroy_v2 cuCtxGetApiVersion
    cuCtxGetCacheConfig cuCtxGetCurrent cuCtxGetDevice cuCtxGetFlags cuCtxGetLimit cuCtxGetSharedMemConfig
    cuCtxGetStreamPriorityRange cuCtxPopCurrent_v2 cuCtxPushCurrent_v2 cuCtxSetCacheConfig cuCtxSetCurrent
    cuCtxSetLimit cuCtxSetSharedMemConfig cuCtxSynchronize cuDestroyExternalMemory cuDeviceGet
    cuDeviceGetAttribute cuDeviceGetCount cuDeviceGetName cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset_v2
    cuDevicePrimaryCtxRetain cuDevicePrimaryCtxSetFlags_v2 cuDeviceTotalMem_v2 cuDriverGetVersion
    cuEventCreate cuEventDestroy_v2 cuEventElapsedTime cuEventQuery cuEventRecord cuEventSynchronize
    cuExternalMemoryGetMappedBuffer cuFuncGetAttribute cuFuncSetCacheConfig cuFuncSetSharedMemConfig
    cuGraphAddKernelNode cuGraphCreate cuGraphDebugDotPrint cuGraphDestroy cuGraphGetEdges
    cuGraphGetNodes cuGraphKernelNodeGetParams cuGraphNodeGetType cuImportExternalMemory cuInit cuLaunchHostFunc
    cuLaunchKernel cuLinkAddData_v2 cuLinkComplete cuLinkCreate_v2 cuLinkDestroy cuMemAdvise cuMemAllocAsync
    cuMemAllocHost_v2 cuMemAllocManaged cuMemAlloc_v2 cuMemFreeAsync cuMemFreeHost cuMemFree_v2 cuMemGetInfo_v2
    cuMemPrefetchAsync cuMemcpy2D_v2 cuMemcpyAtoH_v2 cuMemcpyDtoDAsync_v2 cuMemcpyDtoD_v2 cuMemcpyDtoHAsync_v2
    cuMemcpyDtoH_v2 cuMemcpyHtoA_v2 cuMemcpyHtoDAsync_v2 cuMemcpyHtoD_v2 cuMemsetD16Async cuMemsetD16_v2
    cuMemsetD32Async cuMemsetD32_v2 cuMemsetD8Async cuMemsetD8_v2 cuModuleGetFunction cuModuleGetGlobal_v2
    cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleUnload cuOccupancyAvailableDynamicSMemPerBlock
    cuOccupancyMaxActiveBlocksPerMultiprocessor cuOccupancyMaxPotentialBlockSize cuStreamDestroy_v2
    cuStreamGetFlags cuStreamGetPriority cuStreamSynchronize cuStreamWaitEvent
    cuSurfObjectCreate cuSurfObjectDestroy cuSurfObjectGetResourceDesc cuTexObjectCreate cuTexObjectDestroy
    cuTexObjectGetResourceDesc cuTexObjectGetResourceViewDesc

    cuDeviceGetUuid_v2 cuFuncSetAttribute cuGetErrorName cuGraphExecDestroy cuGraphInstantiateWithFlags cuGraphLaunch
    cuGraphUpload cuLaunchKernelEx cuStreamBeginCapture_v2 cuStreamEndCapture cuStreamIsCapturing cuTensorMapEncodeTiled
}

/// Opens libcuda.so.1 and fills the table of driver functions. Later calls return the result of the first.
pub fn load() -> Result<(), Error> {
    bind(&["libcuda.so.1".as_ref(), "/usr/lib/wsl/lib/libcuda.so.1".as_ref()])
}

/// Does the same as [`load`], with the driver library at `path` instead of libcuda.so.1.
pub fn load_from(path: impl AsRef<OsStr>) -> Result<(), Error> {
    bind(&[path.as_ref()])
}

/// The names of functions that the driver lacks, or the reason why there is no driver.
static OUTCOME: OnceLock<Result<Vec<&'static str>, String>> = OnceLock::new();

fn bind(candidates: &[&OsStr]) -> Result<(), Error> {
    let outcome = OUTCOME.get_or_init(|| {
        let mut reason = String::new();
        for name in candidates {
            // SAFETY: the initializers of a CUDA driver may run at any time, and the library is never closed.
            match unsafe { libloading::Library::new(*name) } {
                Ok(library) => {
                    return Ok(fill(&std::mem::ManuallyDrop::new(library)));
                }
                Err(error) if reason.is_empty() => reason = text_of(&error),
                Err(_) => {}
            }
        }
        Err(reason)
    });
    outcome.as_ref().map(|_| ()).map_err(|reason| Error::NoDriver { reason: reason.clone() })
}

/// Fills the table. Returns the names that the library does not have.
fn fill(library: &libloading::Library) -> Vec<&'static str> {
    let mut absent = Vec::new();
    for (name, slot) in TABLE {
        // SAFETY: only the address is taken; each caller declares the signature that it calls through the slot.
        let symbol = unsafe { library.get::<*mut c_void>(*name) };
        if symbol.is_err() {
            absent.extend(name.to_str());
        }
        let address = symbol.map_or(not_found as *mut c_void, |symbol| *symbol);
        slot.store(address, Relaxed);
    }
    absent
}

/// Returns the message of `dlopen`, which libloading keeps as the error's source.
pub(crate) fn text_of(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns the names of driver functions that the loaded driver does not have. Empty before [`load`].
pub fn missing() -> &'static [&'static str] {
    OUTCOME.get().and_then(|outcome| outcome.as_deref().ok()).unwrap_or_default()
}
