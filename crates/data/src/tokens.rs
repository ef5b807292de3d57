//! Token files: llm.c's `.bin` shards.
//!
//! A header of 256 little-endian i32 (magic 20240520, version 1, number of tokens, zeros), then each token as a u16.

use anyhow::{Context, Result, ensure};
use std::fmt;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

const MAGIC: i32 = 20240520;
const VERSION: i32 = 1;
const HEADER_BYTES: usize = 1024;

/// Most tokens a shard can hold: its header counts them in an i32.
pub const MAX_SHARD_TOKENS: usize = i32::MAX as usize;

/// A shard of tokens, from a file or from memory. Clones share it.
#[derive(Clone, Debug)]
pub struct Tokens {
    name: String,
    len: usize,
    source: Source,
}

/// Files are read with `pread` rather than mapped: a file cut short under a running program is then an error, not a SIGBUS.
#[derive(Clone, Debug)]
enum Source {
    File(Arc<File>),
    Memory(Arc<[u16]>),
}

impl Tokens {
    /// Opens a `.bin` file and checks its header against its size.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let file = File::open(path).with_context(|| format!("cannot open token file {name}"))?;
        let size = file.metadata().with_context(|| format!("cannot read {name}"))?.len();
        ensure!(
            size >= HEADER_BYTES as u64,
            "{name} is no token file: expected a header of {HEADER_BYTES} bytes, found {size} bytes"
        );
        let mut header = [0; HEADER_BYTES];
        file.read_exact_at(&mut header, 0).with_context(|| format!("cannot read {name}"))?;
        let word = |i: usize| i32::from_le_bytes(header[4 * i..4 * i + 4].try_into().expect("four bytes"));
        ensure!(word(0) == MAGIC, "{name} is no token file: expected magic {MAGIC}, found {}", word(0));
        ensure!(
            word(1) == VERSION,
            "{name}: expected token file version {VERSION}, found {}; make it again with `data`",
            word(1)
        );
        ensure!(word(2) > 0, "{name}: expected a token count above 0 in its header, found {}", word(2));
        let len = word(2) as usize;
        let expected = (HEADER_BYTES + 2 * len) as u64;
        ensure!(
            size == expected,
            "{name} is {}: its header promises {len} tokens, expected {expected} bytes, found {size}",
            if size < expected { "truncated" } else { "too long" }
        );
        Ok(Self { name, len, source: Source::File(Arc::new(file)) })
    }

    /// Opens every file that matches a glob pattern, in the order of their names.
    pub fn open_all(pattern: &str) -> Result<Vec<Self>> {
        let paths = glob::glob(pattern).with_context(|| format!("'{pattern}' is no glob pattern"))?;
        let shards = paths
            .map(|path| Self::open(&path.with_context(|| format!("cannot read what '{pattern}' matches"))?))
            .collect::<Result<Vec<_>>>()?;
        ensure!(
            !shards.is_empty(),
            "no file matches '{pattern}': expected token files (.bin), as the `data` command makes"
        );
        Ok(shards)
    }

    pub fn in_memory(name: impl Into<String>, tokens: impl Into<Arc<[u16]>>) -> Self {
        let tokens = tokens.into();
        Self { name: name.into(), len: tokens.len(), source: Source::Memory(tokens) }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Path of the file, or what stands in for one.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Copies tokens `start .. start + out.len()`, which must be in the shard.
    pub fn read(&self, start: usize, out: &mut [u16]) -> Result<()> {
        debug_assert!(start + out.len() <= self.len);
        match &self.source {
            Source::Memory(tokens) => out.copy_from_slice(&tokens[start..start + out.len()]),
            Source::File(file) => {
                file.read_exact_at(bytemuck::cast_slice_mut(out), (HEADER_BYTES + 2 * start) as u64)
                    .with_context(|| format!("cannot read tokens {start}..{} of {}", start + out.len(), self.name))?;
                for token in out {
                    *token = u16::from_le(*token);
                }
            }
        }
        Ok(())
    }
}

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Writes a `.bin` file, whole or not at all.
pub fn write(path: &Path, tokens: &[u16]) -> Result<()> {
    ensure!(
        (1..=MAX_SHARD_TOKENS).contains(&tokens.len()),
        "cannot write {}: a token file holds 1 to {MAX_SHARD_TOKENS} tokens, not {}",
        path.display(),
        tokens.len()
    );
    atomic_file::write(path, |out| {
        let mut header = [0; HEADER_BYTES];
        for (i, word) in [MAGIC, VERSION, tokens.len() as i32].into_iter().enumerate() {
            header[4 * i..4 * i + 4].copy_from_slice(&word.to_le_bytes());
        }
        out.write_all(&header)?;
        for chunk in tokens.chunks(1 << 16) {
            out.write_all(&chunk.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<_>>())?;
        }
        Ok(())
    })
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
    fn what_is_written_is_read_and_has_llm_cs_layout() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard.bin");
        write(&path, &[50256, 1, 258]).unwrap();
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

    /// The file has a hole, and takes no room.
    #[test]
    fn the_end_of_the_largest_shard_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard.bin");
        write(&path, &[1]).unwrap();
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
    fn bad_files_are_named_with_what_was_expected_and_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("good.bin");
        write(&path, &[7; 100]).unwrap();
        let good = fs::read(&path).unwrap();
        let with = |word: usize, value: i32| {
            let mut bytes = good.clone();
            bytes[4 * word..4 * word + 4].copy_from_slice(&value.to_le_bytes());
            error_of(&bytes)
        };
        assert!(error_of(&good[..1000]).contains("1024 bytes, found 1000"));
        assert!(error_of(&good[..1222]).contains("truncated: its header promises 100 tokens, expected 1224"));
        assert!(error_of(&[&good[..], &[0]].concat()).contains("too long"));
        assert!(with(0, 20240326).contains("expected magic 20240520, found 20240326"));
        assert!(with(1, 7).contains("expected token file version 1, found 7"));
        assert!(with(2, -5).contains("found -5"));
        assert!(with(2, 0).contains("found 0"));
        assert!(with(2, i32::MAX).contains("truncated"));
        let missing = format!("{:#}", Tokens::open(&dir.path().join("none.bin")).unwrap_err());
        assert!(missing.contains("none.bin") && missing.contains("No such file"), "{missing}");
        let unmatched = format!("{:#}", Tokens::open_all("/nowhere/*.bin").unwrap_err());
        assert!(unmatched.contains("/nowhere/*.bin"), "{unmatched}");
    }
}
