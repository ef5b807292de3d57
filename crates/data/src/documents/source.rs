//! Opens files and standard input, and decompresses them while they are read.

use super::STDIN;
use anyhow::{Context, Result};
use flate2::bufread::MultiGzDecoder;
use indicatif::ProgressBar;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Size of the buffers of compressed and of decompressed bytes.
const BUFFER_BYTES: usize = 256 << 10;
/// A NUL byte in this many first bytes marks a file as binary.
const BINARY_PROBE_BYTES: usize = 8 << 10;

/// A decompressed stream.
pub struct Source {
    name: String,
    stream: BufReader<Box<dyn Read>>,
}

/// Counts the bytes that pass through a reader.
struct Counted<R> {
    inner: R,
    progress: ProgressBar,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.progress.inc(n as u64);
        Ok(n)
    }
}

/// Returns the path without `.gz` or `.zst`.
pub fn without_compression(path: &Path) -> PathBuf {
    match path.extension().and_then(|e| e.to_str()) {
        Some("gz" | "zst") => path.with_extension(""),
        _ => path.to_owned(),
    }
}

impl Source {
    /// Opens a file or, for `-`, standard input.
    pub fn open(path: &Path, progress: &ProgressBar) -> Result<Self> {
        let name = if path == Path::new(STDIN) { "standard input".to_owned() } else { path.display().to_string() };
        let progress = progress.clone();
        let raw: Box<dyn Read> = if path == Path::new(STDIN) {
            Box::new(Counted { inner: io::stdin(), progress })
        } else {
            let inner = File::open(path).with_context(|| format!("cannot read {name}"))?;
            Box::new(Counted { inner, progress })
        };
        let stream: Box<dyn Read> = match path.extension().and_then(|e| e.to_str()) {
            Some("gz") => Box::new(MultiGzDecoder::new(BufReader::with_capacity(BUFFER_BYTES, raw))),
            Some("zst") => Box::new(
                zstd::Decoder::with_buffer(BufReader::with_capacity(BUFFER_BYTES, raw))
                    .with_context(|| format!("cannot decompress {name}"))?,
            ),
            _ => raw,
        };
        Ok(Self { name, stream: BufReader::with_capacity(BUFFER_BYTES, stream) })
    }

    /// Returns the name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether no byte is left.
    pub fn is_empty(&mut self) -> Result<bool> {
        let name = &self.name;
        Ok(self.stream.fill_buf().with_context(|| cannot_read(name))?.is_empty())
    }

    /// Returns whether the next bytes contain a NUL byte.
    pub fn is_binary(&mut self) -> Result<bool> {
        let name = &self.name;
        let next = self.stream.fill_buf().with_context(|| cannot_read(name))?;
        Ok(next[..next.len().min(BINARY_PROBE_BYTES)].contains(&0))
    }

    /// Returns whether the next bytes are a byte order mark of UTF-16 or UTF-32.
    pub fn is_utf16(&mut self) -> Result<bool> {
        let name = &self.name;
        let next = self.stream.fill_buf().with_context(|| cannot_read(name))?;
        Ok(next.starts_with(b"\xff\xfe") || next.starts_with(b"\xfe\xff") || next.starts_with(b"\0\0\xfe\xff"))
    }

    /// Returns the next bytes; none at the end.
    pub fn next_block(&mut self) -> Result<Vec<u8>> {
        let mut block = Vec::with_capacity(BUFFER_BYTES);
        let name = &self.name;
        (&mut self.stream).take(BUFFER_BYTES as u64).read_to_end(&mut block).with_context(|| cannot_read(name))?;
        Ok(block)
    }

    /// Returns the stream.
    pub fn stream(&mut self) -> &mut (impl BufRead + use<>) {
        &mut self.stream
    }
}

/// Returns the context of a read error.
pub fn cannot_read(name: &str) -> String {
    let compressed = matches!(Path::new(name).extension().and_then(|e| e.to_str()), Some("gz" | "zst"));
    if compressed {
        format!("cannot decompress {name}: expected complete compressed data; download or compress it again")
    } else {
        format!("cannot read {name}")
    }
}
