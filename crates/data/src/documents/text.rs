//! Text files, as one document or split at a separator.

use super::source::Source;
use super::{FileReport, Sink, valid_text};
use anyhow::Result;

/// Passes the documents of a text file to `sink`, in blocks.
pub fn read(source: &mut Source, separator: Option<&str>, sink: &mut dyn Sink) -> Result<FileReport> {
    let mut report = FileReport::default();
    source.skip_byte_order_mark()?;
    let mut splitter =
        Splitter { separator: separator.unwrap_or(""), kept: String::new(), after_separator: false, found: false };
    let mut bytes = Vec::new();
    loop {
        let last = source.read_block(&mut bytes)? == 0;
        let complete = bytes.len() - if last { 0 } else { incomplete_character(&bytes) };
        report.invalid_utf8 += valid_text(&bytes[..complete], &mut |text| splitter.push(text, false, sink))?;
        bytes.drain(..complete);
        if last {
            splitter.push("", true, sink)?;
            sink.end()?;
            report.without_separator = separator.is_some() && !splitter.found;
            return Ok(report);
        }
    }
}

/// Returns the number of bytes at the end of a block that begin a character. Its other bytes are in the next block.
fn incomplete_character(block: &[u8]) -> usize {
    let begins = |len: &usize| {
        let end = block.len().checked_sub(*len).map(|start| std::str::from_utf8(&block[start..]));
        end.is_some_and(|end| end.is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none()))
    };
    (1..=3).find(begins).unwrap_or(0)
}

/// Splits a text at a separator.
struct Splitter<'a> {
    /// Empty: the text is one document.
    separator: &'a str,
    /// The end of the text so far, which may contain the beginning of a separator.
    kept: String,
    /// Set if a line break here belongs to the separator.
    after_separator: bool,
    /// Set after the first separator.
    found: bool,
}

impl Splitter<'_> {
    fn push(&mut self, text: &str, last: bool, sink: &mut dyn Sink) -> Result<()> {
        if self.separator.is_empty() {
            return sink.text(text);
        }
        self.kept.push_str(text);
        let kept = std::mem::take(&mut self.kept);
        let mut rest = kept.as_str();
        loop {
            rest = match (self.after_separator, rest) {
                (true, "" | "\r") if !last => break,
                (true, rest) => rest.strip_prefix("\r\n").or_else(|| rest.strip_prefix('\n')).unwrap_or(rest),
                (false, rest) => rest,
            };
            self.after_separator = false;
            let Some(at) = rest.find(self.separator) else { break };
            sink.text(&rest[..at])?;
            sink.end()?;
            rest = &rest[at + self.separator.len()..];
            self.after_separator = true;
            self.found = true;
        }
        let keep = if last { 0 } else { self.separator.len() - 1 };
        let mut ready = if self.after_separator { 0 } else { rest.len().saturating_sub(keep) };
        while !rest.is_char_boundary(ready) {
            ready -= 1;
        }
        sink.text(&rest[..ready])?;
        rest[ready..].clone_into(&mut self.kept);
        Ok(())
    }
}
