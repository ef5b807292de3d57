//! Finds the field with the text in a file that a user has not described.

use super::source::Source;
use super::{Format, Reading, Sink, parquet, read};
use anyhow::{Result, bail};
use serde_json::Value;
use std::io::BufRead;
use std::path::Path;
use system::progress::Progress;

/// Returns a field or column with text in the first record of a file: `text`, or else the one with the longest text. For a text
/// file, the result is `text`, which has no meaning there. Returns `None` for a file without text.
pub fn text_field(path: &Path) -> Option<String> {
    let mut names = names(path).ok()?;
    // The sort is stable: the others remain in their order.
    names.sort_by_key(|name| name != "text");
    names.into_iter().find(|name| has_text(path, name))
}

/// Returns the fields of the first record, the one with the longest value first.
fn names(path: &Path) -> Result<Vec<String>> {
    let progress = Progress::default();
    let mut values = Vec::new();
    match Format::of_name(path) {
        Format::Text => return Ok(vec!["text".to_owned()]),
        Format::Parquet => return parquet::columns(path),
        Format::Jsonl => {
            let mut line = String::new();
            Source::open(path, &progress)?.stream().read_line(&mut line)?;
            add_strings(&serde_json::from_str(line.trim_start_matches('\u{feff}'))?, "", &mut values);
        }
        Format::Csv => {
            let mut source = Source::open(path, &progress)?;
            source.skip_byte_order_mark()?;
            let mut rows = ::csv::Reader::from_reader(source.stream());
            let names = rows.headers()?.clone();
            let first = rows.records().next().transpose()?.unwrap_or_default();
            values.extend(names.iter().zip(&first).map(|(name, value)| (value.len(), name.to_owned())));
        }
    }
    values.sort_by_key(|(len, _)| std::cmp::Reverse(*len));
    Ok(values.into_iter().map(|(_, name)| name).collect())
}

/// Adds lengths and names of the strings in a JSON object, and of those in its objects.
fn add_strings(value: &Value, name: &str, found: &mut Vec<(usize, String)>) {
    match value {
        Value::String(text) => found.push((text.len(), name.to_owned())),
        Value::Object(fields) => {
            for (field, value) in fields {
                let name = if name.is_empty() { field.clone() } else { format!("{name}.{field}") };
                add_strings(value, &name, found);
            }
        }
        _ => {}
    }
}

/// Returns whether a field of the first documents contains text.
fn has_text(path: &Path, field: &str) -> bool {
    let mut first = FirstText(false);
    // The sink ends the reading with an error.
    let _ = read(path, &Reading { field: field.to_owned(), ..Reading::default() }, &Progress::default(), &mut first);
    first.0
}

/// Ends the reading of a file at its first text.
struct FirstText(bool);

impl Sink for FirstText {
    fn text(&mut self, text: &str) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.0 = true;
        bail!("text is found");
    }

    fn end(&mut self) -> Result<()> {
        Ok(())
    }
}
