//! Finds the device compiler, the LLVM tools and the CUDA tools.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::compile::clean;

/// The rustup toolchain that is used if it is installed.
pub const NIGHTLY: &str = "nightly-2026-05-20";

/// The major version of LLVM that the kernels of this repository are tested with.
pub const TESTED_LLVM: u32 = 22;

/// The environment variable that selects the device toolchain: the name of a rustup toolchain, such as `nightly-2026-10-15`, or the
/// directory above its `bin/rustc`.
pub const TOOLCHAIN_VARIABLE: &str = "CUDA_BUILDER_TOOLCHAIN";

/// The environment variable that names the directory of the CUDA tools, instead of the default of [`tools_directory`].
pub const TOOLS_VARIABLE: &str = "CUDA_BUILDER_TOOLS";

/// The oldest supported rustc. Earlier versions lack NVPTX flags that this crate uses.
const OLDEST: (u32, u32) = (1, 96);

const LLVM_TOOLS: [&str; 4] = ["llvm-link", "llvm-dis", "opt", "llc"];

/// A complete device toolchain: rustc, cargo, the sources of `core`, and the LLVM tools of rustc's LLVM version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolchain {
    /// The compiler.
    pub rustc: PathBuf,
    /// The cargo of the same version.
    pub cargo: PathBuf,
    /// The directory of llvm-link, llvm-dis, opt and llc.
    pub llvm_bin: PathBuf,
    /// The release of rustc, such as `1.96.0`.
    pub release: String,
    /// The version of LLVM that rustc was built with, such as `22.1.8`.
    pub llvm_version: String,
}

/// No complete device toolchain was found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct NoToolchain {
    /// The toolchains that were searched, each with the reason why it is incomplete.
    pub searched: Vec<(String, String)>,
}

impl fmt::Display for NoToolchain {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "no complete device toolchain found (")?;
        for (i, (name, reason)) in self.searched.iter().enumerate() {
            write!(f, "{}{name}: {reason}", if i == 0 { "" } else { "; " })?;
        }
        write!(f, "); run scripts/setup or cargo kernels setup, and build again")
    }
}

impl fmt::Display for Toolchain {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { rustc, release, llvm_bin, llvm_version, .. } = self;
        write!(f, "rustc {release} ({}), LLVM {llvm_version} ({})", rustc.display(), llvm_bin.display())
    }
}

/// The locations of toolchains.
#[derive(Clone, Debug)]
pub(crate) struct Search {
    /// The value of [`TOOLCHAIN_VARIABLE`].
    pub chosen: Option<String>,
    pub rustup_home: Option<PathBuf>,
    /// `/usr`, which contains `bin/rustc`, `bin/cargo` and `lib/llvm-N` of Debian.
    pub system: PathBuf,
}

impl Default for Search {
    fn default() -> Self {
        let home = || std::env::home_dir().map(|home| home.join(".rustup"));
        Self {
            chosen: std::env::var(TOOLCHAIN_VARIABLE).ok().filter(|chosen| !chosen.is_empty()),
            rustup_home: std::env::var_os("RUSTUP_HOME").map(PathBuf::from).or_else(home),
            system: "/usr".into(),
        }
    }
}

impl Search {
    /// Returns the toolchain of a rustup name or of a directory, with a description.
    fn named(&self, chosen: &str) -> (String, PathBuf) {
        let prefix = match &self.rustup_home {
            Some(home) if !chosen.contains('/') => home.join("toolchains").join(with_host(chosen)),
            _ => chosen.into(),
        };
        (format!("{TOOLCHAIN_VARIABLE}={chosen}"), prefix)
    }

    /// Returns the directories of the toolchains to try, with descriptions.
    fn installed(&self) -> Vec<(String, PathBuf)> {
        let toolchains = self.rustup_home.as_ref().map(|home| home.join("toolchains"));
        let pinned = toolchains.as_ref().map(|all| (format!("rustup's {NIGHTLY}"), all.join(with_host(NIGHTLY))));
        let debian = ("Debian's rustc-web".to_owned(), self.system.clone());
        let mut others = toolchains.as_ref().map(|all| subdirectories(all)).unwrap_or_default();
        others.retain(|other| pinned.as_ref().is_none_or(|(_, pinned)| other != pinned));
        let others = others.into_iter().rev().filter_map(|other| {
            let name = other.file_name()?.to_str()?.to_owned();
            name.starts_with("nightly").then(|| (format!("rustup's {name}"), other))
        });
        pinned.into_iter().chain([debian]).chain(others).collect()
    }
}

/// Returns the name of a rustup toolchain with the platform of this machine, if it lacks one.
fn with_host(name: &str) -> String {
    let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    if name.ends_with(&host) { name.to_owned() } else { format!("{name}-{host}") }
}

/// Returns the user's directory for CUDA tools, where `cargo kernels setup` installs them: [`TOOLS_VARIABLE`], otherwise `cuda_builder` in
/// `XDG_DATA_HOME` or `~/.local/share`.
pub fn tools_directory() -> PathBuf {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable(TOOLS_VARIABLE).unwrap_or_else(|| {
        let data = variable("XDG_DATA_HOME").or_else(|| std::env::home_dir().map(|home| home.join(".local/share")));
        data.unwrap_or_else(std::env::temp_dir).join("cuda_builder")
    })
}

impl Toolchain {
    /// Returns the toolchain that [`TOOLCHAIN_VARIABLE`] names. Without that variable, returns the first complete toolchain of these:
    /// [`NIGHTLY`] of rustup; rustc-web, cargo-web, rust-web-src and llvm-N of Debian; the other nightlies of rustup, newest first.
    ///
    /// # Errors
    /// Returns the reason why each toolchain is incomplete, and the command that installs one.
    pub fn find() -> Result<Self, NoToolchain> {
        Self::find_in(&Search::default())
    }

    pub(crate) fn find_in(search: &Search) -> Result<Self, NoToolchain> {
        let candidates = search.chosen.as_ref().map_or_else(|| search.installed(), |chosen| vec![search.named(chosen)]);
        let mut searched = Vec::new();
        for (name, prefix) in candidates {
            match Self::at(&prefix) {
                Ok(toolchain) => return Ok(toolchain),
                Err(reason) => searched.push((name, reason)),
            }
        }
        Err(NoToolchain { searched })
    }

    /// Returns the toolchain under `prefix`, or the reason why it is incomplete.
    fn at(prefix: &Path) -> Result<Self, String> {
        let (rustc, cargo) = (prefix.join("bin/rustc"), prefix.join("bin/cargo"));
        for program in [&rustc, &cargo] {
            if !program.is_file() {
                return Err(format!("{} does not exist", program.display()));
            }
        }
        let about = ask(&rustc, "-vV")?;
        let field = |name: &str| {
            let value = about.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
            value.map(str::to_owned).ok_or_else(|| format!("{} -vV prints no {name}", rustc.display()))
        };
        let (release, llvm_version, host) = (field("release")?, field("LLVM version")?, field("host")?);
        if version(&release) < Some(OLDEST) {
            let (major, minor) = OLDEST;
            return Err(format!("{}: expected {major}.{minor} or later, found {release}", rustc.display()));
        }
        let rustlib = PathBuf::from(ask(&rustc, "--print=sysroot")?.trim()).join("lib/rustlib");
        let core = rustlib.join("src/rust/library/core/src/lib.rs");
        if !core.is_file() {
            return Err(format!("{} does not exist (rust-src, rust-web-src)", core.display()));
        }
        let llvm = llvm_version.split('.').next().unwrap_or_default();
        let directories = [rustlib.join(host).join("bin"), prefix.join(format!("lib/llvm-{llvm}/bin"))];
        let complete = |directory: &&PathBuf| LLVM_TOOLS.iter().all(|tool| directory.join(tool).is_file());
        let Some(llvm_bin) = directories.iter().find(complete).cloned() else {
            let [rustup, debian] = directories.map(|directory| directory.display().to_string());
            return Err(format!("{} are neither in {rustup} nor in {debian}", LLVM_TOOLS.join(", ")));
        };
        Ok(Self { rustc, cargo, llvm_bin, release, llvm_version })
    }

    /// Returns a warning if the toolchain has another version of LLVM than the tested one.
    pub(crate) fn warning(&self) -> Option<String> {
        let major: Option<u32> = self.llvm_version.split('.').next().and_then(|major| major.parse().ok());
        (major != Some(TESTED_LLVM)).then(|| {
            format!(
                "device toolchain: expected LLVM {TESTED_LLVM}, found {self}; kernels may be slower, and their tests should run on a GPU. To \
                 select another toolchain, set {TOOLCHAIN_VARIABLE}"
            )
        })
    }

    pub(crate) fn llvm_tool(&self, name: &str) -> PathBuf {
        self.llvm_bin.join(name)
    }
}

/// Returns (1, 96) for `1.96.0-nightly`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(['.', '-']).map(|part| part.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

fn ask(rustc: &Path, question: &str) -> Result<String, String> {
    let output = clean(Command::new(rustc).arg(question))
        .output()
        .map_err(|error| format!("cannot start {}: {error}", rustc.display()))?;
    if !output.status.success() {
        return Err(format!(
            "{} {question} failed: {}",
            rustc.display(),
            String::from_utf8_lossy(&output.stderr).trim()
        ));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Finds `ptxas`, `cuobjdump` or `nvdisasm`.
///
/// The search order is: `PATH`, the CUDA toolkit (`CUDA_HOME`, `CUDA_PATH`, /usr/local/cuda), `.tools` in the workspace (where
/// `scripts/setup` installs it), [`tools_directory`], and Python site-packages directories.
pub fn find_cuda_tool(name: &str, workspace: Option<&Path>) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let toolkits = toolkits.chain(["/usr/local/cuda".into()]).map(|toolkit| toolkit.join("bin"));
    let direct = std::env::split_paths(&path).chain(toolkits).map(|directory| directory.join(name));
    let packages = site_packages().into_iter().map(|packages| packages.join("nvidia"));
    let mut wheels = workspace.map(|root| root.join(".tools")).into_iter().chain([tools_directory()]).chain(packages);
    direct.into_iter().find(|tool| tool.is_file()).or_else(|| wheels.find_map(|wheels| find_below(&wheels, name, 4)))
}

/// Finds `**/bin/name` at most `depth` directories below `directory`.
fn find_below(directory: &Path, name: &str, depth: usize) -> Option<PathBuf> {
    let tool = directory.join("bin").join(name);
    if tool.is_file() {
        return Some(tool);
    }
    subdirectories(directory).into_iter().filter(|_| depth > 0).find_map(|below| find_below(&below, name, depth - 1))
}

fn site_packages() -> Vec<PathBuf> {
    let homes = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from).into_iter();
    let homes = homes.chain(std::env::home_dir().map(|home| home.join(".local")));
    let homes = homes.chain(["/usr/local".into(), "/usr".into()]);
    let pythons = homes.flat_map(|home| subdirectories(&home.join("lib")));
    let pythons = pythons.filter(|p| p.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"python3")));
    pythons.flat_map(|python| [python.join("site-packages"), python.join("dist-packages")]).collect()
}

/// Returns the subdirectories of `directory`, sorted.
fn subdirectories(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut directories: Vec<_> = entries.filter(|path| path.is_dir()).collect();
    directories.sort();
    directories
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    type Outcome = Result<(), Box<dyn std::error::Error>>;

    /// Creates a complete Debian toolchain with LLVM 22. Its rustc reports version `release`.
    fn fake_system(prefix: &Path, release: &str) -> Outcome {
        for directory in ["bin", "lib/llvm-22/bin", "lib/rustlib/src/rust/library/core/src"] {
            fs::create_dir_all(prefix.join(directory))?;
        }
        let rustc = prefix.join("bin/rustc");
        let about = format!("release: {release}\\nhost: x86_64-unknown-linux-gnu\\nLLVM version: 22.1.8");
        let answer = format!("#!/bin/sh\nif [ $1 = -vV ]; then echo '{about}'; else echo {}; fi\n", prefix.display());
        let script = prefix.join("rustc.sh");
        fs::write(&script, answer.replace("\\n", "\n"))?;
        // Another process writes the program. A program cannot start while a file descriptor is open that can write it, and processes that
        // other tests start inherit the file descriptors of this one.
        let installed = Command::new("install").arg("-m755").args([&script, &rustc]).status()?;
        assert!(installed.success(), "install: {installed}");
        for tool in LLVM_TOOLS {
            fs::write(prefix.join("lib/llvm-22/bin").join(tool), "")?;
        }
        fs::write(prefix.join("bin/cargo"), "")?;
        fs::write(prefix.join("lib/rustlib/src/rust/library/core/src/lib.rs"), "")?;
        Ok(())
    }

    fn find(prefix: &Path) -> Result<Toolchain, NoToolchain> {
        find_chosen(prefix, None)
    }

    fn find_chosen(prefix: &Path, chosen: Option<&str>) -> Result<Toolchain, NoToolchain> {
        let rustup_home = Some(prefix.join("rustup"));
        Toolchain::find_in(&Search { chosen: chosen.map(str::to_owned), rustup_home, system: prefix.to_owned() })
    }

    #[test]
    fn finds_a_complete_system_toolchain_with_the_llvm_of_its_rustc() -> Outcome {
        let scratch = tempfile::tempdir()?;
        fake_system(scratch.path(), "1.97.0")?;
        let found = find(scratch.path())?;
        assert_eq!(found.release, "1.97.0");
        assert_eq!(found.llvm_bin, scratch.path().join("lib/llvm-22/bin"));
        Ok(())
    }

    #[test]
    fn error_names_the_missing_part_of_a_toolchain() -> Outcome {
        for lacking in ["bin/cargo", "lib/llvm-22/bin/llc", "lib/rustlib/src/rust/library/core/src/lib.rs"] {
            let scratch = tempfile::tempdir()?;
            fake_system(scratch.path(), "1.96.0")?;
            fs::remove_file(scratch.path().join(lacking))?;
            let error = find(scratch.path()).expect_err(lacking).to_string();
            let file = Path::new(lacking).file_name().and_then(|name| name.to_str()).unwrap_or_default();
            assert!(error.contains(file) && error.contains("scripts/setup"), "{lacking}: {error}");
        }
        Ok(())
    }

    #[test]
    fn rejects_a_rustc_that_is_too_old() -> Outcome {
        let scratch = tempfile::tempdir()?;
        fake_system(scratch.path(), "1.63.0")?;
        let error = find(scratch.path()).expect_err("1.63 is too old").to_string();
        assert!(error.contains("expected 1.96 or later, found 1.63.0"), "{error}");
        Ok(())
    }

    #[test]
    fn prefers_the_pinned_nightly() -> Outcome {
        let scratch = tempfile::tempdir()?;
        fake_system(scratch.path(), "1.96.0")?;
        let nightly = scratch.path().join("rustup/toolchains").join(with_host(NIGHTLY));
        fake_system(&nightly, "1.97.0-nightly")?;
        let tools = nightly.join("lib/rustlib/x86_64-unknown-linux-gnu");
        fs::create_dir_all(&tools)?;
        fs::rename(nightly.join("lib/llvm-22/bin"), tools.join("bin"))?;
        let found = find(scratch.path())?;
        assert_eq!((found.release.as_str(), found.llvm_bin), ("1.97.0-nightly", tools.join("bin")));
        Ok(())
    }

    #[test]
    fn the_variable_selects_a_toolchain_by_name_or_directory() -> Outcome {
        let scratch = tempfile::tempdir()?;
        fake_system(scratch.path(), "1.96.0")?;
        let other = scratch.path().join("rustup/toolchains").join(with_host("nightly-2026-10-15"));
        fake_system(&other, "1.101.0-nightly")?;
        for chosen in ["nightly-2026-10-15", &with_host("nightly-2026-10-15"), &other.display().to_string()] {
            assert_eq!(find_chosen(scratch.path(), Some(chosen))?.release, "1.101.0-nightly", "{chosen}");
        }
        let error = find_chosen(scratch.path(), Some("nightly-1999-12-31")).expect_err("not installed").to_string();
        assert!(error.contains("CUDA_BUILDER_TOOLCHAIN=nightly-1999-12-31: ") && !error.contains("Debian"), "{error}");
        Ok(())
    }

    #[test]
    fn the_newest_other_nightly_is_the_last_choice() -> Outcome {
        let scratch = tempfile::tempdir()?;
        for (date, release) in [("2026-08-01", "1.99.0-nightly"), ("2026-10-15", "1.101.0-nightly")] {
            let name = with_host(&format!("nightly-{date}"));
            fake_system(&scratch.path().join("rustup/toolchains").join(name), release)?;
        }
        assert_eq!(find(scratch.path())?.release, "1.101.0-nightly");
        fake_system(scratch.path(), "1.96.0")?;
        assert_eq!(find(scratch.path())?.release, "1.96.0");
        Ok(())
    }

    #[test]
    fn another_version_of_llvm_is_a_warning_that_names_both() {
        let toolchain = |llvm_version: &str| Toolchain {
            rustc: "/r/bin/rustc".into(),
            cargo: "/r/bin/cargo".into(),
            llvm_bin: "/r/llvm".into(),
            release: "1.101.0-nightly".into(),
            llvm_version: llvm_version.into(),
        };
        assert_eq!(toolchain("22.1.8").warning(), None);
        let warning = toolchain("23.1.0").warning().expect("a warning");
        for part in ["expected LLVM 22", "1.101.0-nightly", "LLVM 23.1.0", TOOLCHAIN_VARIABLE] {
            assert!(warning.contains(part), "{warning:?} lacks {part}");
        }
    }

    #[test]
    fn finds_a_cuda_tool_installed_by_setup() -> Outcome {
        let scratch = tempfile::tempdir()?;
        let bin = scratch.path().join(".tools/cuda/nvidia/cu13/bin");
        fs::create_dir_all(&bin)?;
        fs::write(bin.join("no-such-cuda-tool"), "")?;
        assert_eq!(find_cuda_tool("no-such-cuda-tool", Some(scratch.path())), Some(bin.join("no-such-cuda-tool")));
        assert_eq!(find_cuda_tool("no-such-cuda-tool", None), None);
        Ok(())
    }
}
