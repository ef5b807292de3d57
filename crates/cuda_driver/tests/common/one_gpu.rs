//! A part of mock drivers: one GPU of compute capability 9.9 with 200 KiB of shared memory for each block.
use std::ffi::c_void;
#[unsafe(no_mangle)] pub extern "C" fn cuInit(_: u32) -> u32 { 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceGetCount(count: *mut i32) -> u32 { unsafe { *count = 1 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceGet(device: *mut i32, _: i32) -> u32 { unsafe { *device = 0 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceGetName(name: *mut u8, _: i32, _: i32) -> u32 { unsafe { *name = 0 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _: i32) -> u32 { unsafe { *bytes = 1 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut i32, id: i32, _: i32) -> u32 {
    unsafe { *value = if id == 97 { 200 << 10 } else { 9 } }; 0
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(to: *mut usize, _: i32) -> u32 { unsafe { *to = 99 }; 0 }
#[unsafe(no_mangle)] pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_: i32) -> u32 { 0 }
#[unsafe(no_mangle)] pub extern "C" fn cuCtxSetCurrent(_: *mut c_void) -> u32 { 0 }
