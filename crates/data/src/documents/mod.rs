//! Documents in text, JSON lines, CSV and parquet files, also compressed with gzip or zstd.
//!
//! [`find`] selects the files and [`read`] passes their documents to a [`Sink`] in bounded memory. Tokenization does not belong
//! here.

mod csv;
mod field;
mod find;
mod jsonl;
mod parquet;
mod records;
mod source;
mod text;

pub use field::text_field;
pub use find::{Found, Reason, Skipped, find};
pub(crate) use jsonl::not_an_object;
pub use parquet::check as check_parquet;
pub(crate) use records::{Record, read as read_records};

use anyhow::{Result, bail, ensure};
use source::Source;
use std::path::Path;
use system::progress::Progress;

/// Largest record of a JSON lines or CSV file. Text files have no such limit.
const MAX_RECORD_BYTES: usize = 128 << 20;

/// The path that stands for standard input.
pub const STDIN: &str = "-";

/// Format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Plain text: one document, or several with a separator.
    Text,
    /// One JSON object per line.
    Jsonl,
    /// Columns in compressed pages.
    Parquet,
    /// Comma-separated values; the first row names the columns.
    Csv,
}

impl Format {
    /// Returns the format that a file name implies. The endings `.gz` and `.zst` are ignored.
    pub fn of_name(path: &Path) -> Self {
        let inner = source::without_compression(path);
        match inner.extension().and_then(|e| e.to_str()).map(str::to_ascii_lowercase).as_deref() {
            Some("jsonl" | "ndjson") => Self::Jsonl,
            Some("parquet") => Self::Parquet,
            Some("csv") => Self::Csv,
            _ => Self::Text,
        }
    }
}

/// How files are read.
#[derive(Clone, Debug)]
pub struct Reading {
    /// The format; `None` infers it from each name.
    pub format: Option<Format>,
    /// The field or column with the text. `a.b` names field `b` of field `a`.
    pub field: String,
    /// Ends a document in a text file. A line break directly after it belongs to it.
    pub separator: Option<String>,
}

impl Default for Reading {
    fn default() -> Self {
        Self { format: None, field: "text".into(), separator: None }
    }
}

/// Receives documents, in pieces of any size.
pub trait Sink {
    /// Appends text to the current document.
    fn text(&mut self, text: &str) -> Result<()>;
    /// Ends the current document.
    fn end(&mut self) -> Result<()>;
}

/// The result of reading a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileReport {
    /// Invalid UTF-8 sequences, each replaced by U+FFFD.
    pub invalid_utf8: usize,
    /// Null values of a parquet file, each read as a document without text.
    pub null: usize,
    /// Set if a separator was given that a text file does not contain.
    pub without_separator: bool,
    /// Set if the file was not read.
    pub skipped: Option<Reason>,
}

/// Passes the documents of a file to `sink`. `progress` counts the bytes of the file.
pub fn read(path: &Path, reading: &Reading, progress: &Progress, sink: &mut dyn Sink) -> Result<FileReport> {
    let format = reading.format.unwrap_or_else(|| Format::of_name(path));
    if format == Format::Parquet {
        check_random_access(path)?;
        return parquet::read(path, &reading.field, progress, sink);
    }
    let mut source = Source::open(path, progress)?;
    if source.is_empty() {
        return Ok(FileReport { skipped: Some(Reason::Empty), ..FileReport::default() });
    }
    if format == Format::Text && path != Path::new(STDIN) && source.is_utf16() {
        return Ok(FileReport { skipped: Some(Reason::Utf16), ..FileReport::default() });
    }
    source.check_utf8()?;
    match format {
        Format::Text if source.is_binary() => {
            if path == Path::new(STDIN) {
                bail!("standard input: expected text, found a NUL byte; decompress or convert the input");
            }
            Ok(FileReport { skipped: Some(Reason::Binary), ..FileReport::default() })
        }
        Format::Text => text::read(&mut source, reading.separator.as_deref(), sink),
        Format::Jsonl => jsonl::read(&mut source, &reading.field, sink),
        Format::Csv if source.is_binary() => {
            bail!(
                "{}: expected comma-separated values, found a NUL byte; convert the file, or check --format",
                source.name()
            )
        }
        Format::Csv => csv::read(&mut source, &reading.field, sink),
        Format::Parquet => unreachable!("parquet files are read above"),
    }
}

/// Fails for input that cannot be read at random positions.
fn check_random_access(path: &Path) -> Result<()> {
    ensure!(
        path != Path::new(STDIN) && source::without_compression(path) == path,
        "{}: expected a parquet file, found {}; parquet is read at random positions: pass an uncompressed file",
        path.display(),
        if path == Path::new(STDIN) { "standard input" } else { "a compressed one" }
    );
    Ok(())
}

/// Passes bytes as one document to `sink` and returns the number of invalid UTF-8 sequences.
fn document(bytes: &[u8], sink: &mut dyn Sink) -> Result<usize> {
    let invalid = valid_text(bytes, &mut |text| sink.text(text))?;
    sink.end()?;
    Ok(invalid)
}

/// Passes UTF-8 text to `put`, with U+FFFD in place of each invalid sequence. Returns the number of these sequences.
fn valid_text(bytes: &[u8], put: &mut dyn FnMut(&str) -> Result<()>) -> Result<usize> {
    if let Ok(text) = std::str::from_utf8(bytes) {
        return put(text).map(|()| 0);
    }
    let mut invalid = 0;
    for chunk in bytes.utf8_chunks() {
        put(chunk.valid())?;
        if !chunk.invalid().is_empty() {
            invalid += 1;
            put("\u{fffd}")?;
        }
    }
    Ok(invalid)
}

/// Names that a message lists. The rest is left out, since a file in the wrong format may have thousands, of any length.
const LISTED_NAMES: usize = 20;
/// Characters of a listed name.
const LISTED_CHARACTERS: usize = 100;

/// Lists names of fields, columns or files for a message.
pub(crate) fn list_names(names: impl ExactSizeIterator<Item: AsRef<str>>) -> String {
    let more = names.len().saturating_sub(LISTED_NAMES);
    let shortened = |name: &str| match name.char_indices().nth(LISTED_CHARACTERS) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.to_owned(),
    };
    let mut listed: Vec<String> = names.take(LISTED_NAMES).map(|name| shortened(name.as_ref())).collect();
    if more > 0 {
        listed.push(format!("and {more} more"));
    }
    if listed.is_empty() { "none".to_owned() } else { listed.join(", ") }
}

#[cfg(test)]
mod tests;
