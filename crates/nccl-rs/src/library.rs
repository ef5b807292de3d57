//! The opened library and its version.

use crate::result::{Error, Result, check};
use crate::sys::Functions;
use cuda_driver::library::{Found, NotFound, SearchPath};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The oldest version with all functions and configuration fields that this crate uses.
const OLDEST: Version = Version { major: 2, minor: 18, patch: 0 };

/// The file name of NCCL in all versions 2.
const NAME: &str = "libnccl.so.2";

/// A version of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The major version.
    pub major: u32,
    /// The minor version.
    pub minor: u32,
    /// The patch version.
    pub patch: u32,
}

impl Version {
    /// Converts NCCL's number: 21803 is 2.18.3. Before 2.9, 2804 was 2.8.4.
    const fn from_number(number: u32) -> Self {
        let unit = if number < 10_000 { 1000 } else { 10_000 };
        Self { major: number / unit, minor: number % unit / 100, patch: number % 100 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

pub(crate) struct Library {
    pub functions: Functions,
    pub version: Version,
}

/// The library of this process, or the error of opening it.
static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();

pub(crate) fn library() -> Result<&'static Library> {
    let open = || Library::bind(SearchPath::detect().open(&[NAME])?);
    LIBRARY.get_or_init(open).as_ref().map_err(Clone::clone)
}

impl Library {
    fn bind(found: Found) -> Result<Self> {
        let functions = Functions::bind(found)?;
        let mut number = 0;
        // SAFETY: the call writes one integer.
        check(unsafe { (functions.version)(&raw mut number) }, "ncclGetVersion", "")?;
        let version = Version::from_number(number.unsigned_abs());
        if version < OLDEST {
            return Err(Error::TooOld { path: functions.path, version, oldest: OLDEST });
        }
        Ok(Self { functions, version })
    }
}

/// Returns the path of NCCL and its version. Returns [`Error::Missing`] if it is not found, and [`Error::TooOld`] for a version
/// before 2.18.
pub fn find() -> Result<(PathBuf, Version)> {
    let library = library()?;
    Ok((library.functions.path.clone(), library.version))
}

/// Opens the library at `path` if none is open yet, and does the same as [`find`].
pub fn load_from(path: &Path) -> Result<(PathBuf, Version)> {
    let open = || {
        // SAFETY: NCCL runs no initializers that depend on the program's state.
        let library = unsafe { libloading::Library::new(path) }.map_err(|error| NotFound {
            names: vec![path.display().to_string()],
            directories: Vec::new(),
            failures: vec![(path.into(), error.to_string())],
        })?;
        Library::bind(Found { library, path: path.into() })
    };
    LIBRARY.get_or_init(open).as_ref().map_err(Clone::clone)?;
    find()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_both_numbering_schemes_are_parsed() {
        assert_eq!(Version::from_number(23203).to_string(), "2.32.3");
        assert_eq!(Version::from_number(21805), Version { major: 2, minor: 18, patch: 5 });
        assert_eq!(Version::from_number(2804), Version { major: 2, minor: 8, patch: 4 });
        assert!(
            Version::from_number(2804) < OLDEST
                && Version::from_number(21706) < OLDEST
                && Version::from_number(21800) >= OLDEST
        );
    }
}
