//! Atomic writes of directories.

use super::temporary::TemporaryDirectory;
use super::{create_directory, parent, sync_directory};
use anyhow::{Context, Result, ensure};
use rustix::io::Errno;
use std::path::Path;
use system::fs::{self, File};

/// Creates a temporary directory next to `path`, fills it with files by `fill`, syncs them to disk and renames the directory to
/// `path`. On error the temporary directory is removed and an existing directory at `path` is unchanged.
///
/// An existing directory is replaced with all its files. The caller must have checked that this is wanted.
pub fn write_directory<T>(path: &Path, fill: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let cannot = || format!("cannot write {}", path.display());
    ensure!(path.file_name().is_some(), "{}: expected a path that ends with the name of a directory", path.display());
    let parent = parent(path);
    create_directory(parent)?;
    let temporary = TemporaryDirectory::create(parent).with_context(cannot)?;
    let result = fill(temporary.path()).with_context(cannot)?;
    for name in fs::names(temporary.path()).with_context(cannot)? {
        File::open(temporary.path().join(name)).and_then(|file| file.sync_all()).with_context(cannot)?;
    }
    sync_directory(temporary.path())?;
    if fs::exists(path).with_context(cannot)? {
        exchange(temporary.path(), path).with_context(cannot)?;
        sync_directory(parent)?;
        // The temporary name is now that of the old directory, which is removed.
        temporary.close().with_context(|| format!("cannot remove the previous {}", path.display()))?;
    } else {
        fs::rename(temporary.path(), path).with_context(cannot)?;
        sync_directory(parent)?;
    }
    Ok(result)
}

/// Exchanges the names of two directories in one step, or in three where the file system cannot.
fn exchange(new: &Path, old: &Path) -> Result<()> {
    match fs::exchange(new, old) {
        Err(error)
            if [Errno::INVAL, Errno::NOSYS, Errno::OPNOTSUPP]
                .contains(&Errno::from_io_error(&error).unwrap_or(Errno::IO)) =>
        {
            exchange_in_steps(new, old)
        }
        result => Ok(result?),
    }
}

/// Exchanges the names of two directories by three renames. On error `old` keeps its name.
fn exchange_in_steps(new: &Path, old: &Path) -> Result<()> {
    // Not a temporary name: if the process is killed here, this is the only copy of the old files.
    let mut name = old.file_name().unwrap_or_default().to_owned();
    name.push(".previous");
    let aside = old.with_file_name(name);
    fs::rename(old, &aside).with_context(|| format!("cannot rename {} to {}", old.display(), aside.display()))?;
    if let Err(error) = fs::rename(new, old) {
        fs::rename(&aside, old)
            .with_context(|| format!("{error}; the previous directory is now {}", aside.display()))?;
        return Err(error.into());
    }
    Ok(fs::rename(&aside, new)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TEMPORARY_PREFIX;
    use anyhow::bail;
    use std::fs;

    fn names(path: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_directory_appears_complete_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/model");
        let fill = |name: &'static str| {
            move |at: &Path| {
                fs::write(at.join(name), name)?;
                assert!(at.file_name().unwrap().to_str().unwrap().starts_with(TEMPORARY_PREFIX));
                Ok(3)
            }
        };
        assert_eq!(write_directory(&path, fill("x")).unwrap(), 3);
        assert_eq!([names(&path), names(&dir.path().join("a"))], [["x"], ["model"]]);
        let failed: Result<()> = write_directory(&path, |at| {
            fs::write(at.join("half"), "")?;
            bail!("disk full")
        });
        let message = format!("{:#}", failed.unwrap_err());
        assert!(message.contains("a/model: disk full"), "{message}");
        assert_eq!([names(&path), names(&dir.path().join("a"))], [["x"], ["model"]]);
        // An existing directory is replaced.
        write_directory(&path, fill("y")).unwrap();
        assert_eq!([names(&path), names(&dir.path().join("a"))], [["y"], ["model"]]);
        let message = write_directory(Path::new("/"), |_| Ok(())).unwrap_err().to_string();
        assert!(message.contains("expected a path that ends with the name of a directory"), "{message}");
    }

    #[test]
    fn directories_are_exchanged() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| dir.path().join(name));
        for path in [&a, &b] {
            fs::create_dir(path).unwrap();
            fs::write(path.join(path.file_name().unwrap()), "").unwrap();
        }
        exchange(&a, &b).unwrap();
        assert_eq!([names(&a), names(&b)], [["b"], ["a"]]);
        exchange_in_steps(&a, &b).unwrap();
        assert_eq!([names(&a), names(&b)], [["a"], ["b"]]);
        exchange_in_steps(&dir.path().join("missing"), &b).unwrap_err();
        assert_eq!((names(&b), names(dir.path())), (vec!["b".to_owned()], vec!["a".to_owned(), "b".to_owned()]));
    }
}
