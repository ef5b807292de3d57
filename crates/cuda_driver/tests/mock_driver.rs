//! Calls a mock driver that is loaded instead of libcuda. Arguments must arrive unchanged, and functions that it lacks must
//! return CUDA_ERROR_NOT_FOUND.

mod common;

use common::build;
use cuda_driver::{Error, sys};

const SOURCE: &str = r#"
use std::ffi::c_void;
#[unsafe(no_mangle)] pub extern "C" fn cuInit(_: u32) -> u32 { 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceGetCount(count: *mut i32) -> u32 { unsafe { *count = 3 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDriverGetVersion(v: *mut i32) -> u32 { unsafe { *v = 13010 }; 0 }
#[unsafe(no_mangle)] pub extern "C" fn cuDeviceGet(_: *mut i32, _: i32) -> u32 { 719 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuGetErrorName(code: u32, name: *mut *const u8) -> u32 {
    if code != 719 { return 1 }
    unsafe { *name = c"CUDA_ERROR_LAUNCH_FAILED".as_ptr().cast() }; 0
}
// Twelve arguments: six in registers, six on the stack. Returns their digits in order.
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuTensorMapEncodeTiled(map: *mut u64, a: i32, b: u32, c: *mut c_void,
    d: *const u64, e: *const u64, f: *const u32, g: *const u32, h: i32, i: i32, j: i32, k: i32) -> u32 {
    let digits = [a as u64, b as u64, c as u64, d as u64, e as u64, f as u64, g as u64, h as u64, i as u64, j as u64, k as u64];
    unsafe { *map = digits.iter().fold(0, |number, digit| number * 16 + digit) }; 0
}
"#;

#[test]
fn late_bound_calls_pass_arguments_and_report_missing_functions() {
    let dir = tempfile::tempdir().unwrap();
    cuda_driver::load_from(build(dir.path(), SOURCE)).unwrap();

    assert_eq!(cuda_driver::driver_version().unwrap(), (13, 1));
    assert_eq!(cuda_driver::device_count().unwrap(), 3);

    let mut map = sys::CUtensorMap([0; 16]);
    let at = |digit: usize| std::ptr::without_provenance_mut::<u8>(digit);
    // SAFETY: the mock accesses no pointer but the first.
    let code = unsafe {
        let (c, d, e, f, g) = (at(3).cast(), at(4).cast(), at(5).cast(), at(6).cast(), at(7).cast());
        sys::cuTensorMapEncodeTiled(&raw mut map, 1, 2, c, d, e, f, g, 8, 9, 10, 11)
    };
    assert_eq!((code, map.0[0]), (0, 0x123_4567_89ab));

    let missing = cuda_driver::missing();
    assert!(missing.contains(&"cuLaunchKernelEx") && !missing.contains(&"cuInit"), "{missing:?}");
    // SAFETY: the mock lacks this function, so none of the arguments is read.
    assert_eq!(unsafe { sys::cuGraphLaunch(std::ptr::null_mut(), std::ptr::null_mut()) }, 500);

    // The mock has a name for this code, but no description.
    let error = cuda_driver::Gpu::open(1).unwrap_err();
    assert_eq!(error.code(), Some(719));
    let text = error.to_string();
    assert!(text.starts_with("cuDeviceGet(1): CUDA_ERROR_LAUNCH_FAILED (719): CUDA error without"), "{text}");
    assert!(text.contains("compute-sanitizer"), "{text}");

    let error = cuda_driver::Gpu::open(3).unwrap_err();
    assert!(matches!(error, Error::NoSuchDevice { index: 3, count: 3 }));
}
