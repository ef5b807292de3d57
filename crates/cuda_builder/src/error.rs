//! Why a device crate could not be built.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("OUT_DIR is not set: call CudaBuilder::build from a build script, or give it an out_dir")]
    NoOutDir,

    #[error(
        "no device crate {krate:?}: expected a Cargo.toml in it, found none from {package:?} upwards; give \
         CudaBuilder::new the crate's directory"
    )]
    NoCrate { krate: PathBuf, package: PathBuf },

    #[error("{arch:?} is no GPU architecture: expected sm_ and a number, as sm_80 or sm_90a")]
    BadArch { arch: String },

    #[error("{path:?}: {source}")]
    File { path: PathBuf, source: io::Error },

    #[error("{step} for {arch}: cannot start {program:?}: {source}; scripts/setup installs the device toolchain")]
    Start { step: &'static str, arch: String, program: PathBuf, source: io::Error },

    #[error("{step} for {arch} failed ({status}): {advice}\ncommand: {command}\n{tail}")]
    Command {
        step: &'static str,
        arch: String,
        status: ExitStatus,
        command: String,
        tail: String,
        advice: &'static str,
    },

    #[error("the device crate built for {arch}, but left no LLVM bitcode beside {artifact:?}: expected {expected:?}")]
    NoBitcode { arch: String, artifact: PathBuf, expected: PathBuf },

    #[error("{krate:?} has no kernel for {arch}: mark at least one function #[kernel]")]
    NoKernels { krate: PathBuf, arch: String },

    #[error(
        "launch bounds of kernel {kernel}: cannot read {found:?}; expected maxntid, minctasm, maxnreg or cluster, =, and \
         a positive number (maxntid and cluster: up to three, with commas)"
    )]
    BadBounds { kernel: String, found: String },

    #[error(
        "launch bounds are given for {kernel}, which is no kernel; write them with #[kernel(…)] on the kernel itself"
    )]
    NoSuchKernel { kernel: String },

    #[error(
        "{arch}: nothing on a GPU defines {}; take cuda_std's function of that purpose in its place",
        .functions.iter().map(|u| format!("{} (called by {})", u.name, u.callers.join(", "))).collect::<Vec<_>>().join("; ")
    )]
    Unresolved { arch: String, functions: Vec<Unresolved> },
}

/// A function that is called and that nothing defines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unresolved {
    pub name: String,
    pub callers: Vec<String>,
}

pub(crate) fn at<T>(path: &Path, result: io::Result<T>) -> Result<T, Error> {
    result.map_err(|source| Error::File { path: path.to_owned(), source })
}
