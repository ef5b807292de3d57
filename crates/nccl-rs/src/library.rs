//! The opened library and its version.

use crate::result::{Error, Result, check};
use crate::sys::Functions;
use cuda_driver::library::{Found, NotFound, SearchPath};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The first with every function and the whole configuration that this crate uses.
const OLDEST: Version = Version { major: 2, minor: 18, patch: 0 };

/// The one name that the library has in every version 2.
const NAME: &str = "libnccl.so.2";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl Version {
    /// From the library's own number: 21803 is 2.18.3, and before 2.9, 2804 was 2.8.4.
    const fn of(number: u32) -> Self {
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

/// The library of this process; the first outcome is kept.
static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();

pub(crate) fn library() -> Result<&'static Library> {
    let open = || Library::of(SearchPath::detect().open(&[NAME])?);
    LIBRARY.get_or_init(open).as_ref().map_err(Clone::clone)
}

impl Library {
    fn of(found: Found) -> Result<Self> {
        let functions = Functions::of(found)?;
        let mut number = 0;
        // SAFETY: writes one integer.
        check(unsafe { (functions.version)(&raw mut number) }, "ncclGetVersion", "")?;
        let version = Version::of(number.unsigned_abs());
        if version < OLDEST {
            return Err(Error::TooOld { path: functions.path, version, oldest: OLDEST });
        }
        Ok(Self { functions, version })
    }
}

/// Where the library is, and its version. A missing one is [`Error::Missing`], which says what to install and where it was
/// looked for; one before 2.18 is [`Error::TooOld`].
pub fn find() -> Result<(PathBuf, Version)> {
    let library = library()?;
    Ok((library.functions.path.clone(), library.version))
}

/// Takes the library at `path`, if none has been opened yet; then as [`find`].
pub fn load_from(path: &Path) -> Result<(PathBuf, Version)> {
    let open = || {
        // SAFETY: NCCL runs nothing at load time that depends on the program's state.
        let library = unsafe { libloading::Library::new(path) }.map_err(|error| NotFound {
            names: vec![path.display().to_string()],
            directories: Vec::new(),
            failures: vec![(path.into(), error.to_string())],
        })?;
        Library::of(Found { library, path: path.into() })
    };
    LIBRARY.get_or_init(open).as_ref().map_err(Clone::clone)?;
    find()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_in_both_numberings() {
        assert_eq!(Version::of(23203).to_string(), "2.32.3");
        assert_eq!(Version::of(21805), Version { major: 2, minor: 18, patch: 5 });
        assert_eq!(Version::of(2804), Version { major: 2, minor: 8, patch: 4 });
        assert!(Version::of(2804) < OLDEST && Version::of(21706) < OLDEST && Version::of(21800) >= OLDEST);
    }
}
