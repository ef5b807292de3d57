//! Comma-separated values. The first row names the columns.

use super::source::{Source, cannot_read};
use super::{FileReport, MAX_RECORD_BYTES, Sink, document};
use anyhow::{Context, Result, anyhow, ensure};
use std::io::{self, Read};

/// A reader that fails when a record is too long, so that a missing quotation mark does not read the whole file into memory.
struct Limited<R> {
    inner: R,
    left: usize,
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
        self.left -= n;
        Ok(n)
    }
}

/// Passes the column `field` of each row to `sink` as a document.
pub fn read(source: &mut Source, field: &str, sink: &mut dyn Sink) -> Result<FileReport> {
    let mut report = FileReport::default();
    let name = source.name().to_owned();
    let mut reader = ::csv::Reader::from_reader(Limited { inner: source.stream(), left: MAX_RECORD_BYTES });
    let headers = reader.byte_headers().map_err(|error| explain(error, &name))?;
    let text =
        |bytes: &[u8]| String::from_utf8_lossy(bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)).into_owned();
    let columns: Vec<String> = headers.iter().map(text).collect();
    let column = columns.iter().position(|column| column == field).with_context(|| {
        format!(
            "{name}, row 1: expected a column \"{field}\", found {}; name the column with the text with --field",
            columns.join(", ")
        )
    })?;
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
