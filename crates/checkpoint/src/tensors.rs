//! Blocks of tensors in the files of llm.c: the parameter tensors, or the optimizer state of each.
//!
//! The tensors that the model has follow each other in [`Param::ALL`] order without gaps. All layers of a tensor are together.

use crate::finite::NonFinite;
use anyhow::{Context, Result};
use engine::Engine;
use engine::tensor::{DType, Tensor};
use half::bf16;
use model::{Descriptor, Param, Params, Shard, WeightStore};
use std::io::{BufReader, Read, Seek, Write};
use std::ops::Range;
use system::progress::{self, Unit};

/// Number of elements that are copied through host memory at a time.
const CHUNK: usize = 1 << 20;

/// The tensor shapes of a file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FileShape {
    /// Shape of the model.
    pub descriptor: Descriptor,
    /// Rows of wte and lm_head in the file: V or more. llm.c and llm.rs pad the vocabulary to different numbers of rows.
    pub padded_vocab: usize,
    /// The tensors of the file.
    pub order: Order,
}

/// The tensors of a file and their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The model's tensors in [`Param::ALL`] order.
    Params,
    /// The 16 tensors of llm.c's Llama: the head follows the embedding, and there are zeros in place of biases.
    LlmCLlama,
}

/// Tensors of all layers that follow each other in a file.
#[derive(Clone, Debug)]
pub struct Slot {
    /// The tensor, or `None` for zeros that no tensor of the model has.
    pub param: Option<Param>,
    /// Elements of one layer.
    pub elements: usize,
    /// The layers, or 0 if the tensor does not belong to layers.
    pub layers: Vec<usize>,
}

impl FileShape {
    /// Returns the shape of files written by this program.
    pub fn new(descriptor: Descriptor) -> Self {
        Self { descriptor, padded_vocab: descriptor.padded_vocab(), order: Order::Params }
    }

    /// Returns the tensors of the file in order.
    pub fn slots(&self) -> Vec<Slot> {
        let d = &self.descriptor;
        let layers = |param: Param| param.layers(d).collect();
        let slot = |param| Slot { param: Some(param), elements: self.tensor_elements(param), layers: layers(param) };
        match self.order {
            Order::Params => d.params().map(slot).collect(),
            Order::LlmCLlama => {
                let zeros = |after, elements| [slot(after), Slot { param: None, elements, layers: layers(after) }];
                let vectors = [
                    zeros(Param::Ln1w, d.channels),
                    zeros(Param::Qkvw, d.qkv_channels()),
                    zeros(Param::Attprojw, d.channels),
                    zeros(Param::Ln2w, d.channels),
                    zeros(Param::Fcw, d.fc_channels()),
                    zeros(Param::Fcprojw, d.channels),
                    zeros(Param::Lnfw, d.channels),
                ];
                [slot(Param::Wte), slot(Param::LmHead)].into_iter().chain(vectors.into_iter().flatten()).collect()
            }
        }
    }

    /// Returns the number of elements of all tensors. The header of a damaged file may describe more than fits a `usize`.
    pub fn elements(&self) -> u128 {
        self.shard_elements(Shard::UNSHARDED)
    }

    /// Returns the number of elements of a shard, which is a share of each tensor of each layer.
    pub fn shard_elements(&self, share: Shard) -> u128 {
        let elements = |Slot { elements, layers, .. }: Slot| {
            let n = elements as u128;
            let part = n.div_ceil(share.ranks as u128);
            let own = n.min((share.rank as u128 + 1) * part) - n.min(share.rank as u128 * part);
            own * layers.len() as u128
        };
        self.slots().into_iter().map(elements).sum()
    }

    /// Returns the number of elements before a tensor of one layer in the file, and of the tensor without padding of the
    /// vocabulary.
    pub(crate) fn place(&self, param: Param, layer: usize) -> (u64, usize) {
        let before = self.slots().into_iter().take_while(|slot| slot.param != Some(param));
        let before: u64 = before.map(|slot| (slot.layers.len() * slot.elements) as u64).sum();
        let layers = param.layers(&self.descriptor).take_while(|&before| before < layer).count();
        (before + (layers * self.tensor_elements(param)) as u64, self.used(param))
    }

    /// Returns the number of elements of a tensor of one layer in the file.
    fn tensor_elements(&self, param: Param) -> usize {
        let (rows, columns) = param.shape(&self.descriptor);
        if param.has_vocab_rows() { self.padded_vocab * columns } else { rows * columns }
    }

    /// Returns the number of elements of a tensor of one layer without padding of the vocabulary.
    fn used(&self, param: Param) -> usize {
        let (rows, columns) = param.shape(&self.descriptor);
        if param.has_vocab_rows() { self.descriptor.vocab * columns } else { rows * columns }
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
    stores: &[WeightStore],
    engine: &mut dyn Engine,
) -> Result<()> {
    let ranks = files.len();
    let total = shape.elements() as u64 * dtype.bytes() as u64;
    let progress = progress::start("loading tensors", Unit::Bytes, total);
    let mut bytes = Vec::new();
    let of_slot = |Slot { param, elements, layers }| layers.into_iter().map(move |layer| (param, elements, layer));
    for (param, len, layer) in shape.slots().into_iter().flat_map(of_slot) {
        let used = param.map_or(0, |param| shape.used(param));
        let mut non_finite = NonFinite::default();
        let held = |param| {
            let place = |store: &WeightStore| store.held(param, layer);
            stores.iter().filter_map(|store| place(store).map(|(kept, tensor)| (*store, kept, tensor))).collect()
        };
        let held: Vec<_> = param.map(held).unwrap_or_default();
        for (rank, file) in files.iter_mut().enumerate() {
            let share = Shard { rank, ranks }.of(len);
            for start in share.clone().step_by(CHUNK) {
                let chunk = start..share.end.min(start + CHUNK);
                progress.add((chunk.len() * dtype.bytes()) as u64);
                let wanted = |kept: &Range<usize>| chunk.start.max(kept.start)..chunk.end.min(kept.end).min(used);
                if held.iter().all(|(_, kept, _)| wanted(kept).is_empty()) {
                    file.seek_relative((chunk.len() * dtype.bytes()) as i64)?;
                    continue;
                }
                bytes.resize(chunk.len() * dtype.bytes(), 0);
                file.read_exact(&mut bytes).with_context(|| format!("cannot read {}", slot_name(param, layer)))?;
                non_finite.add(&bytes[..chunk.end.min(used).saturating_sub(chunk.start) * dtype.bytes()], dtype);
                for (store, kept, tensor) in &held {
                    let wanted = wanted(kept);
                    if !wanted.is_empty() {
                        let at = |element: usize| (element - chunk.start) * dtype.bytes();
                        let to = tensor.slice(wanted.start - kept.start, wanted.len());
                        convert_and_write(store, to, dtype, &bytes[at(wanted.start)..at(wanted.end)], engine)?;
                    }
                }
            }
        }
        non_finite.check(&slot_name(param, layer))?;
    }
    Ok(())
}

/// Returns the name of a tensor of one layer in messages.
pub fn name(param: Param, layer: usize) -> String {
    if param.layered() { format!("{} of layer {layer}", param.name()) } else { param.name().to_owned() }
}

fn slot_name(param: Option<Param>, layer: usize) -> String {
    param.map_or_else(|| "zeros".to_owned(), |param| name(param, layer))
}

/// Converts elements of type `dtype` to those of `store` and writes them to its tensor `to`.
fn convert_and_write(
    store: &WeightStore,
    to: Tensor,
    dtype: DType,
    bytes: &[u8],
    engine: &mut dyn Engine,
) -> Result<()> {
    if to.dtype == dtype {
        return engine.write_bytes(to, bytes);
    }
    let values: Vec<f32> = match dtype {
        DType::Bf16 => bytes.as_chunks().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect(),
        DType::F32 | DType::I32 | DType::U16 | DType::Fp8 | DType::Block8 { .. } => {
            bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
        }
    };
    store.write(engine, to, &values)
}
