//! Builds a device crate to PTX and cubins from a build script:
//!
//! ```no_run
//! let built = cuda_builder::CudaBuilder::new("gpu").arch("sm_80").arch("sm_90a").build()?;
//! # Ok::<(), cuda_builder::Error>(())
//! ```
//!
//! The crate of the build script includes `OUT_DIR/kernels.rs`. That file defines
//! `pub static MODULES: &[cuda_builder::Module]` and `pub static MODULES_MISSING: Option<&str>`, the reason why `MODULES`
//! is empty. `pub static KERNELS: cuda_builder::Kernels` holds both, for `cuda_driver::CheckedModule`.
//!
//! # Pipeline
//!
//! The device rustc ([`Toolchain`]) compiles the crate and its dependencies, including `core`, to LLVM bitcode. The bitcode
//! is linked, annotated (see the module `ir`), internalized to the kernels, optimized and lowered to PTX. `ptxas` assembles
//! the PTX to a cubin. The architectures share the dependencies of the device crate. From bitcode on, they are built in
//! parallel.
//!
//! # Cubins
//!
//! A machine without an NVIDIA GPU cannot run kernels, so the default there is to build PTX only: `ptxas` takes about half of
//! the time of a device build. Set `LLM_RS_CUBINS=1` to build cubins anyway, for programs that run on other machines and to
//! check kernels for register spills. `LLM_RS_CUBINS=all` also builds optional architectures ([`CudaBuilder::optional_arch`]).
//! [`CudaBuilder::only_for_local_gpus`] builds nothing there. Without cubins, the driver compiles PTX when the program starts, and the
//! kernels for `sm_90a` are not available (the driver's compiler miscompiles them, see docs/internals/performance/toolchain.md).
//! `LLM_RS_CUBINS=0` turns cubins off.
//!
//! # Files
//!
//! The builder writes into `OUT_DIR` and the target directory only. The lock file of a device crate that is not in the workspace of its
//! host crate is the exception: cargo writes it, as for every package.

#![warn(missing_docs)]

mod choice;
mod compile;
mod error;
mod generate;
mod gpus;
mod ir;
mod lines;
mod local_memory;
mod module;
mod ptx;
mod resources;
mod toolchain;
mod unchecked;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

pub use choice::ModuleChoice;
pub use error::{Error, ExcessiveShared, Unresolved};
pub use module::{ARCHITECTURES, Kernel, Kernels, LaunchBounds, Module, Resources, has_feature};
pub use toolchain::{
    NIGHTLY, NoToolchain, TESTED_LLVM, TOOLCHAIN_VARIABLE, TOOLS_VARIABLE, Toolchain, find_cuda_tool, tools_directory,
};
pub use unchecked::Unchecked;

use compile::{CompileOptions, Job};
use toolchain::Search;

/// Builds one device crate for one or more GPU architectures.
pub struct CudaBuilder {
    krate: PathBuf,
    archs: Vec<String>,
    /// Those of `archs` that are built for a local GPU or on request only.
    optional: Vec<String>,
    out_dir: Option<PathBuf>,
    cubins: Option<bool>,
    line_info: Option<bool>,
    local: bool,
    options: CompileOptions,
    search: Search,
}

/// The environment variable that turns cubins on (`1`, or `all` with those of optional architectures) or off (`0`).
const CUBINS_VARIABLE: &str = "LLM_RS_CUBINS";

/// The environment variable that adds line information to PTX and cubins (`1`) or leaves it out (`0`).
const LINE_INFO_VARIABLE: &str = "LLM_RS_LINE_INFO";

/// Set in the environment of the cargo that builds device crates, so that their build scripts do not build device code again.
const RUNNING_VARIABLE: &str = "CUDA_BUILDER_RUNNING";

/// The device crate of each output directory that this process has written.
static WRITTEN: Mutex<BTreeMap<PathBuf, PathBuf>> = Mutex::new(BTreeMap::new());

/// The result of a build.
#[derive(Debug)]
pub struct Built {
    /// One module per architecture, in the order of the calls of [`CudaBuilder::arch`]. Empty without a device toolchain.
    pub modules: Vec<BuiltModule>,
    /// The reason why there are no modules, and the command that fixes it.
    pub missing: Option<String>,
    /// The warnings, each printed as `cargo::warning`.
    pub warnings: Vec<String>,
    /// The input files and directories, printed as `cargo::rerun-if-changed`.
    pub watched: Vec<PathBuf>,
}

/// The device crate built for one architecture.
#[derive(Debug)]
pub struct BuiltModule {
    /// The architecture, such as `sm_90a`.
    pub arch: String,
    /// The PTX file.
    pub ptx: PathBuf,
    /// The cubin file, or `None` if no cubins are built.
    pub cubin: Option<PathBuf>,
    /// The kernels, sorted by name.
    pub kernels: Vec<Kernel>,
}

impl CudaBuilder {
    /// Returns a builder for the device crate in the directory `krate`. A relative directory is searched in the directory of
    /// the package being built, and then in each of its ancestors.
    pub fn new(krate: impl Into<PathBuf>) -> Self {
        Self {
            krate: krate.into(),
            archs: Vec::new(),
            optional: Vec::new(),
            out_dir: None,
            cubins: None,
            line_info: None,
            local: false,
            options: CompileOptions::default(),
            search: Search::default(),
        }
    }

    /// Adds an architecture, one of [`ARCHITECTURES`]. The device crate, but not its dependencies, sees it as
    /// `cfg(cuda_arch = "sm_90a")`, and what it can do as `cfg(cuda_feature = "wgmma")` (see [`has_feature`]).
    #[must_use]
    pub fn arch(mut self, arch: &str) -> Self {
        self.archs.push(arch.to_owned());
        self
    }

    /// Adds an architecture that is built only if it is the newest one for a GPU of this machine, or if `LLM_RS_CUBINS` is `all`.
    ///
    /// It is for kernels that are faster on some GPUs, which could also run those of another architecture.
    #[must_use]
    pub fn optional_arch(mut self, arch: &str) -> Self {
        self.optional.push(arch.to_owned());
        self.arch(arch)
    }

    /// Sets the directory for `kernels.rs` and the modules. The default is `OUT_DIR`.
    #[must_use]
    pub fn out_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.out_dir = Some(directory.into());
        self
    }

    /// Makes the division and the square root of f32 approximate, with an error of 2 units in the last place, as nvcc does with
    /// `--use_fast_math`. By default both are rounded correctly, as on the host.
    #[must_use]
    pub fn approximate_division(mut self) -> Self {
        self.options.approximate = true;
        self
    }

    /// Allows device code that the emulator cannot check: `unsafe` in the device crate, atomics of `core`, mutable statics, and
    /// instructions for thread block clusters. By default such code is an error.
    #[must_use]
    pub fn allow_unchecked(mut self) -> Self {
        self.options.unchecked = true;
        self
    }

    /// Enables features of the device crate. Its default features are enabled, too.
    #[must_use]
    pub fn features(mut self, features: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.options.features.extend(features.into_iter().map(Into::into));
        self
    }

    /// Limits kernels to `registers` registers per thread (`.maxnreg`), from 16 to 255, as nvcc does with `-maxrregcount`. Kernels that
    /// declare `blocks_per_sm` keep the limit that follows from it.
    #[must_use]
    pub fn registers(mut self, registers: u32) -> Self {
        self.options.registers = Some(registers);
        self
    }

    /// Sets whether PTX and cubins contain the Rust lines of their instructions, for Nsight Compute, compute-sanitizer and `cargo kernels
    /// inspect`. The instructions of the PTX are the same, but ptxas may choose other registers or another order. PTX and cubins become
    /// about three times as large, and contain the absolute paths of the source files.
    ///
    /// The default is the value of `LLM_RS_LINE_INFO`, and without that variable, false.
    #[must_use]
    pub fn line_info(mut self, line_info: bool) -> Self {
        self.line_info = Some(line_info);
        self
    }

    /// Sets whether to build cubins. The default is the value of `LLM_RS_CUBINS`, and without that variable, whether this
    /// machine has an NVIDIA GPU.
    #[must_use]
    pub fn cubins(mut self, cubins: bool) -> Self {
        self.cubins = Some(cubins);
        self
    }

    /// Builds only what the GPUs of this machine can run: for each of them the newest architecture, and nothing without a GPU. A device
    /// build takes minutes, and most programs run where they are built. `LLM_RS_CUBINS=1` builds all architectures anyway, except for
    /// [optional](Self::optional_arch) ones.
    #[must_use]
    pub fn only_for_local_gpus(mut self) -> Self {
        self.local = true;
        self
    }

    /// Builds the device crate, and prints warnings and watched paths for cargo.
    ///
    /// Succeeds with [`Built::missing`] set if there is no device toolchain, or no GPU ([`CudaBuilder::only_for_local_gpus`]).
    ///
    /// # Errors
    /// Returns an error if the crate does not exist or does not compile, if a tool fails, if a kernel's launch bounds are
    /// invalid, or if a kernel calls an undefined function.
    pub fn build(&self) -> Result<Built, Error> {
        let built = self.build_quietly()?;
        for path in &built.watched {
            println!("cargo::rerun-if-changed={}", path.display());
        }
        let variables = [CUBINS_VARIABLE, LINE_INFO_VARIABLE, TOOLCHAIN_VARIABLE, TOOLS_VARIABLE];
        for variable in variables.into_iter().chain(["CUDA_HOME", "CUDA_PATH"]) {
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
        self.validate()?;
        let krate = self.locate()?;
        claim(&out_dir, &krate)?;
        let built = self.build_into(&out_dir, &krate);
        if built.is_err() {
            // Nothing is lost if another builder, such as one with fewer features, writes there.
            written().remove(&out_dir);
        }
        built
    }

    fn build_into(&self, out_dir: &Path, krate: &Path) -> Result<Built, Error> {
        let root = workspace_root(krate);
        let archs = self.wanted_archs();
        let built = match Toolchain::find_in(&self.search) {
            _ if archs.is_empty() => Built::without_modules(
                format!(
                    "built without GPU kernels, because the machine that built the program has no NVIDIA GPU; set {CUBINS_VARIABLE}=1 and \
                     build again"
                ),
                None,
            ),
            Ok(toolchain) => self.build_with(&toolchain, &archs, krate, &root, out_dir)?,
            Err(missing) => {
                Built::without_modules(format!("built without GPU kernels: {missing}"), watched_tools(&root))
            }
        };
        generate::write(out_dir, &built)?;
        Ok(built)
    }

    /// Returns the architectures to build.
    fn wanted_archs(&self) -> Vec<&str> {
        let cubins = std::env::var(CUBINS_VARIABLE).unwrap_or_default();
        self.archs_for(&cubins, gpus::local().as_deref())
    }

    /// Returns the architectures to build for a value of `LLM_RS_CUBINS` and the GPUs of this machine.
    fn archs_for(&self, cubins: &str, gpus: Option<&[u32]>) -> Vec<&str> {
        let mut archs: Vec<&str> = self.archs.iter().map(String::as_str).collect();
        if cubins != "all" {
            let local = gpus::archs_for(&archs, gpus);
            let only_local = self.local && ["", "0"].contains(&cubins);
            let always = |arch: &str| !only_local && self.optional.iter().all(|optional| optional != arch);
            archs.retain(|arch| local.contains(arch) || always(arch));
        }
        archs
    }

    fn build_with(
        &self,
        toolchain: &Toolchain,
        archs: &[&str],
        krate: &Path,
        root: &Path,
        out_dir: &Path,
    ) -> Result<Built, Error> {
        let wants_cubins = wants_cubins(self.cubins);
        let ptxas = if wants_cubins { find_cuda_tool("ptxas", Some(root)) } else { None };
        let device_target = device_target(out_dir);
        let (ptxas_path, target) = (ptxas.as_deref(), device_target.as_path());
        let options = CompileOptions { line_info: wants_line_info(self.line_info), ..self.options.clone() };
        let options = &options;
        let job = |arch| Job { toolchain, ptxas: ptxas_path, krate, arch, target, out_dir, options };
        let jobs: Vec<_> = archs.iter().map(|arch| job(arch)).collect();
        let _lock = compile::lock(target)?;
        let outputs: Result<Vec<compile::JobOutput>, Error> = std::thread::scope(|scope| {
            let mut running = Vec::new();
            for job in &jobs {
                let crates = job.compile()?;
                running.push(scope.spawn(move || job.build_module(crates)));
            }
            let running = running.into_iter();
            running.map(|job| job.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        });
        let mut built = Built { modules: Vec::new(), missing: None, warnings: Vec::new(), watched: Vec::new() };
        for output in outputs? {
            built.modules.push(output.module);
            built.warnings.extend(output.warnings);
            built.watched.extend(output.watched);
        }
        built.watched.extend([toolchain.rustc.clone(), toolchain.llvm_tool("llc")]);
        match ptxas {
            Some(ptxas) => built.watched.push(ptxas),
            None if wants_cubins => {
                built.watched.extend(watched_tools(root));
                built.warnings.push(format!(
                    "built no cubins: expected ptxas in PATH, CUDA_HOME, {} or Python's packages, found none; run scripts/setup or cargo \
                     kernels setup, or install a CUDA toolkit, and build again",
                    tools_directory().display()
                ));
            }
            None => built.warnings.extend(self.cubins.is_none().then(|| {
                format!(
                    "built no cubins, because this machine has no NVIDIA GPU; set {CUBINS_VARIABLE}=1 to build them"
                )
            })),
        }
        built.warnings.extend(toolchain.warning());
        dedup(&mut built.warnings);
        dedup(&mut built.watched);
        Ok(built)
    }

    /// Checks the options before anything is compiled.
    fn validate(&self) -> Result<(), Error> {
        if self.archs.is_empty() {
            return Err(Error::NoArch);
        }
        if let Some(arch) = self.archs.iter().find(|arch| !ARCHITECTURES.contains(&arch.as_str())) {
            return Err(Error::BadArch { arch: arch.clone() });
        }
        match self.options.registers {
            Some(registers) if !(16..=255).contains(&registers) => Err(Error::BadRegisters { registers }),
            _ => Ok(()),
        }
    }

    /// Returns the canonical path of the device crate's directory, as it is in debug information.
    fn locate(&self) -> Result<PathBuf, Error> {
        let package = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from("."), PathBuf::from);
        let package = error::at(&package, package.canonicalize())?;
        if std::env::var_os(RUNNING_VARIABLE).is_some() {
            return Err(Error::Nested { package });
        }
        let mut candidates = package.ancestors().map(|base| base.join(&self.krate));
        let found = candidates.find(|candidate| candidate.join("Cargo.toml").is_file());
        let found = found.ok_or_else(|| Error::NoCrate { krate: self.krate.clone(), package: package.clone() })?;
        let canonical = error::at(&found, found.canonicalize())?;
        // Outside a build script there is no package being built.
        if canonical == package && std::env::var_os("OUT_DIR").is_some() {
            return Err(Error::OwnPackage { krate: self.krate.clone() });
        }
        Ok(canonical)
    }
}

impl Built {
    /// Returns the result of a build without kernels for a reason, which is also a warning.
    fn without_modules(missing: String, watched: Option<PathBuf>) -> Self {
        let warnings = vec![missing.clone()];
        Self { modules: Vec::new(), warnings, missing: Some(missing), watched: watched.into_iter().collect() }
    }
}

/// Records that `krate` is built into a directory. Another build there would replace its files, even one of the same crate.
fn claim(out_dir: &Path, krate: &Path) -> Result<(), Error> {
    let mut written = written();
    match written.get(out_dir) {
        Some(first) if first == krate => {
            Err(Error::BuiltTwice { out_dir: out_dir.to_owned(), krate: krate.to_owned() })
        }
        Some(first) => {
            Err(Error::SharedOutDir { out_dir: out_dir.to_owned(), first: first.clone(), second: krate.to_owned() })
        }
        None => {
            written.insert(out_dir.to_owned(), krate.to_owned());
            Ok(())
        }
    }
}

fn written() -> MutexGuard<'static, BTreeMap<PathBuf, PathBuf>> {
    WRITTEN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn dedup<T: Ord>(list: &mut Vec<T>) {
    list.sort();
    list.dedup();
}

/// Returns the resources of each function in the output of `ptxas -v`, by name.
pub fn parse_ptxas_log(log: &str) -> BTreeMap<String, Resources> {
    resources::parse(log).functions
}

/// Returns whether to build cubins: the `explicit` choice, the value of the environment variable, or whether this machine has
/// an NVIDIA GPU.
fn wants_cubins(explicit: Option<bool>) -> bool {
    explicit.unwrap_or_else(|| match std::env::var(CUBINS_VARIABLE).as_deref() {
        Ok("0") => false,
        Ok("") | Err(_) => gpus::exist(),
        Ok(_) => true,
    })
}

/// Returns whether to build line information: the `explicit` choice, or the value of the environment variable.
fn wants_line_info(explicit: Option<bool>) -> bool {
    explicit.unwrap_or_else(|| std::env::var(LINE_INFO_VARIABLE).is_ok_and(|value| !value.is_empty() && value != "0"))
}

/// Returns the nearest directory at or above the device crate that contains `.tools`, otherwise the nearest that contains
/// Cargo.lock, otherwise the crate itself.
fn workspace_root(krate: &Path) -> PathBuf {
    let containing = |name| krate.ancestors().find(move |directory| directory.join(name).exists());
    containing(".tools").or_else(|| containing("Cargo.lock")).unwrap_or(krate).to_owned()
}

/// Returns the directory where `scripts/setup` and `cargo kernels setup` write a file whenever they install a tool: `.tools` of the
/// workspace if it exists, otherwise that of the user, which is created with an old modification time. `None` if it cannot be created.
///
/// Cargo runs the build script in each build if a watched path does not exist, and in the next build if it was modified after
/// the script started.
fn watched_tools(root: &Path) -> Option<PathBuf> {
    let in_workspace = root.join(".tools");
    if in_workspace.is_dir() {
        return Some(in_workspace);
    }
    let tools = tools_directory();
    if !tools.is_dir() {
        std::fs::create_dir_all(&tools).ok()?;
        File::open(&tools).and_then(|directory| directory.set_modified(SystemTime::UNIX_EPOCH)).ok()?;
    }
    Some(tools)
}

/// Returns the target directory of the device build. All profiles and device crates of the enclosing target directory share
/// it, so that `core` is built once.
fn device_target(out_dir: &Path) -> PathBuf {
    let target = out_dir.ancestors().find(|directory| directory.join("CACHEDIR.TAG").is_file());
    target.unwrap_or(out_dir).join("cuda")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_without_a_toolchain_succeeds_and_reports_the_reason() -> Result<(), Box<dyn std::error::Error>> {
        let scratch = tempfile::tempdir()?;
        let krate = scratch.path().join("device");
        std::fs::create_dir(&krate)?;
        std::fs::write(krate.join("Cargo.toml"), "")?;
        let mut builder = CudaBuilder::new(&krate).arch("sm_80").out_dir(scratch.path());
        builder.search = Search {
            chosen: None,
            rustup_home: Some(scratch.path().join("rustup")),
            system: scratch.path().join("usr"),
        };

        let built = builder.build_quietly()?;

        assert!(built.modules.is_empty());
        let [warning] = &built.warnings[..] else { panic!("one warning, not {:?}", built.warnings) };
        assert_eq!(Some(warning), built.missing.as_ref());
        assert_eq!(std::fs::read_dir(&krate)?.count(), 1, "the builder wrote into the device crate");
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
    fn two_crates_cannot_share_an_output_directory() {
        let directory = Path::new("/out/of/a/package");
        claim(directory, Path::new("/a")).expect("the first crate");
        let error = claim(directory, Path::new("/b")).expect_err("another crate").to_string();
        for part in ["/out/of/a/package", "\"/a\" and \"/b\"", "out_dir"] {
            assert!(error.contains(part), "{error:?} lacks {part:?}");
        }
    }

    #[test]
    fn a_crate_cannot_be_built_twice_into_an_output_directory() -> Result<(), Box<dyn std::error::Error>> {
        let scratch = tempfile::tempdir()?;
        let krate = scratch.path().join("device");
        std::fs::create_dir(&krate)?;
        std::fs::write(krate.join("Cargo.toml"), "")?;
        let toolchain = || Search { chosen: None, rustup_home: None, system: scratch.path().join("usr") };
        let build = |arch: &str, out_dir: &Path| {
            CudaBuilder { search: toolchain(), ..CudaBuilder::new(&krate).arch(arch).out_dir(out_dir) }.build_quietly()
        };
        // A failed build does not reserve its directory.
        let out_dir = scratch.path().join("out");
        std::fs::write(&out_dir, "")?;
        build("sm_80", &out_dir).expect_err("the directory is a file");
        std::fs::remove_file(&out_dir)?;
        build("sm_80", &out_dir)?;
        let error = build("sm_90a", &out_dir).expect_err("the same crate again").to_string();
        for part in [&*krate.to_string_lossy(), &out_dir.to_string_lossy(), "one builder", "CudaBuilder::out_dir"] {
            assert!(error.contains(part), "{error:?} lacks {part:?}");
        }
        build("sm_90a", scratch.path())?;
        Ok(())
    }

    #[test]
    fn an_error_is_readable_in_its_debug_form() {
        // `fn main() -> Result<(), Error>` prints this form.
        assert_eq!(format!("{:?}", Error::NoOutDir), Error::NoOutDir.to_string());
    }

    #[test]
    fn an_optional_architecture_is_built_for_a_local_gpu_or_on_request() {
        let builder = CudaBuilder::new("gpu").arch("sm_80").optional_arch("sm_89").arch("sm_90a");
        let local = CudaBuilder::new("gpu").arch("sm_80").optional_arch("sm_89").arch("sm_90a").only_for_local_gpus();
        let every = ["sm_80", "sm_89", "sm_90a"];
        for builder in [&builder, &local] {
            for gpus in [Some(&[][..]), Some(&[90]), Some(&[120]), None] {
                assert_eq!(builder.archs_for("all", gpus), every, "{gpus:?}");
            }
            assert_eq!(builder.archs_for("1", Some(&[])), ["sm_80", "sm_90a"]);
            assert_eq!(builder.archs_for("1", Some(&[90])), ["sm_80", "sm_90a"]);
            assert_eq!(builder.archs_for("1", Some(&[120])), every);
        }
        for cubins in ["", "0"] {
            assert_eq!(builder.archs_for(cubins, Some(&[])), ["sm_80", "sm_90a"]);
            assert!(local.archs_for(cubins, Some(&[])).is_empty());
            for (gpu, arch) in [(86, "sm_80"), (89, "sm_89"), (90, "sm_90a"), (100, "sm_89"), (120, "sm_89")] {
                assert_eq!(local.archs_for(cubins, Some(&[gpu])), [arch]);
            }
        }
    }

    #[test]
    fn an_explicit_choice_of_cubins_takes_precedence() {
        assert!(wants_cubins(Some(true)));
        assert!(!wants_cubins(Some(false)));
    }

    #[test]
    fn error_names_a_device_crate_that_does_not_exist() {
        let builder = CudaBuilder::new("no_such_crate").arch("sm_80").out_dir("/nonexistent");
        let error = builder.build_quietly().expect_err("must fail");
        assert!(error.to_string().contains("no_such_crate"), "{error}");
    }

    #[test]
    fn invalid_options_are_rejected_before_the_build() {
        let error =
            |builder: CudaBuilder| builder.out_dir("/nonexistent").build_quietly().expect_err("must fail").to_string();
        for arch in ["sm_75", "sm_90b", "90", "sm_130"] {
            let error = error(CudaBuilder::new("gpu").arch("sm_80").arch(arch));
            assert!(error.contains("expected one of sm_80, ") && error.contains(&format!("found {arch:?}")), "{error}");
        }
        assert!(error(CudaBuilder::new("gpu")).contains("expected at least one"));
        let error = error(CudaBuilder::new("gpu").arch("sm_80").registers(300));
        assert!(error.contains("expected 16 to 255, found 300"), "{error}");
    }
}
