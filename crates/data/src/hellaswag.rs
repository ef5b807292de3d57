//! Conversion of HellaSwag's JSON lines to multiple-choice examples, tokenized with GPT-2's encoding.

use super::multiple_choice::{COMPLETIONS, Example, MAX_EXAMPLES, gpt2_ids};
use crate::download::Remote;
use anyhow::{Context, Result, bail, ensure};
use rayon::prelude::*;
use serde_json::Value;
use std::path::Path;

const URL: &str = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl";
const SHA256: &str = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588";

/// Returns the address of the validation split.
pub fn remote() -> Remote {
    Remote::with_sha256(URL, SHA256)
}

/// Reads a file with one JSON object per line.
///
/// `ctx` is the context, `endings` holds four completions, and `label` is the index of the correct completion. A space
/// separates the context from a completion. Other fields are ignored.
pub fn read(path: &Path) -> Result<Vec<Example>> {
    let name = path.display();
    let text = bounded_file::read_to_string(path, bounded_file::TEXT).with_context(|| format!("cannot read {name}"))?;
    let lines: Vec<(usize, &str)> = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).collect();
    ensure!(
        (1..=MAX_EXAMPLES).contains(&lines.len()),
        "{name}: expected 1 to {MAX_EXAMPLES} examples, one per line, found {} examples",
        lines.len()
    );
    // Results keep the line order, so the error of the first invalid line is reported.
    let examples: Vec<Result<Example>> = lines
        .par_iter()
        .map(|(i, line)| parse_example(line).with_context(|| format!("{name}, line {}", i + 1)))
        .collect();
    examples.into_iter().collect()
}

fn parse_example(line: &str) -> Result<Example> {
    let value: Value = serde_json::from_str(line).context("not valid JSON")?;
    let Value::Object(fields) = value else { bail!("expected an object, found {}", describe(&value)) };
    let field = |name: &str| fields.get(name).with_context(|| format!("field '{name}' is missing"));
    let invalid = |name: &str, expected: &str, found: &Value| {
        anyhow::anyhow!("field '{name}': expected {expected}, found {}", describe(found))
    };

    let context = field("ctx")?;
    let context = context.as_str().ok_or_else(|| invalid("ctx", "a string", context))?;
    ensure!(!context.is_empty(), "field 'ctx': expected text, found an empty string");
    let endings = field("endings")?;
    let endings = endings.as_array().ok_or_else(|| invalid("endings", "an array of strings", endings))?;
    let completions = endings
        .iter()
        .map(|ending| {
            let ending = ending.as_str().ok_or_else(|| invalid("endings", "strings", ending))?;
            gpt2_ids(&format!(" {ending}"))
        })
        .collect::<Result<Vec<_>>>()?;
    let completions = <[Vec<u32>; COMPLETIONS]>::try_from(completions)
        .map_err(|found| anyhow::anyhow!("field 'endings': expected {COMPLETIONS} strings, found {}", found.len()))?;
    let label = field("label")?;
    let in_range = |label: &u64| *label < COMPLETIONS as u64;
    let expected = "0, 1, 2 or 3 (a test set without labels cannot be scored)";
    let label = label.as_u64().filter(in_range).ok_or_else(|| invalid("label", expected, label))?;
    Ok(Example { context: gpt2_ids(context)?, completions, label: label as usize })
}

/// Describes a value in an error message: scalars by their value, others by their type.
fn describe(value: &Value) -> String {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(text) if text.is_empty() => "an empty string".to_owned(),
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}
