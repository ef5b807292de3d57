//! Comma-separated values. The first row names the columns.

use super::source::{Source, cannot_read};
use super::{FileReport, MAX_RECORD_BYTES, Sink, document, list_names};
use anyhow::{Context, Result, anyhow, ensure};
use std::error::Error;
use std::fmt;
use std::io::{self, Read};

/// An error in the rows, which begins with the line.
#[derive(Debug)]
struct Invalid(String);

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Invalid {}

/// A reader that fails when a record is too long, so that a missing quotation mark does not read the whole file into memory. It
/// also fails if quotation marks are missing, which the csv crate accepts.
struct Limited<R> {
    inner: R,
    left: usize,
    quotes: Quotes,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Err(io::Error::other(Invalid(format!(
                "line {}: expected at most {MAX_RECORD_BYTES} bytes in a row, found more; check for a missing quotation mark",
                self.quotes.first_line
            ))));
        }
        let n = buffer.len().min(self.left);
        let n = self.inner.read(&mut buffer[..n])?;
        let checked = if n == 0 && !buffer.is_empty() { self.quotes.end() } else { self.quotes.push(&buffer[..n]) };
        checked.map_err(io::Error::other)?;
        self.left -= n;
        Ok(n)
    }
}

/// A position relative to quotation marks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    FieldStart,
    Unquoted,
    Quoted,
    /// After a quotation mark within quotation marks, which ends them unless another one follows.
    AfterQuote,
    /// Spaces after the quotation mark at the end of a field.
    AfterQuoteAndSpace,
}

/// Finds quoted fields in the bytes of a file, by the rules of the csv crate.
struct Quotes {
    place: Place,
    line: u64,
    /// Line in which the current field begins.
    first_line: u64,
}

impl Quotes {
    const START: Self = Self { place: Place::FieldStart, line: 1, first_line: 1 };

    /// Fails if a field continues after its last quotation mark. A missing one then makes several rows look like a field.
    fn push(&mut self, bytes: &[u8]) -> Result<(), Invalid> {
        use Place::{AfterQuote, AfterQuoteAndSpace, FieldStart, Quoted, Unquoted};
        for &byte in bytes {
            if self.place == FieldStart {
                self.first_line = self.line;
            }
            self.place = match (self.place, byte) {
                (Quoted, b'"') => AfterQuote,
                (FieldStart | AfterQuote, b'"') | (Quoted, _) => Quoted,
                (_, b',' | b'\n' | b'\r') => FieldStart,
                (AfterQuote | AfterQuoteAndSpace, b' ' | b'\t') => AfterQuoteAndSpace,
                (AfterQuote | AfterQuoteAndSpace, _) => {
                    return Err(Invalid(format!(
                        "line {}: expected a comma or the end of the row after the quoted field from line {}, found more text; \
                         check for a missing quotation mark, and write each one within a field twice",
                        self.line, self.first_line
                    )));
                }
                _ => Unquoted,
            };
            self.line += u64::from(byte == b'\n');
        }
        Ok(())
    }

    /// Fails if the file ends within a field.
    fn end(&self) -> Result<(), Invalid> {
        if self.place == Place::Quoted {
            return Err(Invalid(format!(
                "line {}: expected a quotation mark that ends the field, found the end of the file; add it",
                self.first_line
            )));
        }
        Ok(())
    }
}

/// Passes the column `field` of each row to `sink` as a document.
pub fn read(source: &mut Source, field: &str, sink: &mut dyn Sink) -> Result<FileReport> {
    let mut report = FileReport::default();
    let name = source.name().to_owned();
    source.skip_byte_order_mark()?;
    let mut reader =
        ::csv::Reader::from_reader(Limited { inner: source.stream(), left: MAX_RECORD_BYTES, quotes: Quotes::START });
    let headers = reader.byte_headers().map_err(|error| explain(error, &name))?;
    let columns: Vec<String> = headers.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect();
    let column = columns.iter().position(|column| column == field).with_context(|| {
        format!(
            "{name}, row 1: expected a column \"{field}\", found {}; name the column with the text with --field",
            list_names(columns.iter())
        )
    })?;
    let same = columns.iter().filter(|column| *column == field).count();
    ensure!(same == 1, "{name}, row 1: expected one column \"{field}\", found {same}; rename or remove the others");
    let mut record = ::csv::ByteRecord::new();
    loop {
        reader.get_mut().left = MAX_RECORD_BYTES;
        if !reader.read_byte_record(&mut record).map_err(|error| explain(error, &name))? {
            return Ok(report);
        }
        ensure!(column < record.len(), "{name}: expected {} columns in each row", columns.len());
        report.invalid_utf8 += document(&record[column], sink)?;
    }
}

/// Names the file, the row and the line of an error.
fn explain(error: ::csv::Error, name: &str) -> anyhow::Error {
    if let ::csv::ErrorKind::Io(error) = error.kind()
        && let Some(invalid) = error.get_ref().and_then(|error| error.downcast_ref::<Invalid>())
    {
        return anyhow!("{name}, {invalid}");
    }
    match error.kind() {
        ::csv::ErrorKind::UnequalLengths { pos, expected_len, len } => {
            let place =
                pos.as_ref().map_or(String::new(), |at| format!(", row {}, line {}", at.record() + 1, at.line()));
            anyhow!(
                "{name}{place}: expected {expected_len} columns, as in the first row, found {len}; check the quotation marks"
            )
        }
        _ => cannot_read(name, error),
    }
}
