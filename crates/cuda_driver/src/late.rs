//! The table of late-bound driver functions and the library that fills it.

use crate::Error;
use std::arch::naked_asm;
use std::ffi::{CStr, OsStr, c_char, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

type Slot = AtomicPtr<c_void>;

const NOT_INITIALIZED: u32 = 3;
const NOT_FOUND: u32 = 500;

extern "C" fn not_initialized() -> u32 {
    NOT_INITIALIZED
}

/// Stands where the driver is too old to have a function.
extern "C" fn not_found() -> u32 {
    NOT_FOUND
}

/// The one function that is more than a jump: cust's `CudaError::to_string` panics where it fails, so it never does.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(code: u32, text: *mut *const c_char) -> u32 {
    type ErrorString = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;
    // SAFETY: the slot holds the driver's cuGetErrorString or a stand-in that reads no argument.
    let real: ErrorString = unsafe { std::mem::transmute(slot::ERROR_STRING.load(Relaxed)) };
    let mut found: *const c_char = std::ptr::null();
    // SAFETY: `found` is a valid place for the answer.
    if unsafe { real(code, &raw mut found) } != 0 || found.is_null() {
        found = c"CUDA error without a description".as_ptr();
    }
    // SAFETY: the caller passes a valid place for the text, as cuGetErrorString requires.
    unsafe { *text = found };
    0
}

macro_rules! late_bound {
    ($($name:ident)*) => {
        #[expect(non_upper_case_globals, reason = "the driver's names")]
        mod slot {
            use super::{Slot, not_initialized};
            pub static ERROR_STRING: Slot = Slot::new(not_initialized as *mut _);
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
            $((
                // A C string literal of the name; concat! ends it with its NUL.
                match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => unreachable!(),
                },
                &slot::$name,
            )),*
        ];
    };
}

// What cust 0.3.2 refers to, then what `sys` adds.
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
    cuOccupancyMaxActiveBlocksPerMultiprocessor cuOccupancyMaxPotentialBlockSize cuStreamCreateWithPriority
    cuStreamDestroy_v2 cuStreamGetFlags cuStreamGetPriority cuStreamSynchronize cuStreamWaitEvent
    cuSurfObjectCreate cuSurfObjectDestroy cuSurfObjectGetResourceDesc cuTexObjectCreate cuTexObjectDestroy
    cuTexObjectGetResourceDesc cuTexObjectGetResourceViewDesc

    cuDeviceGetUuid_v2 cuFuncSetAttribute cuGetErrorName cuGraphExecDestroy cuGraphInstantiateWithFlags cuGraphLaunch
    cuGraphUpload cuLaunchKernelEx cuMemHostAlloc cuStreamBeginCapture_v2 cuStreamCreate cuStreamEndCapture
    cuStreamQuery cuTensorMapEncodeTiled
}

/// Opens libcuda.so.1 and binds the table. The first outcome, good or bad, is kept for the life of the process.
pub fn load() -> Result<(), Error> {
    bind(&["libcuda.so.1".as_ref(), "/usr/lib/wsl/lib/libcuda.so.1".as_ref()])
}

/// As [`load`], from a driver library at `path` instead of libcuda.so.1.
pub fn load_from(path: impl AsRef<OsStr>) -> Result<(), Error> {
    bind(&[path.as_ref()])
}

/// What the driver lacks, or why there is none.
static OUTCOME: OnceLock<Result<Vec<&'static str>, String>> = OnceLock::new();

fn bind(candidates: &[&OsStr]) -> Result<(), Error> {
    let outcome = OUTCOME.get_or_init(|| {
        let mut reason = String::new();
        for name in candidates {
            // SAFETY: a CUDA driver's initialisers may run at any time, and the library is never closed.
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

/// Fills the table; returns the names that the library does not have.
fn fill(library: &libloading::Library) -> Vec<&'static str> {
    let mut absent = Vec::new();
    for (name, slot) in TABLE {
        // SAFETY: only the address is taken; the signature is that of whoever calls through the slot.
        let symbol = unsafe { library.get::<*mut c_void>(*name) };
        if symbol.is_err() {
            absent.extend(name.to_str());
        }
        let address = symbol.map_or(not_found as *mut c_void, |symbol| *symbol);
        slot.store(address, Relaxed);
    }
    absent
}

/// dlopen's own words, which libloading keeps as the source.
pub(crate) fn text_of(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Names in the table that the loaded driver does not have; empty before [`load`].
pub fn missing() -> &'static [&'static str] {
    OUTCOME.get().and_then(|outcome| outcome.as_deref().ok()).unwrap_or_default()
}
