//! A machine without a driver: everything answers in words, nothing crashes.

use cuda_driver::cust::{self, CudaFlags, error::CudaError};
use cuda_driver::{Error, Gpu};

#[test]
fn calls_before_load_are_not_initialized() {
    assert_eq!(cust::init(CudaFlags::empty()), Err(CudaError::NotInitialized));
    // cust's Display panics where cuGetErrorString fails.
    assert!(CudaError::NotInitialized.to_string().contains("without a description"));
    assert!(cuda_driver::missing().is_empty());
}

#[test]
fn a_missing_driver_is_named() {
    let error = cuda_driver::load_from("libcuda-absent.so.1").unwrap_err();
    assert!(matches!(error, Error::NoDriver { .. }));
    let text = error.to_string();
    assert!(text.contains("libcuda-absent.so.1") && text.contains("run on the CPU"), "{text}");
    // The first outcome is kept.
    assert_eq!(cuda_driver::load().unwrap_err().to_string(), text);
    assert_eq!(Gpu::open(0).unwrap_err().to_string(), text);
}
