//! Temporary files and directories, which are removed unless they are renamed.

use crate::TEMPORARY_PREFIX;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use system::fs::{self, File};
use system::process;

/// Calls `create` with new names in `directory` until one does not exist.
fn with_new_name<T>(directory: &Path, create: impl Fn(&Path) -> io::Result<T>) -> io::Result<(PathBuf, T)> {
    loop {
        let number = process::next_number();
        // Processes of several hosts may have the same number, and share the directory.
        let path = directory.join(format!("{TEMPORARY_PREFIX}{:x}-{number}", process::id()));
        match create(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            created => return Ok((path, created?)),
        }
    }
}

/// A file that is removed when this is dropped.
pub struct TemporaryFile(Option<PathBuf>);

impl TemporaryFile {
    /// Creates a file in `directory`, with permissions to which the umask of the process applies.
    pub fn create(directory: &Path, mode: u32) -> io::Result<(Self, File)> {
        let (path, file) = with_new_name(directory, |path| File::create_new(path, mode))?;
        Ok((Self(Some(path)), file))
    }

    /// Renames the file, which is kept.
    pub fn rename_to(mut self, path: &Path) -> io::Result<()> {
        let temporary = self.0.as_deref().unwrap_or(path);
        fs::rename(temporary, path)?;
        self.0 = None;
        Ok(())
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if let Some(path) = self.0.take() {
            // Leftover files are removed when the next run starts in the directory.
            let _ = fs::remove_file(&path);
        }
    }
}

/// A directory that is removed with its contents when this is dropped, unless its name has gone.
pub struct TemporaryDirectory(PathBuf);

impl TemporaryDirectory {
    /// Creates a directory in `directory`.
    pub fn create(directory: &Path) -> io::Result<Self> {
        Ok(Self(with_new_name(directory, fs::create_dir)?.0))
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Removes it, and reports an error.
    pub fn close(self) -> io::Result<()> {
        fs::remove_dir_all(&self.0)
    }
}

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
