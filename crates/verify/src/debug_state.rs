//! llm.c's debug state (`…_debug_state.bin`): what another implementation computed for one batch.
//!
//! A header of 256 little-endian i32 (magic 20240327, version 2, B, T, zeros), then inputs (B, T) and targets (B, T) i32,
//! logits (B, T, V), the mean loss, and the gradients of the 16 parameter tensors in [`Param::ALL`](model::Param)
//! order, wte's with Vp rows; all f32.

use anyhow::{Context, Result, ensure};
use engine::BatchLayout;
use model::Descriptor;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

const MAGIC: i32 = 20240327;
const VERSION: i32 = 2;
const HEADER_BYTES: u64 = 1024;

/// A debug state of a model whose size agrees with its header and the model's. It is read from front to back.
#[derive(Debug)]
pub struct DebugState {
    path: PathBuf,
    file: BufReader<File>,
    layout: BatchLayout,
}

impl DebugState {
    /// `padded_vocab` is the model file's, which the gradient of wte has too.
    pub fn open(path: &Path, descriptor: &Descriptor, padded_vocab: usize) -> Result<Self> {
        let name = path.display();
        let mut file = File::open(path).with_context(|| format!("cannot open debug state {name}"))?;
        let size = file.metadata().with_context(|| format!("cannot read {name}"))?.len();
        ensure!(
            size >= HEADER_BYTES,
            "{name} is no debug state: expected a header of {HEADER_BYTES} bytes, found {size} bytes"
        );
        let mut header = [0; 16];
        file.read_exact(&mut header).with_context(|| format!("cannot read {name}"))?;
        let [magic, version, b, t] = [0, 1, 2, 3].map(|i| word(&header, i));
        ensure!(magic == MAGIC, "{name} is no debug state: expected magic {MAGIC}, found {magic}");
        ensure!(version == VERSION, "{name}: expected debug state version {VERSION}, found {version}");
        ensure!(b > 0 && t > 0, "{name}: expected a batch of B and T of at least 1, found B = {b}, T = {t}");
        let layout = BatchLayout { b: b as usize, t: t as usize };
        ensure!(
            layout.t <= descriptor.max_seq_len,
            "{name} has sequences of T = {t} tokens; the model takes up to {}",
            descriptor.max_seq_len
        );
        let parameters = descriptor.parameters() as u128 - (descriptor.padded_vocab() * descriptor.channels) as u128
            + (padded_vocab * descriptor.channels) as u128;
        let rows = b as u128 * t as u128;
        let expected = u128::from(HEADER_BYTES) + 4 * (rows * (2 + descriptor.vocab as u128) + 1 + parameters);
        ensure!(
            u128::from(size) == expected,
            "{name} is of another model or {}: for {descriptor}, B = {b}, T = {t}, expected {expected} bytes, found {size}",
            if u128::from(size) < expected { "truncated" } else { "too long" }
        );
        file.seek(SeekFrom::Start(HEADER_BYTES)).with_context(|| format!("cannot read {name}"))?;
        Ok(Self { path: path.to_owned(), file: BufReader::new(file), layout })
    }

    pub fn layout(&self) -> BatchLayout {
        self.layout
    }

    /// The next (B, T) tokens, all below `vocab`.
    pub fn tokens(&mut self, what: &str, vocab: usize) -> Result<Vec<i32>> {
        let bytes = self.bytes(4 * self.layout.b * self.layout.t)?;
        let tokens: Vec<i32> = bytes.as_chunks().0.iter().map(|&b| i32::from_le_bytes(b)).collect();
        let beyond = tokens.iter().position(|&token| token < 0 || token as usize >= vocab);
        if let Some(i) = beyond {
            anyhow::bail!("{}: {what}[{i}] is {}, expected a token below {vocab}", self.path.display(), tokens[i]);
        }
        Ok(tokens)
    }

    /// The next `len` numbers.
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

fn word(header: &[u8], i: usize) -> i32 {
    i32::from_le_bytes(header[4 * i..4 * i + 4].try_into().expect("four bytes"))
}
