//! JSON lines: one object per line.

use super::source::{Source, cannot_read};
use super::{FileReport, MAX_RECORD_BYTES, Sink, list_names};
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;
use std::io::{BufRead, Read};

/// Passes the field `field` of each line to `sink` as a document.
pub fn read(source: &mut Source, field: &str, sink: &mut dyn Sink) -> Result<FileReport> {
    let name = source.name().to_owned();
    let invalid_utf8 = read_lines(source, &mut |number, line| {
        if let Some(document) = value(line, field).with_context(|| place(&name, number))? {
            sink.text(&document)?;
        }
        sink.end()
    })?;
    Ok(FileReport { invalid_utf8, ..FileReport::default() })
}

/// Names a line in a message.
pub fn place(file: &str, line: usize) -> String {
    format!("{file}, line {line}")
}

/// Passes each line that is not blank to `put`, with its number. Returns the number of invalid UTF-8 sequences, each of which became
/// U+FFFD.
pub fn read_lines(source: &mut Source, put: &mut dyn FnMut(usize, &str) -> Result<()>) -> Result<usize> {
    let mut invalid = 0;
    let name = source.name().to_owned();
    let mut line = Vec::new();
    for number in 1usize.. {
        line.clear();
        let limit = MAX_RECORD_BYTES as u64 + 1;
        source.stream().take(limit).read_until(b'\n', &mut line).map_err(|error| cannot_read(&name, error))?;
        ensure!(
            line.len() <= MAX_RECORD_BYTES,
            "{}: expected at most {MAX_RECORD_BYTES} bytes in a line, found more; store long documents as text files",
            place(&name, number)
        );
        if line.is_empty() {
            break;
        }
        // A byte order mark may precede the first line.
        let content = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&line);
        if content.trim_ascii().is_empty() {
            continue;
        }
        let text = String::from_utf8_lossy(content);
        if let Cow::Owned(_) = text {
            invalid += content.utf8_chunks().filter(|chunk| !chunk.invalid().is_empty()).count();
        }
        put(number, &text)?;
    }
    Ok(invalid)
}

/// Returns the text in a field of an object; `None` if it is null.
fn value(json: &str, field: &str) -> Result<Option<String>> {
    let fields: Fields = serde_json::from_str(json).map_err(|error| not_an_object(json, &error))?;
    let Some(raw) = fields.get(field)? else {
        let inner = match field.split_once('.') {
            Some((outer, inner)) => fields.get(outer)?.map(|outer| (outer, inner)),
            None => None,
        };
        let Some((outer, inner)) = inner else {
            bail!(
                "expected a field \"{field}\", found {}; name the field with the text with --field",
                list_names(fields.0.iter().map(|(name, _)| name))
            );
        };
        // As in a parquet file, a field of null is null.
        return if outer.get() == "null" { Ok(None) } else { value(outer.get(), inner) };
    };
    serde_json::from_str(raw.get()).map_err(|error| match kind(raw.get()) {
        "a string" => {
            anyhow!("field \"{field}\": expected a valid string, found {}; repair or remove the line", what(&error))
        }
        other => {
            anyhow!("field \"{field}\": expected a string, found {other}; name the field with the text with --field")
        }
    })
}

/// The fields of an object, in their order.
struct Fields<'a>(Vec<(String, &'a RawValue)>);

impl<'a> Fields<'a> {
    /// Returns the value of a field. Fails if the object contains the field twice.
    fn get(&self, name: &str) -> Result<Option<&'a RawValue>> {
        let mut values = self.0.iter().filter(|(found, _)| found == name).map(|(_, value)| *value);
        let first = values.next();
        ensure!(values.next().is_none(), "expected one field \"{name}\", found several; remove all but one");
        Ok(first)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Vec::new();
        while let Some(field) = map.next_entry()? {
            fields.push(field);
        }
        Ok(Fields(fields))
    }
}

/// Returns the error for text that is not a JSON object.
pub fn not_an_object(json: &str, error: &serde_json::Error) -> anyhow::Error {
    if error.is_data() {
        return anyhow!("expected a JSON object, found {}; check --format and --field", kind(json.trim_start()));
    }
    anyhow!("expected a JSON object, found {} at column {}; repair or remove the line", what(error), error.column())
}

/// Returns the description of an error without its position, which is relative to the line or the field.
fn what(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

/// Returns the kind of a JSON value.
fn kind(json: &str) -> &'static str {
    match json.as_bytes().first() {
        Some(b'{') => "an object",
        Some(b'[') => "an array",
        Some(b'"') => "a string",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        Some(_) => "a number",
        None => "nothing",
    }
}
