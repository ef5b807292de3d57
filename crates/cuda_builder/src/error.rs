//! Errors of a device build.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use crate::module::ARCHITECTURES;
use crate::unchecked::Unchecked;

/// The reason why a device crate could not be built.
#[derive(thiserror::Error)]
#[expect(missing_docs, reason = "the messages describe the fields")]
pub enum Error {
    /// There is no output directory.
    #[error("OUT_DIR is not set: call CudaBuilder::build from a build script, or set an out_dir")]
    NoOutDir,

    /// The device crate does not exist.
    #[error(
        "device crate {krate:?}: expected a directory with a Cargo.toml in {package:?} or above, found none; give \
         CudaBuilder::new the crate's directory"
    )]
    NoCrate { krate: PathBuf, package: PathBuf },

    /// The name of an architecture is invalid.
    #[error("GPU architecture: expected one of {}, found {arch:?}; correct CudaBuilder::arch", ARCHITECTURES.join(", "))]
    BadArch { arch: String },

    /// The builder was given no architecture.
    #[error("GPU architectures: expected at least one, found none; add CudaBuilder::arch, for example arch(\"sm_80\")")]
    NoArch,

    /// A limit of registers that no GPU has.
    #[error("registers per thread: expected 16 to 255, found {registers}; correct CudaBuilder::registers")]
    BadRegisters { registers: u32 },

    /// The builder would build the package that calls it, which would build itself again.
    #[error(
        "device crate {krate:?}: expected a package other than the one that builds it, found the same package; move the kernels to \
         a crate of their own"
    )]
    OwnPackage { krate: PathBuf },

    /// A device crate, or one of its dependencies, has a build script that builds device code.
    #[error(
        "device build: expected device crates without a build script that calls CudaBuilder, found one in package {package:?}; call it in the build script of a host crate"
    )]
    Nested { package: PathBuf },

    /// Two builders write to one directory.
    #[error(
        "{out_dir:?}: expected one device crate for each output directory, found {first:?} and {second:?}; give each builder its own with CudaBuilder::out_dir"
    )]
    SharedOutDir { out_dir: PathBuf, first: PathBuf, second: PathBuf },

    /// Two builders build the same crate into one directory.
    #[error(
        "{out_dir:?}: expected one build of each device crate, found a second build of {krate:?}, which would replace the first; add all \
         architectures and features to one builder, or give each builder its own directory with CudaBuilder::out_dir"
    )]
    BuiltTwice { out_dir: PathBuf, krate: PathBuf },

    /// LLVM cannot lower some kernels.
    #[error("kernel{} {}: {cause}", if kernels.len() == 1 { "" } else { "s" }, kernels.join(", "))]
    Kernels { kernels: Vec<String>, cause: Box<Error> },

    /// A file could not be read or written.
    #[error("{path:?}: {source}")]
    File { path: PathBuf, source: io::Error },

    /// A tool could not be started.
    #[error(
        "{step} for {arch}: cannot start {program:?}: {source}; scripts/setup or cargo kernels setup installs the device toolchain"
    )]
    Start { step: &'static str, arch: String, program: PathBuf, source: io::Error },

    /// A tool failed.
    #[error("{step} for {arch} failed ({status}): {advice}\ncommand: {command}\n{tail}")]
    Command {
        step: &'static str,
        arch: String,
        status: ExitStatus,
        command: String,
        tail: String,
        advice: &'static str,
    },

    /// rustc wrote no LLVM bitcode.
    #[error("LLVM bitcode for {arch}: expected {expected:?} next to {artifact:?}, found no such file")]
    NoBitcode { arch: String, artifact: PathBuf, expected: PathBuf },

    /// The device crate has no kernels.
    #[error("{krate:?} has no kernel for {arch}: mark at least one function #[kernel]")]
    NoKernels { krate: PathBuf, arch: String },

    /// Launch bounds are invalid.
    #[error(
        "launch bounds of kernel {kernel}: expected maxntid, minctasm or maxnreg, =, and a positive number \
         (maxntid: up to three, separated by commas), found {found:?}"
    )]
    BadBounds { kernel: String, found: String },

    /// Launch bounds are given for a function that is not a kernel.
    #[error("launch bounds of {kernel}: expected a kernel, found no kernel of this name; write them in #[kernel(…)]")]
    NoSuchKernel { kernel: String },

    /// Kernels need more shared memory than a block can have.
    #[error(
        "{arch}: {}; use smaller or fewer arrays and tiles, or compile the kernel only for architectures with more shared memory \
         (arch = or requires = in #[kernel(…)])",
        .kernels.iter().map(ExcessiveShared::to_string).collect::<Vec<_>>().join("; ")
    )]
    SharedMemory { arch: String, kernels: Vec<ExcessiveShared> },

    /// The device code contains what the emulator cannot check.
    #[error(
        "{arch}: {}; CudaBuilder::allow_unchecked builds code that the emulator does not check",
        .found.iter().map(Unchecked::to_string).collect::<Vec<_>>().join("; ")
    )]
    Unchecked { arch: String, found: Vec<Unchecked> },

    /// Kernels call undefined functions.
    #[error(
        "{arch}: undefined on the GPU: {}; use the corresponding function of cuda_std",
        .functions.iter().map(|u| format!("{} (called by {})", u.name, u.callers.join(", "))).collect::<Vec<_>>().join("; ")
    )]
    Unresolved { arch: String, functions: Vec<Unresolved> },
}

/// Writes the message: a build script that returns an error from `main` prints it in this form.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A kernel with too much shared memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExcessiveShared {
    /// The name of the kernel.
    pub kernel: String,
    /// Bytes of static shared memory.
    pub fixed: u64,
    /// Bytes of dynamic shared memory, or 0 if they are known only at the launch.
    pub dynamic: u64,
    /// The most bytes of static shared memory, or of both.
    pub limit: u64,
}

impl fmt::Display for ExcessiveShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, fixed, dynamic, limit } = self;
        write!(f, "kernel {kernel}: expected at most {limit} bytes of ")?;
        match (fixed, dynamic) {
            (fixed, 0) => write!(f, "static shared memory, found {fixed}"),
            (0, dynamic) => write!(f, "shared memory per block, found {dynamic}"),
            _ => write!(f, "shared memory per block, found {} ({fixed} static)", fixed + dynamic),
        }
    }
}

/// An undefined function and its callers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unresolved {
    /// The name of the function.
    pub name: String,
    /// The names of the functions that call it.
    pub callers: Vec<String>,
}

/// Adds the path to the error of a file operation.
pub(crate) fn at<T>(path: &Path, result: io::Result<T>) -> Result<T, Error> {
    result.map_err(|source| Error::File { path: path.to_owned(), source })
}
