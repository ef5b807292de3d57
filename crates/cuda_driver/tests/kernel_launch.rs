//! Module loading and kernel launches with a mock driver.

mod common;

use common::build;
use cuda_driver::{Gpu, LaunchConfig, Module, Stream};
use std::ffi::c_void;

const ONE_GPU: &str = include_str!("common/one_gpu.rs");

/// Images that begin with `bad` do not compile. A launch must have the arguments 7 and 9, and fails with the code of stream
/// capture in blocks of 1024 threads.
const SOURCE: &str = r#"
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuStreamCreateWithPriority(to: *mut usize, _: u32, _: i32) -> u32 { unsafe { *to = 5 }; 0 }
#[unsafe(no_mangle)] pub extern "C" fn cuStreamDestroy_v2(_: usize) -> u32 { 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuModuleLoadDataEx(to: *mut usize, image: *const u8, options: u32, keys: *const i32, values: *const *mut c_void) -> u32 {
    unsafe {
        if std::slice::from_raw_parts(image, 3) != b"bad" { *to = 6; return 0 }
        if options == 2 && *keys == 5 { std::ptr::copy(c"line 1: bad".as_ptr().cast::<u8>(), (*values).cast::<u8>(), 12) }
    }
    222
}
#[unsafe(no_mangle)] pub extern "C" fn cuModuleUnload(module: usize) -> u32 { assert_eq!(module, 6); 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuModuleGetFunction(to: *mut usize, _: usize, name: *const u8) -> u32 {
    if unsafe { *name } != b'k' { return 500 }
    unsafe { *to = 8 }; 0
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuFuncGetAttribute(value: *mut i32, id: i32, _: usize) -> u32 { unsafe { *value = id }; 0 }
#[unsafe(no_mangle)] pub extern "C" fn cuFuncSetAttribute(function: usize, id: i32, value: i32) -> u32 {
    assert_eq!((function, id, value), (8, 8, 100 << 10)); 0
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuLaunchKernel(function: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32,
    shared: u32, stream: usize, arguments: *const *const u32, extra: usize) -> u32 {
    if bx == 1024 { return 901 }
    assert_eq!((function, [gx, gy, gz], [bx, by, bz], shared, stream, extra), (8, [2, 3, 4], [32, 1, 1], 100 << 10, 5, 0));
    assert_eq!(unsafe { [**arguments, **arguments.add(1)] }, [7, 9]);
    0
}
#[repr(C)] pub struct Config { grid: [u32; 3], block: [u32; 3], shared: u32, stream: usize, attributes: *const [u32; 18], count: u32 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuLaunchKernelEx(config: *const Config, _: usize, _: usize, _: usize) -> u32 {
    let config = unsafe { &*config };
    assert_eq!((config.grid, config.block, config.count), ([2, 3, 4], [1024, 1, 1], 0));
    901
}
"#;

#[test]
fn launches_pass_their_shape_and_arguments_and_errors_are_exact() {
    let dir = tempfile::tempdir().unwrap();
    cuda_driver::load_from(build(dir.path(), &[ONE_GPU, SOURCE].concat())).unwrap();
    let gpu = Gpu::open(0).unwrap();
    let stream = Stream::new(&gpu).unwrap();

    let error = Module::load(&gpu, "test", b"bad image").err().unwrap();
    assert_eq!(error.code(), Some(222), "a code that cust does not know");
    assert!(error.to_string().contains("the driver's compiler reports: line 1: bad"), "{error}");

    let module = Module::load(&gpu, "test", b"good image").unwrap();
    let error = module.function("absent").unwrap_err().to_string();
    assert!(error.starts_with("module test has no kernel absent"), "{error}");
    let function = module.function("kernel").unwrap();
    assert_eq!((function.resources().registers, function.resources().local_bytes), (4, 3));

    let config = LaunchConfig { grid: [2, 3, 4], block: [32, 1, 1], shared_bytes: 100 << 10 };
    let launch = |config: &LaunchConfig| {
        let (first, second) = (7_u32, 9_u32);
        let mut arguments = [(&raw const first).cast_mut().cast::<c_void>(), (&raw const second).cast_mut().cast()];
        // SAFETY: the mock reads two integers.
        unsafe { function.launch(&stream, config, &mut arguments) }
    };
    launch(&config).unwrap();
    let error = launch(&LaunchConfig { block: [1024, 1, 1], ..config }).unwrap_err();
    assert_eq!(error.code(), Some(901), "a code that cust does not know");
    let error = launch(&LaunchConfig { shared_bytes: 300 << 10, ..config }).unwrap_err().to_string();
    assert_eq!(
        error,
        "kernel kernel: expected at most 204799 bytes of shared memory per block on this GPU, found 307200; use smaller or fewer \
         arrays and tiles in the kernel, or a GPU with more shared memory"
    );
}
