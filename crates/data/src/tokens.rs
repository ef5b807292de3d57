//! Token files: llm.c's `.bin` shards.
//!
//! A file consists of a [`header`] (magic, version, number of tokens) and the tokens in little-endian order:
//! as u16 with magic 20240520 and version 1, or as u32 with magic 20240801 and version 7 (llm.c's format for Llama 3).
//!
//! A [`mask`] beside a file has the same layout, with one byte of flags per token.

use crate::header::{self, Format, HEADER_BYTES};
use crate::mask;
use crate::pattern;
use anyhow::{Context, Error, Result, anyhow, ensure};
use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use xxhash_rust::xxh3::Xxh3;

/// The number of bytes that a file stores per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// Two bytes, for vocabularies of up to 65,536 tokens.
    U16,
    /// Four bytes.
    U32,
    /// One byte, for the flags of a [`mask`].
    Flags,
}

impl Width {
    /// Returns the smallest width for a vocabulary of `vocab` tokens.
    pub const fn of_vocab(vocab: usize) -> Self {
        if vocab <= 1 << 16 { Self::U16 } else { Self::U32 }
    }

    /// Returns the number of bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
            Self::Flags => 1,
        }
    }

    pub(crate) const fn format(self) -> Format {
        match self {
            Self::U16 => Format { name: "token file", magic: 20240520, version: 1 },
            Self::U32 => Format { name: "token file", magic: 20240801, version: 7 },
            Self::Flags => Format { name: "mask file", magic: 20251128, version: 1 },
        }
    }
}

/// The largest number of tokens in a shard. The header stores the number as an i32.
pub const MAX_SHARD_TOKENS: usize = i32::MAX as usize;

/// A shard of tokens, in a file or in memory. Cloning is cheap: clones share the tokens.
#[derive(Clone, Debug)]
pub struct Tokens {
    name: String,
    len: usize,
    source: Source,
    /// The flags of the tokens.
    mask: Option<Arc<Tokens>>,
}

/// Storage of the tokens. A file is read with `pread` instead of being mapped, so truncating it during a run is
/// an error instead of a SIGBUS.
#[derive(Clone, Debug)]
enum Source {
    File(Arc<Shard>),
    Memory(Arc<Vec<u32>>),
}

/// A file of tokens. It is opened for each read: a data set may have more shards than a process may have open files.
#[derive(Debug)]
struct Shard {
    path: PathBuf,
    width: Width,
    /// The version whose contents are known to be those of the file that was opened.
    version: Mutex<FileVersion>,
    /// The hash of the tokens, if the data set records it.
    hash: Option<u64>,
}

/// Identifies the contents of a file without reading them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileVersion {
    inode: u64,
    size: u64,
    /// Time of the last change of the contents, in seconds and nanoseconds. A program may set it to any value.
    modified: (i64, i64),
    /// Time of the last change of contents or attributes.
    changed: (i64, i64),
}

impl FileVersion {
    fn of(file: &File) -> io::Result<Self> {
        let found = file.metadata()?;
        Ok(Self {
            inode: found.ino(),
            size: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    }
}

impl Shard {
    /// Fills `bytes` with the tokens from `start` on. Opens the file unless it is given.
    fn read_tokens(&self, file: Option<&File>, start: usize, bytes: &mut [u8]) -> Result<()> {
        let width = self.width.bytes();
        let end = start + bytes.len() / width;
        let at = (HEADER_BYTES + width * start) as u64;
        let read = match file {
            Some(file) => self.read_exact_at(file, bytes, at),
            None => bounded_file::open(&self.path)
                .map_err(Error::from)
                .and_then(|file| self.read_exact_at(&file, bytes, at)),
        };
        read.with_context(|| format!("cannot read tokens {start}..{end} of {}", self.path.display()))
    }

    /// Reads bytes at a position of the file. Fails if the contents may have changed since [`Tokens::open`].
    fn read_exact_at(&self, file: &File, bytes: &mut [u8], at: u64) -> Result<()> {
        self.check_version(file)?;
        let read = file.read_exact_at(bytes, at);
        // The file may have changed between the check and the read.
        if self.check_version(file)? { Ok(read?) } else { self.read_exact_at(file, bytes, at) }
    }

    /// Returns whether the file still has the known version. Returns false if it has another version whose tokens have the recorded
    /// hash, which becomes the known version: the file was touched, linked or replaced by a copy.
    fn check_version(&self, file: &File) -> Result<bool> {
        let mut known = self.version.lock().unwrap_or_else(PoisonError::into_inner);
        let found = FileVersion::of(file)?;
        if found == *known {
            return Ok(true);
        }
        let same_contents = match self.hash {
            Some(hash) if found.size == known.size => hash_of(file)? == hash && FileVersion::of(file)? == found,
            _ => false,
        };
        if !same_contents {
            return Err(changed(*known, found));
        }
        *known = found;
        Ok(false)
    }
}

/// Returns the error for a file that has changed.
fn changed(known: FileVersion, found: FileVersion) -> Error {
    anyhow!(
        "the file changed after it was opened: expected {} bytes, unmodified, found {} bytes{}; do not replace token files during \
         a run",
        known.size,
        found.size,
        if found.size == known.size { ", modified" } else { "" }
    )
}

/// Returns the XXH3 hash of the tokens in a file, without the header.
fn hash_of(file: &File) -> io::Result<u64> {
    let mut hash = Xxh3::new();
    let mut block = vec![0; 1 << 20];
    let mut at = HEADER_BYTES as u64;
    loop {
        match file.read_at(&mut block, at)? {
            0 => return Ok(hash.digest()),
            read => {
                hash.update(&block[..read]);
                at += read as u64;
            }
        }
    }
}

impl Tokens {
    /// Opens a `.bin` file and the mask beside it, if there is one. Checks their headers and sizes.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        ensure!(
            !path.is_dir(),
            "{name}: expected a token file (.bin), found a directory; use the pattern '{name}/*.bin'"
        );
        let tokens = Self::open_widths(path, &[Width::U16, Width::U32])?;
        let mask = mask::path(path);
        if mask == path || !mask.exists() {
            return Ok(tokens);
        }
        let mask = Self::open_widths(&mask, &[Width::Flags])?;
        ensure!(
            mask.len == tokens.len,
            "{mask}: expected flags for the {} tokens of {name}, found {}; make the data set again",
            tokens.len,
            mask.len
        );
        Ok(Self { mask: Some(Arc::new(mask)), ..tokens })
    }

    /// Opens a file with one of these widths.
    fn open_widths(path: &Path, widths: &[Width]) -> Result<Self> {
        let name = path.display().to_string();
        let formats: Vec<Format> = widths.iter().map(|width| width.format()).collect();
        let kind = formats[0].name;
        let file = bounded_file::open(path).with_context(|| format!("cannot open {kind} {name}"))?;
        let version = FileVersion::of(&file).with_context(|| format!("cannot read {name}"))?;
        let size = version.size;
        let (which, header) = header::read_one_of(&formats, &name, &mut &file)?;
        let (width, count) = (widths[which], header.word(2));
        ensure!(count > 0, "{name}: expected a token count above 0 in the header, found {count}");
        let len = count as usize;
        let expected = (HEADER_BYTES + width.bytes() * len) as u64;
        ensure!(
            size == expected,
            "{name} is {}: expected {expected} bytes for the {len} tokens in the header, found {size}",
            if size < expected { "truncated" } else { "too long" }
        );
        let shard = Shard { path: path.to_owned(), width, version: Mutex::new(version), hash: None };
        Ok(Self { name, len, source: Source::File(Arc::new(shard)), mask: None })
    }

    /// Opens every file that matches a glob pattern, sorted by name.
    pub fn open_all(pattern: &str) -> Result<Vec<Self>> {
        find(pattern)?.iter().map(|path| Self::open(path)).collect()
    }

    /// Creates a shard in memory. `name` identifies it in messages.
    pub fn in_memory(name: impl Into<String>, tokens: Vec<u32>) -> Self {
        Self { name: name.into(), len: tokens.len(), source: Source::Memory(Arc::new(tokens)), mask: None }
    }

    /// Adds flags to a shard in memory, one for each token.
    #[must_use]
    pub fn with_flags(self, flags: Vec<u32>) -> Self {
        debug_assert_eq!(flags.len(), self.len);
        let mask = Self::in_memory(format!("{} (mask)", self.name), flags);
        Self { mask: Some(Arc::new(mask)), ..self }
    }

    /// Returns the flags of the tokens, if the shard has a mask.
    pub fn mask(&self) -> Option<&Self> {
        self.mask.as_deref()
    }

    /// Sets the hashes of the tokens and of the mask that the data set records. A file that changes while it is in use is then no error
    /// if its contents still have this hash.
    #[must_use]
    pub fn with_recorded_hashes(self, tokens: Option<u64>, mask: Option<u64>) -> Self {
        let mask = self.mask.map(|flags| Arc::new((*flags).clone().with_recorded_hashes(mask, None)));
        let source = match self.source {
            Source::File(shard) => {
                let version = Mutex::new(*shard.version.lock().unwrap_or_else(PoisonError::into_inner));
                Source::File(Arc::new(Shard { path: shard.path.clone(), width: shard.width, version, hash: tokens }))
            }
            memory @ Source::Memory(_) => memory,
        };
        Self { source, mask, ..self }
    }

    /// Returns the hash that the data set records, if there is one.
    pub(crate) fn recorded_hash(&self) -> Option<u64> {
        match &self.source {
            Source::File(shard) => shard.hash,
            Source::Memory(_) => None,
        }
    }

    /// Returns the hash of the tokens, or `None` in memory.
    pub fn hash(&self) -> Result<Option<u64>> {
        let Source::File(shard) = &self.source else { return Ok(None) };
        let hash = bounded_file::open(&shard.path).and_then(|file| hash_of(&file));
        hash.map(Some).with_context(|| format!("cannot read {}", self.name))
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the shard has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the path of the file, or the name of a shard in memory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of bytes per token in the file, or `None` in memory.
    pub fn width(&self) -> Option<Width> {
        match &self.source {
            Source::File(shard) => Some(shard.width),
            Source::Memory(_) => None,
        }
    }

    /// Returns the largest id in a range of the shard. `buffer` is reused by later calls.
    pub(crate) fn largest_in(&self, range: Range<usize>, buffer: &mut Vec<u8>) -> Result<u32> {
        let largest = match &self.source {
            Source::Memory(tokens) => tokens[range].iter().copied().max(),
            Source::File(shard) => {
                buffer.resize(shard.width.bytes() * range.len(), 0);
                shard.read_tokens(None, range.start, buffer)?;
                match shard.width {
                    Width::U16 => buffer.as_chunks().0.iter().map(|&id| u16::from_le_bytes(id)).max().map(u32::from),
                    Width::U32 => buffer.as_chunks().0.iter().map(|&id| u32::from_le_bytes(id)).max(),
                    Width::Flags => buffer.iter().max().map(|&flags| flags.into()),
                }
            }
        };
        Ok(largest.unwrap_or(0))
    }

    /// Returns the positions of a token.
    pub(crate) fn positions_of(&self, token: u32) -> Result<Vec<u32>> {
        // The blocks fit into the cache.
        const BLOCK: usize = 1 << 17;
        let mut found = Vec::new();
        let shard = match &self.source {
            Source::Memory(tokens) => {
                find_all(tokens, &token, 0, &mut found);
                return Ok(found);
            }
            Source::File(shard) => shard,
        };
        let mut bytes = Vec::new();
        for start in (0..self.len).step_by(BLOCK) {
            bytes.resize(shard.width.bytes() * BLOCK.min(self.len - start), 0);
            shard.read_tokens(None, start, &mut bytes)?;
            match (shard.width, u16::try_from(token)) {
                (Width::U16, Ok(token)) => find_all(bytes.as_chunks().0, &token.to_le_bytes(), start, &mut found),
                (Width::U16, Err(_)) | (Width::Flags, _) => {}
                (Width::U32, _) => find_all(bytes.as_chunks().0, &token.to_le_bytes(), start, &mut found),
            }
        }
        Ok(found)
    }

    /// Opens the file for many calls of [`read_from`](Self::read_from). Returns `None` in memory.
    pub(crate) fn open_file(&self) -> Result<Option<Arc<File>>> {
        let Source::File(shard) = &self.source else { return Ok(None) };
        let file = bounded_file::open(&shard.path).with_context(|| format!("cannot open {}", self.name))?;
        Ok(Some(Arc::new(file)))
    }

    /// Reads tokens `start..start + out.len()` into `out`. The range must lie in the shard.
    pub fn read(&self, start: usize, out: &mut [u32]) -> Result<()> {
        self.read_from(None, start, out)
    }

    /// Reads tokens as [`read`](Self::read) does, from a file that is open.
    pub(crate) fn read_from(&self, file: Option<&File>, start: usize, out: &mut [u32]) -> Result<()> {
        debug_assert!(start + out.len() <= self.len);
        match &self.source {
            Source::Memory(tokens) => out.copy_from_slice(&tokens[start..start + out.len()]),
            Source::File(shard) => {
                let mut bytes = vec![0; shard.width.bytes() * out.len()];
                shard.read_tokens(file, start, &mut bytes)?;
                match shard.width {
                    Width::U16 => {
                        let tokens = bytes.as_chunks().0.iter().map(|&token| u32::from(u16::from_le_bytes(token)));
                        out.iter_mut().zip(tokens).for_each(|(to, token)| *to = token);
                    }
                    Width::U32 => {
                        let tokens = bytes.as_chunks().0.iter().map(|&token| u32::from_le_bytes(token));
                        out.iter_mut().zip(tokens).for_each(|(to, token)| *to = token);
                    }
                    Width::Flags => out.iter_mut().zip(bytes).for_each(|(to, flags)| *to = flags.into()),
                }
            }
        }
        Ok(())
    }
}

/// Adds the positions of a value in a part of a shard that begins at `start`.
fn find_all<T: PartialEq>(values: &[T], wanted: &T, start: usize, found: &mut Vec<u32>) {
    // The comparison of a whole group has no branches, so that it is vectorized.
    const GROUP: usize = 64;
    for (i, group) in values.chunks(GROUP).enumerate() {
        if group.iter().fold(0, |any, value| any | u8::from(value == wanted)) != 0 {
            let matching = group.iter().enumerate().filter(|(_, value)| *value == wanted);
            found.extend(matching.map(|(j, _)| (start + GROUP * i + j) as u32));
        }
    }
}

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Returns the files that match a glob pattern, sorted by name.
pub fn find(pattern: &str) -> Result<Vec<PathBuf>> {
    let paths = pattern::paths(pattern)?;
    ensure!(
        !paths.is_empty(),
        "no file matches '{pattern}': expected token files (.bin); create them with the `data` command"
    );
    Ok(paths)
}

/// Writes a `.bin` file atomically. Every token must fit into `width`.
pub fn write<T: Copy + Into<u32>>(path: &Path, tokens: &[T], width: Width) -> Result<()> {
    ensure!(
        (1..=MAX_SHARD_TOKENS).contains(&tokens.len()),
        "cannot write {}: expected 1 to {MAX_SHARD_TOKENS} tokens, found {}",
        path.display(),
        tokens.len()
    );
    atomic_file::write(path, |out| {
        out.write_all(&width.format().header_bytes(&[tokens.len() as i32]))?;
        let mut bytes = Vec::new();
        for chunk in tokens.chunks(1 << 16) {
            bytes.clear();
            for &token in chunk {
                let token: u32 = token.into();
                debug_assert!(width == Width::U32 || u16::try_from(token).is_ok(), "token {token} in 16 bits");
                bytes.extend_from_slice(&token.to_le_bytes()[..width.bytes()]);
            }
            out.write_all(&bytes)?;
        }
        Ok(())
    })
}

/// Writes a `.bin` file in parts, without holding it in memory. The file has no valid header before
/// [`finish`](Self::finish).
pub struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
    width: Width,
    len: usize,
    hash: Xxh3,
}

impl Writer {
    /// Creates the file.
    pub fn create(path: &Path, width: Width) -> Result<Self> {
        let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        let file = BufWriter::with_capacity(1 << 20, file);
        let mut writer = Self { path: path.to_owned(), file, width, len: 0, hash: Xxh3::new() };
        writer.write(&[0; HEADER_BYTES])?;
        Ok(writer)
    }

    /// Returns the number of tokens so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no tokens yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends tokens. Each must fit into the width.
    pub fn push(&mut self, tokens: &[u32]) -> Result<()> {
        ensure!(
            tokens.len() <= MAX_SHARD_TOKENS - self.len,
            "cannot write {}: expected at most {MAX_SHARD_TOKENS} tokens, found more",
            self.path.display()
        );
        self.len += tokens.len();
        let mut bytes = Vec::with_capacity(tokens.len().min(1 << 14) * self.width.bytes());
        for chunk in tokens.chunks(1 << 14) {
            bytes.clear();
            for token in chunk {
                debug_assert!(self.width == Width::U32 || u16::try_from(*token).is_ok(), "token {token} in 16 bits");
                bytes.extend_from_slice(&token.to_le_bytes()[..self.width.bytes()]);
            }
            self.hash.update(&bytes);
            self.write(&bytes)?;
        }
        Ok(())
    }

    /// Writes the header and syncs the file to disk. Returns the hash of the tokens, as [`Tokens::hash`] does.
    pub fn finish(mut self) -> Result<u64> {
        let header = self.width.format().header_bytes(&[self.len as i32]);
        let finish = |file: &mut BufWriter<File>| {
            file.flush()?;
            file.get_ref().write_all_at(&header, 0)?;
            file.get_ref().sync_all()
        };
        finish(&mut self.file).with_context(|| format!("cannot write {}", self.path.display()))?;
        Ok(self.hash.digest())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn error_of(bytes: &[u8]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard.bin");
        fs::write(&path, bytes).unwrap();
        let message = format!("{:#}", Tokens::open(&path).unwrap_err());
        assert!(message.contains("shard.bin"), "{message}");
        message
    }

    #[test]
    fn written_file_has_the_llm_c_layout_and_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard.bin");
        write(&path, &[50256u16, 1, 258], Width::U16).unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len(), 1024 + 6);
        assert_eq!(bytes[..12], [0x88, 0xd8, 0x34, 1, 1, 0, 0, 0, 3, 0, 0, 0]);
        assert!(bytes[12..1024].iter().all(|b| *b == 0));
        assert_eq!(bytes[1024..], [0x50, 0xc4, 1, 0, 2, 1]);
        let tokens = Tokens::open(&path).unwrap();
        let mut two = [0; 2];
        tokens.read(1, &mut two).unwrap();
        assert_eq!((tokens.len(), two), (3, [1, 258]));
    }

    #[test]
    fn wide_file_has_the_llama_layout_and_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard.bin");
        write(&path, &[128_000u32, 7], Width::of_vocab(128_256)).unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes[..12], [0xa1, 0xd9, 0x34, 1, 7, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(bytes[1024..], [0, 0xf4, 1, 0, 7, 0, 0, 0]);
        let mut one = [0];
        Tokens::open(&path).unwrap().read(1, &mut one).unwrap();
        assert_eq!(one, [7]);
        assert_eq!([65_536, 65_537].map(Width::of_vocab), [Width::U16, Width::U32]);
    }

    #[test]
    fn changed_files_are_errors_that_name_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard.bin");
        let change = |change: &dyn Fn()| {
            write(&path, &[1u16, 2, 3], Width::U16).unwrap();
            let tokens = Tokens::open(&path).unwrap();
            tokens.read(0, &mut [0; 3]).unwrap();
            change();
            let message = format!("{:#}", tokens.read(0, &mut [0; 3]).unwrap_err());
            assert!(message.contains("shard.bin"), "{message}");
            message
        };
        let shorter = || fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1028).unwrap();
        assert!(change(&shorter).contains("expected 1030 bytes, unmodified, found 1028 bytes"));
        let replaced = || write(&path, &[4u16, 5, 6], Width::U16).unwrap();
        assert!(change(&replaced).contains("found 1030 bytes, modified"));
        assert!(change(&|| fs::remove_file(&path).unwrap()).contains("No such file"));
        let in_place = |at: u64, restore_time: bool| {
            let time = fs::metadata(&path).unwrap().modified().unwrap();
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.write_all_at(&[9], at).unwrap();
            if restore_time {
                file.set_modified(time).unwrap();
            }
        };
        assert!(change(&|| in_place(1026, false)).contains("found 1030 bytes, modified"));
        assert!(change(&|| in_place(1026, true)).contains("found 1030 bytes, modified"));
    }

    #[test]
    fn a_file_with_a_recorded_hash_may_be_touched_or_replaced_by_a_copy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard.bin");
        let ids = [1u16, 2, 3];
        write(&path, &ids, Width::U16).unwrap();
        let hash = Tokens::open(&path).unwrap().hash().unwrap();
        let tokens = Tokens::open(&path).unwrap().with_recorded_hashes(hash, None);
        let read = || {
            let mut found = [0; 3];
            tokens.read(0, &mut found).map(|()| found)
        };
        let touch = || fs::File::open(&path).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        let copy = || write(&path, &ids, Width::U16).unwrap();
        for change in [&touch as &dyn Fn(), &copy, &touch] {
            change();
            assert_eq!(read().unwrap(), [1, 2, 3]);
        }
        write(&path, &[1u16, 2, 4], Width::U16).unwrap();
        let message = format!("{:#}", read().unwrap_err());
        assert!(message.contains("shard.bin") && message.contains("found 1030 bytes, modified"), "{message}");
        // The file is accepted when its contents are back.
        copy();
        assert_eq!(read().unwrap(), [1, 2, 3]);
    }

    #[test]
    fn writer_creates_the_same_file_as_write() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["a.bin", "b.bin"].map(|name| dir.path().join(name));
        for width in [Width::U16, Width::U32] {
            let tokens: Vec<u32> = (0..40_000).collect();
            write(&paths[0], &tokens, width).unwrap();
            let mut writer = Writer::create(&paths[1], width).unwrap();
            assert!(writer.is_empty());
            writer.push(&tokens[..7]).unwrap();
            writer.push(&tokens[7..]).unwrap();
            assert_eq!(writer.len(), 40_000);
            let hash = writer.finish().unwrap();
            assert!(fs::read(&paths[0]).unwrap() == fs::read(&paths[1]).unwrap());
            assert_eq!(Tokens::open(&paths[0]).unwrap().hash().unwrap(), Some(hash));
        }
    }

    /// The file is sparse, so it takes almost no disk space.
    #[test]
    fn last_tokens_of_the_largest_shard_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard.bin");
        write(&path, &[1u16], Width::U16).unwrap();
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&i32::MAX.to_le_bytes(), 8).unwrap();
        let bytes = (HEADER_BYTES + 2 * MAX_SHARD_TOKENS) as u64;
        file.set_len(bytes).unwrap();
        file.write_all_at(&[3, 0, 4, 0], bytes - 4).unwrap();
        let tokens = Tokens::open(&path).unwrap();
        let mut three = [9; 3];
        tokens.read(MAX_SHARD_TOKENS - 3, &mut three).unwrap();
        assert_eq!((tokens.len(), three), (2_147_483_647, [0, 3, 4]));
    }

    #[test]
    fn errors_name_the_file_and_the_expected_and_found_values() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("good.bin");
        write(&path, &[7u16; 100], Width::U16).unwrap();
        let good = fs::read(&path).unwrap();
        let with = |word: usize, value: i32| {
            let mut bytes = good.clone();
            bytes[4 * word..4 * word + 4].copy_from_slice(&value.to_le_bytes());
            error_of(&bytes)
        };
        assert!(error_of(&good[..1000]).contains("1024 bytes, found 1000"));
        assert!(
            error_of(&good[..1222])
                .contains("truncated: expected 1224 bytes for the 100 tokens in the header, found 1222")
        );
        assert!(error_of(&[&good[..], &[0]].concat()).contains("too long"));
        assert!(with(0, 20240326).contains("expected magic 20240520 or 20240801, found 20240326"));
        assert!(with(1, 2).contains("expected token file version 1, found 2"));
        assert!(with(2, -5).contains("found -5"));
        assert!(with(2, 0).contains("found 0"));
        assert!(with(2, i32::MAX).contains("truncated"));
        let missing = format!("{:#}", Tokens::open(&dir.path().join("none.bin")).unwrap_err());
        assert!(missing.contains("none.bin") && missing.contains("No such file"), "{missing}");
        let unmatched = format!("{:#}", Tokens::open_all("/nowhere/*.bin").unwrap_err());
        assert!(unmatched.contains("/nowhere/*.bin"), "{unmatched}");
    }
}
