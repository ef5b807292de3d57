//! Atomic writes of files and directories: they appear complete or not at all.

#![warn(missing_docs)]

mod directory;
mod temporary;

pub use directory::write_directory;

use anyhow::{Context, Result};
use std::io::BufWriter;
use std::path::Path;
use system::fs::{self, File};
use temporary::TemporaryFile;

/// Prefix of the names of temporary files and directories.
pub const TEMPORARY_PREFIX: &str = ".unfinished-";

/// Writes a temporary file next to `path` with `fill`, syncs it to disk and renames it to `path`. On error the temporary file
/// is removed and an existing file at `path` is unchanged. If `path` is a symbolic link, the file that it names is replaced.
pub fn write<T>(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> Result<T>) -> Result<T> {
    // The permissions of `File::create`. The umask of the process still applies.
    write_with_mode(path, 0o666, fill)
}

/// Writes a file like [`write()`] that only its owner can read.
pub fn write_private<T>(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> Result<T>) -> Result<T> {
    write_with_mode(path, 0o600, fill)
}

fn write_with_mode<T>(path: &Path, mode: u32, fill: impl FnOnce(&mut BufWriter<File>) -> Result<T>) -> Result<T> {
    let cannot = || format!("cannot write {}", path.display());
    // Replaces the target of a symbolic link, not the link.
    let target = fs::link_target(path);
    let path = target.as_deref().unwrap_or(path);
    let directory = parent(path);
    let (temporary, file) = TemporaryFile::create(directory, mode).with_context(cannot)?;
    let mut writer = BufWriter::with_capacity(1 << 20, file);
    let result = fill(&mut writer).with_context(cannot)?;
    let file = writer.into_inner().map_err(std::io::IntoInnerError::into_error).with_context(cannot)?;
    file.sync_all().with_context(cannot)?;
    temporary.rename_to(path).with_context(cannot)?;
    sync_directory(directory)?;
    Ok(result)
}

/// Returns the directory that contains `path`.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Syncs a directory to disk. Without it, a new name may be lost in a power failure although the file was synced.
pub fn sync_directory(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|directory| directory.sync_all())
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Creates a directory and its parents.
pub fn create_directory(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("cannot create directory {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;
    use std::fs;
    use std::io::Write;

    #[test]
    fn the_parent_of_a_plain_name_is_the_current_directory() {
        for (path, expected) in [("x", "."), ("a/x", "a"), ("a/b/", "a"), ("/x", "/")] {
            assert_eq!(parent(Path::new(path)), Path::new(expected), "{path}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_private_file_is_readable_by_its_owner_only() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        write_private(&path, |file| Ok(file.write_all(b"secret")?)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_failed_write_keeps_the_old_file_and_removes_the_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.bin");
        write(&path, |w| Ok(w.write_all(b"old")?)).unwrap();
        let failed: Result<()> = write(&path, |w| {
            w.write_all(b"half of the n")?;
            bail!("disk full")
        });
        let message = format!("{:#}", failed.unwrap_err());
        assert!(message.contains("x.bin") && message.contains("disk full"), "{message}");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_does_not_replace_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        fs::create_dir(&path).unwrap();
        let message = format!("{:#}", write(&path, |_| Ok(())).unwrap_err());
        assert_eq!(message, format!("cannot write {}: Is a directory (os error 21)", path.display()));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
