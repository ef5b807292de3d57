//! Status codes as errors, and calls that go on after they have returned.

use crate::library::{Library, Version};
use crate::sys::{self, Comm, Config, Functions, Status};
use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    #[error(
        "{0}; several GPUs need NCCL: `pip install nvidia-nccl-cu13` (driver 580 or later) or `pip install \
         nvidia-nccl-cu12`, or install NVIDIA's package libnccl2, or set LD_LIBRARY_PATH to where it is"
    )]
    Missing(#[from] cuda_driver::library::NotFound),

    #[error(
        "{} is NCCL {version}, expected {oldest} or later: `pip install --upgrade nvidia-nccl-cu13` (driver 580 or later) \
         or nvidia-nccl-cu12, or set LD_LIBRARY_PATH to a newer one",
        path.display()
    )]
    TooOld { path: PathBuf, version: Version, oldest: Version },

    #[error("{} has no {function}: it is not NCCL 2.18 or later; install a newer one", path.display())]
    NoFunction { path: PathBuf, function: &'static str },

    /// A call that failed, with what NCCL says about it.
    #[error("{call}: {} ({status}){}{}", name(*status), text(detail), advice(*status))]
    Call { call: String, status: Status, detail: String },

    #[error("{call} has not ended after {:.1} s: another rank never came, or is gone; NCCL_DEBUG=INFO tells more", waited.as_secs_f64())]
    Timeout { call: String, waited: Duration },

    #[error("{call}: {what}")]
    Operand { call: &'static str, what: String },

    #[error("{call}: the communicator has been closed, or aborted because the run has lost a rank")]
    Closed { call: String },

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

/// What the user can do; begins with "; " or is empty.
fn advice(status: Status) -> &'static str {
    match status {
        1 => "; a CUDA call of NCCL failed: the driver may be too old for this NCCL, or the GPU out of memory",
        2 => "; the network or shared memory failed: see NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME, and the size of /dev/shm",
        5 => "; two ranks may share one GPU",
        6 => "; another rank has ended, or the network to it has failed",
        _ => "",
    }
}

fn text(detail: &str) -> String {
    if detail.is_empty() { String::new() } else { format!(": {detail}") }
}

/// `Ok` where `status` is success.
pub(crate) fn check(status: Status, call: &str, detail: &str) -> Result<()> {
    match status {
        sys::SUCCESS => Ok(()),
        status => Err(Error::Call { call: call.into(), status, detail: detail.into() }),
    }
}

/// How long to leave the processor to others between two looks at a call that is under way.
pub(crate) const PAUSE: Duration = Duration::from_micros(50);

/// A communicator of the library, from its first call to its last.
pub(crate) struct Owned {
    raw: Comm,
    nccl: &'static Functions,
}

// SAFETY: the library binds a communicator to a device, not to a thread; it is used by one thread at a time, as `Owned` is not
// `Sync`.
unsafe impl Send for Owned {}

impl Owned {
    /// Begins to make the communicator; [`wait`](Self::wait) ends it. The device's context is current.
    pub fn begin(library: &'static Library, ranks: c_int, id: sys::UniqueId, rank: c_int) -> Result<Self> {
        let nccl = &library.functions;
        let mut config = Config::non_blocking();
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle; reads the configuration, whose size it is told in it, before the call returns.
        let status = unsafe { (nccl.init_rank_config)(&raw mut raw, ranks, id, rank, &raw mut config) };
        if raw.is_null() {
            return Err(Error::Call { call: "ncclCommInitRankConfig".into(), status, detail: String::new() });
        }
        let owned = Self { raw, nccl };
        owned.accepted(status, "ncclCommInitRankConfig")?;
        Ok(owned)
    }

    pub fn raw(&self) -> Comm {
        self.raw
    }

    pub fn nccl(&self) -> &'static Functions {
        self.nccl
    }

    /// What the library says of the last failure.
    fn detail(&self) -> String {
        // SAFETY: the handle is live; the answer is a string that the library owns, or null.
        let text: *const c_char = unsafe { (self.nccl.last_error)(self.raw) };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: not null, so it ends with a NUL; it is copied at once.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
    }

    /// Whether a call has done its work; false where it goes on.
    pub fn accepted(&self, status: Status, call: &str) -> Result<bool> {
        match status {
            sys::SUCCESS => Ok(true),
            sys::IN_PROGRESS => Ok(false),
            status => Err(Error::Call { call: call.into(), status, detail: self.detail() }),
        }
    }

    /// The communicator's state: true when nothing is under way; what failed, on any rank or on the device, is the error.
    pub fn is_settled(&self, call: &str) -> Result<bool> {
        let mut state = sys::SUCCESS;
        // SAFETY: the handle is live; writes one integer.
        let status = unsafe { (self.nccl.async_error)(self.raw, &raw mut state) };
        self.accepted(status, "ncclCommGetAsyncError")?;
        self.accepted(state, call)
    }

    /// Waits until `call`, which may go on, has done its work on the host.
    pub fn wait(&self, call: &str, at_most: Duration) -> Result<()> {
        let begun = Instant::now();
        while !self.is_settled(call)? {
            let waited = begun.elapsed();
            if waited >= at_most {
                return Err(Error::Timeout { call: call.into(), waited });
            }
            sleep(PAUSE);
        }
        Ok(())
    }

    /// Waits for the other ranks to be done with this one, and frees everything.
    pub fn close(self, at_most: Duration) -> Result<()> {
        // SAFETY: the handle is live.
        let status = unsafe { (self.nccl.finalize)(self.raw) };
        if !self.accepted(status, "ncclCommFinalize")? {
            self.wait("ncclCommFinalize", at_most)?;
        }
        // SAFETY: the handle is live and not used again: it is not dropped.
        let status = unsafe { (self.nccl.destroy)(self.raw) };
        std::mem::forget(self);
        check(status, "ncclCommDestroy", "")
    }
}

impl Drop for Owned {
    /// Ends what is under way, without asking other ranks.
    fn drop(&mut self) {
        // SAFETY: the handle is live and not used again. There is nobody to tell of a failure.
        unsafe { (self.nccl.abort)(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_what_to_install() {
        let error = Error::from(cuda_driver::library::NotFound {
            names: vec!["libnccl.so.2".into()],
            directories: vec!["/usr/lib64".into()],
            failures: Vec::new(),
        });
        let text = error.to_string();
        assert!(text.starts_with("libnccl.so.2 not found; looked in the dynamic linker's path, /usr/lib64"), "{text}");
        assert!(text.contains("pip install nvidia-nccl-cu13") && text.contains("LD_LIBRARY_PATH"), "{text}");
    }

    #[test]
    fn a_failed_call_says_what_nccl_says_and_what_to_do() {
        let error = Error::Call { call: "ncclAllReduce".into(), status: 6, detail: "socket closed by peer".into() };
        assert_eq!(
            error.to_string(),
            "ncclAllReduce: ncclRemoteError (6): socket closed by peer; another rank has ended, or the network to it has failed"
        );
    }
}
