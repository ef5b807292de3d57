//! The driver calls this crate makes itself. They return the bare code: `cust`'s `CUresult` is an enum of CUDA 11.4's
//! codes, and a newer driver's code would not be a value of it.

use std::ffi::{c_char, c_int, c_void};

pub use cust::sys::{CUcontext, CUevent, CUfunction, CUgraph, CUgraphExec, CUmodule, CUstream};

pub type CUdevice = c_int;
pub type CUdeviceptr = u64;

pub const CU_STREAM_NON_BLOCKING: u32 = 1;
pub const CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: u32 = 1;
pub const CU_EVENT_DISABLE_TIMING: u32 = 2;
pub const CU_MEMHOSTALLOC_PORTABLE: u32 = 1;

pub const CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: c_int = 0;
pub const CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: c_int = 1;
pub const CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: c_int = 3;
pub const CU_FUNC_ATTRIBUTE_NUM_REGS: c_int = 4;
pub const CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
pub const CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: c_int = 14;

pub const CU_JIT_ERROR_LOG_BUFFER: c_int = 5;
pub const CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: c_int = 6;

pub const CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: u32 = 4;

pub const CUDA_ERROR_OUT_OF_MEMORY: u32 = 2;
pub const CUDA_ERROR_NOT_READY: u32 = 600;

/// A tensor map as the hardware reads it; opaque.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CUtensorMap(pub [u64; 16]);

#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct CUlaunchAttribute {
    pub id: u32,
    pub pad: u32,
    pub value: [u32; 16],
}

#[repr(C)]
pub struct CUlaunchConfig {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub stream: CUstream,
    pub attributes: *const CUlaunchAttribute,
    pub attribute_count: u32,
}

unsafe extern "C" {
    pub fn cuGetErrorName(code: u32, name: *mut *const c_char) -> u32;
    pub fn cuGetErrorString(code: u32, text: *mut *const c_char) -> u32;

    pub fn cuInit(flags: u32) -> u32;
    pub fn cuDriverGetVersion(version: *mut c_int) -> u32;
    pub fn cuDeviceGetCount(count: *mut c_int) -> u32;
    pub fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> u32;
    pub fn cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice) -> u32;
    pub fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: CUdevice) -> u32;
    pub fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) -> u32;
    pub fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice) -> u32;
    pub fn cuCtxSetCurrent(context: CUcontext) -> u32;
    pub fn cuCtxSynchronize() -> u32;

    pub fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32;
    pub fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) -> u32;
    pub fn cuMemFree_v2(address: CUdeviceptr) -> u32;
    pub fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: u32) -> u32;
    pub fn cuMemFreeHost(address: *mut c_void) -> u32;
    pub fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) -> u32;
    pub fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) -> u32;
    pub fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) -> u32;
    pub fn cuMemsetD8Async(to: CUdeviceptr, value: u8, bytes: usize, stream: CUstream) -> u32;

    pub fn cuStreamCreate(stream: *mut CUstream, flags: u32) -> u32;
    pub fn cuStreamDestroy_v2(stream: CUstream) -> u32;
    pub fn cuStreamSynchronize(stream: CUstream) -> u32;
    pub fn cuStreamQuery(stream: CUstream) -> u32;
    pub fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32) -> u32;
    pub fn cuStreamGetFlags(stream: CUstream, flags: *mut u32) -> u32;
    pub fn cuStreamBeginCapture_v2(stream: CUstream, mode: u32) -> u32;
    pub fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> u32;

    pub fn cuEventCreate(event: *mut CUevent, flags: u32) -> u32;
    pub fn cuEventDestroy_v2(event: CUevent) -> u32;
    pub fn cuEventRecord(event: CUevent, stream: CUstream) -> u32;
    pub fn cuEventSynchronize(event: CUevent) -> u32;
    pub fn cuEventQuery(event: CUevent) -> u32;
    pub fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent) -> u32;

    pub fn cuGraphDestroy(graph: CUgraph) -> u32;
    pub fn cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: u64) -> u32;
    pub fn cuGraphUpload(exec: CUgraphExec, stream: CUstream) -> u32;
    pub fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) -> u32;
    pub fn cuGraphExecDestroy(exec: CUgraphExec) -> u32;

    pub fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        options: u32,
        keys: *mut c_int,
        values: *mut *mut c_void,
    ) -> u32;
    pub fn cuModuleUnload(module: CUmodule) -> u32;
    pub fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) -> u32;
    pub fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: CUfunction) -> u32;
    pub fn cuFuncSetAttribute(function: CUfunction, attribute: c_int, value: c_int) -> u32;
    pub fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        function: CUfunction,
        block_size: c_int,
        shared_bytes: usize,
    ) -> u32;
    pub fn cuLaunchKernelEx(
        config: *const CUlaunchConfig,
        function: CUfunction,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> u32;

    pub fn cuTensorMapEncodeTiled(
        map: *mut CUtensorMap,
        element: c_int,
        rank: u32,
        base: *mut c_void,
        extents: *const u64,
        strides: *const u64,
        box_extents: *const u32,
        element_strides: *const u32,
        interleave: c_int,
        swizzle: c_int,
        l2_promotion: c_int,
        out_of_bounds_fill: c_int,
    ) -> u32;
}
