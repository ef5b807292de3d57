//! Errors on a machine without a driver.

use cuda_driver::cust::{self, CudaFlags, error::CudaError};
use cuda_driver::{Error, Gpu};

#[test]
fn calls_before_load_return_not_initialized() {
    assert_eq!(cust::init(CudaFlags::empty()), Err(CudaError::NotInitialized));
    // cust's Display panics if cuGetErrorString fails.
    assert!(CudaError::NotInitialized.to_string().contains("without a description"));
    assert!(cuda_driver::missing().is_empty());
}

#[test]
fn errors_name_a_missing_driver() {
    let error = cuda_driver::load_from("libcuda-absent.so.1").unwrap_err();
    assert!(matches!(error, Error::NoDriver { .. }));
    let text = error.to_string();
    assert!(text.contains("libcuda-absent.so.1") && text.contains("run on the CPU"), "{text}");
    // Later calls return the result of the first.
    assert_eq!(cuda_driver::load().unwrap_err().to_string(), text);
    assert_eq!(Gpu::open(0).unwrap_err().to_string(), text);
}
