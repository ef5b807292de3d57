//! Builds one device crate for one architecture: compile, link, annotate, optimize, lower, assemble.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

use crate::BuiltModule;
use crate::error::{Error, ExcessiveShared, at};
use crate::lines::Lines;
use crate::local_memory::{self, demangle};
use crate::module::{
    ARCHITECTURES, FEATURES, Kernel, Resources, STATIC_SHARED_LIMIT, arch_number, has_feature, shared_limit,
};
use crate::toolchain::Toolchain;
use crate::{ir, lines, ptx, resources, unchecked};
use tinyjson::JsonValue;

const TARGET: &str = "nvptx64-nvidia-cuda";

/// Tells `#[kernel]` to accept `unsafe` in the bodies of kernels. The crate `cuda_std_macros` reads it.
const UNCHECKED_VARIABLE: &str = "CUDA_BUILDER_UNCHECKED";

/// Flags of the device rustc. MIR jump threading would duplicate barriers into divergent branches. rustc's LLVM passes are off,
/// because the IR must be annotated before it is optimized.
const RUSTFLAGS: [&str; 5] = [
    "-Zunstable-options",
    "-Cpanic=immediate-abort",
    "-Zmir-enable-passes=-JumpThreading",
    "-Cno-prepopulate-passes",
    "--emit=llvm-bc",
];

const PROFILE: [(&str, &str); 7] = [
    ("OPT_LEVEL", "3"),
    ("CODEGEN_UNITS", "1"),
    ("DEBUG", "0"),
    ("DEBUG_ASSERTIONS", "false"),
    ("OVERFLOW_CHECKS", "false"),
    ("INCREMENTAL", "false"),
    ("LTO", "off"),
];

/// Flags of `opt`. Accumulators stay in registers only if the loops over them are unrolled completely. Accesses become
/// `ld.shared` and `st.shared` only if address spaces are inferred before the O3 pipeline drops the assumptions about them.
const OPT_FLAGS: [&str; 4] = [
    "-passes=internalize,globaldce,default<O3>",
    "-passes-ep-scalar-optimizer-late=infer-address-spaces",
    "-unroll-threshold=4000",
    "-unroll-partial-threshold=75",
];

/// Flags of `llc`. They enable contraction to fma, as nvcc does by default.
const LLC_FLAGS: [&str; 2] = ["-O3", "-nvptx-fma-level=2"];

/// Flags of `llc` for approximate division and square root, as nvcc's `--use_fast_math`.
const APPROXIMATE: [&str; 2] = ["-nvptx-prec-divf32=0", "-nvptx-prec-sqrtf32=0"];

/// Flags of `llc` for the division and square root of IEEE 754, as nvcc's default.
const EXACT: [&str; 2] = ["-nvptx-prec-divf32=2", "-nvptx-prec-sqrtf32=1"];

/// Returns the flag of `llc` for the version of PTX, or `None` for LLVM's choice.
///
/// PTX 8.0 has all instructions of architectures up to sm_90a, except for those of sm_89: 8.1 has its conversions to FP8, and 8.4 its
/// `mma` in FP8. Drivers accept them since CUDA 12.0 and 12.4.
fn ptx_version(arch: &str) -> Option<&'static str> {
    match arch_number(arch)? {
        89 => Some("-mattr=+ptx84"),
        number => (number <= 90).then_some("-mattr=+ptx80"),
    }
}

/// The ways out of the error about `unsafe`.
const UNSAFE_ADVICE: &str = "the emulator cannot check `unsafe`: access memory with the methods of the views (Global, GlobalSlice, \
     SharedArray, …); or move the unsafe code to a function that is not a kernel, with #[allow(unsafe_code)], and test it on a GPU; or \
     allow it in the whole crate with CudaBuilder::allow_unchecked";

/// The source of the build steps. PTX files and cubins of an earlier build are reused only if it has not changed.
const STEPS: [&str; 7] = [
    include_str!("compile.rs"),
    include_str!("ir.rs"),
    include_str!("lines.rs"),
    include_str!("local_memory.rs"),
    include_str!("ptx.rs"),
    include_str!("remainder.ll"),
    include_str!("unchecked.rs"),
];

pub struct Job<'a> {
    pub toolchain: &'a Toolchain,
    pub ptxas: Option<&'a Path>,
    pub krate: &'a Path,
    pub arch: &'a str,
    /// The target directory of the device build, kept between builds. All architectures share it.
    pub target: &'a Path,
    pub out_dir: &'a Path,
    pub options: &'a CompileOptions,
}

/// The choices of a builder that all architectures share.
#[derive(Clone, Debug, Default, Hash)]
pub struct CompileOptions {
    /// Features of the device crate.
    pub features: Vec<String>,
    /// Whether f32 division and square root are approximate.
    pub approximate: bool,
    /// Whether device code may contain what the emulator cannot check.
    pub unchecked: bool,
    /// Whether PTX and cubins contain the source lines of instructions.
    pub line_info: bool,
    /// The most registers per thread of kernels whose declaration does not limit them.
    pub registers: Option<u32>,
}

pub struct JobOutput {
    pub module: BuiltModule,
    pub warnings: Vec<String>,
    pub watched: Vec<PathBuf>,
}

/// The output of cargo.
#[derive(Default)]
pub struct Crates {
    bitcode: Vec<PathBuf>,
    /// The manifests and source directories of the path dependencies, including the device crate.
    sources: Vec<PathBuf>,
    warnings: Vec<String>,
    errors: String,
    /// Whether one of the errors is about `unsafe`.
    has_unsafe_code: bool,
}

impl Job<'_> {
    /// Compiles the device crate and its dependencies to bitcode. Jobs compile one after the other.
    ///
    /// The flags of dependencies do not depend on the architecture, so that `core` is compiled once for all. `ir::mark` sets the
    /// architecture of functions.
    pub fn compile(&self) -> Result<Crates, Error> {
        // Directives without debug sections. LLVM marks PTX with line tables for debugging, and ptxas then does not optimize it.
        self.compile_with(self.options.line_info.then_some("-Cdebuginfo=line-directives-only"))
    }

    /// Compiles with a choice of debug information for the device crate. Dependencies are compiled once, without it: what is inlined
    /// from them gets the line of the call.
    fn compile_with(&self, debug_info: Option<&str>) -> Result<Crates, Error> {
        static RUNNING: Mutex<()> = Mutex::new(());
        let _running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        if !ARCHITECTURES.contains(&self.arch) {
            return Err(Error::BadArch { arch: self.arch.to_owned() });
        }
        let mut command = Command::new(&self.toolchain.cargo);
        let features = FEATURES.into_iter().filter(|feature| has_feature(self.arch, feature));
        clean(&mut command)
            .current_dir(self.krate)
            .args(["rustc", "--lib", "--release", "-Zbuild-std=core", "--message-format=json", "--target", TARGET])
            .arg("--target-dir")
            .arg(self.target)
            .args(self.options.features.iter().flat_map(|feature| ["--features", feature]))
            .args(["--", "--cfg"])
            .arg(format!("cuda_arch=\"{}\"", self.arch))
            .args(features.flat_map(|feature| ["--cfg".to_owned(), format!("cuda_feature=\"{feature}\"")]))
            .args((!self.options.unchecked).then_some("-Dunsafe_code"))
            .args(debug_info)
            .env("RUSTC", &self.toolchain.rustc)
            .env("RUSTC_WRAPPER", "")
            .env("RUSTC_WORKSPACE_WRAPPER", "")
            .env("RUSTC_BOOTSTRAP", "1")
            .env(crate::RUNNING_VARIABLE, "1")
            .env_remove(UNCHECKED_VARIABLE)
            .envs(self.options.unchecked.then_some((UNCHECKED_VARIABLE, "1")))
            .env("CARGO_ENCODED_RUSTFLAGS", RUSTFLAGS.join("\x1f"))
            .envs(PROFILE.map(|(key, value)| (format!("CARGO_PROFILE_RELEASE_{key}"), value)));
        let step = "compiling the device crate";
        let output = self.start(&mut command, step)?;
        let crates = self.read_messages(&String::from_utf8_lossy(&output.stdout))?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let (text, advice) = if crates.errors.is_empty() {
                (tail(&stderr), "see the message of cargo below")
            } else {
                let advice =
                    if crates.has_unsafe_code { UNSAFE_ADVICE } else { "fix the errors in the device code below" };
                (crates.errors, advice)
            };
            return Err(self.failed(step, &command, &output, text, advice));
        }
        Ok(crates)
    }

    /// Builds the module from the output of [`compile`](Self::compile).
    pub fn build_module(&self, crates: Crates) -> Result<JobOutput, Error> {
        let mut crate_hash = DefaultHasher::new();
        self.krate.hash(&mut crate_hash);
        let work = self.target.join("linked").join(self.arch).join(format!("{:016x}", crate_hash.finish()));
        create_directory(&work)?;
        let files = Files::in_directory(&work);
        let fingerprint = self.fingerprint(&crates.bitcode)?;
        if fs::read_to_string(&files.stamp).ok().as_ref() != Some(&fingerprint) {
            if files.stamp.exists() {
                at(&files.stamp, fs::remove_file(&files.stamp))?;
            }
            self.lower(&crates.bitcode, &files)?;
            at(&files.stamp, fs::write(&files.stamp, &fingerprint))?;
        }
        self.deliver(&files, crates)
    }

    fn read_messages(&self, messages: &str) -> Result<Crates, Error> {
        let mut crates = Crates::default();
        for message in messages.lines().filter_map(|line| line.parse::<JsonValue>().ok()) {
            let text = |path: &[&str]| text(&message, path);
            let is_ours = text(&["package_id"]).is_some_and(|id| id.starts_with("path+"))
                && !text(&["manifest_path"]).is_some_and(|path| path.contains("/lib/rustlib/src/"));
            match text(&["reason"]) {
                Some("compiler-artifact") => {
                    crates.bitcode.extend(self.bitcode(&message)?);
                    let source = text(&["target", "src_path"]).map(Path::new).and_then(Path::parent);
                    let manifest = text(&["manifest_path"]).map(Path::new);
                    crates.sources.extend(manifest.into_iter().chain(source).filter(|_| is_ours).map(Path::to_owned));
                }
                Some("compiler-message") => match text(&["message", "level"]) {
                    Some("error") => {
                        crates.errors += text(&["message", "rendered"]).unwrap_or_default();
                        crates.has_unsafe_code |= text(&["message", "code", "code"]) == Some("unsafe_code");
                    }
                    Some("warning") if is_ours => crates.warnings.extend(one_line(&message)),
                    _ => {}
                },
                _ => {}
            }
        }
        Ok(crates)
    }

    /// Returns the bitcode file of a library built for the GPU. It is next to the .rmeta file and has the same name.
    fn bitcode(&self, artifact: &JsonValue) -> Result<Option<PathBuf>, Error> {
        let files = at_path(artifact, &["filenames"]).and_then(JsonValue::get::<Vec<JsonValue>>);
        let mut files = files.into_iter().flatten().filter_map(|file| text(file, &[])).map(Path::new);
        let Some(metadata) = files.find(|file| file.extension().is_some_and(|e| e == "rmeta")) else {
            return Ok(None);
        };
        if !metadata.components().any(|component| component.as_os_str() == TARGET) {
            return Ok(None);
        }
        let name = metadata.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        // Only the prefix of every library: the name of the crate may start with it too.
        let expected = metadata.with_file_name(name.strip_prefix("lib").unwrap_or(name)).with_extension("bc");
        if expected.is_file() {
            Ok(Some(expected))
        } else {
            Err(Error::NoBitcode { arch: self.arch.to_owned(), artifact: metadata.to_owned(), expected })
        }
    }

    /// Returns a hash of all inputs of the PTX and the cubin.
    fn fingerprint(&self, bitcode: &[PathBuf]) -> Result<String, Error> {
        let mut hasher = DefaultHasher::new();
        (STEPS, self.arch, self.options).hash(&mut hasher);
        for path in bitcode {
            at(path, fs::read(path))?.hash(&mut hasher);
        }
        let tools = ["llvm-link", "llvm-dis", "opt", "llc"].map(|tool| self.toolchain.llvm_tool(tool));
        for tool in tools.iter().map(PathBuf::as_path).chain(self.ptxas) {
            let modified = at(tool, fs::metadata(tool).and_then(|metadata| metadata.modified()))?;
            (tool, modified).hash(&mut hasher);
        }
        self.ptxas.is_some().hash(&mut hasher);
        Ok(format!("{:016x}", hasher.finish()))
    }

    /// Lowers bitcode to PTX, and to a cubin if there is a ptxas.
    fn lower(&self, bitcode: &[PathBuf], files: &Files) -> Result<(), Error> {
        let advice = "the device toolchain may be incomplete: run scripts/setup or cargo kernels setup";
        let tool = |name| Command::new(self.toolchain.llvm_tool(name));
        self.run_tool(tool("llvm-link").args(bitcode).arg("-o").arg(&files.linked), "linking bitcode", advice)?;
        self.run_tool(tool("llvm-dis").arg(&files.linked).arg("-o").arg(&files.raw), "disassembling bitcode", advice)?;

        let marked = self.mark(&files.raw)?;
        if marked.kernels.is_empty() {
            return Err(Error::NoKernels { krate: self.krate.to_owned(), arch: self.arch.to_owned() });
        }
        at(&files.marked, fs::write(&files.marked, &marked.ir))?;
        let dynamic_shared = self.dynamic_shared(&marked, files)?;
        self.check_shared(&dynamic_shared, &BTreeMap::new())?;
        let names: Vec<&str> = marked.kernels.keys().map(String::as_str).collect();
        let mut opt = tool("opt");
        opt.args(OPT_FLAGS).arg(format!("-internalize-public-api-list={}", names.join(",")));
        self.run_tool(opt.arg("-S").arg(&files.marked).arg("-o").arg(&files.optimized), "optimizing", advice)?;

        let optimized = at(&files.optimized, fs::read_to_string(&files.optimized))?;
        if !self.options.unchecked {
            let found = unchecked::find(&optimized, None);
            if !found.is_empty() {
                let debug = self.with_debug_info(&names, files).ok();
                let find = |ir: &String| unchecked::find(ir, Some(&Lines::new(ir, self.krate)));
                // The module with debug information should have the same code.
                let found = debug.as_ref().map(find).filter(|with_lines| !with_lines.is_empty()).unwrap_or(found);
                return Err(Error::Unchecked { arch: self.arch.to_owned(), found });
            }
        }
        let mut lowered = ir::without_compiler_fences(&ir::with_constant_dimensions(&optimized, &marked.kernels));
        if self.options.line_info {
            lowered = lines::attribute(&lowered, self.krate);
        }
        at(&files.optimized, fs::write(&files.optimized, lowered))?;

        let mut llc = tool("llc");
        llc.args(LLC_FLAGS)
            .args(if self.options.approximate { APPROXIMATE } else { EXACT })
            .arg(format!("-mcpu={}", self.arch));
        llc.args(ptx_version(self.arch));
        let advice =
            "the device code needs an operation that the GPU or this LLVM does not support; see the message below";
        let lowered = self.run_tool(llc.arg(&files.optimized).arg("-o").arg(&files.ptx), "lowering to PTX", advice);
        lowered.map_err(|error| self.name_kernels(error, &names, files))?;
        let text = ptx::align_tensor_maps(&at(&files.ptx, fs::read_to_string(&files.ptx))?);
        at(&files.ptx, fs::write(&files.ptx, &text))?;

        let functions = ptx::unresolved(&text);
        if !functions.is_empty() {
            return Err(Error::Unresolved { arch: self.arch.to_owned(), functions });
        }
        self.check_shared(&dynamic_shared, &ptx::static_shared(&text))?;
        if let Some(ptxas) = self.ptxas {
            let mut command = Command::new(ptxas);
            command.arg("-v").args(self.options.line_info.then_some("-lineinfo"));
            command.arg(format!("-arch={}", self.arch)).arg(&files.ptx).arg("-o").arg(&files.cubin);
            let advice = "see the message of ptxas below; its line numbers refer to the PTX file in the command";
            let output = self.run_tool(&mut command, "assembling", advice)?;
            at(&files.log, fs::write(&files.log, &output.stderr))?;
        }
        Ok(())
    }

    /// Annotates the linked module.
    fn mark(&self, raw: &Path) -> Result<ir::Marked, Error> {
        ir::mark(&at(raw, fs::read_to_string(raw))?, self.arch, self.options.registers)
    }

    /// Compiles the device crate again with debug information, and returns the optimized code of `kernels`. It is used for messages
    /// only: debug information makes the module several times as large, and may change its code.
    fn with_debug_info(&self, kernels: &[&str], files: &Files) -> Result<String, Error> {
        let debug = |extension: &str| files.optimized.with_file_name(format!("debug.{extension}"));
        let (linked, raw, optimized) = (debug("bc"), debug("raw.ll"), debug("ll"));
        let tool = |name| Command::new(self.toolchain.llvm_tool(name));
        let crates = self.compile_with(Some("-Cdebuginfo=full"))?;
        self.run_tool(tool("llvm-link").args(&crates.bitcode).arg("-o").arg(&linked), "linking bitcode", "")?;
        self.run_tool(tool("llvm-dis").arg(&linked).arg("-o").arg(&raw), "disassembling bitcode", "")?;
        at(&raw, fs::write(&raw, self.mark(&raw)?.ir))?;
        let mut opt = tool("opt");
        opt.args(OPT_FLAGS).arg(format!("-internalize-public-api-list={}", kernels.join(",")));
        self.run_tool(opt.arg("-S").arg(&raw).arg("-o").arg(&optimized), "optimizing", "")?;
        at(&optimized, fs::read_to_string(&optimized))
    }

    /// Returns what debug information says about functions and kernels with spills or local memory: nothing if the build with debug
    /// information fails. The result is kept for the next build.
    fn find_local_memory(
        &self,
        functions: &[&str],
        declared: &BTreeMap<String, ir::Declared>,
        files: &Files,
    ) -> BTreeMap<String, local_memory::Function> {
        // A function that is not inlined may be called by any kernel.
        let are_kernels = functions.iter().all(|function| declared.contains_key(*function));
        let all = || declared.keys().map(String::as_str).collect();
        let kernels: Vec<&str> = if are_kernels { functions.to_vec() } else { all() };
        let (optimized, stamp) = (files.optimized.with_file_name("debug.ll"), files.stamp.with_extension("debug"));
        let built_from = fs::read_to_string(&files.stamp).unwrap_or_default() + &kernels.join(",");
        let kept = fs::read_to_string(&stamp).is_ok_and(|stamp| stamp == built_from);
        let kept = if kept { fs::read_to_string(&optimized).ok() } else { None };
        let ir = kept.map_or_else(|| self.with_debug_info(&kernels, files), Ok);
        let Ok(ir) = ir else { return BTreeMap::new() };
        let _ = fs::write(&stamp, built_from);
        local_memory::find(&ir, &Lines::new(&ir, self.krate))
    }

    /// Returns the bytes of dynamic shared memory of each kernel for which they are constant.
    ///
    /// The functions that return them are optimized without the kernels, so that they do not change the kernels' code.
    fn dynamic_shared(&self, marked: &ir::Marked, files: &Files) -> Result<BTreeMap<String, u64>, Error> {
        if marked.shared_bytes.is_empty() {
            return Ok(BTreeMap::new());
        }
        let sizes = files.marked.with_extension("sizes.ll");
        let mut opt = Command::new(self.toolchain.llvm_tool("opt"));
        opt.arg("-passes=internalize,globaldce,default<O2>");
        opt.arg(format!("-internalize-public-api-list={}", marked.shared_bytes.join(",")));
        let advice = "the device toolchain may be incomplete: run scripts/setup or cargo kernels setup";
        self.run_tool(opt.arg("-S").arg(&files.marked).arg("-o").arg(&sizes), "computing shared memory", advice)?;
        Ok(ir::shared_bytes(&at(&sizes, fs::read_to_string(&sizes))?))
    }

    /// Returns an error if kernels need more shared memory than a block can have on this architecture.
    fn check_shared(&self, dynamic: &BTreeMap<String, u64>, fixed: &BTreeMap<String, u64>) -> Result<(), Error> {
        let names: BTreeSet<&String> = dynamic.keys().chain(fixed.keys()).collect();
        let excessive = |kernel: &&String| {
            let [dynamic, fixed] = [dynamic, fixed].map(|bytes| bytes.get(*kernel).copied().unwrap_or(0));
            let kernel = demangle(kernel);
            if fixed > STATIC_SHARED_LIMIT {
                return Some(ExcessiveShared { kernel, fixed, dynamic: 0, limit: STATIC_SHARED_LIMIT });
            }
            let limit = shared_limit(self.arch)?.into();
            (fixed.saturating_add(dynamic) > limit).then_some(ExcessiveShared { kernel, fixed, dynamic, limit })
        };
        let kernels: Vec<_> = names.iter().filter_map(excessive).collect();
        if kernels.is_empty() { Ok(()) } else { Err(Error::SharedMemory { arch: self.arch.to_owned(), kernels }) }
    }

    /// Adds to an error of `llc` which kernels it cannot lower. LLVM reports an instruction, often without its function. Each kernel is
    /// lowered without the others.
    fn name_kernels(&self, error: Error, kernels: &[&str], files: &Files) -> Error {
        let alone = files.optimized.with_extension("alone.ll");
        let lowers = |kernel: &str| -> Result<(), Error> {
            let mut opt = Command::new(self.toolchain.llvm_tool("opt"));
            opt.arg("-passes=internalize,globaldce").arg(format!("-internalize-public-api-list={kernel}"));
            self.run_tool(opt.arg("-S").arg(&files.optimized).arg("-o").arg(&alone), "optimizing", "")?;
            let mut llc = Command::new(self.toolchain.llvm_tool("llc"));
            llc.args(LLC_FLAGS).arg(format!("-mcpu={}", self.arch)).args(ptx_version(self.arch));
            self.run_tool(llc.arg(&alone).arg("-o").arg(alone.with_extension("ptx")), "lowering to PTX", "").map(|_| ())
        };
        let failing: Vec<String> =
            kernels.iter().filter(|kernel| lowers(kernel).is_err()).map(|kernel| (*kernel).to_owned()).collect();
        if failing.is_empty() { error } else { Error::Kernels { kernels: failing, cause: Box::new(error) } }
    }

    /// Copies the module to the output directory, and collects warnings and the properties of its kernels.
    fn deliver(&self, files: &Files, crates: Crates) -> Result<JobOutput, Error> {
        let name = |extension| self.out_dir.join(format!("{}.{extension}", self.arch));
        create_directory(self.out_dir)?;
        let copy = |from: &Path, to: PathBuf| at(from, fs::copy(from, &to)).map(|_| to);
        let ptx_path = copy(&files.ptx, name("ptx"))?;
        let cubin = self.ptxas.map(|_| copy(&files.cubin, name("cubin"))).transpose()?;

        let declared = self.mark(&files.raw)?.kernels;
        let mut warnings = crates.warnings;
        let report = match self.ptxas {
            Some(_) => Some(resources::parse(&at(&files.log, fs::read_to_string(&files.log))?)),
            None => None,
        };
        warnings.extend(self.resource_warnings(report.as_ref(), &declared, files)?);
        if let Some(report) = &report {
            warnings.extend(report.remarks.iter().map(|remark| format!("{}: {remark}", self.arch)));
        }
        let kernel = |(name, declared): (String, ir::Declared)| {
            let resources = report.as_ref().and_then(|report| report.functions.get(&name).copied());
            Kernel { name: name.into(), bounds: declared.bounds, resources, signature: declared.signature }
        };
        let kernels = declared.into_iter().map(kernel).collect();
        let module = BuiltModule { arch: self.arch.to_owned(), ptx: ptx_path, cubin, kernels };
        Ok(JobOutput { module, warnings, watched: crates.sources })
    }

    /// Returns warnings about functions that spill registers or use local memory: from the report of ptxas, otherwise from the PTX.
    fn resource_warnings(
        &self,
        report: Option<&resources::Report>,
        declared: &BTreeMap<String, ir::Declared>,
        files: &Files,
    ) -> Result<Vec<String>, Error> {
        let local = if let Some(report) = report {
            report.functions.clone()
        } else {
            let text = at(&files.ptx, fs::read_to_string(&files.ptx))?;
            let stack = |bytes: u64| Resources { stack: bytes.try_into().unwrap_or(u32::MAX), ..Resources::default() };
            ptx::local_memory(&text).into_iter().map(|(name, bytes)| (name, stack(bytes))).collect()
        };
        let uses_memory = |resources: &Resources| resources.stack + resources.spill_stores + resources.spill_loads > 0;
        let local: Vec<_> = local.iter().filter(|(_, resources)| uses_memory(resources)).collect();
        if local.is_empty() {
            return Ok(Vec::new());
        }
        let names: Vec<&str> = local.iter().map(|(name, _)| name.as_str()).collect();
        let found = self.find_local_memory(&names, declared, files);
        let unknown = local_memory::Function::default();
        let warning = |(name, resources): (&String, &Resources)| {
            let (kernel, demangled) = (declared.get(name), demangle(name));
            let function = found.get(&demangled).unwrap_or(&unknown);
            let (kind, place) = (if kernel.is_some() { "kernel" } else { "function" }, function.at());
            let warning = resources.warning(kernel.map(|kernel| &kernel.bounds), function)?;
            Some(format!("{}: {kind} {demangled}{place} {warning}", self.arch))
        };
        Ok(local.into_iter().filter_map(warning).collect())
    }

    fn run_tool(&self, command: &mut Command, step: &'static str, advice: &'static str) -> Result<Output, Error> {
        let output = self.start(clean(command), step)?;
        if output.status.success() {
            return Ok(output);
        }
        let text = tail(&String::from_utf8_lossy(&output.stderr));
        Err(self.failed(step, command, &output, text, advice))
    }

    fn start(&self, command: &mut Command, step: &'static str) -> Result<Output, Error> {
        command.output().map_err(|source| {
            let program = command.get_program().into();
            Error::Start { step, arch: self.arch.to_owned(), program, source }
        })
    }

    fn failed(
        &self,
        step: &'static str,
        command: &Command,
        output: &Output,
        tail: String,
        advice: &'static str,
    ) -> Error {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let command = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
        Error::Command { step, arch: self.arch.to_owned(), status: output.status, command, tail, advice }
    }
}

/// The intermediate files of one module.
struct Files {
    linked: PathBuf,
    raw: PathBuf,
    marked: PathBuf,
    optimized: PathBuf,
    ptx: PathBuf,
    cubin: PathBuf,
    log: PathBuf,
    stamp: PathBuf,
}

impl Files {
    fn in_directory(directory: &Path) -> Self {
        let file = |name| directory.join(name);
        Self {
            linked: file("linked.bc"),
            raw: file("raw.ll"),
            marked: file("marked.ll"),
            optimized: file("optimized.ll"),
            ptx: file("module.ptx"),
            cubin: file("module.cubin"),
            log: file("ptxas.log"),
            stamp: file("stamp"),
        }
    }
}

/// Locks the target directory of device builds for this process until the file is dropped.
pub fn lock(target: &Path) -> Result<fs::File, Error> {
    create_directory(target)?;
    let path = target.join(".builder-lock");
    let lock = at(&path, fs::File::create(&path))?;
    at(&path, lock.lock())?;
    Ok(lock)
}

fn create_directory(path: &Path) -> Result<(), Error> {
    at(path, fs::create_dir_all(path))
}

/// Formats a compiler message that has a place in the source as `message (file:line)`.
fn one_line(message: &JsonValue) -> Option<String> {
    let diagnostic = at_path(message, &["message"])?;
    let span = at_path(diagnostic, &["spans"])?.get::<Vec<JsonValue>>()?.first()?;
    let (text, file) = (text(diagnostic, &["message"])?, text(span, &["file_name"])?);
    let line = at_path(span, &["line_start"])?.get::<f64>()?;
    Some(format!("device build: {} ({file}:{line})", text.lines().next().unwrap_or_default()))
}

/// Returns the value at a path of keys.
fn at_path<'a>(value: &'a JsonValue, path: &[&str]) -> Option<&'a JsonValue> {
    path.iter().try_fold(value, |value, key| value.get::<HashMap<String, JsonValue>>()?.get(*key))
}

/// Returns the string at a path of keys.
fn text<'a>(value: &'a JsonValue, path: &[&str]) -> Option<&'a str> {
    at_path(value, path)?.get::<String>().map(String::as_str)
}

/// Returns the last lines of the output of a tool. The stack of an aborted LLVM tool is left out: it is longer than the tail, and the
/// message precedes it.
fn tail(text: &str) -> String {
    const LINES: usize = 30;
    let is_stack = |line: &str| {
        line.trim_start().strip_prefix('#').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    let is_noise =
        |line: &str| line.starts_with("PLEASE submit a bug report") || line.starts_with("Stack dump") || is_stack(line);
    let lines: Vec<&str> = text.lines().filter(|line| !is_noise(line)).collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

/// Removes from the environment of a command the variables that cargo, rustup and the user set for the host build. The device
/// build uses another toolchain. Variables that locate cargo's packages remain.
pub(crate) fn clean(command: &mut Command) -> &mut Command {
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(configures_host_build) {
            command.env_remove(name);
        }
    }
    command
}

fn configures_host_build(name: &str) -> bool {
    const KEPT: [&str; 5] = ["CARGO_HOME", "CARGO_HTTP_", "CARGO_NET_", "CARGO_REGISTR", "CARGO_SOURCE_"];
    const DROPPED: [&str; 4] = ["CARGO", "RUST", "DEP_", "LD_LIBRARY_PATH"];
    const BUILD_SCRIPT: [&str; 8] =
        ["OUT_DIR", "TARGET", "HOST", "NUM_JOBS", "OPT_LEVEL", "PROFILE", "DEBUG", "MAKEFLAGS"];
    let starts_with = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    !starts_with(&KEPT) && (starts_with(&DROPPED) || BUILD_SCRIPT.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_of_an_aborted_tool_is_shown_without_its_stack() {
        let stack = " #0 0x00007f97530b8786 main (/usr/bin/llc+0x1)\n".repeat(31);
        let text = format!(
            "LLVM ERROR: unsupported library call operation!\nPLEASE submit a bug report to\nStack dump:\n{stack}"
        );
        assert_eq!(tail(&text), "LLVM ERROR: unsupported library call operation!");
    }

    #[test]
    fn only_the_locations_of_packages_are_inherited() {
        for name in ["RUSTFLAGS", "RUSTC", "RUSTC_WRAPPER", "RUSTUP_TOOLCHAIN", "RUST_RECURSION_COUNT", "CARGO"] {
            assert!(configures_host_build(name), "{name} reaches the device build");
        }
        for name in ["CARGO_ENCODED_RUSTFLAGS", "CARGO_TARGET_DIR", "CARGO_PROFILE_RELEASE_LTO", "LD_LIBRARY_PATH"] {
            assert!(configures_host_build(name), "{name} reaches the device build");
        }
        for name in ["PATH", "HOME", "CARGO_HOME", "CARGO_NET_OFFLINE", "HTTPS_PROXY", "TMPDIR"] {
            assert!(!configures_host_build(name), "{name} does not reach the device build");
        }
    }
}
