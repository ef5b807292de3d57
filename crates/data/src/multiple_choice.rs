//! Multiple-choice sets: llm.c's evaluation files (`.bin`), such as HellaSwag's.
//!
//! A header of 256 little-endian i32 (magic 20240522, version 1, number of examples, bytes of the longest one, zeros), then
//! the examples as u16: 65535, bytes of the example, its index, its label, 4, length and tokens of the context, length and
//! tokens of each of the 4 completions.

use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::ops::Range;
use std::path::Path;

const MAGIC: i32 = 20240522;
const VERSION: i32 = 1;
const HEADER_BYTES: usize = 1024;
const EXAMPLE_MARK: u16 = u16::MAX;
/// Mark, bytes, index, label, number of completions.
const PREFIX_WORDS: usize = 5;
/// An example with a context and completions of one token each.
const SHORTEST_BYTES: usize = 2 * (PREFIX_WORDS + 2 + 2 * COMPLETIONS);

/// Completions of an example.
pub const COMPLETIONS: usize = 4;

/// Most examples a set can have: they are numbered in a u16.
pub const MAX_EXAMPLES: usize = u16::MAX as usize;

/// A text and the ways it might go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    pub context: Vec<u16>,
    pub completions: [Vec<u16>; COMPLETIONS],
    /// Index of the completion that is right.
    pub label: usize,
}

impl Example {
    /// Tokens of the context with its longest completion.
    pub fn longest(&self) -> usize {
        self.context.len() + self.completions.iter().map(Vec::len).max().unwrap_or(0)
    }

    fn tokens(&self) -> impl Iterator<Item = u16> {
        self.context.iter().chain(self.completions.iter().flatten()).copied()
    }

    fn parts(&self) -> impl Iterator<Item = &Vec<u16>> {
        std::iter::once(&self.context).chain(&self.completions)
    }

    fn bytes(&self) -> usize {
        2 * (PREFIX_WORDS + self.parts().map(|part| 1 + part.len()).sum::<usize>())
    }
}

/// The examples of a file.
#[derive(Clone, Debug)]
pub struct MultipleChoice {
    name: String,
    examples: Vec<Example>,
}

impl MultipleChoice {
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let file = File::open(path).with_context(|| format!("cannot open evaluation file {name}"))?;
        Self::read(name, BufReader::new(file))
    }

    /// The first `n` examples of a file; all of them without `n`.
    pub fn open_first(path: &Path, n: Option<usize>) -> Result<Self> {
        let mut set = Self::open(path)?;
        set.examples.truncate(n.unwrap_or(MAX_EXAMPLES));
        Ok(set)
    }

    /// `name` is for messages. Memory is taken only for what `from` does hold.
    pub fn read(name: String, mut from: impl Read) -> Result<Self> {
        let mut header = [0; HEADER_BYTES];
        let found = fill(&mut from, &mut header).with_context(|| format!("cannot read {name}"))?;
        ensure!(
            found == HEADER_BYTES,
            "{name} is no evaluation file: expected a header of {HEADER_BYTES} bytes, found {found} bytes"
        );
        let word = |i: usize| i32::from_le_bytes(header[4 * i..4 * i + 4].try_into().expect("four bytes"));
        ensure!(word(0) == MAGIC, "{name} is no evaluation file: expected magic {MAGIC}, found {}", word(0));
        ensure!(word(1) == VERSION, "{name}: expected evaluation file version {VERSION}, found {}", word(1));
        let in_range = |i: usize, what: &str, range: Range<usize>| {
            usize::try_from(word(i)).ok().filter(|n| range.contains(n)).with_context(|| {
                format!(
                    "{name}: expected {what} of {} to {} in its header, found {}",
                    range.start,
                    range.end - 1,
                    word(i)
                )
            })
        };
        let count = in_range(2, "a number of examples", 1..MAX_EXAMPLES + 1)?;
        let longest = in_range(3, "a longest example", SHORTEST_BYTES..usize::from(u16::MAX) + 1)?;
        let mut examples = Vec::new();
        for index in 0..count {
            let example = read_example(&mut from, index, longest);
            examples.push(example.with_context(|| format!("{name}, example {index} of {count}"))?);
        }
        let after = fill(&mut from, &mut [0]).with_context(|| format!("cannot read {name}"))?;
        ensure!(after == 0, "{name} is too long: it goes on after the {count} examples that its header promises");
        Ok(Self { name, examples })
    }

    /// Path of the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn examples(&self) -> &[Example] {
        &self.examples
    }

    /// The examples that `rank` of `ranks` processes takes: consecutive ones, as many for each until they run out.
    pub fn share(&self, rank: usize, ranks: usize) -> Range<usize> {
        let n = self.examples.len();
        let share = n.div_ceil(ranks);
        (rank * share).min(n)..((rank + 1) * share).min(n)
    }

    /// That a model with this vocabulary can read the examples in sequences of `seq` tokens.
    pub fn check(&self, vocab: usize, seq: usize) -> Result<()> {
        for (index, example) in self.examples.iter().enumerate() {
            if let Some(token) = example.tokens().find(|&token| usize::from(token) >= vocab) {
                bail!(
                    "{}, example {index}: token {token}, expected tokens below {vocab}, the model's vocabulary: \
                     the file was made for another one",
                    self.name
                );
            }
            let longest = example.longest();
            ensure!(
                longest <= seq,
                "{}, example {index}: context and completion have up to {longest} tokens, which sequences of {seq} \
                 do not hold: use a --seq of at least {}",
                self.name,
                self.examples.iter().map(Example::longest).max().unwrap_or(0)
            );
        }
        Ok(())
    }
}

/// Reads until `to` is full or there is no more; returns the bytes read.
fn fill(from: &mut impl Read, to: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < to.len() {
        match from.read(&mut to[len..]) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}

fn words(bytes: &[u8]) -> Vec<u16> {
    bytes.as_chunks().0.iter().map(|&word| u16::from_le_bytes(word)).collect()
}

fn read_example(from: &mut impl Read, index: usize, longest: usize) -> Result<Example> {
    let mut prefix = [0; 2 * PREFIX_WORDS];
    let found = fill(from, &mut prefix)?;
    ensure!(found == prefix.len(), "truncated: expected {} bytes, found {found}", prefix.len());
    let [mark, bytes, own_index, label, completions] = words(&prefix)[..] else { unreachable!("five words") };
    ensure!(mark == EXAMPLE_MARK, "expected the mark {EXAMPLE_MARK} at its beginning, found {mark}");
    let (bytes, label) = (usize::from(bytes), usize::from(label));
    ensure!(
        (SHORTEST_BYTES..=longest).contains(&bytes) && bytes.is_multiple_of(2),
        "expected a size of {SHORTEST_BYTES} to {longest} bytes, the longest by the file's header, found {bytes}"
    );
    ensure!(usize::from(own_index) == index, "expected its index to be {index}, found {own_index}");
    ensure!(label < COMPLETIONS, "expected a label of 0 to {}, found {label}", COMPLETIONS - 1);
    ensure!(usize::from(completions) == COMPLETIONS, "expected {COMPLETIONS} completions, found {completions}");
    let mut body = vec![0; bytes - prefix.len()];
    let found = fill(from, &mut body)?;
    ensure!(found == body.len(), "truncated: expected {bytes} bytes, found {}", prefix.len() + found);
    let body = words(&body);
    let mut rest = &body[..];
    let mut part = |what: &str| -> Result<Vec<u16>> {
        let taken = rest.split_first().and_then(|(&len, tokens)| tokens.split_at_checked(usize::from(len)));
        let (tokens, after) = taken.with_context(|| format!("{what} goes beyond the example's {bytes} bytes"))?;
        ensure!(!tokens.is_empty(), "{what} has no tokens");
        rest = after;
        Ok(tokens.to_vec())
    };
    let context = part("its context")?;
    let completions = [part("completion 0")?, part("completion 1")?, part("completion 2")?, part("completion 3")?];
    ensure!(rest.is_empty(), "expected {bytes} bytes, its parts have {}", bytes - 2 * rest.len());
    Ok(Example { context, completions, label })
}

/// Writes an evaluation file, whole or not at all.
pub fn write(path: &Path, examples: &[Example]) -> Result<()> {
    let name = path.display();
    ensure!(
        (1..=MAX_EXAMPLES).contains(&examples.len()),
        "cannot write {name}: an evaluation file holds 1 to {MAX_EXAMPLES} examples, not {}",
        examples.len()
    );
    for (index, example) in examples.iter().enumerate() {
        ensure!(
            u16::try_from(example.bytes()).is_ok(),
            "cannot write {name}: example {index} takes {} bytes, expected at most {}",
            example.bytes(),
            u16::MAX
        );
        ensure!(
            example.label < COMPLETIONS && example.parts().all(|part| !part.is_empty()),
            "cannot write {name}: example {index} has an empty part or no such completion as {}",
            example.label
        );
    }
    let longest = examples.iter().map(Example::bytes).max().unwrap_or(0);
    atomic_file::write(path, |out| {
        let mut header = [0; HEADER_BYTES];
        let words = [MAGIC, VERSION, examples.len() as i32, longest as i32];
        for (slot, word) in header.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *slot = word.to_le_bytes();
        }
        out.write_all(&header)?;
        for (index, example) in examples.iter().enumerate() {
            let mut words =
                vec![EXAMPLE_MARK, example.bytes() as u16, index as u16, example.label as u16, COMPLETIONS as u16];
            for part in example.parts() {
                words.push(part.len() as u16);
                words.extend(part);
            }
            out.write_all(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>())?;
        }
        Ok(())
    })
}
