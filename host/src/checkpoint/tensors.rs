//! The 16 parameter tensors, or what is laid out like them, back to back as llm.c's files have them: in [`Param::ALL`]
//! order, all layers of one together, no gaps.

use crate::engine::Engine;
use crate::model::{Descriptor, Param, Params};
use crate::tensor::{DType, Tensor};
use anyhow::{Context, Result};
use half::bf16;
use std::io::{BufReader, Read, Seek, Write};

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
        let Descriptor { layers, channels, max_seq_len, .. } = self.descriptor;
        let [t, l, c, vp] = [max_seq_len, layers, channels, self.padded_vocab].map(|n| n as u128);
        vp * c + t * c + l * (12 * c * c + 13 * c) + 2 * c
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

/// Reads tensors of type `dtype` into each of `blocks`, which are laid out by `layout`.
pub fn read<R: Read + Seek>(
    from: &mut BufReader<R>,
    shape: Shape,
    dtype: DType,
    layout: &Params,
    blocks: &[Tensor],
    engine: &mut dyn Engine,
) -> Result<()> {
    let Shape { descriptor: Descriptor { vocab, channels, .. }, padded_vocab } = shape;
    let mut bytes = Vec::new();
    for (param, layer) in layout.file_order() {
        let range = layout.range(param, layer);
        let unpadded = if param == Param::Wte { vocab * channels } else { range.len() };
        for start in (0..unpadded).step_by(CHUNK) {
            let len = CHUNK.min(unpadded - start);
            bytes.resize(len * dtype.bytes(), 0);
            from.read_exact(&mut bytes).with_context(|| format!("cannot read {}", param.name()))?;
            for block in blocks {
                store(block.slice(range.start + start, len), dtype, &bytes, engine)?;
            }
        }
        if param == Param::Wte {
            from.seek_relative(((padded_vocab - vocab) * channels * dtype.bytes()) as i64)?;
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
