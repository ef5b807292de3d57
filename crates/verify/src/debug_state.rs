//! Debug states of llm.c (`*_debug_state.bin`): the results of another implementation for one batch.
//!
//! A file consists of a [header](data::header), the inputs (B, T) and targets (B, T) as i32, and the following values as f32: the
//! logits (B, T, V), the mean loss, and the gradients of the parameter tensors. Words 2 and 3 of the header are B and T.
//!
//! * GPT-2 (magic 20240327, version 2): the gradients are in [`Param::ALL`](model::Param) order. That of wte has Vp rows.
//! * Llama of llm.c's branch `llama3` (magic 20240803, version 3): the gradients are those of the 16 tensors of its model file, with
//!   zeros in place of biases ([`Order::LlmCLlama`]). Queries and keys have interleaved rotary pairs. Word 4 of the header is a number
//!   of optimizer steps. The losses and the gradient norms of these steps follow the gradients.

use anyhow::{Context, Result, ensure};
use checkpoint::tensors::{FileShape, Order, Slot};
use data::header::{self, Format, HEADER_BYTES};
use engine::BatchLayout;
use model::{Descriptor, Param};
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

const NAME: &str = "debug state";
const FORMATS: [(Format, Order); 2] = [
    (Format { name: NAME, magic: 20240327, version: 2 }, Order::Params),
    (Format { name: NAME, magic: 20240803, version: 3 }, Order::LlmCLlama),
];

/// An open debug state of the expected size. It is read sequentially.
#[derive(Debug)]
pub struct DebugState {
    path: PathBuf,
    file: BufReader<File>,
    layout: BatchLayout,
    shape: FileShape,
    steps: usize,
}

impl DebugState {
    /// Opens a debug state of the model. `padded_vocab` is the number of wte rows in the model file.
    pub fn open(path: &Path, descriptor: &Descriptor, padded_vocab: usize) -> Result<Self> {
        let name = path.display();
        let mut file = bounded_file::open(path).with_context(|| format!("cannot open debug state {name}"))?;
        let size = file.metadata().with_context(|| format!("cannot read {name}"))?.len();
        let (which, header) = header::read_one_of(&FORMATS.map(|(format, _)| format), &name.to_string(), &mut file)?;
        let order = FORMATS[which].1;
        let [b, t] = [2, 3].map(|i| header.word(i));
        ensure!(b > 0 && t > 0, "{name}: expected B and T of at least 1, found B = {b}, T = {t}");
        let layout = BatchLayout::new(b as usize, t as usize);
        ensure!(
            layout.t <= descriptor.max_seq_len,
            "{name}: expected sequences of at most {} tokens, the model's limit, found T = {t}",
            descriptor.max_seq_len
        );
        let (padded_vocab, steps) = match order {
            Order::Params => (padded_vocab, 0),
            // This format does not pad the vocabulary.
            Order::LlmCLlama => (descriptor.vocab, header.word(4)),
        };
        ensure!(steps >= 0, "{name}: expected a number of steps of at least 0, found {steps}");
        let shape = FileShape { descriptor: *descriptor, padded_vocab, order };
        let absent = descriptor.params().find(|&param| !has(&shape, param));
        ensure!(
            absent.is_none(),
            "{name}: expected the debug state of a model with {descriptor}, found one of llm.c's Llama, which has no {}",
            absent.map_or("", Param::name)
        );
        let rows = b as u128 * t as u128;
        let floats = rows * (2 + descriptor.vocab as u128) + 1 + shape.elements() + 2 * steps as u128;
        let expected = HEADER_BYTES as u128 + 4 * floats;
        ensure!(
            u128::from(size) == expected,
            "{name} belongs to another model or is {}: \
             expected {expected} bytes for {descriptor}, B = {b}, T = {t}, found {size}",
            if u128::from(size) < expected { "truncated" } else { "too long" }
        );
        Ok(Self { path: path.to_owned(), file: BufReader::new(file), layout, shape, steps: steps as usize })
    }

    /// Returns the tensors of the gradients, in the order of the file.
    pub fn slots(&self) -> Vec<Slot> {
        self.shape.slots()
    }

    /// Returns the order of the tensors.
    pub fn order(&self) -> Order {
        self.shape.order
    }

    /// Returns the number of optimizer steps with a loss in the file.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Returns the layout of the batch.
    pub fn layout(&self) -> BatchLayout {
        self.layout
    }

    /// Reads the next (B, T) tokens and checks that they are below `vocab`. `name` identifies them in messages.
    pub fn tokens(&mut self, name: &str, vocab: usize) -> Result<Vec<i32>> {
        let bytes = self.bytes(4 * self.layout.b * self.layout.t)?;
        let tokens: Vec<i32> = bytes.as_chunks().0.iter().map(|&b| i32::from_le_bytes(b)).collect();
        let invalid = tokens.iter().position(|&token| token < 0 || token as usize >= vocab);
        if let Some(i) = invalid {
            anyhow::bail!("{}: {name}[{i}]: expected a token below {vocab}, found {}", self.path.display(), tokens[i]);
        }
        Ok(tokens)
    }

    /// Reads the next `len` floats.
    pub fn floats(&mut self, len: usize) -> Result<Vec<f32>> {
        let bytes = self.bytes(4 * len)?;
        Ok(bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect())
    }

    fn bytes(&mut self, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.file.read_exact(&mut bytes).with_context(|| format!("cannot read {}", self.path.display()))?;
        Ok(bytes)
    }
}

/// Reports whether the file has the gradient of a tensor. A tied head is part of wte.
fn has(shape: &FileShape, param: Param) -> bool {
    shape.slots().iter().any(|slot| slot.param == Some(param))
}
