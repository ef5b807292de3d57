//! The 16 parameter tensors, or what is laid out like them, back to back as llm.c's files have them: in [`Param::ALL`]
//! order, all layers of one together, no gaps.

use anyhow::{Context, Result};
use engine::Engine;
use engine::tensor::{DType, Tensor};
use half::bf16;
use model::{Descriptor, Param, Params, Shard, Store};
use std::io::{BufReader, Read, Seek, Write};
use std::ops::Range;

/// Elements that pass through host memory at once.
const CHUNK: usize = 1 << 20;

/// What a file says of its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub descriptor: Descriptor,
    /// Rows of wte in the file. Those beyond the vocabulary mean nothing, and another program may have another number.
    pub padded_vocab: usize,
}

impl Shape {
    pub fn of(descriptor: Descriptor) -> Self {
        Self { descriptor, padded_vocab: descriptor.padded_vocab() }
    }

    /// Elements of all tensors; a file's header may describe more than fits a `usize`.
    pub fn elements(&self) -> u128 {
        self.elements_of(Shard::UNSHARDED)
    }

    /// Elements of a share of each tensor of each layer.
    pub fn elements_of(&self, share: Shard) -> u128 {
        let of = |param: Param| {
            let (rows, columns) = match param {
                Param::Wte => (self.padded_vocab, self.descriptor.channels),
                _ => param.shape(&self.descriptor),
            };
            let n = rows as u128 * columns as u128;
            let part = n.div_ceil(share.ranks as u128);
            let own = n.min((share.rank as u128 + 1) * part) - n.min(share.rank as u128 * part);
            own * if param.layered() { self.descriptor.layers as u128 } else { 1 }
        };
        Param::ALL.into_iter().map(of).sum()
    }

    /// Elements of a tensor of one layer in the file.
    fn elements_in(&self, param: Param) -> usize {
        match param {
            Param::Wte => self.padded_vocab * self.descriptor.channels,
            _ => param.len(&self.descriptor),
        }
    }
}

/// Writes what `block` holds, the bytes of elements of `size` bytes laid out by `layout`.
pub fn write(out: &mut impl Write, layout: &Params, block: &[u8], size: usize) -> Result<()> {
    for (param, layer) in layout.file_order() {
        let range = layout.range(param, layer);
        out.write_all(&block[range.start * size..range.end * size])?;
    }
    Ok(())
}

/// Reads tensors of type `dtype` into each of `stores`, what is kept of them there. Each of the files has its share of every
/// tensor of every layer.
pub fn read<R: Read + Seek>(
    files: &mut [BufReader<R>],
    shape: Shape,
    dtype: DType,
    stores: &[Store],
    engine: &mut dyn Engine,
) -> Result<()> {
    let Descriptor { vocab, channels, .. } = shape.descriptor;
    let ranks = files.len();
    let mut bytes = Vec::new();
    for (param, layer) in Params::new(shape.descriptor).file_order() {
        let len = shape.elements_in(param);
        let meant = if param == Param::Wte { vocab * channels } else { len };
        let held: Vec<_> = stores.iter().filter_map(|store| store.held(param, layer)).collect();
        for (rank, file) in files.iter_mut().enumerate() {
            let share = Shard { rank, ranks }.of(len);
            for start in share.clone().step_by(CHUNK) {
                let chunk = start..share.end.min(start + CHUNK);
                let wanted = |kept: &Range<usize>| chunk.start.max(kept.start)..chunk.end.min(kept.end).min(meant);
                if held.iter().all(|(kept, _)| wanted(kept).is_empty()) {
                    file.seek_relative((chunk.len() * dtype.bytes()) as i64)?;
                    continue;
                }
                bytes.resize(chunk.len() * dtype.bytes(), 0);
                file.read_exact(&mut bytes).with_context(|| format!("cannot read {}", param.name()))?;
                for (kept, tensor) in &held {
                    let wanted = wanted(kept);
                    if !wanted.is_empty() {
                        let at = |element: usize| (element - chunk.start) * dtype.bytes();
                        let to = tensor.slice(wanted.start - kept.start, wanted.len());
                        store(to, dtype, &bytes[at(wanted.start)..at(wanted.end)], engine)?;
                    }
                }
            }
        }
    }
    Ok(())
}

fn store(to: Tensor, dtype: DType, bytes: &[u8], engine: &mut dyn Engine) -> Result<()> {
    if to.dtype == dtype {
        return engine.write_bytes(to, bytes);
    }
    let values: Vec<f32> = match dtype {
        DType::Bf16 => bytes.as_chunks().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect(),
        DType::F32 | DType::I32 => bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
    };
    engine.write(to, &values)
}
