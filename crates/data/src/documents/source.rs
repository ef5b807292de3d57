//! Opens files and standard input, and decompresses them while they are read.

use super::STDIN;
use crate::header::read_available;
use anyhow::{Context, Result, anyhow, ensure};
use flate2::bufread::MultiGzDecoder;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};
use system::progress::Progress;

/// Size of the buffers of compressed and of decompressed bytes.
const BUFFER_BYTES: usize = 256 << 10;
/// Bytes at the beginning that determine whether a file is binary.
const HEAD_BYTES: usize = 8 << 10;

/// Part of zstd's error for a frame that needs more memory than its decoder uses by default.
const LARGE_WINDOW: &str = "requires too much memory";

/// A decompressed stream.
pub struct Source {
    name: String,
    /// The first bytes. All of them are read at once: what a pipe has ready must not change the result.
    head: Vec<u8>,
    stream: BufReader<Box<dyn Read>>,
}

/// A compression that the extension of a file names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compression {
    Gzip,
    Zstd,
}

impl Compression {
    fn of_name(path: &Path) -> Option<Self> {
        let extension = path.extension().and_then(OsStr::to_str)?;
        if extension.eq_ignore_ascii_case("gz") {
            Some(Self::Gzip)
        } else if extension.eq_ignore_ascii_case("zst") {
            Some(Self::Zstd)
        } else {
            None
        }
    }
}

/// Returns the path without `.gz` or `.zst`.
pub fn without_compression(path: &Path) -> PathBuf {
    if Compression::of_name(path).is_some() { path.with_extension("") } else { path.to_owned() }
}

impl Source {
    /// Opens a file or, for `-`, standard input.
    pub fn open(path: &Path, progress: &Progress) -> Result<Self> {
        let name = if path == Path::new(STDIN) { "standard input".to_owned() } else { path.display().to_string() };
        let progress = progress.clone();
        let raw: Box<dyn Read> = if path == Path::new(STDIN) {
            Box::new(progress.count(io::stdin()))
        } else {
            let inner = File::open(path).with_context(|| format!("cannot read {name}"))?;
            Box::new(progress.count(inner))
        };
        let buffered = |raw| BufReader::with_capacity(BUFFER_BYTES, raw);
        let mut stream: Box<dyn Read> = match Compression::of_name(path) {
            Some(Compression::Gzip) => Box::new(MultiGzDecoder::new(buffered(raw))),
            Some(Compression::Zstd) => Box::new(
                zstd::Decoder::with_buffer(buffered(raw)).with_context(|| format!("cannot decompress {name}"))?,
            ),
            None => raw,
        };
        let mut head = vec![0; HEAD_BYTES];
        let len = read_available(&mut stream, &mut head).map_err(|error| cannot_read(&name, error))?;
        head.truncate(len);
        let whole: Box<dyn Read> = Box::new(Cursor::new(head.clone()).chain(stream));
        Ok(Self { name, head, stream: BufReader::with_capacity(BUFFER_BYTES, whole) })
    }

    /// Returns the name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.head.is_empty()
    }

    /// Returns whether the first bytes contain a NUL byte.
    pub fn is_binary(&self) -> bool {
        self.head.contains(&0)
    }

    /// Returns whether the first bytes are a byte order mark of UTF-16 or UTF-32.
    pub fn is_utf16(&self) -> bool {
        [&b"\xff\xfe"[..], b"\xfe\xff", b"\0\0\xfe\xff"].iter().any(|mark| self.head.starts_with(mark))
    }

    /// Fails if the first bytes are a byte order mark of UTF-16 or UTF-32.
    pub fn check_utf8(&self) -> Result<()> {
        ensure!(
            !self.is_utf16(),
            "{}: expected UTF-8, found a byte order mark of UTF-16 or UTF-32; convert the input, for example with \
             `iconv -f UTF-16 -t UTF-8`",
            self.name
        );
        Ok(())
    }

    /// Skips a byte order mark of UTF-8 at the beginning. Nothing may have been read before.
    pub fn skip_byte_order_mark(&mut self) -> Result<()> {
        if self.head.starts_with(b"\xef\xbb\xbf") {
            let name = &self.name;
            self.stream.read_exact(&mut [0; 3]).map_err(|error| cannot_read(name, error))?;
        }
        Ok(())
    }

    /// Appends the next bytes to `bytes` and returns their number, which is 0 at the end.
    pub fn read_block(&mut self, bytes: &mut Vec<u8>) -> Result<usize> {
        let name = &self.name;
        (&mut self.stream).take(BUFFER_BYTES as u64).read_to_end(bytes).map_err(|error| cannot_read(name, error))
    }

    /// Returns the stream.
    pub fn stream(&mut self) -> &mut (impl BufRead + use<>) {
        &mut self.stream
    }
}

/// Returns the error of a file that cannot be read.
pub fn cannot_read(name: &str, error: impl Into<anyhow::Error>) -> anyhow::Error {
    let error = error.into();
    if format!("{error:#}").contains(LARGE_WINDOW) {
        anyhow!(
            "cannot decompress {name}: expected a window of at most 128 MiB, found a larger one, which `zstd --long` makes; \
             decompress it with `zstd -d --long=31`"
        )
    } else if Compression::of_name(Path::new(name)).is_some() {
        error.context(format!(
            "cannot decompress {name}: expected complete compressed data; download or compress it again"
        ))
    } else {
        error.context(format!("cannot read {name}"))
    }
}
