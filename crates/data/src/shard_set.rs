//! Data sets of several token files, which replace an older data set only when they are complete.

use crate::header::HEADER_BYTES;
use crate::tokens::{MAX_SHARD_TOKENS, Width};
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Directory, in the temporary directory, of the files that are replaced.
const REPLACED: &str = "replaced";

/// A token file of a data set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Path.
    pub path: PathBuf,
    /// Number of tokens.
    pub tokens: usize,
}

/// A data set that is being written, in a temporary directory within its directory.
#[derive(Debug)]
pub struct ShardSet {
    out: PathBuf,
    temporary: TempDir,
    width: Width,
    written: Vec<Written>,
}

impl ShardSet {
    /// Starts a data set in the directory `out`, which is created.
    pub fn create(out: &Path, width: Width) -> Result<Self> {
        atomic_file::create_directory(out)?;
        let mut builder = tempfile::Builder::new();
        let temporary = builder.prefix(atomic_file::TEMPORARY_PREFIX).tempdir_in(out);
        let temporary = temporary.with_context(|| format!("cannot write into {}", out.display()))?;
        Ok(Self { out: out.to_owned(), temporary, width, written: Vec::new() })
    }

    /// Returns a directory for other temporary files, which is removed with the data set's.
    pub fn temporary(&self) -> &Path {
        self.temporary.path()
    }

    /// Starts a token file.
    pub fn shard(&self, name: &str) -> Result<ShardFile> {
        let path = self.out.join(name);
        let cannot_write = || format!("cannot write {}", path.display());
        let file = File::create_new(self.temporary.path().join(name)).with_context(cannot_write)?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        // The header contains the number of tokens, so it is written last.
        out.write_all(&[0; HEADER_BYTES]).with_context(cannot_write)?;
        Ok(ShardFile { out, written: Written { path, tokens: 0 }, width: self.width, bytes: Vec::new() })
    }

    /// Completes a token file.
    pub fn finish(&mut self, shard: ShardFile) -> Result<()> {
        self.written.push(shard.finish()?);
        Ok(())
    }

    /// Replaces an older data set, the files that match the glob patterns `old`, by the completed files.
    ///
    /// All old files are removed before the first new one appears, so that a crash never leaves a mixture of both.
    pub fn commit(self, old: &[&str]) -> Result<Vec<Written>> {
        let temporary = self.temporary.path();
        let replaced = temporary.join(REPLACED);
        atomic_file::create_directory(&replaced)?;
        atomic_file::sync_directory(temporary)?;
        for path in matching(&self.out, old)? {
            move_into(&path, &replaced)?;
        }
        for written in &self.written {
            let name = written.path.file_name().expect("a shard has a name");
            move_into(&temporary.join(name), &self.out)?;
        }
        atomic_file::sync_directory(&self.out)?;
        Ok(self.written)
    }
}

/// Returns the files in a directory that match one of the patterns.
fn matching(directory: &Path, patterns: &[&str]) -> Result<Vec<PathBuf>> {
    let escaped = glob::Pattern::escape(&directory.to_string_lossy());
    let mut files = Vec::new();
    for pattern in patterns {
        for path in glob::glob(&format!("{escaped}/{pattern}"))? {
            let path = path?;
            ensure!(!path.is_dir(), "{}: expected a token file, found a directory; use another --out", path.display());
            files.push(path);
        }
    }
    Ok(files)
}

fn move_into(file: &Path, directory: &Path) -> Result<()> {
    let to = directory.join(file.file_name().expect("a shard has a name"));
    fs::rename(file, &to).with_context(|| format!("cannot move {} to {}", file.display(), to.display()))
}

/// A token file that is being written.
#[derive(Debug)]
pub struct ShardFile {
    out: BufWriter<File>,
    written: Written,
    width: Width,
    bytes: Vec<u8>,
}

impl ShardFile {
    /// Returns the number of tokens so far.
    pub fn len(&self) -> usize {
        self.written.tokens
    }

    /// Returns whether there are no tokens so far.
    pub fn is_empty(&self) -> bool {
        self.written.tokens == 0
    }

    fn cannot_write(&self) -> String {
        format!("cannot write {}", self.written.path.display())
    }

    /// Appends tokens, which must fit into the width of the data set.
    pub fn extend(&mut self, ids: &[u32]) -> Result<()> {
        self.written.tokens += ids.len();
        ensure!(
            self.written.tokens <= MAX_SHARD_TOKENS,
            "{}: expected at most {MAX_SHARD_TOKENS} tokens in a file, found more",
            self.cannot_write()
        );
        self.bytes.clear();
        match self.width {
            Width::U16 => self.bytes.extend(ids.iter().flat_map(|&id| {
                debug_assert!(u16::try_from(id).is_ok(), "token {id} in 16 bits");
                (id as u16).to_le_bytes()
            })),
            Width::U32 => self.bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes())),
        }
        self.out.write_all(&self.bytes).with_context(|| self.cannot_write())
    }

    fn finish(mut self) -> Result<Written> {
        ensure!(!self.is_empty(), "{}: expected at least one token, found none", self.cannot_write());
        let header = self.width.format().header_bytes(&[self.written.tokens as i32]);
        let mut write_header = || {
            self.out.seek(SeekFrom::Start(0))?;
            self.out.write_all(&header)?;
            self.out.flush()?;
            self.out.get_ref().sync_all()
        };
        write_header().with_context(|| format!("cannot write {}", self.written.path.display()))?;
        Ok(self.written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Tokens, tokens};

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn set(out: &Path, names: &[&str]) -> ShardSet {
        let mut set = ShardSet::create(out, Width::U16).unwrap();
        for name in names {
            let mut shard = set.shard(name).unwrap();
            shard.extend(&[1, 2]).unwrap();
            shard.extend(&[50256]).unwrap();
            set.finish(shard).unwrap();
        }
        set
    }

    #[test]
    fn only_a_complete_set_replaces_the_old_files() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        set(&out, &["a_0.bin", "a_1.bin"]).commit(&["a_*.bin"]).unwrap();
        fs::write(out.join("b.txt"), "kept").unwrap();
        drop(set(&out, &["a_0.bin"]));
        assert_eq!(names(&out), ["a_0.bin", "a_1.bin", "b.txt"]);
        let written = set(&out, &["a_0.bin"]).commit(&["a_*.bin"]).unwrap();
        assert_eq!(written, [Written { path: out.join("a_0.bin"), tokens: 3 }]);
        assert_eq!(names(&out), ["a_0.bin", "b.txt"]);
        let expected = dir.path().join("expected.bin");
        tokens::write(&expected, &[1u16, 2, 50256], Width::U16).unwrap();
        assert_eq!(fs::read(out.join("a_0.bin")).unwrap(), fs::read(expected).unwrap());
    }

    #[test]
    fn wide_files_have_four_bytes_per_token() {
        let dir = tempfile::tempdir().unwrap();
        let mut set = ShardSet::create(dir.path(), Width::U32).unwrap();
        let mut shard = set.shard("a.bin").unwrap();
        shard.extend(&[128_000, 5]).unwrap();
        set.finish(shard).unwrap();
        set.commit(&[]).unwrap();
        let mut ids = [0; 2];
        Tokens::open(&dir.path().join("a.bin")).unwrap().read(0, &mut ids).unwrap();
        assert_eq!(ids, [128_000, 5]);
    }

    #[test]
    fn empty_files_and_directories_in_the_way_are_errors_that_keep_the_old_files() {
        let dir = tempfile::tempdir().unwrap();
        let mut empty = ShardSet::create(dir.path(), Width::U16).unwrap();
        let shard = empty.shard("a_0.bin").unwrap();
        assert!(format!("{:#}", empty.finish(shard).unwrap_err()).contains("a_0.bin"));
        fs::write(dir.path().join("a_0.bin"), "old").unwrap();
        fs::create_dir(dir.path().join("a_9.bin")).unwrap();
        let message = format!("{:#}", set(dir.path(), &["a_0.bin"]).commit(&["a_*.bin"]).unwrap_err());
        assert!(message.contains("a_9.bin") && message.contains("found a directory"), "{message}");
        drop(empty);
        assert_eq!(names(dir.path()), ["a_0.bin", "a_9.bin"]);
        assert_eq!(fs::read(dir.path().join("a_0.bin")).unwrap(), b"old");
    }
}
