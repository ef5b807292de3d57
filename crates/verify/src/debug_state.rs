//! llm.c's debug state (`*_debug_state.bin`): the results of another implementation for one batch.
//!
//! A file consists of a [header](data::header) (magic 20240327, version 2, B, T), the inputs (B, T) and targets (B, T)
//! as i32, and the following tensors as f32: the logits (B, T, V), the mean loss, and the gradients of the 16 parameter
//! tensors in [`Param::ALL`](model::Param) order. The gradient of wte has Vp rows.

use anyhow::{Context, Result, ensure};
use data::header::{Format, HEADER_BYTES};
use engine::BatchLayout;
use model::Descriptor;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

const FORMAT: Format = Format { name: "debug state", magic: 20240327, version: 2 };

/// An open debug state of the expected size. It is read sequentially.
#[derive(Debug)]
pub struct DebugState {
    path: PathBuf,
    file: BufReader<File>,
    layout: BatchLayout,
}

impl DebugState {
    /// Opens a debug state of the model. `padded_vocab` is the number of wte rows in the model file.
    pub fn open(path: &Path, descriptor: &Descriptor, padded_vocab: usize) -> Result<Self> {
        let name = path.display();
        let mut file = File::open(path).with_context(|| format!("cannot open debug state {name}"))?;
        let size = file.metadata().with_context(|| format!("cannot read {name}"))?.len();
        let header = FORMAT.read_header(&name.to_string(), &mut file)?;
        let [b, t] = [2, 3].map(|i| header.word(i));
        ensure!(b > 0 && t > 0, "{name}: expected B and T of at least 1, found B = {b}, T = {t}");
        let layout = BatchLayout { b: b as usize, t: t as usize };
        ensure!(
            layout.t <= descriptor.max_seq_len,
            "{name}: expected sequences of at most {} tokens, the model's limit, found T = {t}",
            descriptor.max_seq_len
        );
        let parameters = descriptor.parameters() as u128 - (descriptor.padded_vocab() * descriptor.channels) as u128
            + (padded_vocab * descriptor.channels) as u128;
        let rows = b as u128 * t as u128;
        let expected = HEADER_BYTES as u128 + 4 * (rows * (2 + descriptor.vocab as u128) + 1 + parameters);
        ensure!(
            u128::from(size) == expected,
            "{name} belongs to another model or is {}: \
             expected {expected} bytes for {descriptor}, B = {b}, T = {t}, found {size}",
            if u128::from(size) < expected { "truncated" } else { "too long" }
        );
        Ok(Self { path: path.to_owned(), file: BufReader::new(file), layout })
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
