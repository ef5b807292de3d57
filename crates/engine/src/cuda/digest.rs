//! Digests of tensors, computed where the tensors are.

use super::{Cuda, Float};
use crate::digest::{of_bytes, through_host};
use crate::tensor::{DType, Tensor};
use crate::{Engine, Result};
use gpu::digest::{digest, grid, partials};

/// Bytes that a thread loads at a time, and the alignment of what the kernel reads.
const PACKET: usize = 16;

/// See [`Engine::digest`]. The host hashes the elements before the first and after the last whole packet.
pub(super) fn of_tensor<T: Float>(cuda: &mut Cuda<T>, tensor: Tensor, first: u64) -> Result<u64> {
    let size = tensor.dtype.bytes();
    let head = ((tensor.offset.next_multiple_of(PACKET) - tensor.offset) / size).min(tensor.len);
    let body = (tensor.len - head) / (PACKET / size) * (PACKET / size);
    let Some(scratch) = cuda.scratch.filter(|scratch| body > 0 && scratch.len >= partials(1)) else {
        return through_host(cuda, tensor, first);
    };
    let body_of_tensor = tensor.slice(head, body);
    let words = Tensor { len: body_of_tensor.bytes() / 4, dtype: DType::F32, ..body_of_tensor };
    let blocks = grid(words.len, cuda.executor.sm_count()).min((scratch.len / partials(1)) as u32);
    let scratch = scratch.slice(0, partials(blocks));
    let (out, inp) = (cuda.output("scratch", scratch, scratch.len)?, cuda.input("values", words, words.len)?);
    let (start, n) = (first.wrapping_add(head as u64), words.len as u64);
    let launch = match size {
        1 => digest::<1>(out, inp, start, n),
        2 => digest::<2>(out, inp, start, n),
        _ => digest::<4>(out, inp, start, n),
    };
    cuda.launch(launch, [blocks, 1, 1], 0)?;
    let mut bytes = vec![0; scratch.bytes()];
    cuda.read_bytes(scratch, &mut bytes)?;
    let mut sum = bytes.as_chunks().0.iter().map(|sum| u64::from_le_bytes(*sum)).fold(0, u64::wrapping_add);
    for (from, to) in [(0, head), (head + body, tensor.len)] {
        if from < to {
            let mut bytes = vec![0; (to - from) * size];
            cuda.read_bytes(tensor.slice(from, to - from), &mut bytes)?;
            sum = sum.wrapping_add(of_bytes(&bytes, size, first.wrapping_add(from as u64)));
        }
    }
    Ok(sum)
}
