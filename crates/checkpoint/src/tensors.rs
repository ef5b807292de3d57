//! Blocks of tensors in the files of llm.c: the 16 parameter tensors, or the optimizer state of each.
//!
//! The tensors follow each other in [`Param::ALL`] order without gaps. All layers of a tensor are together.

use crate::finite::NonFinite;
use anyhow::{Context, Result};
use engine::Engine;
use engine::tensor::{DType, Tensor};
use half::bf16;
use model::{Descriptor, Param, Params, Shard, Store};
use std::io::{BufReader, Read, Seek, Write};
use std::ops::Range;

/// Number of elements that are copied through host memory at a time.
const CHUNK: usize = 1 << 20;

/// The tensor shapes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileShape {
    /// Shape of the model.
    pub descriptor: Descriptor,
    /// Rows of wte in the file: V or more. llm.c and llm.rs pad the vocabulary to different numbers of rows.
    pub padded_vocab: usize,
}

impl FileShape {
    /// Returns the shape of files written by this program.
    pub fn new(descriptor: Descriptor) -> Self {
        Self { descriptor, padded_vocab: descriptor.padded_vocab() }
    }

    /// Returns the number of elements of all tensors. The header of a damaged file may describe more than fits a `usize`.
    pub fn elements(&self) -> u128 {
        self.shard_elements(Shard::UNSHARDED)
    }

    /// Returns the number of elements of a shard, which is a share of each tensor of each layer.
    pub fn shard_elements(&self, share: Shard) -> u128 {
        let elements = |param: Param| {
            let (rows, columns) = match param {
                Param::Wte => (self.padded_vocab, self.descriptor.channels),
                _ => param.shape(&self.descriptor),
            };
            let n = rows as u128 * columns as u128;
            let part = n.div_ceil(share.ranks as u128);
            let own = n.min((share.rank as u128 + 1) * part) - n.min(share.rank as u128 * part);
            own * if param.layered() { self.descriptor.layers as u128 } else { 1 }
        };
        Param::ALL.into_iter().map(elements).sum()
    }

    /// Returns the number of elements before a tensor of one layer in the file, and of the tensor without padding of the
    /// vocabulary.
    pub(crate) fn place(&self, param: Param, layer: usize) -> (u64, usize) {
        let layers = |param: Param| if param.layered() { self.descriptor.layers } else { 1 };
        let before = Param::ALL.into_iter().take_while(|other| *other != param);
        let before: u64 = before.map(|other| (layers(other) * self.tensor_elements(other)) as u64).sum();
        let len = self.tensor_elements(param);
        let used = if param == Param::Wte { self.descriptor.vocab * self.descriptor.channels } else { len };
        (before + (layer * len) as u64, used)
    }

    /// Returns the number of elements of a tensor of one layer in the file.
    fn tensor_elements(&self, param: Param) -> usize {
        match param {
            Param::Wte => self.padded_vocab * self.descriptor.channels,
            _ => param.len(&self.descriptor),
        }
    }
}

/// Writes all tensors of `block`, which contains elements of `size` bytes in `layout`.
pub fn write(out: &mut impl Write, layout: &Params, block: &[u8], size: usize) -> Result<()> {
    for (param, layer) in layout.file_order() {
        let range = layout.range(param, layer);
        out.write_all(&block[range.start * size..range.end * size])?;
    }
    Ok(())
}

/// Reads all tensors from `files` into `stores`. Each file contains its share of every tensor of every layer, of type `dtype`.
/// Each store receives only the ranges that it holds. NaN and infinite values are an error that names the tensor.
pub fn read<R: Read + Seek>(
    files: &mut [BufReader<R>],
    shape: FileShape,
    dtype: DType,
    stores: &[Store],
    engine: &mut dyn Engine,
) -> Result<()> {
    let Descriptor { vocab, channels, .. } = shape.descriptor;
    let ranks = files.len();
    let mut bytes = Vec::new();
    for (param, layer) in Params::new(shape.descriptor).file_order() {
        let len = shape.tensor_elements(param);
        let used = if param == Param::Wte { vocab * channels } else { len };
        let mut non_finite = NonFinite::default();
        let held: Vec<_> = stores.iter().filter_map(|store| store.held(param, layer)).collect();
        for (rank, file) in files.iter_mut().enumerate() {
            let share = Shard { rank, ranks }.of(len);
            for start in share.clone().step_by(CHUNK) {
                let chunk = start..share.end.min(start + CHUNK);
                let wanted = |kept: &Range<usize>| chunk.start.max(kept.start)..chunk.end.min(kept.end).min(used);
                if held.iter().all(|(kept, _)| wanted(kept).is_empty()) {
                    file.seek_relative((chunk.len() * dtype.bytes()) as i64)?;
                    continue;
                }
                bytes.resize(chunk.len() * dtype.bytes(), 0);
                file.read_exact(&mut bytes).with_context(|| format!("cannot read {}", param.name()))?;
                non_finite.add(&bytes[..chunk.end.min(used).saturating_sub(chunk.start) * dtype.bytes()], dtype);
                for (kept, tensor) in &held {
                    let wanted = wanted(kept);
                    if !wanted.is_empty() {
                        let at = |element: usize| (element - chunk.start) * dtype.bytes();
                        let to = tensor.slice(wanted.start - kept.start, wanted.len());
                        convert_and_write(to, dtype, &bytes[at(wanted.start)..at(wanted.end)], engine)?;
                    }
                }
            }
        }
        non_finite.check(&name(param, layer))?;
    }
    Ok(())
}

/// Returns the name of a tensor of one layer in messages.
pub fn name(param: Param, layer: usize) -> String {
    if param.layered() { format!("{} of layer {layer}", param.name()) } else { param.name().to_owned() }
}

/// Converts elements of type `dtype` to the type of the tensor `to` and writes them.
fn convert_and_write(to: Tensor, dtype: DType, bytes: &[u8], engine: &mut dyn Engine) -> Result<()> {
    if to.dtype == dtype {
        return engine.write_bytes(to, bytes);
    }
    let values: Vec<f32> = match dtype {
        DType::Bf16 => bytes.as_chunks().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect(),
        DType::F32 | DType::I32 => bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
    };
    engine.write(to, &values)
}
