//! Files and directories.

use crate::simulation::disk::{Open, on_disk};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::fmt::Debug;
use std::fs;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

pub use std::fs::TryLockError;

/// An open file or directory, of the operating system or of a simulated disk.
#[derive(Debug)]
pub struct File(Box<dyn FileOperations>);

/// The operations of a [`File`]. The default implementations are those of a simulated disk.
pub trait FileOperations: Read + Write + Seek + Debug + Send + Sync {
    /// Waits until contents and metadata are on the disk.
    fn sync_all(&self) -> io::Result<()>;

    /// Waits until the contents are on the disk.
    fn sync_data(&self) -> io::Result<()> {
        self.sync_all()
    }

    /// Returns the size in bytes.
    fn size(&self) -> io::Result<u64>;

    /// Returns whether the file still has a name. On a network file system, the server may have removed it. Files of a simulated disk
    /// are only removed by the program itself.
    fn has_name(&self) -> io::Result<bool> {
        Ok(true)
    }

    /// Returns the path of an open directory if another directory, or none, has the path `path` under which it was opened. Returns
    /// `None` for a directory that still has that path or was removed. Directories of a simulated disk do not move.
    fn moved_from(&self, _path: &Path) -> Option<PathBuf> {
        None
    }

    /// Truncates or extends the file.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Returns another handle, with the same position.
    fn try_clone(&self) -> io::Result<File>;

    /// Takes the exclusive lock of a file or directory, which its last handle releases.
    fn try_lock(&self) -> Result<(), TryLockError>;

    /// Reads at most `buffer.len()` bytes from a position.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Fills a buffer from a position.
    fn read_exact_at(&self, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !buffer.is_empty() {
            let n = self.read_at(buffer, offset)?;
            if n == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            (buffer, offset) = (&mut buffer[n..], offset + n as u64);
        }
        Ok(())
    }
}

impl File {
    fn open_as(path: &Path, how: Open, real: impl FnOnce() -> io::Result<fs::File>) -> io::Result<Self> {
        on_disk(path).map_or_else(|| Ok(real()?.into()), |task| Ok(Self::new(task.open(path, how)?)))
    }

    pub(crate) fn new(file: impl FileOperations + 'static) -> Self {
        Self(Box::new(file))
    }

    /// Opens a file for reading, or a directory for syncing and locking it.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        Self::open_as(path, Open::Read, || fs::File::open(path))
    }

    /// Creates a file for writing, or empties an existing one.
    pub fn create(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        Self::open_as(path, Open::Create, || fs::File::create(path))
    }

    /// Creates a file that must not exist, with permissions to which the umask of the process applies.
    pub fn create_new(path: impl AsRef<Path>, mode: u32) -> io::Result<Self> {
        let path = path.as_ref();
        let create = || fs::File::options().write(true).create_new(true).mode(mode).open(path);
        Self::open_as(path, Open::CreateNew, create)
    }

    /// Opens a file for reading, and for writing at its end. Creates it if necessary.
    pub fn append(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        Self::open_as(path, Open::Append, || fs::File::options().read(true).append(true).create(true).open(path))
    }
}

impl FileOperations for fs::File {
    fn sync_all(&self) -> io::Result<()> {
        Self::sync_all(self)
    }

    fn sync_data(&self) -> io::Result<()> {
        Self::sync_data(self)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn has_name(&self) -> io::Result<bool> {
        match self.metadata() {
            Err(error) if error.kind() == ErrorKind::StaleNetworkFileHandle => Ok(false),
            metadata => Ok(metadata?.nlink() > 0),
        }
    }

    fn moved_from(&self, path: &Path) -> Option<PathBuf> {
        let identity = |metadata: &fs::Metadata| (metadata.dev(), metadata.ino());
        let own = identity(&self.metadata().ok()?);
        match fs::metadata(path) {
            Ok(found) if identity(&found) == own => return None,
            // The path may be reachable again later.
            Err(error) if error.kind() != ErrorKind::NotFound => return None,
            _ => {}
        }
        let now = fs::read_link(format!("/proc/self/fd/{}", self.as_raw_fd())).ok()?;
        // A removed directory has no path.
        fs::metadata(&now).is_ok_and(|found| identity(&found) == own).then_some(now)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        Self::set_len(self, len)
    }

    fn try_clone(&self) -> io::Result<File> {
        Ok(Self::try_clone(self)?.into())
    }

    fn try_lock(&self) -> Result<(), TryLockError> {
        Self::try_lock(self)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, buffer, offset)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buffer, offset)
    }
}

impl From<fs::File> for File {
    fn from(file: fs::File) -> Self {
        Self::new(file)
    }
}

impl Deref for File {
    type Target = dyn FileOperations;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl Read for File {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for File {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.0.seek(to)
    }
}

/// Returns whether a path is on a simulated disk, which has only files and directories.
pub fn is_simulated(path: &Path) -> bool {
    on_disk(path).is_some()
}

/// Renames a file or directory. Replaces an existing file.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    match on_disk(from) {
        Some(task) => task.rename(from, to),
        None => fs::rename(from, to),
    }
}

/// Exchanges the names of two files or directories in one step. Some file systems cannot.
pub fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    match on_disk(one) {
        Some(task) => task.exchange(one, other),
        None => Ok(renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)?),
    }
}

/// Removes a file.
pub fn remove_file(path: &Path) -> io::Result<()> {
    match on_disk(path) {
        Some(task) => task.remove_file(path),
        None => fs::remove_file(path),
    }
}

/// Removes a directory with its contents.
pub fn remove_dir_all(path: &Path) -> io::Result<()> {
    let Some(task) = on_disk(path) else { return fs::remove_dir_all(path) };
    for name in task.list(path)? {
        let path = path.join(name);
        if task.is_directory(&path)? { remove_dir_all(&path) } else { task.remove_file(&path) }?;
    }
    task.remove_directory(path)
}

/// Removes an empty directory.
pub fn remove_dir(path: &Path) -> io::Result<()> {
    match on_disk(path) {
        Some(task) => task.remove_directory(path),
        None => fs::remove_dir(path),
    }
}

/// Creates a directory.
pub fn create_dir(path: &Path) -> io::Result<()> {
    match on_disk(path) {
        Some(task) => task.create_directory(path),
        None => fs::create_dir(path),
    }
}

/// Creates a directory and its parents, unless they exist. Syncs the parent of each directory that it creates: otherwise a power
/// failure may take the directory with everything in it.
pub fn create_dir_all(path: &Path) -> io::Result<()> {
    if is_dir(path) || path.as_os_str().is_empty() {
        return Ok(());
    }
    let parent = path.parent().unwrap_or(path);
    create_dir_all(parent)?;
    match create_dir(path) {
        // Another rank may create it at the same time.
        Err(error) if !is_dir(path) => return Err(error),
        _ => {}
    }
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    File::open(parent)?.sync_all()
}

/// Returns the names in a directory, in any order. Names that are not UTF-8 are left out.
pub fn names(directory: &Path) -> io::Result<Vec<String>> {
    if let Some(task) = on_disk(directory) {
        return task.list(directory);
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        names.extend(entry?.file_name().into_string().ok());
    }
    Ok(names)
}

/// Returns whether a path exists. Unlike `Path::exists`, it returns errors such as EIO instead of reporting that the path is absent.
pub fn exists(path: &Path) -> io::Result<bool> {
    match on_disk(path) {
        Some(task) => Ok(task.is_directory(path).is_ok()),
        None => path.try_exists(),
    }
}

/// Returns whether a path is a directory.
pub fn is_dir(path: &Path) -> bool {
    match on_disk(path) {
        Some(task) => task.is_directory(path).unwrap_or(false),
        None => path.is_dir(),
    }
}

/// Returns the final target of a symbolic link, or `None` if `path` is no link or its target does not exist. A simulated disk has no links.
pub fn link_target(path: &Path) -> Option<PathBuf> {
    let is_link = on_disk(path).is_none() && fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink());
    is_link.then(|| fs::canonicalize(path).ok()).flatten()
}

/// Returns whether a path is on NFS, where the lock of a directory does not exclude other clients.
pub fn is_nfs(path: &Path) -> bool {
    const NFS_SUPER_MAGIC: i64 = 0x6969;
    on_disk(path).is_none() && rustix::fs::statfs(path).is_ok_and(|system| system.f_type == NFS_SUPER_MAGIC)
}

/// Returns the free space of the file system of a path in bytes.
pub fn free_space(path: &Path) -> io::Result<u64> {
    if let Some(task) = on_disk(path) {
        return task.free_space();
    }
    let space = rustix::fs::statvfs(path)?;
    Ok(space.f_bavail.saturating_mul(space.f_frsize))
}
