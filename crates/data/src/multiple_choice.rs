//! Multiple-choice evaluation sets, such as HellaSwag, in llm.c's file format.

mod file;

pub use file::{MAGIC, write};

use anyhow::{Context, Result, bail, ensure};
use rayon::prelude::*;
use std::io::{BufReader, Read};
use std::ops::Range;
use std::path::Path;
use tokenizer::Tokenizer;

/// Number of completions of an example.
pub const COMPLETIONS: usize = 4;

/// The largest number of examples in a set. The file stores an example's index as a u16.
pub const MAX_EXAMPLES: usize = u16::MAX as usize;

/// A context with its candidate completions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// Tokens of the context.
    pub context: Vec<u32>,
    /// Tokens of each completion.
    pub completions: [Vec<u32>; COMPLETIONS],
    /// Index of the correct completion.
    pub label: usize,
}

impl Example {
    /// Returns the number of tokens of the context with the longest completion.
    pub fn longest(&self) -> usize {
        self.context.len() + self.completions.iter().map(Vec::len).max().unwrap_or(0)
    }

    fn tokens(&self) -> impl Iterator<Item = u32> {
        self.parts().flatten().copied()
    }

    /// Returns the context and the completions.
    fn parts(&self) -> impl Iterator<Item = &Vec<u32>> {
        std::iter::once(&self.context).chain(&self.completions)
    }
}

/// Returns the ids of a text in GPT-2's encoding, that of evaluation files.
pub(crate) fn gpt2_ids(text: &str) -> Result<Vec<u32>> {
    Tokenizer::gpt2().encode(text)
}

/// A set of examples.
#[derive(Clone, Debug)]
pub struct MultipleChoice {
    name: String,
    examples: Vec<Example>,
}

impl MultipleChoice {
    /// Reads an evaluation file.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let file = bounded_file::open(path).with_context(|| format!("cannot open evaluation file {name}"))?;
        Self::read(name, BufReader::new(file))
    }

    /// Reads an evaluation file and keeps the first `n` examples, or all of them without `n`.
    pub fn open_first(path: &Path, n: Option<usize>) -> Result<Self> {
        let mut set = Self::open(path)?;
        set.examples.truncate(n.unwrap_or(MAX_EXAMPLES));
        Ok(set)
    }

    /// Reads the contents of an evaluation file. `name` identifies the file in messages.
    ///
    /// Memory use is bounded by the amount of input, even if the header is corrupt.
    pub fn read(name: String, from: impl Read) -> Result<Self> {
        let examples = file::read(&name, from)?;
        Ok(Self { name, examples })
    }

    /// Encodes the texts again with the tokenizer of a model, because files contain ids of GPT-2's encoding. `None` keeps the ids.
    pub fn with_tokenizer(mut self, tokenizer: Option<&Tokenizer>) -> Result<Self> {
        let gpt2 = Tokenizer::gpt2();
        let Some(tokenizer) = tokenizer.filter(|tokenizer| **tokenizer != gpt2) else { return Ok(self) };
        let encode = |ids: &mut Vec<u32>| -> Result<()> {
            *ids = tokenizer.encode(&gpt2.text(ids))?;
            ensure!(!ids.is_empty(), "expected at least one token of {tokenizer} for each text, found none");
            Ok(())
        };
        self.examples.par_iter_mut().enumerate().try_for_each(|(index, example)| {
            let mut parts = std::iter::once(&mut example.context).chain(&mut example.completions);
            parts.try_for_each(encode).with_context(|| format!("{}, example {index}", self.name))
        })?;
        Ok(self)
    }

    /// Returns the path of the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the examples in file order.
    pub fn examples(&self) -> &[Example] {
        &self.examples
    }

    /// Returns the shard of examples that `rank` of `ranks` processes evaluates. Shards are contiguous and of equal
    /// length, except that the last ones may be shorter or empty.
    pub fn share(&self, rank: usize, ranks: usize) -> Range<usize> {
        let n = self.examples.len();
        let share = n.div_ceil(ranks);
        (rank * share).min(n)..((rank + 1) * share).min(n)
    }

    /// Checks that every token is below `vocab` and that every context with its completion fits in `seq` tokens.
    pub fn check(&self, vocab: usize, seq: usize) -> Result<()> {
        for (index, example) in self.examples.iter().enumerate() {
            if let Some(token) = example.tokens().find(|&token| token as usize >= vocab) {
                bail!(
                    "{}, example {index}: token {token}, expected tokens below {vocab}, the vocabulary size; \
                     tokenize the set for this model",
                    self.name
                );
            }
            let longest = example.longest();
            ensure!(
                longest <= seq,
                "{}, example {index}: expected at most {seq} tokens of context and completion, found {longest} tokens; \
                 use a --seq of at least {}",
                self.name,
                self.examples.iter().map(Example::longest).max().unwrap_or(0)
            );
        }
        Ok(())
    }
}
