//! The simulated disk. It has the guarantees of POSIX and no more:
//!
//! * A file keeps its contents in a power failure if it was synced after the last write. Otherwise each sector of 512 bytes has its
//!   old or its new contents, or zeros, and the file its old or its new length or one between them.
//! * A name (a new file, a rename, a removal) survives if its directory was synced afterwards. Otherwise it may be lost, in any order:
//!   of two changes of a directory, the second may survive without the first. A rename within a directory is one change; a rename
//!   between directories is one change of each.
//! * Syncing a file does not sync its name.
//!
//! File systems guarantee more, each in its own way. A program that relies on POSIX alone is safe on all of them.

use super::random::{Random, mix};
use super::{Guard, ROOT, Task, current, killed};
use crate::fs::{File, FileOperations, TryLockError};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Component, Path};
use std::time::Duration;

/// Bytes that are written to the medium as a whole.
const SECTOR: usize = 512;

/// Free space of a disk that is not full.
const FREE_BYTES: u64 = 1 << 40;

/// A simulated disk: a tree of files and directories below [`ROOT`].
#[derive(Clone, Debug)]
pub struct Disk {
    nodes: Vec<Node>,
    open: Vec<OpenFile>,
    /// The locked files and directories, each with the process and the handle that hold the lock.
    locks: BTreeMap<usize, (usize, usize)>,
    /// Bytes that all files together may have.
    capacity: Option<u64>,
    /// Number of changes that fail from now on.
    failures: u32,
    /// Duration of an operation, at most.
    pub(super) delay: Duration,
}

/// A file or a directory. Number 0 is the root.
#[derive(Clone, Debug)]
enum Node {
    File { contents: Vec<u8>, synced: Vec<u8> },
    Directory(Directory),
}

#[derive(Clone, Debug, Default)]
struct Directory {
    entries: BTreeMap<String, usize>,
    /// The entries when the directory was synced last.
    synced: BTreeMap<String, usize>,
    /// The changes since then.
    changes: Vec<Change>,
}

/// Names with their new nodes; `None` removes a name.
type Change = Vec<(String, Option<usize>)>;

#[derive(Clone, Copy, Debug)]
struct OpenFile {
    node: usize,
    position: usize,
    append: bool,
    handles: usize,
}

impl Default for Disk {
    fn default() -> Self {
        let root = Node::Directory(Directory::default());
        Self {
            nodes: vec![root],
            open: Vec::new(),
            locks: BTreeMap::new(),
            capacity: None,
            failures: 0,
            delay: Duration::ZERO,
        }
    }
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Open {
    Read,
    /// Creates the file or empties it.
    Create,
    /// Creates the file, which must not exist.
    CreateNew,
    /// Creates the file if necessary, and writes at its end.
    Append,
}

impl Directory {
    fn change(&mut self, change: Change) {
        for (name, node) in &change {
            match node {
                Some(node) => drop(self.entries.insert(name.clone(), *node)),
                None => drop(self.entries.remove(name)),
            }
        }
        self.changes.push(change);
    }
}

impl Disk {
    /// Loses what was not synced. The seed decides what else survives.
    pub fn lose_power(&mut self, seed: u64) {
        self.open.clear();
        self.locks.clear();
        for (number, node) in self.nodes.iter_mut().enumerate() {
            let mut random = Random::new(seed ^ mix(number as u64));
            match node {
                Node::Directory(directory) => {
                    let mut entries = std::mem::take(&mut directory.synced);
                    for change in directory.changes.drain(..).filter(|_| random.below(2) == 0) {
                        for (name, node) in change {
                            match node {
                                Some(node) => drop(entries.insert(name, node)),
                                None => drop(entries.remove(&name)),
                            }
                        }
                    }
                    directory.entries = entries.clone();
                    directory.synced = entries;
                }
                Node::File { contents, synced } => {
                    if contents != synced {
                        *contents = torn(synced, contents, &mut random);
                        synced.clone_from(contents);
                    }
                }
            }
        }
        (self.failures, self.delay) = (0, Duration::ZERO);
    }

    /// Leaves space for this many more bytes.
    pub fn fill_up(&mut self, bytes: u64) {
        self.capacity = Some(self.used() + bytes);
    }

    /// Makes enough space.
    pub fn empty(&mut self) {
        self.capacity = None;
    }

    /// Makes the disk faultless: changes from now on succeed, at full speed.
    pub fn repair(&mut self) {
        (self.capacity, self.failures, self.delay) = (None, 0, Duration::ZERO);
    }

    /// Returns the contents of a file, or `None` if there is no such file.
    pub fn read(&self, path: &Path) -> Option<Vec<u8>> {
        match &self.nodes[self.find(path).ok()?] {
            Node::File { contents, .. } => Some(contents.clone()),
            Node::Directory(_) => None,
        }
    }

    /// Returns the names in a directory, in order. There are none in a directory that does not exist.
    pub fn names(&self, path: &Path) -> Vec<String> {
        self.list(path).unwrap_or_default()
    }

    pub(super) fn fail(&mut self, count: u32) {
        self.failures = count;
    }

    pub(super) fn release_locks(&mut self, process: usize) {
        self.locks.retain(|_, (holder, _)| *holder != process);
    }

    fn used(&self) -> u64 {
        let mut used = 0;
        let mut pending = vec![0];
        while let Some(node) = pending.pop() {
            match &self.nodes[node] {
                Node::File { contents, .. } => used += contents.len() as u64,
                Node::Directory(directory) => pending.extend(directory.entries.values()),
            }
        }
        used
    }

    fn free(&self) -> u64 {
        self.capacity.map_or(FREE_BYTES, |capacity| capacity.saturating_sub(self.used()))
    }

    /// Fails if the disk is failing.
    fn check(&mut self) -> io::Result<()> {
        if self.failures > 0 {
            self.failures -= 1;
            return Err(io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error()));
        }
        Ok(())
    }

    fn directory(&mut self, node: usize) -> io::Result<&mut Directory> {
        match &mut self.nodes[node] {
            Node::Directory(directory) => Ok(directory),
            Node::File { .. } => Err(ErrorKind::NotADirectory.into()),
        }
    }

    fn find(&self, path: &Path) -> io::Result<usize> {
        let relative = path.strip_prefix(ROOT).map_err(|_| ErrorKind::NotFound)?;
        let mut node = 0;
        for component in relative.components() {
            let Component::Normal(name) = component else { return Err(ErrorKind::InvalidInput.into()) };
            let Node::Directory(directory) = &self.nodes[node] else { return Err(ErrorKind::NotADirectory.into()) };
            let name = name.to_str().ok_or(ErrorKind::InvalidInput)?;
            node = *directory.entries.get(name).ok_or(ErrorKind::NotFound)?;
        }
        Ok(node)
    }

    /// Returns the directory that contains a path, and the name there.
    fn place(&self, path: &Path) -> io::Result<(usize, String)> {
        let parent = path.parent().ok_or(ErrorKind::InvalidInput)?;
        let name = path.file_name().and_then(OsStr::to_str).ok_or(ErrorKind::InvalidInput)?;
        Ok((self.find(parent)?, name.to_owned()))
    }

    fn open(&mut self, path: &Path, how: Open) -> io::Result<usize> {
        let found = match self.find(path) {
            Ok(_) if how == Open::CreateNew => return Err(ErrorKind::AlreadyExists.into()),
            Err(error) if error.kind() == ErrorKind::NotFound && how != Open::Read => {
                let (parent, name) = self.place(path)?;
                self.check()?;
                let node = self.nodes.len();
                self.directory(parent)?.change(vec![(name, Some(node))]);
                self.nodes.push(Node::File { contents: Vec::new(), synced: Vec::new() });
                node
            }
            found => found?,
        };
        match &mut self.nodes[found] {
            Node::File { contents, .. } if how == Open::Create => contents.clear(),
            Node::Directory(_) if how != Open::Read => return Err(ErrorKind::IsADirectory.into()),
            _ => {}
        }
        self.open.push(OpenFile { node: found, position: 0, append: how == Open::Append, handles: 1 });
        Ok(self.open.len() - 1)
    }

    fn write(&mut self, open: usize, bytes: &[u8]) -> io::Result<usize> {
        self.check()?;
        let free = self.free();
        let OpenFile { node, position, append, .. } = self.open[open];
        let Node::File { contents, .. } = &mut self.nodes[node] else { return Err(ErrorKind::IsADirectory.into()) };
        let position = if append { contents.len() } else { position };
        let space = (contents.len().saturating_sub(position) as u64).saturating_add(free);
        let n = bytes.len().min(usize::try_from(space).unwrap_or(usize::MAX));
        if n == 0 && !bytes.is_empty() {
            return Err(io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error()));
        }
        contents.resize(contents.len().max(position + n), 0);
        contents[position..position + n].copy_from_slice(&bytes[..n]);
        self.open[open].position = position + n;
        Ok(n)
    }

    fn read_at(&self, open: usize, buffer: &mut [u8], position: usize) -> io::Result<usize> {
        let Node::File { contents, .. } = &self.nodes[self.open[open].node] else {
            return Err(ErrorKind::IsADirectory.into());
        };
        let available = contents.get(position..).unwrap_or_default();
        let n = available.len().min(buffer.len());
        buffer[..n].copy_from_slice(&available[..n]);
        Ok(n)
    }

    fn sync(&mut self, open: usize) -> io::Result<()> {
        self.check()?;
        match &mut self.nodes[self.open[open].node] {
            Node::File { contents, synced } => synced.clone_from(contents),
            Node::Directory(directory) => {
                directory.synced.clone_from(&directory.entries);
                directory.changes.clear();
            }
        }
        Ok(())
    }

    fn len(&self, node: usize) -> u64 {
        match &self.nodes[node] {
            Node::File { contents, .. } => contents.len() as u64,
            Node::Directory(_) => 0,
        }
    }

    fn set_len(&mut self, open: usize, len: usize) -> io::Result<()> {
        self.check()?;
        match &mut self.nodes[self.open[open].node] {
            Node::File { contents, .. } => contents.resize(len, 0),
            Node::Directory(_) => return Err(ErrorKind::IsADirectory.into()),
        }
        Ok(())
    }

    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let node = self.find(from)?;
        if let Ok(target) = self.find(to) {
            match (&self.nodes[node], &self.nodes[target]) {
                (Node::File { .. }, Node::Directory(_)) => return Err(ErrorKind::IsADirectory.into()),
                (Node::Directory(_), Node::File { .. }) => return Err(ErrorKind::NotADirectory.into()),
                (_, Node::Directory(target)) if !target.entries.is_empty() => {
                    return Err(ErrorKind::DirectoryNotEmpty.into());
                }
                _ => {}
            }
        }
        let ((old, old_name), (new, new_name)) = (self.place(from)?, self.place(to)?);
        self.check()?;
        let (removed, added) = ((old_name, None), (new_name, Some(node)));
        if old == new {
            self.directory(old)?.change(vec![removed, added]);
        } else {
            self.directory(new)?.change(vec![added]);
            self.directory(old)?.change(vec![removed]);
        }
        Ok(())
    }

    fn exchange(&mut self, one: &Path, other: &Path) -> io::Result<()> {
        let (a, b) = (self.find(one)?, self.find(other)?);
        let ((one, one_name), (other, other_name)) = (self.place(one)?, self.place(other)?);
        self.check()?;
        let (first, second) = ((one_name, Some(b)), (other_name, Some(a)));
        if one == other {
            self.directory(one)?.change(vec![first, second]);
        } else {
            self.directory(one)?.change(vec![first]);
            self.directory(other)?.change(vec![second]);
        }
        Ok(())
    }

    fn remove(&mut self, path: &Path, directory: bool) -> io::Result<()> {
        match &self.nodes[self.find(path)?] {
            Node::Directory(_) if !directory => return Err(ErrorKind::IsADirectory.into()),
            Node::File { .. } if directory => return Err(ErrorKind::NotADirectory.into()),
            Node::Directory(found) if !found.entries.is_empty() => return Err(ErrorKind::DirectoryNotEmpty.into()),
            _ => {}
        }
        let (parent, name) = self.place(path)?;
        self.check()?;
        self.directory(parent)?.change(vec![(name, None)]);
        Ok(())
    }

    fn create_directory(&mut self, path: &Path) -> io::Result<()> {
        if self.find(path).is_ok() {
            return Err(ErrorKind::AlreadyExists.into());
        }
        let (parent, name) = self.place(path)?;
        self.check()?;
        let node = self.nodes.len();
        self.directory(parent)?.change(vec![(name, Some(node))]);
        self.nodes.push(Node::Directory(Directory::default()));
        Ok(())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        match &self.nodes[self.find(path)?] {
            Node::Directory(directory) => Ok(directory.entries.keys().cloned().collect()),
            Node::File { .. } => Err(ErrorKind::NotADirectory.into()),
        }
    }
}

/// Returns the contents of a file after a power failure.
fn torn(synced: &[u8], contents: &[u8], random: &mut Random) -> Vec<u8> {
    let sector = |from: &[u8], at: usize| {
        let mut bytes = [0; SECTOR];
        let available = from.get(at..).unwrap_or_default();
        let n = available.len().min(SECTOR);
        bytes[..n].copy_from_slice(&available[..n]);
        bytes
    };
    match random.below(4) {
        0 => return synced.to_vec(),
        1 => return contents.to_vec(),
        _ => {}
    }
    let (shorter, longer) = (synced.len().min(contents.len()), synced.len().max(contents.len()));
    let between = shorter + random.below((longer - shorter) as u64 + 1) as usize;
    let len = random.choose(&[synced.len(), contents.len(), between]);
    let mut result = Vec::with_capacity(len);
    for at in (0..len).step_by(SECTOR) {
        let from = if random.below(2) == 0 { synced } else { contents };
        result.extend_from_slice(&sector(from, at)[..SECTOR.min(len - at)]);
    }
    result
}

/// Returns the simulated thread that accesses a path, if the path is on the simulated disk.
pub(crate) fn on_disk(path: &Path) -> Option<Task> {
    if path.starts_with(ROOT) { current() } else { None }
}

/// A handle of an open file or directory.
#[derive(Debug)]
pub(crate) struct Handle {
    task: Task,
    open: usize,
}

impl Task {
    fn disk(&self) -> io::Result<Guard<'_>> {
        self.operation(true)
    }

    pub(crate) fn open(&self, path: &Path, how: Open) -> io::Result<Handle> {
        let open = self.disk()?.disk.open(path, how)?;
        Ok(Handle { task: self.clone(), open })
    }

    pub(crate) fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.disk()?.disk.rename(from, to)
    }

    pub(crate) fn exchange(&self, one: &Path, other: &Path) -> io::Result<()> {
        self.disk()?.disk.exchange(one, other)
    }

    pub(crate) fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.disk()?.disk.remove(path, false)
    }

    pub(crate) fn remove_directory(&self, path: &Path) -> io::Result<()> {
        self.disk()?.disk.remove(path, true)
    }

    pub(crate) fn create_directory(&self, path: &Path) -> io::Result<()> {
        self.disk()?.disk.create_directory(path)
    }

    pub(crate) fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.disk()?.disk.list(path)
    }

    /// Returns whether a path is a directory, or an error if it does not exist.
    pub(crate) fn is_directory(&self, path: &Path) -> io::Result<bool> {
        let disk = &self.disk()?.disk;
        Ok(matches!(disk.nodes[disk.find(path)?], Node::Directory(_)))
    }

    pub(crate) fn free_space(&self) -> io::Result<u64> {
        Ok(self.disk()?.disk.free())
    }
}

impl Handle {
    /// Performs an operation of the thread that runs, which may be another one than the thread that opened the file. A handle
    /// becomes invalid in a power failure.
    fn with_disk<R>(&self, operation: impl FnOnce(&mut Disk) -> io::Result<R>) -> io::Result<R> {
        let task = current().ok_or_else(killed)?;
        let mut state = task.disk()?;
        if self.open >= state.disk.open.len() {
            return Err(killed());
        }
        operation(&mut state.disk)
    }
}

impl Read for Handle {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.with_disk(|disk| {
            let n = disk.read_at(self.open, buffer, disk.open[self.open].position)?;
            disk.open[self.open].position += n;
            Ok(n)
        })
    }
}

impl Write for Handle {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.with_disk(|disk| disk.write(self.open, bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Handle {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.with_disk(|disk| {
            let OpenFile { node, position, .. } = disk.open[self.open];
            let new = match to {
                SeekFrom::Start(offset) => i128::from(offset),
                SeekFrom::Current(offset) => position as i128 + i128::from(offset),
                SeekFrom::End(offset) => i128::from(disk.len(node)) + i128::from(offset),
            };
            let new = usize::try_from(new).map_err(|_| ErrorKind::InvalidInput)?;
            disk.open[self.open].position = new;
            Ok(new as u64)
        })
    }
}

impl FileOperations for Handle {
    fn sync_all(&self) -> io::Result<()> {
        self.with_disk(|disk| disk.sync(self.open))
    }

    fn size(&self) -> io::Result<u64> {
        self.with_disk(|disk| Ok(disk.len(disk.open[self.open].node)))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.with_disk(|disk| disk.set_len(self.open, len as usize))
    }

    fn try_clone(&self) -> io::Result<File> {
        self.with_disk(|disk| {
            disk.open[self.open].handles += 1;
            Ok(File::new(Self { task: self.task.clone(), open: self.open }))
        })
    }

    fn try_lock(&self) -> Result<(), TryLockError> {
        let holder = (self.task.process, self.open);
        let holds = self.with_disk(|disk| {
            let node = disk.open[self.open].node;
            Ok(*disk.locks.entry(node).or_insert(holder) == holder)
        });
        if holds.map_err(TryLockError::Error)? { Ok(()) } else { Err(TryLockError::WouldBlock) }
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.with_disk(|disk| disk.read_at(self.open, buffer, offset as usize))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let disk = &mut self.task.world.lock().disk;
        let Some(open) = disk.open.get_mut(self.open) else { return };
        open.handles -= 1;
        if open.handles == 0 {
            let (node, held) = (open.node, (self.task.process, self.open));
            disk.locks.retain(|locked, holder| *locked != node || *holder != held);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_torn_file_has_old_and_new_sectors_or_zeros() {
        let (old, new) = ([1; 700], [2; 2000]);
        let mut seen = BTreeSet::new();
        for seed in 0..500 {
            let torn = torn(&old, &new, &mut Random::new(seed));
            assert!((700..=2000).contains(&torn.len()));
            for (at, byte) in torn.iter().enumerate() {
                assert!(*byte == 2 || *byte == u8::from(at < 700), "{at}: {byte}");
            }
            seen.insert((torn.len() == 700, torn.contains(&0), torn.contains(&1), torn.contains(&2)));
        }
        assert!(seen.len() > 4, "{seen:?}");
    }
}
