//! llm.c's model files of GPT-2 (`.bin`).
//!
//! The header consists of 256 little-endian i32: magic 20240326, version, maxT, V, L, NH, C, Vp, zeros. The parameter tensors
//! follow in [`Param::ALL`](model::Param::ALL) order without gaps, all layers of a tensor together. Their type is f32 in
//! version 3 and bf16 in version 5.

use super::{Header, dtype_of, version_of};
use crate::tensors::{FileShape, Order};
use anyhow::{Context, Result, ensure};
use engine::tensor::DType;
use model::Descriptor;
use std::io::{Read, Write};
use system::fs::File;

/// First word of a file.
pub const MAGIC: i32 = 20240326;
const HEADER_BYTES: usize = 1024;

pub(super) fn read_header(file: &mut File, size: u64, name: &str) -> Result<Header> {
    ensure!(
        size >= HEADER_BYTES as u64,
        "{name} is not a model file: expected a header of {HEADER_BYTES} bytes, found {size} bytes"
    );
    let mut header = [0; HEADER_BYTES];
    file.read_exact(&mut header).with_context(|| format!("cannot read {name}"))?;
    let word = |i: usize| i32::from_le_bytes(header[4 * i..4 * i + 4].try_into().expect("four bytes"));
    ensure!(word(0) == MAGIC, "{name} is not a model file: expected magic {MAGIC}, found {}", word(0));
    let dtype = dtype_of(word(1), name)?;
    let [max_seq_len, vocab, layers, heads, channels, padded_vocab] =
        [2, 3, 4, 5, 6, 7].map(|i| word(i).max(0) as usize);
    let descriptor = Descriptor::gpt2(layers, heads, channels, max_seq_len, vocab)
        .with_context(|| format!("{name}: invalid header"))?;
    ensure!(padded_vocab >= vocab, "{name}: expected a padded vocabulary of at least {vocab}, found {padded_vocab}");
    let shape = FileShape { descriptor, padded_vocab, order: Order::Params };
    Ok(Header { shape, dtype, tensors_at: HEADER_BYTES as u64 })
}

/// Writes the header. All tensors must follow in the order of [`Params::file_order`](model::Params::file_order), with the
/// vocabulary padded to [`Descriptor::padded_vocab`] rows.
pub fn write_header(out: &mut impl Write, descriptor: Descriptor, dtype: DType) -> Result<()> {
    let Descriptor { layers, heads, channels, max_seq_len, vocab, .. } = descriptor;
    let words = [max_seq_len, vocab, layers, heads, channels, descriptor.padded_vocab()].map(|word| word as i32);
    let mut header = [0; HEADER_BYTES];
    for (slot, word) in
        header.as_chunks_mut::<4>().0.iter_mut().zip([MAGIC, version_of(dtype)].into_iter().chain(words))
    {
        *slot = word.to_le_bytes();
    }
    Ok(out.write_all(&header)?)
}
