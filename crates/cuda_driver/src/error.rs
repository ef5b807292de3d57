//! What can go wrong with a GPU, in words.

use crate::sys;
use std::ffi::{CStr, c_char};

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    #[error(
        "no CUDA driver: {reason}; install the NVIDIA driver of this machine (inside a container, start it with its \
         GPUs), or run on the CPU"
    )]
    NoDriver { reason: String },

    #[error("the CUDA driver finds no GPU; check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or run on the CPU")]
    NoDevice,

    #[error("there is no GPU {index}: the driver sees {count}, numbered from 0; check CUDA_VISIBLE_DEVICES")]
    NoSuchDevice { index: usize, count: usize },

    /// A driver call that failed: what was called, with what, and the driver's name and text for the code.
    #[error("{call}: {name} ({code}): {text}{}", advice(*code))]
    Call { call: String, code: u32, name: String, text: String },

    #[error(
        "out of GPU memory: asked for {asked} bytes, {free} of {total} are free{}",
        advice(sys::CUDA_ERROR_OUT_OF_MEMORY)
    )]
    OutOfMemory { asked: usize, free: usize, total: usize },

    #[error("the driver rejects module {module}: {name} ({code}): {text}{}{}", log_of(log), advice(*code))]
    Module { module: String, code: u32, name: String, text: String, log: String },

    #[error(
        "module {module} has no kernel {kernel}; the program and its kernels are of different builds, rebuild both"
    )]
    NoKernel { module: String, kernel: String },

    #[error("kernel {kernel} asks for {asked} bytes of shared memory a block, this GPU gives at most {limit}")]
    SharedMemory { kernel: String, asked: u32, limit: u32 },

    #[error("tensor map: {0}")]
    TensorMap(String),
}

impl Error {
    /// The driver's code, where there is one.
    pub fn code(&self) -> Option<u32> {
        match self {
            Self::Call { code, .. } | Self::Module { code, .. } => Some(*code),
            Self::OutOfMemory { .. } => Some(sys::CUDA_ERROR_OUT_OF_MEMORY),
            _ => None,
        }
    }
}

/// `Ok` where `code` is success, else the error of `call`.
pub(crate) fn check(code: u32, call: &str) -> Result<()> {
    check_with(code, || call.to_owned())
}

/// As [`check`], for a call whose description is worth building only when it failed.
pub(crate) fn check_with(code: u32, call: impl FnOnce() -> String) -> Result<()> {
    match code {
        0 => Ok(()),
        code => {
            let (name, text) = describe(code);
            Err(Error::Call { call: call(), code, name, text })
        }
    }
}

/// The driver's name and text for a code.
pub(crate) fn describe(code: u32) -> (String, String) {
    let get = |call: unsafe extern "C" fn(u32, *mut *const c_char) -> u32, otherwise: &str| {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the call writes one pointer to a static string, or nothing.
        let found = unsafe { call(code, &raw mut text) } == 0 && !text.is_null();
        // SAFETY: where found, `text` is a static, NUL-terminated string.
        if found { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() } else { otherwise.to_owned() }
    };
    (get(sys::cuGetErrorName, "CUDA error"), get(sys::cuGetErrorString, "no description"))
}

/// What the user can do about a code; begins with "; " or is empty.
fn advice(code: u32) -> &'static str {
    match code {
        2 => "; free GPU memory (nvidia-smi lists who holds it), or take a smaller batch or model",
        3 => "; the CUDA driver is not loaded",
        35 | 222 | 803 => "; the driver is older than this program needs, update it (R525 or later)",
        100 | 101 => "; check nvidia-smi and CUDA_VISIBLE_DEVICES",
        209 | 218 => "; this program has no kernels for this GPU: it needs compute capability 8.0 or later",
        214 | 220 => "; the GPU's hardware reports a fault, see `nvidia-smi -q` and the system log (Xid)",
        500 => "; the driver is too old to have it, update it (R525 or later)",
        // Sticky: every later call in this process fails the same way.
        700 | 715..=719 => {
            "; a kernel failed, at or before this call, and the GPU context is lost: run again; if it comes back, run \
             under compute-sanitizer to find the kernel"
        }
        701 => "; the launch asks for more registers or shared memory than the GPU has",
        _ => "",
    }
}

fn log_of(log: &str) -> String {
    if log.is_empty() { String::new() } else { format!("; the compiler of the driver says: {log}") }
}
