//! JSON lines: one object per line.

use super::source::{Source, cannot_read};
use super::{FileReport, MAX_RECORD_BYTES, Sink};
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{BufRead, Read};

/// Passes the field `field` of each line to `sink` as a document.
pub fn read(source: &mut Source, field: &str, sink: &mut dyn Sink) -> Result<FileReport> {
    let mut report = FileReport::default();
    let name = source.name().to_owned();
    let mut line = Vec::new();
    for number in 1usize.. {
        line.clear();
        let limit = MAX_RECORD_BYTES as u64 + 1;
        source.stream().take(limit).read_until(b'\n', &mut line).with_context(|| cannot_read(&name))?;
        let place = || format!("{name}, line {number}");
        ensure!(
            line.len() <= MAX_RECORD_BYTES,
            "{}: expected at most {MAX_RECORD_BYTES} bytes in a line, found more; store long documents as text files",
            place()
        );
        if line.is_empty() {
            break;
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        // A byte order mark may precede the first line.
        let content = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&line);
        report.invalid_utf8 += content.utf8_chunks().filter(|chunk| !chunk.invalid().is_empty()).count();
        let text = String::from_utf8_lossy(content);
        if let Some(document) = value(&text, field).with_context(place)? {
            sink.text(&document)?;
        }
        sink.end()?;
    }
    Ok(report)
}

/// Returns the text in a field of an object; `None` if it is null.
fn value(json: &str, field: &str) -> Result<Option<String>> {
    let fields = fields(json).map_err(|error| not_an_object(json, &error))?;
    let Some(raw) = fields.get(field) else {
        let inner = field.split_once('.').and_then(|(outer, inner)| Some((fields.get(outer)?, inner)));
        let Some((outer, inner)) = inner else {
            let names: Vec<&str> = fields.keys().map(AsRef::as_ref).collect();
            bail!(
                "expected a field \"{field}\", found {}; name the field with the text with --field",
                if names.is_empty() { "no field".to_owned() } else { names.join(", ") }
            );
        };
        return value(outer.get(), inner);
    };
    serde_json::from_str(raw.get()).map_err(|_| {
        anyhow!(
            "field \"{field}\": expected a string, found {}; name the field with the text with --field",
            kind(raw.get())
        )
    })
}

fn fields(json: &str) -> serde_json::Result<BTreeMap<Cow<'_, str>, &RawValue>> {
    serde_json::from_str(json)
}

fn not_an_object(json: &str, error: &serde_json::Error) -> anyhow::Error {
    if error.is_data() {
        return anyhow!("expected a JSON object, found {}; check --format and --field", kind(json.trim_start()));
    }
    // The line of the error is always 1.
    let what = error.to_string();
    let what = what.split(" at line ").next().unwrap_or(&what).to_owned();
    anyhow!("expected a JSON object, found {what} at column {}; repair or remove the line", error.column())
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
