//! llm.c's evaluation files (`.bin`).
//!
//! A file consists of a [header](crate::header) (magic 20240522, version 1, number of examples, size of the longest
//! example in bytes) and the examples as little-endian u16 words. An example consists of:
//!
//! - its prefix: the marker 65535, its size in bytes, its index, its label, and 4, the number of completions;
//! - the length and the tokens of the context;
//! - the length and the tokens of each completion.

use super::{COMPLETIONS, Example, MAX_EXAMPLES};
use crate::header::{Format, Header, read_available};
use anyhow::{Context, Result, ensure};
use std::io::{Read, Write};
use std::ops::RangeInclusive;
use std::path::Path;

/// First word of a file.
pub const MAGIC: i32 = 20240522;

const FORMAT: Format = Format { name: "evaluation file", magic: MAGIC, version: 1 };
const EXAMPLE_MARKER: u16 = u16::MAX;
/// Words of an example's prefix: marker, size, index, label, number of completions.
const PREFIX_WORDS: usize = 5;
/// Size of the smallest example: one token in the context and in each completion.
const MIN_EXAMPLE_BYTES: usize = 2 * (PREFIX_WORDS + 2 + 2 * COMPLETIONS);
/// The prefix stores an example's size as a u16.
const MAX_EXAMPLE_BYTES: usize = u16::MAX as usize;

/// Reads the examples of a file. `name` identifies the file in messages.
pub(super) fn read(name: &str, mut from: impl Read) -> Result<Vec<Example>> {
    let header = FORMAT.read_header(name, &mut from)?;
    let count = word_in(&header, 2, 1..=MAX_EXAMPLES).with_context(|| format!("{name}: number of examples"))?;
    let longest = word_in(&header, 3, MIN_EXAMPLE_BYTES..=MAX_EXAMPLE_BYTES)
        .with_context(|| format!("{name}: size of the longest example"))?;
    let mut examples = Vec::new();
    for index in 0..count {
        let example = read_example(&mut from, index, longest);
        examples.push(example.with_context(|| format!("{name}, example {index} of {count}"))?);
    }
    let trailing = read_available(&mut from, &mut [0]).with_context(|| format!("cannot read {name}"))?;
    ensure!(trailing == 0, "{name} is too long: expected the end of the file after {count} examples, found more bytes");
    Ok(examples)
}

fn word_in(header: &Header, i: usize, range: RangeInclusive<usize>) -> Result<usize> {
    let word = header.word(i);
    usize::try_from(word)
        .ok()
        .filter(|n| range.contains(n))
        .with_context(|| format!("expected {} to {} in the header, found {word}", range.start(), range.end()))
}

fn words(bytes: &[u8]) -> Vec<u16> {
    bytes.as_chunks().0.iter().map(|&word| u16::from_le_bytes(word)).collect()
}

/// Reads an example of at most `longest` bytes.
fn read_example(from: &mut impl Read, index: usize, longest: usize) -> Result<Example> {
    let mut prefix = [0; 2 * PREFIX_WORDS];
    let found = read_available(from, &mut prefix)?;
    ensure!(found == prefix.len(), "truncated: expected {} bytes, found {found}", prefix.len());
    let [marker, bytes, stored_index, label, completions] = words(&prefix)[..] else { unreachable!("five words") };
    ensure!(marker == EXAMPLE_MARKER, "expected the marker {EXAMPLE_MARKER}, found {marker}");
    let (bytes, label) = (usize::from(bytes), usize::from(label));
    ensure!(
        (MIN_EXAMPLE_BYTES..=longest).contains(&bytes) && bytes.is_multiple_of(2),
        "expected an even size of {MIN_EXAMPLE_BYTES} to {longest} bytes, found {bytes}"
    );
    ensure!(usize::from(stored_index) == index, "expected index {index}, found {stored_index}");
    ensure!(label < COMPLETIONS, "expected a label of 0 to {}, found {label}", COMPLETIONS - 1);
    ensure!(usize::from(completions) == COMPLETIONS, "expected {COMPLETIONS} completions, found {completions}");
    let mut body = vec![0; bytes - prefix.len()];
    let found = read_available(from, &mut body)?;
    ensure!(found == body.len(), "truncated: expected {bytes} bytes, found {}", prefix.len() + found);
    let body = words(&body);
    let mut rest = &body[..];
    let mut next_part = |name: &str| -> Result<Vec<u32>> {
        let split = rest.split_first().and_then(|(&len, tokens)| tokens.split_at_checked(usize::from(len)));
        let (tokens, after) = split.with_context(|| format!("{name} extends beyond the example's {bytes} bytes"))?;
        ensure!(!tokens.is_empty(), "{name} has no tokens");
        rest = after;
        Ok(tokens.iter().copied().map(u32::from).collect())
    };
    let context = next_part("the context")?;
    let completions = [
        next_part("completion 0")?,
        next_part("completion 1")?,
        next_part("completion 2")?,
        next_part("completion 3")?,
    ];
    ensure!(
        rest.is_empty(),
        "expected {} bytes of context and completions, found {bytes} bytes",
        bytes - 2 * rest.len()
    );
    Ok(Example { context, completions, label })
}

fn example_bytes(example: &Example) -> usize {
    2 * (PREFIX_WORDS + example.parts().map(|part| 1 + part.len()).sum::<usize>())
}

/// Writes an evaluation file atomically.
pub fn write(path: &Path, examples: &[Example]) -> Result<()> {
    let name = path.display();
    ensure!(
        (1..=MAX_EXAMPLES).contains(&examples.len()),
        "cannot write {name}: expected 1 to {MAX_EXAMPLES} examples, found {}",
        examples.len()
    );
    for (index, example) in examples.iter().enumerate() {
        let bytes = example_bytes(example);
        ensure!(
            bytes <= MAX_EXAMPLE_BYTES,
            "cannot write {name}: example {index} takes {bytes} bytes, expected at most {MAX_EXAMPLE_BYTES}"
        );
        ensure!(
            example.parts().all(|part| !part.is_empty()),
            "cannot write {name}: example {index} has an empty context or completion"
        );
        let widest = example.tokens().max().unwrap_or(0);
        ensure!(
            u16::try_from(widest).is_ok(),
            "cannot write {name}: example {index}: expected ids below 65536, found {widest}"
        );
        ensure!(
            example.label < COMPLETIONS,
            "cannot write {name}: example {index}: expected a label of 0 to {}, found {}",
            COMPLETIONS - 1,
            example.label
        );
    }
    let longest = examples.iter().map(example_bytes).max().unwrap_or(0);
    atomic_file::write(path, |out| {
        out.write_all(&FORMAT.header_bytes(&[examples.len() as i32, longest as i32]))?;
        for (index, example) in examples.iter().enumerate() {
            let size = example_bytes(example) as u16;
            let mut words = vec![EXAMPLE_MARKER, size, index as u16, example.label as u16, COMPLETIONS as u16];
            for part in example.parts() {
                words.push(part.len() as u16);
                words.extend(part.iter().map(|&token| token as u16));
            }
            out.write_all(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>())?;
        }
        Ok(())
    })
}
