//! Errors, and waiting for non-blocking calls.

use crate::library::{Library, Version};
use crate::sys::{self, Comm, Config, Functions, Status};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// `Result` with the error type [`Error`] by default.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of NCCL or of a check before a call.
#[derive(Debug, Clone, thiserror::Error)]
#[expect(missing_docs, reason = "the messages describe the fields")]
pub enum Error {
    /// The library was not found.
    #[error(
        "{0}; several GPUs need NCCL: `pip install nvidia-nccl-cu13` (driver 580 or later) or `pip install \
         nvidia-nccl-cu12`, or install NVIDIA's package libnccl2, or set LD_LIBRARY_PATH to the library's directory"
    )]
    Missing(#[from] cuda_driver::library::NotFound),

    /// The library is too old.
    #[error(
        "{}: expected NCCL {oldest} or later, found {version}; `pip install --upgrade nvidia-nccl-cu13` (driver 580 or \
         later) or nvidia-nccl-cu12, or set LD_LIBRARY_PATH to the directory of a newer one",
        path.display()
    )]
    TooOld { path: PathBuf, version: Version, oldest: Version },

    /// The library lacks a function.
    #[error("{}: expected NCCL 2.18 or later, found a library without {function}; install a newer one", path.display())]
    NoFunction { path: PathBuf, function: &'static str },

    /// A call failed. `detail` is the message of NCCL.
    #[error("{call}: {} ({status}){}{}", name(*status), text(detail), advice(*status))]
    Call { call: String, status: Status, detail: String },

    /// A call did not complete in time.
    #[error(
        "{call} timed out after {:.1} s: another rank did not connect or failed; set NCCL_DEBUG=INFO for details",
        waited.as_secs_f64()
    )]
    Timeout { call: String, waited: Duration },

    /// The operands of a call are invalid.
    #[error("{call}: {what}")]
    Operand { call: &'static str, what: String },

    /// The communicator is closed.
    #[error("{call}: the communicator is closed, or was aborted because another rank failed")]
    Closed { call: String },

    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] cuda_driver::Error),
}

fn name(status: Status) -> &'static str {
    match status {
        1 => "ncclUnhandledCudaError",
        2 => "ncclSystemError",
        3 => "ncclInternalError",
        4 => "ncclInvalidArgument",
        5 => "ncclInvalidUsage",
        6 => "ncclRemoteError",
        8 => "ncclTimeout",
        _ => "unknown NCCL status",
    }
}

/// Returns what the user can do about a status. The text begins with "; " or is empty.
fn advice(status: Status) -> &'static str {
    match status {
        1 => "; a CUDA call of NCCL failed: the driver may be too old for this NCCL, or the GPU out of memory",
        2 => "; the network or shared memory failed: see NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME, and the size of /dev/shm",
        5 => "; two ranks may use the same GPU",
        6 => "; another rank or the network connection to it failed",
        _ => "",
    }
}

fn text(detail: &str) -> String {
    if detail.is_empty() { String::new() } else { format!(": {detail}") }
}

/// Returns the error of `call` unless `status` is success.
pub(crate) fn check(status: Status, call: &str, detail: &str) -> Result<()> {
    match status {
        sys::SUCCESS => Ok(()),
        status => Err(Error::Call { call: call.into(), status, detail: detail.into() }),
    }
}

/// The interval at which a call in progress is polled.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// A communicator of NCCL, aborted on drop.
pub(crate) struct Owned {
    raw: Comm,
    nccl: &'static Functions,
}

// SAFETY: NCCL binds a communicator to a device, not to a thread. One thread at a time uses it, because `Owned` is not `Sync`.
unsafe impl Send for Owned {}

impl Owned {
    /// Starts to create a communicator. The creation is complete when [`is_idle`](Self::is_idle) returns true. The device's
    /// context must be current.
    pub fn begin(library: &'static Library, ranks: c_int, id: sys::UniqueId, rank: c_int) -> Result<Self> {
        let nccl = &library.functions;
        let mut config = Config::non_blocking();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the call writes one handle. It reads the configuration, which contains its size, before it returns.
        let status = unsafe { (nccl.init_rank_config)(&raw mut raw, ranks, id, rank, &raw mut config) };
        if raw.is_null() {
            return Err(Error::Call { call: "ncclCommInitRankConfig".into(), status, detail: String::new() });
        }
        let owned = Self { raw, nccl };
        owned.is_complete(status, "ncclCommInitRankConfig")?;
        Ok(owned)
    }

    /// Starts to create a communicator of the ranks that pass the same `color`, in the order of their `key`. NCCL writes its handle to
    /// `handle` at any time until this communicator is idle.
    pub fn begin_split(&self, color: c_int, key: c_int, handle: &'static AtomicPtr<c_void>) -> Result<()> {
        let mut config = Config::non_blocking();
        // SAFETY: the communicator is live, and `handle` is never freed. The call reads the configuration before it returns.
        let status = unsafe { (self.nccl.split)(self.raw, color, key, handle.as_ptr(), &raw mut config) };
        self.is_complete(status, "ncclCommSplit").map(drop)
    }

    /// Returns the communicator of a completed [`begin_split`](Self::begin_split), or `None` if there is none.
    pub fn end_split(&self, handle: &'static AtomicPtr<c_void>) -> Option<Self> {
        let raw = handle.load(Ordering::Acquire);
        (!raw.is_null()).then_some(Self { raw, nccl: self.nccl })
    }

    pub fn raw(&self) -> Comm {
        self.raw
    }

    pub fn nccl(&self) -> &'static Functions {
        self.nccl
    }

    /// Returns the message of NCCL about the last failure.
    fn detail(&self) -> String {
        // SAFETY: the handle is live. The result is a string that NCCL owns, or null.
        let text: *const c_char = unsafe { (self.nccl.last_error)(self.raw) };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: the string is not null, so it ends with a NUL. It is copied at once.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
    }

    /// Returns whether a call that returned `status` is complete. It is in progress otherwise.
    pub fn is_complete(&self, status: Status, call: &str) -> Result<bool> {
        match status {
            sys::SUCCESS => Ok(true),
            sys::IN_PROGRESS => Ok(false),
            status => Err(Error::Call { call: call.into(), status, detail: self.detail() }),
        }
    }

    /// Returns whether no call is in progress. Returns the error of a failure on any rank or on the device.
    pub fn is_idle(&self, call: &str) -> Result<bool> {
        let mut state = sys::SUCCESS;
        // SAFETY: the handle is live. The call writes one integer.
        let status = unsafe { (self.nccl.async_error)(self.raw, &raw mut state) };
        self.is_complete(status, "ncclCommGetAsyncError")?;
        self.is_complete(state, call)
    }

    /// Blocks until `call`, which may be in progress, is done on the host.
    fn wait(&self, call: &str, timeout: Duration) -> Result<()> {
        let start = Instant::now();
        while !self.is_idle(call)? {
            let waited = start.elapsed();
            if waited >= timeout {
                return Err(Error::Timeout { call: call.into(), waited });
            }
            sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Waits for the other ranks to close their communicators, and frees this one.
    pub fn close(self, timeout: Duration) -> Result<()> {
        // SAFETY: the handle is live.
        let status = unsafe { (self.nccl.finalize)(self.raw) };
        if !self.is_complete(status, "ncclCommFinalize")? {
            self.wait("ncclCommFinalize", timeout)?;
        }
        // SAFETY: the handle is live and not used again, because `self` is forgotten below.
        let status = unsafe { (self.nccl.destroy)(self.raw) };
        std::mem::forget(self);
        check(status, "ncclCommDestroy", "")
    }
}

impl Drop for Owned {
    /// Aborts calls in progress without waiting for other ranks.
    fn drop(&mut self) {
        // SAFETY: the handle is live and not used again. A failure cannot be reported.
        unsafe { (self.nccl.abort)(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_a_missing_library_names_it_and_what_to_install() {
        let error = Error::from(cuda_driver::library::NotFound {
            names: vec!["libnccl.so.2".into()],
            directories: vec!["/usr/lib64".into()],
            failures: Vec::new(),
        });
        let text = error.to_string();
        assert!(text.starts_with("libnccl.so.2 not found; searched the dynamic linker's path, /usr/lib64"), "{text}");
        assert!(text.contains("pip install nvidia-nccl-cu13") && text.contains("LD_LIBRARY_PATH"), "{text}");
    }

    #[test]
    fn error_of_a_failed_call_contains_nccl_message_and_advice() {
        let error = Error::Call { call: "ncclAllReduce".into(), status: 6, detail: "socket closed by peer".into() };
        assert_eq!(
            error.to_string(),
            "ncclAllReduce: ncclRemoteError (6): socket closed by peer; another rank or the network connection to it failed"
        );
    }
}
