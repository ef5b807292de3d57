//! Declarations of the driver functions that this crate calls without `cust`.
//!
//! Names and meanings are those of NVIDIA's `cuda.h`; see the CUDA Driver API documentation. The functions return the
//! driver's code as a number, because the code of a newer driver is not a value of `cust`'s enum.

#![expect(missing_docs, reason = "the names and their documentation are NVIDIA's")]

use std::ffi::{c_char, c_int, c_void};

pub use cust::sys::{CUevent, CUfunction, CUgraph, CUgraphExec, CUmodule, CUstream};

pub type CUdevice = c_int;
pub type CUdeviceptr = u64;

pub const CU_STREAM_NON_BLOCKING: u32 = 1;
pub const CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: u32 = 1;
pub const CU_EVENT_DISABLE_TIMING: u32 = 2;
pub const CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;
pub const CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
pub const CU_JIT_ERROR_LOG_BUFFER: c_int = 5;
pub const CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: c_int = 6;

pub const CUDA_ERROR_OUT_OF_MEMORY: u32 = 2;
pub const CUDA_ERROR_NOT_READY: u32 = 600;
pub const CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: u32 = 901;

/// A tensor map in the hardware's opaque format.
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
    pub fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: CUdevice) -> u32;
    pub fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice) -> u32;

    pub fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) -> u32;
    pub fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) -> u32;
    pub fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) -> u32;
    pub fn cuMemsetD8Async(to: CUdeviceptr, value: u8, bytes: usize, stream: CUstream) -> u32;

    pub fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32) -> u32;
    pub fn cuStreamBeginCapture_v2(stream: CUstream, mode: u32) -> u32;
    pub fn cuStreamIsCapturing(stream: CUstream, status: *mut c_int) -> u32;
    pub fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> u32;

    pub fn cuEventCreate(event: *mut CUevent, flags: u32) -> u32;
    pub fn cuEventDestroy_v2(event: CUevent) -> u32;
    pub fn cuEventRecord(event: CUevent, stream: CUstream) -> u32;
    pub fn cuEventSynchronize(event: CUevent) -> u32;
    pub fn cuEventQuery(event: CUevent) -> u32;

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
    pub fn cuFuncSetAttribute(function: CUfunction, attribute: c_int, value: c_int) -> u32;
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
