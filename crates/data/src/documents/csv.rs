//! Comma-separated values. The first row names the columns.

use super::source::{Source, cannot_read};
use super::{FileReport, MAX_RECORD_BYTES, Sink, document, list_names};
use anyhow::{Context, Result, anyhow, ensure};
use std::io::{self, Read};

/// A reader that fails when a record is too long, so that a missing quotation mark does not read the whole file into memory. It
/// also fails if the input ends within quotation marks, which the csv crate accepts.
struct Limited<R> {
    inner: R,
    left: usize,
    quotes: Quotes,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Err(io::Error::other(format!(
                "expected at most {MAX_RECORD_BYTES} bytes in a row, found more; check for a missing quotation mark"
            )));
        }
        let n = buffer.len().min(self.left);
        let n = self.inner.read(&mut buffer[..n])?;
        if n == 0 && n < buffer.len() {
            self.quotes.end()?;
        }
        self.quotes.push(&buffer[..n]);
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
}

/// Finds quoted fields in the bytes of a file, by the rules of the csv crate.
struct Quotes {
    place: Place,
    line: u64,
    /// Line in which the current quoted field begins.
    first_line: u64,
}

impl Quotes {
    const START: Self = Self { place: Place::FieldStart, line: 1, first_line: 1 };

    fn push(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if self.place == Place::FieldStart && byte == b'"' {
                self.first_line = self.line;
            }
            self.place = match (self.place, byte) {
                (Place::Quoted, b'"') => Place::AfterQuote,
                (Place::FieldStart | Place::AfterQuote, b'"') | (Place::Quoted, _) => Place::Quoted,
                (_, b',' | b'\n' | b'\r') => Place::FieldStart,
                _ => Place::Unquoted,
            };
            self.line += u64::from(byte == b'\n');
        }
    }

    fn end(&self) -> io::Result<()> {
        if self.place == Place::Quoted {
            return Err(io::Error::other(format!(
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
    let mut reader =
        ::csv::Reader::from_reader(Limited { inner: source.stream(), left: MAX_RECORD_BYTES, quotes: Quotes::START });
    let headers = reader.byte_headers().map_err(|error| explain(error, &name))?;
    let text =
        |bytes: &[u8]| String::from_utf8_lossy(bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)).into_owned();
    let columns: Vec<String> = headers.iter().map(text).collect();
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
    match error.kind() {
        ::csv::ErrorKind::UnequalLengths { pos, expected_len, len } => {
            let place =
                pos.as_ref().map_or(String::new(), |at| format!(", row {}, line {}", at.record() + 1, at.line()));
            anyhow!(
                "{name}{place}: expected {expected_len} columns, as in the first row, found {len}; check the quotation marks"
            )
        }
        _ => anyhow::Error::from(error).context(cannot_read(name)),
    }
}
