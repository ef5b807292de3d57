//! Builds a device crate to PTX, and to cubins where `ptxas` is found, from a build script:
//!
//! ```no_run
//! let built = cuda_builder::CudaBuilder::new("gpu").arch("sm_80").arch("sm_90a").build()?;
//! # Ok::<(), cuda_builder::Error>(())
//! ```
//!
//! The crate that owns the build script includes `OUT_DIR/kernels.rs`, which defines
//! `pub static MODULES: &[cuda_builder::Module]` and `pub static MODULES_MISSING: Option<&str>`, the reason why `MODULES`
//! is empty.
//!
//! Path: device rustc ([`Toolchain`]) makes LLVM bitcode of the crate and of what it uses, core included; it is linked,
//! internalised to the kernels and marked (see `ir`), optimised, lowered to PTX and assembled.

mod compile;
mod error;
mod generate;
mod ir;
mod module;
mod ptx;
mod resources;
mod toolchain;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

pub use error::Error;
pub use module::{Kernel, LaunchBounds, Module, Resources};
pub use toolchain::{NIGHTLY, NoToolchain, Toolchain, find_cuda_tool};

use compile::Job;
use toolchain::Search;

/// Builds one device crate for one or more GPU architectures.
pub struct CudaBuilder {
    krate: PathBuf,
    archs: Vec<String>,
    out_dir: Option<PathBuf>,
    search: Search,
}

/// What a build left.
#[derive(Debug)]
pub struct Built {
    /// One per architecture, in the order asked for; empty if there is no device toolchain.
    pub modules: Vec<BuiltModule>,
    /// Why there are no modules, and the command that mends it.
    pub missing: Option<String>,
    /// What was printed as `cargo::warning`.
    pub warnings: Vec<String>,
    /// What was printed as `cargo::rerun-if-changed`.
    pub watched: Vec<PathBuf>,
}

/// The device crate built for one architecture.
#[derive(Debug)]
pub struct BuiltModule {
    /// As `sm_90a`.
    pub arch: String,
    pub ptx: PathBuf,
    /// None where no `ptxas` was found.
    pub cubin: Option<PathBuf>,
    /// Sorted by name.
    pub kernels: Vec<Kernel>,
}

impl CudaBuilder {
    /// `krate`: the device crate's directory; a relative one is looked for in the directory of the package being built
    /// and then in each of its ancestors.
    pub fn new(krate: impl Into<PathBuf>) -> Self {
        Self { krate: krate.into(), archs: Vec::new(), out_dir: None, search: Search::default() }
    }

    /// Adds an architecture, as `sm_90a`; device code sees it as `cfg(cuda_arch = "sm_90a")`.
    #[must_use]
    pub fn arch(mut self, arch: &str) -> Self {
        self.archs.push(arch.to_owned());
        self
    }

    /// Where `kernels.rs` and the modules go; `OUT_DIR` unless told.
    #[must_use]
    pub fn out_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.out_dir = Some(directory.into());
        self
    }

    /// Builds, and prints for cargo what to watch and what to warn of.
    ///
    /// Without a device toolchain this succeeds with [`Built::missing`] set.
    ///
    /// # Errors
    /// The crate does not exist or does not compile, a tool fails, a kernel's launch bounds cannot be read, or a kernel
    /// calls a function that nothing defines.
    pub fn build(&self) -> Result<Built, Error> {
        let built = self.build_quietly()?;
        for path in &built.watched {
            println!("cargo::rerun-if-changed={}", path.display());
        }
        for variable in ["CUDA_HOME", "CUDA_PATH"] {
            println!("cargo::rerun-if-env-changed={variable}");
        }
        for warning in &built.warnings {
            println!("cargo::warning={warning}");
        }
        Ok(built)
    }

    fn build_quietly(&self) -> Result<Built, Error> {
        let out_dir = match &self.out_dir {
            Some(directory) => directory.clone(),
            None => std::env::var_os("OUT_DIR").ok_or(Error::NoOutDir)?.into(),
        };
        let krate = self.locate()?;
        let root = workspace_root(&krate);
        let built = match Toolchain::find_in(&self.search) {
            Ok(toolchain) => self.build_with(&toolchain, &krate, &root, &out_dir)?,
            Err(missing) => {
                let missing = format!("built without GPU kernels: {missing}");
                Built {
                    modules: Vec::new(),
                    warnings: vec![missing.clone()],
                    missing: Some(missing),
                    watched: vec![watched_tools(&root)?],
                }
            }
        };
        generate::write(&out_dir, &built)?;
        Ok(built)
    }

    fn build_with(&self, toolchain: &Toolchain, krate: &Path, root: &Path, out_dir: &Path) -> Result<Built, Error> {
        let ptxas = find_cuda_tool("ptxas", Some(root));
        let device_target = device_target(out_dir);
        let (ptxas_path, target) = (ptxas.as_deref(), device_target.as_path());
        let archs = self.archs.iter();
        let jobs: Vec<_> =
            archs.map(|arch| Job { toolchain, ptxas: ptxas_path, krate, arch, target, out_dir }).collect();
        let results: Vec<_> = std::thread::scope(|scope| {
            let running: Vec<_> = jobs.iter().map(|job| scope.spawn(|| job.run())).collect();
            running.into_iter().map(|job| job.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        });
        let mut built = Built { modules: Vec::new(), missing: None, warnings: Vec::new(), watched: Vec::new() };
        for result in results {
            let output = result?;
            built.modules.push(output.module);
            built.warnings.extend(output.warnings);
            built.watched.extend(output.watched);
        }
        built.watched.extend([toolchain.rustc.clone(), toolchain.llvm_tool("llc")]);
        match ptxas {
            Some(ptxas) => built.watched.push(ptxas),
            None => built.watched.push(watched_tools(root)?),
        }
        dedup(&mut built.warnings);
        dedup(&mut built.watched);
        Ok(built)
    }

    /// The device crate's directory, absolute.
    fn locate(&self) -> Result<PathBuf, Error> {
        let package = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from("."), PathBuf::from);
        let package = error::at(&package, package.canonicalize())?;
        let mut candidates = package.ancestors().map(|base| base.join(&self.krate));
        candidates
            .find(|candidate| candidate.join("Cargo.toml").is_file())
            .ok_or_else(|| Error::NoCrate { krate: self.krate.clone(), package })
    }
}

fn dedup<T: Ord>(list: &mut Vec<T>) {
    list.sort();
    list.dedup();
}

/// The nearest directory at or above the device crate that holds `.tools`, else Cargo.lock, else the crate itself.
fn workspace_root(krate: &Path) -> PathBuf {
    let holding = |name| krate.ancestors().find(move |directory| directory.join(name).exists());
    holding(".tools").or_else(|| holding("Cargo.lock")).unwrap_or(krate).to_owned()
}

/// `.tools`, where `scripts/setup` leaves a mark whenever it installs something.
///
/// Cargo runs the build script again, each time, for a watched path that does not exist, and once more for one younger
/// than the script's start: so the directory is made here, and made old.
fn watched_tools(root: &Path) -> Result<PathBuf, Error> {
    let tools = root.join(".tools");
    if !tools.is_dir() {
        error::at(&tools, std::fs::create_dir_all(&tools))?;
        error::at(&tools, File::open(&tools).and_then(|directory| directory.set_modified(SystemTime::UNIX_EPOCH)))?;
    }
    Ok(tools)
}

/// Where device code is compiled: one directory for every profile and every device crate of the enclosing target
/// directory, so that core is built once.
fn device_target(out_dir: &Path) -> PathBuf {
    let target = out_dir.ancestors().find(|directory| directory.join("CACHEDIR.TAG").is_file());
    target.unwrap_or(out_dir).join("cuda")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_toolchain_the_build_goes_on_and_says_why() -> Result<(), Box<dyn std::error::Error>> {
        let scratch = tempfile::tempdir()?;
        let krate = scratch.path().join("device");
        std::fs::create_dir(&krate)?;
        std::fs::write(krate.join("Cargo.toml"), "")?;
        let mut builder = CudaBuilder::new(&krate).arch("sm_80").out_dir(scratch.path());
        builder.search =
            Search { rustup_home: Some(scratch.path().join("rustup")), system: scratch.path().join("usr") };

        let built = builder.build_quietly()?;

        assert!(built.modules.is_empty());
        let [warning] = &built.warnings[..] else { panic!("one warning, not {:?}", built.warnings) };
        assert_eq!(Some(warning), built.missing.as_ref());
        for part in [NIGHTLY, "usr/bin/rustc", "scripts/setup"] {
            assert!(warning.contains(part), "{warning:?} lacks {part}");
        }
        assert!(!warning.contains('\n'));
        assert!(built.watched.iter().all(|path| path.exists()), "{:?}", built.watched);
        let generated = std::fs::read_to_string(scratch.path().join("kernels.rs"))?;
        assert!(generated.contains("MODULES: &[::cuda_builder::Module] = &[];"), "{generated}");
        assert!(generated.contains("scripts/setup"), "{generated}");
        Ok(())
    }

    #[test]
    fn a_device_crate_that_does_not_exist_is_an_error_that_names_it() {
        let error = CudaBuilder::new("no_such_crate").out_dir("/nonexistent").build_quietly().expect_err("must fail");
        assert!(error.to_string().contains("no_such_crate"), "{error}");
    }
}
