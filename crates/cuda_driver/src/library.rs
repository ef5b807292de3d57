//! NVIDIA's libraries, found and opened at run time: by the dynamic linker's own search (`LD_LIBRARY_PATH`, its cache),
//! then in CUDA toolkits, then in the Python packages that carry them (`site-packages/nvidia/*/lib`).

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where to look beyond the dynamic linker's own search.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// Directories that may hold the library itself.
    pub directories: Vec<PathBuf>,
    /// Python prefixes: `lib/python3*/{site,dist}-packages/nvidia/*/lib` below them may hold it.
    pub prefixes: Vec<PathBuf>,
}

/// A library that was opened, and the file it came from (or the bare name, where the dynamic linker found it).
#[derive(Debug)]
pub struct Found {
    pub library: libloading::Library,
    pub path: PathBuf,
}

#[derive(Debug, Clone, thiserror::Error)]
#[error("{} not found; looked in the dynamic linker's path{}{}", names.join(" or "), list(directories), broken(failures))]
pub struct NotFound {
    pub names: Vec<String>,
    /// Directories that were searched and exist.
    pub directories: Vec<PathBuf>,
    /// Files that exist but do not load, with the linker's reason.
    pub failures: Vec<(PathBuf, String)>,
}

fn list(directories: &[PathBuf]) -> String {
    directories.iter().fold(String::new(), |text, directory| text + ", " + &directory.display().to_string())
}

fn broken(failures: &[(PathBuf, String)]) -> String {
    failures.iter().fold(String::new(), |mut text, (path, reason)| {
        let _ = write!(text, "; {} does not load: {reason}", path.display());
        text
    })
}

impl Places {
    /// What this machine and environment suggest.
    pub fn of_this_machine() -> Self {
        let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let mut directories = Vec::new();
        let mut toolkits: Vec<_> = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| var(name)).collect();
        toolkits.extend(["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from));
        // Newest first.
        toolkits.extend(children("/usr/local".as_ref(), "cuda-").into_iter().rev());
        for toolkit in toolkits {
            directories.push(toolkit.join("lib64"));
            directories.extend(children(&toolkit.join("targets"), "").into_iter().map(|target| target.join("lib")));
        }
        directories
            .extend(["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"].map(PathBuf::from));

        let mut prefixes: Vec<_> = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| var(name)).collect();
        for bin in std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()) {
            // A virtual environment's python is a link into its base: both prefixes count.
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

    /// Every existing directory to look in, in order, each once.
    pub fn search_path(&self) -> Vec<PathBuf> {
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

    /// Opens the first library there is: the dynamic linker's answer for any of `names` in turn, then for each name each
    /// directory. Names come in order of preference, such as `libcublasLt.so.13`, `libcublasLt.so.12`.
    pub fn open(&self, names: &[&str]) -> Result<Found, NotFound> {
        let mut failures = Vec::new();
        for name in names {
            if let Ok(library) = open(name.as_ref()) {
                return Ok(Found { library, path: name.into() });
            }
        }
        let mut directories = self.search_path();
        if let Some(found) = open_in(&directories, names, &mut failures) {
            return Ok(found);
        }
        // Last, because it costs a process: Python itself knows of installations that no convention covers.
        let rest: Vec<_> = python_says().into_iter().filter(|d| !directories.contains(d)).collect();
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
    // SAFETY: NVIDIA's libraries run nothing at load time that depends on the program's state.
    unsafe { libloading::Library::new(name) }.map_err(|error| crate::late::text_of(&error))
}

/// `nvidia/*/lib` below a Python package directory.
fn packaged(packages: &Path) -> Vec<PathBuf> {
    children(&packages.join("nvidia"), "").into_iter().map(|package| package.join("lib")).collect()
}

fn python_says() -> Vec<PathBuf> {
    let script = "import site, sys; print('\\n'.join(p for p in sys.path + site.getsitepackages() if p))";
    let output = Command::new("python3").args(["-c", script]).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let mut seen = BTreeSet::new();
    let mut directories: Vec<_> = text.lines().flat_map(|line| packaged(line.as_ref())).collect();
    directories.retain(|directory| directory.is_dir() && seen.insert(directory.clone()));
    directories
}

/// Entries of a directory whose names begin with `start`, sorted; none where it cannot be read.
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

    /// A library that loads, under another name: this test's own dependency on the C library's math part.
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
        let places = Places { directories: vec![root.path().join("absent")], prefixes: vec![root.path().into()] };
        assert_eq!(places.search_path(), [new.clone(), old.clone()]);

        std::os::unix::fs::symlink(real_library(), old.join("libstandin.so.12")).unwrap();
        fs::write(new.join("libstandin.so.12"), "not a library").unwrap();
        let found = places.open(&["libstandin.so.13", "libstandin.so.12"]).unwrap();
        assert_eq!(found.path, old.join("libstandin.so.12"));

        fs::remove_file(old.join("libstandin.so.12")).unwrap();
        let text = places.open(&["libstandin.so.13", "libstandin.so.12"]).unwrap_err().to_string();
        assert!(text.starts_with("libstandin.so.13 or libstandin.so.12 not found; looked in"), "{text}");
        assert!(text.contains(&format!(", {}", old.display())), "{text}");
        assert!(text.contains(&format!("{} does not load: ", new.join("libstandin.so.12").display())), "{text}");
    }

    #[test]
    fn the_preferred_version_wins_over_the_earlier_directory() {
        let root = tempfile::tempdir().unwrap();
        let (a, b) = (root.path().join("a"), root.path().join("b"));
        for (directory, name) in [(&a, "libstandin.so.12"), (&b, "libstandin.so.13")] {
            fs::create_dir(directory).unwrap();
            std::os::unix::fs::symlink(real_library(), directory.join(name)).unwrap();
        }
        let places = Places { directories: vec![a, b.clone()], prefixes: vec![] };
        assert_eq!(places.open(&["libstandin.so.13", "libstandin.so.12"]).unwrap().path, b.join("libstandin.so.13"));
    }
}
