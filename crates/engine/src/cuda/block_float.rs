//! Copies of tensors in blocks of eight values ([`gpu::block_float`]) to and from the host.

use super::{Cuda, Float};
use crate::tensor::Tensor;
use crate::{Engine, Result};
use anyhow::ensure;
use gpu::block_float::{BLOCK, NEAREST, decode, encode};

/// Returns the whole blocks that contain the elements of `tensor`, and the position of its first element in them.
fn whole_blocks(tensor: Tensor) -> (Tensor, usize) {
    let start = tensor.offset / BLOCK * BLOCK;
    let end = (tensor.offset + tensor.len).next_multiple_of(BLOCK);
    (Tensor { offset: start, len: end - start, ..tensor }, tensor.offset - start)
}

/// Returns the values of whole blocks.
fn read_blocks<T: Float, const SIGNED: bool>(cuda: &mut Cuda<T>, blocks: Tensor) -> Result<Vec<f32>> {
    let mut bytes = vec![0; blocks.len];
    cuda.read_bytes(blocks, &mut bytes)?;
    Ok(bytes.as_chunks().0.iter().flat_map(|block| decode::<SIGNED>(u64::from_le_bytes(*block))).collect())
}

/// Returns the values of a tensor.
pub(super) fn read<T: Float, const SIGNED: bool>(cuda: &mut Cuda<T>, from: Tensor) -> Result<Vec<f32>> {
    let (blocks, first) = whole_blocks(from);
    let mut values = read_blocks::<T, SIGNED>(cuda, blocks)?;
    values.truncate(first + from.len);
    Ok(values.split_off(first))
}

/// Writes values to a tensor, rounded to nearest. The other values of its first and last block are rounded again, which changes them only if
/// the exponent of the block grows.
pub(super) fn write<T: Float, const SIGNED: bool>(cuda: &mut Cuda<T>, to: Tensor, values: &[f32]) -> Result<()> {
    ensure!(values.len() == to.len, "write: expected {} values, found {}", to.len, values.len());
    let (blocks, first) = whole_blocks(to);
    let mut with_neighbors = Vec::new();
    if blocks.len > to.len {
        with_neighbors = read_blocks::<T, SIGNED>(cuda, blocks)?;
        with_neighbors[first..first + to.len].copy_from_slice(values);
    }
    let values = if blocks.len > to.len { &with_neighbors } else { values };
    let encoded = values.as_chunks().0.iter().flat_map(|block| encode::<SIGNED>(*block, NEAREST).to_le_bytes());
    cuda.write_bytes(blocks, &encoded.collect::<Vec<u8>>())
}
