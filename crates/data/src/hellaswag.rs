//! HellaSwag's JSON lines to a multiple-choice set in GPT-2's encoding.

use super::multiple_choice::{COMPLETIONS, Example, MAX_EXAMPLES};
use crate::tokenizer::Tokenizer;
use anyhow::{Context, Result, bail, ensure};
use rayon::prelude::*;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// The examples of a file with an object on each line: `ctx` is the context, `endings` has four strings, each of which
/// follows it after a space, and `label` is the index of the right one.
pub fn read(path: &Path) -> Result<Vec<Example>> {
    let name = path.display();
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
    let lines: Vec<(usize, &str)> = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).collect();
    ensure!(
        (1..=MAX_EXAMPLES).contains(&lines.len()),
        "{name} has {} examples, expected 1 to {MAX_EXAMPLES}, one on each line",
        lines.len()
    );
    // In order, so that the first bad line is the one reported.
    let examples: Vec<Result<Example>> =
        lines.par_iter().map(|(i, line)| example(line).with_context(|| format!("{name}, line {}", i + 1))).collect();
    examples.into_iter().collect()
}

fn example(line: &str) -> Result<Example> {
    let value: Value = serde_json::from_str(line).context("no JSON")?;
    let Value::Object(fields) = value else { bail!("expected an object, found {}", kind(&value)) };
    let field = |name: &str| fields.get(name).with_context(|| format!("field '{name}' is missing"));
    let wrong = |name: &str, expected: &str, found: &Value| {
        anyhow::anyhow!("field '{name}': expected {expected}, found {}", kind(found))
    };

    let context = field("ctx")?;
    let context = context.as_str().ok_or_else(|| wrong("ctx", "a string", context))?;
    ensure!(!context.is_empty(), "field 'ctx': expected a text, found none");
    let endings = field("endings")?;
    let endings = endings.as_array().ok_or_else(|| wrong("endings", "an array of strings", endings))?;
    let completions = endings
        .iter()
        .map(|ending| {
            let ending = ending.as_str().ok_or_else(|| wrong("endings", "strings", ending))?;
            Ok(Tokenizer::Gpt2.encode(&format!(" {ending}")))
        })
        .collect::<Result<Vec<_>>>()?;
    let completions = <[Vec<u16>; COMPLETIONS]>::try_from(completions)
        .map_err(|found| anyhow::anyhow!("field 'endings': expected {COMPLETIONS} strings, found {}", found.len()))?;
    let label = field("label")?;
    let in_range = |label: &u64| *label < COMPLETIONS as u64;
    let expected = "0, 1, 2 or 3; a test set without labels cannot be scored";
    let label = label.as_u64().filter(in_range).ok_or_else(|| wrong("label", expected, label))?;
    Ok(Example { context: Tokenizer::Gpt2.encode(context), completions, label: label as usize })
}

/// For messages: what a value is, itself where it is short.
fn kind(value: &Value) -> String {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(text) if text.is_empty() => "an empty string".to_owned(),
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}
