//! Errors of this crate.

use crate::sys;
use cust::error::{CudaError, CudaResult};
use std::ffi::{CStr, c_char};

/// `Result` with the error type [`Error`] by default.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the CUDA driver or of a check before a driver call.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The driver library could not be loaded.
    #[error(
        "no CUDA driver: {reason}; install the NVIDIA driver of this machine (inside a container, start it with its \
         GPUs), or run on the CPU"
    )]
    NoDriver {
        /// The dynamic linker's message.
        reason: String,
    },

    /// The driver reports no GPU.
    #[error("the CUDA driver finds no GPU; check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or run on the CPU")]
    NoDevice,

    /// The device index is too large.
    #[error(
        "GPU index: expected less than {count}, the number of visible GPUs, found {index}; check CUDA_VISIBLE_DEVICES"
    )]
    NoSuchDevice {
        /// The requested index.
        index: usize,
        /// The number of GPUs.
        count: usize,
    },

    /// A driver call failed.
    #[error("{call}: {name} ({code}): {text}{}", advice(*code))]
    Call {
        /// The call and its arguments.
        call: String,
        /// The driver's error code.
        code: u32,
        /// The driver's name of the code.
        name: String,
        /// The driver's description of the code.
        text: String,
    },

    /// There is too little free device memory.
    #[error(
        "out of GPU memory: requested {asked} bytes, but only {free} of {total} are free{}",
        advice(sys::CUDA_ERROR_OUT_OF_MEMORY)
    )]
    OutOfMemory {
        /// The requested bytes.
        asked: usize,
        /// The free bytes.
        free: usize,
        /// The bytes of the device.
        total: usize,
    },

    /// The driver could not load a module.
    #[error("the driver rejects module {module}: {name} ({code}): {text}{}{}", log_of(log), advice(*code))]
    Module {
        /// The module's name.
        module: String,
        /// The driver's error code.
        code: u32,
        /// The driver's name of the code.
        name: String,
        /// The driver's description of the code.
        text: String,
        /// The JIT compiler's error log. May be empty.
        log: String,
    },

    /// A module does not contain a kernel.
    #[error(
        "module {module} has no kernel {kernel}: the program and its kernels are from different builds; rebuild both"
    )]
    NoKernel {
        /// The module's name.
        module: String,
        /// The kernel's name.
        kernel: String,
    },

    /// A launch needs more shared memory than the GPU has.
    #[error(
        "kernel {kernel}: expected at most {limit} bytes of shared memory per block on this GPU, found {asked}; use smaller or fewer \
         arrays and tiles in the kernel, or a GPU with more shared memory"
    )]
    SharedMemory {
        /// The kernel's name.
        kernel: String,
        /// The requested bytes.
        asked: u32,
        /// The most bytes that the kernel can opt in to.
        limit: u32,
    },

    /// No module of a program runs on a GPU.
    #[error(
        "{gpu}, compute capability {}.{}: expected kernels for this GPU, found {found}; add its architecture to CudaBuilder::arch, and for \
         architectures such as sm_90a build with LLM_RS_CUBINS=1",
        capability.0, capability.1
    )]
    NoCode {
        /// The name of the GPU.
        gpu: String,
        /// Its compute capability.
        capability: (u32, u32),
        /// The architectures of the program, or the reason why it has no kernels.
        found: String,
    },

    /// A checked launch of a kernel that was compiled from another source.
    #[error(
        "kernel {kernel}: expected a checked kernel from the source of this program, found another or none; build the program and its \
         kernels again, with the same features"
    )]
    OtherSource {
        /// The kernel's name.
        kernel: String,
    },

    /// A buffer of a checked launch belongs to another stream.
    #[error(
        "kernel {kernel}: expected buffers of the stream of the launch, found buffer {buffer} of {buffers} of another stream or of the \
         emulator; create it on the same stream"
    )]
    OtherStream {
        /// The kernel's name.
        kernel: String,
        /// The number of the buffer among the kernel's buffers, from 1.
        buffer: usize,
        /// The number of buffers.
        buffers: usize,
    },

    /// A checked launch on a stream of a GPU other than the module's.
    #[error(
        "kernel {kernel}: expected a stream of GPU {module}, where its module is loaded, found one of GPU {stream}; load it there too"
    )]
    OtherGpu {
        /// The kernel's name.
        kernel: String,
        /// The GPU of the module.
        module: usize,
        /// The GPU of the stream.
        stream: usize,
    },

    /// Checked work on a stream whose work is captured.
    #[error(
        "stream: expected a stream that is not being captured, found one that is captured as a CUDA graph; the graph could run \
         after its buffers are released, so use unchecked launches and DeviceMemory in graphs"
    )]
    Capturing,

    /// The description of a tensor violates a rule of the hardware.
    #[error("tensor map: {0}")]
    TensorMap(String),
}

impl Error {
    /// Returns the driver's error code, if a driver call failed.
    pub fn code(&self) -> Option<u32> {
        match self {
            Self::Call { code, .. } | Self::Module { code, .. } => Some(*code),
            Self::OutOfMemory { .. } => Some(sys::CUDA_ERROR_OUT_OF_MEMORY),
            _ => None,
        }
    }
}

/// Returns the error of `call` unless `code` is success.
pub(crate) fn check<S: Into<String>>(code: u32, call: impl FnOnce() -> S) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(call_error(code, call())) }
}

/// Returns the error of `call`, which returned `code`.
pub(crate) fn call_error(code: u32, call: impl Into<String>) -> Error {
    let (name, text) = describe(code);
    Error::Call { call: call.into(), code, name, text }
}

/// Returns the error of `call`, for which `cust` returned `error`.
pub(crate) fn from_cust(error: CudaError, call: impl Into<String>) -> Error {
    call_error(error as u32, call)
}

/// Converts the results of `cust`.
pub(crate) trait CustResultExt<T> {
    /// Describes the call that failed.
    fn in_call<S: Into<String>>(self, call: impl FnOnce() -> S) -> Result<T>;
}

impl<T> CustResultExt<T> for CudaResult<T> {
    fn in_call<S: Into<String>>(self, call: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|error| from_cust(error, call()))
    }
}

/// Returns the driver's name and description of a code.
pub(crate) fn describe(code: u32) -> (String, String) {
    let get = |call: unsafe extern "C" fn(u32, *mut *const c_char) -> u32, fallback: &str| {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the call writes one pointer to a static string, or nothing.
        let found = unsafe { call(code, &raw mut text) } == 0 && !text.is_null();
        // SAFETY: if `found`, `text` is a static, NUL-terminated string.
        if found { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() } else { fallback.to_owned() }
    };
    (get(sys::cuGetErrorName, "CUDA error"), get(sys::cuGetErrorString, "no description"))
}

/// Returns what the user can do about an error code. The text begins with "; " or is empty.
fn advice(code: u32) -> &'static str {
    match code {
        2 => "; free GPU memory (nvidia-smi lists the processes that use it), or choose a smaller batch or model",
        3 => "; the CUDA driver is not loaded",
        35 | 222 | 803 => "; the driver is older than this program needs: update it (R525 or later)",
        100 | 101 => "; check nvidia-smi and CUDA_VISIBLE_DEVICES",
        209 | 218 => "; this program has no kernels for this GPU: it needs compute capability 8.0 or later",
        214 | 220 => "; the GPU reports a hardware fault: see `nvidia-smi -q` and the system log (Xid)",
        500 => "; the driver is too old to have this function: update it (R525 or later)",
        // Sticky errors: every later call in this process fails the same way.
        700 | 715..=719 => {
            "; a kernel failed at or before this call, and the GPU context is lost: run again, and if the error recurs, \
             run under compute-sanitizer to find the kernel"
        }
        701 => "; the launch needs more registers or shared memory than the GPU has",
        _ => "",
    }
}

fn log_of(log: &str) -> String {
    if log.is_empty() { String::new() } else { format!("; the driver's compiler reports: {log}") }
}
