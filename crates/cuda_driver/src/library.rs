//! Finds and opens NVIDIA's libraries at run time.
//!
//! The search order is: the dynamic linker's search path (`LD_LIBRARY_PATH` and its cache), CUDA toolkits, and Python
//! packages that contain the libraries (`site-packages/nvidia/*/lib`).

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The directories to search after the dynamic linker's search path.
#[derive(Clone, Debug, Default)]
pub struct SearchPath {
    /// Directories that may contain the library itself.
    pub directories: Vec<PathBuf>,
    /// Python prefixes. `lib/python3*/{site,dist}-packages/nvidia/*/lib` below them may contain the library.
    pub prefixes: Vec<PathBuf>,
}

/// An opened library.
#[derive(Debug)]
pub struct Found {
    /// The library.
    pub library: libloading::Library,
    /// The file it was opened from, or only its name if the dynamic linker found it.
    pub path: PathBuf,
}

/// No library of the requested names could be opened.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{} not found; searched the dynamic linker's path{}{}", names.join(" or "), list(directories), broken(failures))]
pub struct NotFound {
    /// The requested file names.
    pub names: Vec<String>,
    /// The existing directories that were searched.
    pub directories: Vec<PathBuf>,
    /// Files that exist but do not load, each with the dynamic linker's message.
    pub failures: Vec<(PathBuf, String)>,
}

fn list(directories: &[PathBuf]) -> String {
    directories.iter().fold(String::new(), |text, directory| text + ", " + &directory.display().to_string())
}

fn broken(failures: &[(PathBuf, String)]) -> String {
    failures.iter().fold(String::new(), |mut text, (path, reason)| {
        let _ = write!(text, "; {} cannot be loaded: {reason}", path.display());
        text
    })
}

impl SearchPath {
    /// Returns the directories and prefixes that exist by convention on this machine or that the environment names.
    pub fn detect() -> Self {
        let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let mut directories = Vec::new();
        let mut toolkits: Vec<_> = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| var(name)).collect();
        toolkits.extend(["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from));
        // The newest version first.
        toolkits.extend(children("/usr/local".as_ref(), "cuda-").into_iter().rev());
        for toolkit in toolkits {
            directories.push(toolkit.join("lib64"));
            directories.extend(children(&toolkit.join("targets"), "").into_iter().map(|target| target.join("lib")));
        }
        directories
            .extend(["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"].map(PathBuf::from));

        let mut prefixes: Vec<_> = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| var(name)).collect();
        for bin in std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()) {
            // The python of a virtual environment is a link to that of its base. Both prefixes are searched.
            for python in [Some(bin.join("python3")), bin.join("python3").canonicalize().ok()].into_iter().flatten() {
                if python.is_file() {
                    prefixes.extend(python.parent().and_then(Path::parent).map(Path::to_path_buf));
                }
            }
        }
        prefixes.extend(var("HOME").map(|home| home.join(".local")));
        prefixes.extend(["/usr/local", "/usr"].map(PathBuf::from));
        prefixes.extend(children("/opt".as_ref(), ""));
        Self { directories, prefixes }
    }

    /// Returns each existing directory to search once, in order.
    pub fn directories(&self) -> Vec<PathBuf> {
        let mut path = self.directories.clone();
        for prefix in &self.prefixes {
            for python in children(&prefix.join("lib"), "python3").into_iter().rev() {
                path.extend(["site-packages", "dist-packages"].iter().flat_map(|p| packaged(&python.join(p))));
            }
        }
        path.retain(|directory| directory.is_dir());
        let mut seen = BTreeSet::new();
        path.retain(|directory| seen.insert(directory.canonicalize().unwrap_or_else(|_| directory.clone())));
        path
    }

    /// Opens the first library found. `names` are file names in order of preference, such as `libcublasLt.so.13` and
    /// `libcublasLt.so.12`.
    ///
    /// The dynamic linker is tried with each name, and then each directory with the first name, with the second, and so on.
    pub fn open(&self, names: &[&str]) -> Result<Found, NotFound> {
        let mut failures = Vec::new();
        for name in names {
            if let Ok(library) = open(name.as_ref()) {
                return Ok(Found { library, path: name.into() });
            }
        }
        let mut directories = self.directories();
        if let Some(found) = open_in(&directories, names, &mut failures) {
            return Ok(found);
        }
        // Python itself knows of installations outside the conventional directories. This comes last because it starts a
        // process.
        let rest: Vec<_> = python_package_libraries().into_iter().filter(|d| !directories.contains(d)).collect();
        if let Some(found) = open_in(&rest, names, &mut failures) {
            return Ok(found);
        }
        directories.extend(rest);
        Err(NotFound { names: names.iter().map(ToString::to_string).collect(), directories, failures })
    }
}

fn open_in(directories: &[PathBuf], names: &[&str], failures: &mut Vec<(PathBuf, String)>) -> Option<Found> {
    for name in names {
        for path in directories.iter().map(|directory| directory.join(name)).filter(|path| path.exists()) {
            match open(path.as_os_str()) {
                Ok(library) => return Some(Found { library, path }),
                Err(reason) => failures.push((path, reason)),
            }
        }
    }
    None
}

fn open(name: &OsStr) -> Result<libloading::Library, String> {
    // SAFETY: NVIDIA's libraries run no initializers that depend on the program's state.
    unsafe { libloading::Library::new(name) }.map_err(|error| crate::late_binding::text_of(&error))
}

/// Returns `nvidia/*/lib` below a Python package directory.
fn packaged(packages: &Path) -> Vec<PathBuf> {
    children(&packages.join("nvidia"), "").into_iter().map(|package| package.join("lib")).collect()
}

/// Returns the existing `nvidia/*/lib` directories of the `python3` in `PATH`.
fn python_package_libraries() -> Vec<PathBuf> {
    let script = "import site, sys; print('\\n'.join(p for p in sys.path + site.getsitepackages() if p))";
    let output = Command::new("python3").args(["-c", script]).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let mut seen = BTreeSet::new();
    let mut directories: Vec<_> = text.lines().flat_map(|line| packaged(line.as_ref())).collect();
    directories.retain(|directory| directory.is_dir() && seen.insert(directory.clone()));
    directories
}

/// Returns the entries of a directory whose names begin with `start`, sorted. Empty if the directory cannot be read.
fn children(directory: &Path, start: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<_> =
        entries.filter(|e| e.file_name().to_string_lossy().starts_with(start)).map(|e| e.path()).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Returns a library that can be loaded: this process's C library.
    fn real_library() -> PathBuf {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let libc = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| path.contains("/libc."));
        PathBuf::from(libc.expect("a Linux process maps its C library"))
    }

    #[test]
    fn python_packages_are_searched_newest_python_first() {
        let root = tempfile::tempdir().unwrap();
        let lib = |python: &str, package: &str| {
            let lib = root.path().join(format!("lib/{python}/site-packages/nvidia/{package}/lib"));
            fs::create_dir_all(&lib).unwrap();
            lib
        };
        let (old, new) = (lib("python3.10", "cublas"), lib("python3.11", "cu13"));
        let search = SearchPath { directories: vec![root.path().join("absent")], prefixes: vec![root.path().into()] };
        assert_eq!(search.directories(), [new.clone(), old.clone()]);

        std::os::unix::fs::symlink(real_library(), old.join("libmock.so.12")).unwrap();
        fs::write(new.join("libmock.so.12"), "not a library").unwrap();
        let found = search.open(&["libmock.so.13", "libmock.so.12"]).unwrap();
        assert_eq!(found.path, old.join("libmock.so.12"));

        fs::remove_file(old.join("libmock.so.12")).unwrap();
        let text = search.open(&["libmock.so.13", "libmock.so.12"]).unwrap_err().to_string();
        assert!(text.starts_with("libmock.so.13 or libmock.so.12 not found; searched"), "{text}");
        assert!(text.contains(&format!(", {}", old.display())), "{text}");
        assert!(text.contains(&format!("{} cannot be loaded: ", new.join("libmock.so.12").display())), "{text}");
    }

    #[test]
    fn the_preferred_version_takes_precedence_over_the_earlier_directory() {
        let root = tempfile::tempdir().unwrap();
        let (a, b) = (root.path().join("a"), root.path().join("b"));
        for (directory, name) in [(&a, "libmock.so.12"), (&b, "libmock.so.13")] {
            fs::create_dir(directory).unwrap();
            std::os::unix::fs::symlink(real_library(), directory.join(name)).unwrap();
        }
        let search = SearchPath { directories: vec![a, b.clone()], prefixes: vec![] };
        assert_eq!(search.open(&["libmock.so.13", "libmock.so.12"]).unwrap().path, b.join("libmock.so.13"));
    }
}
