//! Checked launches with a mock driver.

mod common;

use common::build;
use cuda_builder::{Kernel, Kernels, LaunchBounds, Module};
use cuda_driver::{Buffer, CheckedModule, Error, Gpu, Stream};
use cuda_std::emulate::Memory;
use cuda_std::shared::Layout;
use cuda_std::{GlobalSlice, GlobalSliceMut, kernel};
use std::borrow::Cow;

const ONE_GPU: &str = include_str!("common/one_gpu.rs");

/// The memory of this process is the device's. `cuStreamIsCapturing` returns the number of begun captures. A launch must have the arguments of
/// `scale`, and computes it.
const SOURCE: &str = r#"
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering::SeqCst};
static CAPTURES: AtomicI32 = AtomicI32::new(0);
static STREAMS: AtomicUsize = AtomicUsize::new(5);
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuStreamCreateWithPriority(to: *mut usize, _: u32, _: i32) -> u32 {
    unsafe { *to = STREAMS.fetch_add(1, SeqCst) }; 0
}
#[unsafe(no_mangle)] pub extern "C" fn cuStreamDestroy_v2(_: usize) -> u32 { 0 }
#[unsafe(no_mangle)] pub extern "C" fn cuStreamSynchronize(_: usize) -> u32 { 0 }
#[unsafe(no_mangle)] pub extern "C" fn cuStreamBeginCapture_v2(_: usize, _: u32) -> u32 { CAPTURES.fetch_add(1, SeqCst); 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuStreamIsCapturing(_: usize, status: *mut i32) -> u32 {
    unsafe { *status = CAPTURES.load(SeqCst) }; 0
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuMemAlloc_v2(to: *mut *mut u8, bytes: usize) -> u32 {
    unsafe { *to = std::alloc::alloc_zeroed(std::alloc::Layout::from_size_align(bytes, 256).unwrap()) }; 0
}
#[unsafe(no_mangle)] pub extern "C" fn cuMemFree_v2(_: usize) -> u32 { 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuMemsetD8Async(to: *mut u8, value: u8, bytes: usize, _: usize) -> u32 {
    unsafe { to.write_bytes(value, bytes) }; 0
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: *mut u8, from: *const u8, bytes: usize, _: usize) -> u32 {
    unsafe { to.copy_from(from, bytes) }; 0
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut u8, from: *const u8, bytes: usize, _: usize) -> u32 {
    unsafe { to.copy_from(from, bytes) }; 0
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuModuleLoadDataEx(to: *mut usize, _: *const u8, _: u32, _: usize, _: usize) -> u32 { unsafe { *to = 6 }; 0 }
#[unsafe(no_mangle)] pub extern "C" fn cuModuleUnload(_: usize) -> u32 { 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuModuleGetFunction(to: *mut usize, _: usize, _: *const u8) -> u32 { unsafe { *to = 8 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuFuncGetAttribute(value: *mut i32, _: i32, _: usize) -> u32 { unsafe { *value = 0 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuLaunchKernel(_: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32,
    shared: u32, _: usize, arguments: *const *const c_void, _: usize) -> u32 {
    assert_eq!(([gx, gy, gz], [bx, by, bz], shared), ([2, 1, 1], [64, 1, 1], 128));
    unsafe {
        let (y, y_length) = (*(*arguments).cast::<*mut f32>(), *(*arguments.add(1)).cast::<u64>());
        let (x, x_length) = (*(*arguments.add(2)).cast::<*const f32>(), *(*arguments.add(3)).cast::<u64>());
        let a = *(*arguments.add(4)).cast::<f32>();
        assert_eq!((y_length, x_length), (100, 100));
        for i in 0..100 { *y.add(i) = a * *x.add(i) }
    }
    0
}
"#;

#[kernel(threads = 64, shared = |layout: &mut Layout| layout.array::<f32>(32), checked)]
fn scale(y: GlobalSliceMut<f32>, x: GlobalSlice<f32>, a: f32) {
    let i = cuda_std::thread::index_1d();
    if let Some(x) = x.get(i) {
        y.set(i, a * x);
    }
}

/// Returns a module with a kernel of this signature, as the builder describes it.
fn kernels(signature: Option<u64>) -> Kernels {
    let kernel = Kernel { name: Cow::Borrowed("scale"), bounds: LaunchBounds::default(), resources: None, signature };
    let kernels: &'static [Kernel] = Box::leak(Box::new([kernel]));
    let module = Module { arch: "sm_80", ptx: "image", cubin: None, kernels, shared_limit: None };
    // SAFETY: the mock driver computes the kernel.
    unsafe { Kernels::new(Box::leak(Box::new([module])), None) }
}

#[test]
fn a_checked_launch_passes_lengths_and_rejects_what_it_cannot_check() {
    let dir = tempfile::tempdir().unwrap();
    cuda_driver::load_from(build(dir.path(), &[ONE_GPU, SOURCE].concat())).unwrap();
    let gpu = Gpu::open(0).unwrap();
    let (stream, other) = (Stream::new(&gpu).unwrap(), Stream::new(&gpu).unwrap());
    let values: Vec<f32> = (0..100).map(|i| i as f32).collect();
    let x = Buffer::from_slice(&stream, &values).unwrap();
    let mut y = Buffer::<f32>::zeroed(&stream, 100).unwrap();
    let signature = scale(y.slice_mut(), x.slice(), 0.0).signature();
    let module = CheckedModule::load(&gpu, &kernels(Some(signature))).unwrap();

    module.launch(&stream, [2, 1, 1], &scale(y.slice_mut(), x.slice(), 3.0)).unwrap();
    assert_eq!(y.read().unwrap(), values.iter().map(|x| 3.0 * x).collect::<Vec<_>>());

    let foreign = Buffer::from_slice(&other, &values).unwrap();
    let error = module.launch(&stream, [2, 1, 1], &scale(y.slice_mut(), foreign.slice(), 3.0)).unwrap_err();
    assert!(matches!(error, Error::OtherStream { buffer: 2, buffers: 2, .. }), "{error}");
    let mut memory = Memory::new();
    let emulated = memory.input_slice("x", &values);
    let error = module.launch(&stream, [2, 1, 1], &scale(y.slice_mut(), emulated, 3.0)).unwrap_err();
    assert!(matches!(error, Error::OtherStream { .. }), "{error}");

    for wrong in [None, Some(signature ^ 1)] {
        let module = CheckedModule::load(&gpu, &kernels(wrong)).unwrap();
        let error = module.launch(&stream, [2, 1, 1], &scale(y.slice_mut(), x.slice(), 3.0)).unwrap_err();
        assert!(matches!(error, Error::OtherSource { .. }), "{error}");
    }

    stream.begin_capture().unwrap();
    let error = module.launch(&stream, [2, 1, 1], &scale(y.slice_mut(), x.slice(), 3.0)).unwrap_err();
    assert!(matches!(error, Error::Capturing), "{error}");
    assert!(matches!(y.read(), Err(Error::Capturing)));
}
