//! The one block of memory that every tensor lies in.

use crate::Result;
use crate::tensor::{DType, Tensor};
use anyhow::{anyhow, ensure};
use std::ops::Range;

/// Bytes of a cache line, and of the widest vector: where the arena begins is a multiple of it.
const LINE: usize = 64;

/// f32 words; i32 tensors are the same words seen as integers.
#[derive(Debug, Default)]
pub(super) struct Arena {
    memory: Vec<f32>,
    start: usize,
    words: usize,
}

/// A tensor as an operation wants it: its role in the operation and how many elements it must have.
pub(super) type Operand = (&'static str, Tensor, usize);

/// What stands in for an operand that was not given.
pub(super) const ABSENT: Tensor = Tensor { offset: 0, len: 0, dtype: DType::F32 };

impl Arena {
    /// `bytes` of zeros.
    pub(super) fn new(bytes: usize) -> Self {
        let words = bytes.div_ceil(size_of::<f32>());
        let memory = vec![0.0f32; words + LINE / size_of::<f32>()];
        let start = memory.as_ptr().align_offset(LINE);
        Self { memory, start, words }
    }

    fn words(&self, name: &str, tensor: Tensor) -> Result<Range<usize>> {
        let start = tensor.offset / size_of::<f32>();
        ensure!(tensor.dtype != DType::Bf16, "tensor '{name}' is bf16, but the CPU engine stores f32 only");
        ensure!(
            tensor.offset.is_multiple_of(size_of::<f32>()) && start + tensor.len <= self.words,
            "tensor '{name}' ({} elements at byte {}) does not lie in the CPU engine's arena of {} bytes: \
             allocate the plan it comes from first",
            tensor.len,
            tensor.offset,
            self.words * size_of::<f32>(),
        );
        Ok(self.start + start..self.start + start + tensor.len)
    }

    /// The tensors' words, which must not overlap.
    pub(super) fn split<const N: usize>(&mut self, operation: &str, operands: [Operand; N]) -> Result<[&mut [f32]; N]> {
        let mut ranges = [const { 0..0 }; N];
        for (range, (name, tensor, len)) in ranges.iter_mut().zip(operands) {
            ensure!(
                tensor.len == len,
                "{operation}: tensor '{name}' has {} elements, its shape asks for {len}",
                tensor.len
            );
            *range = self.words(name, tensor)?;
        }
        self.memory.get_disjoint_mut(ranges).map_err(|_| {
            let names = operands.map(|(name, ..)| name).join(", ");
            anyhow!("{operation}: two of the tensors {names} overlap, each must have memory of its own")
        })
    }

    pub(super) fn get(&self, tensor: Tensor) -> Result<&[f32]> {
        Ok(&self.memory[self.words("from", tensor)?])
    }

    /// Copies one tensor to another of the same length; they may overlap.
    pub(super) fn copy(&mut self, to: Tensor, from: Tensor) -> Result<()> {
        let (to, from) = (self.words("to", to)?, self.words("from", from)?);
        ensure!(to.len() == from.len(), "copy of {} elements to a tensor of {}", from.len(), to.len());
        self.memory.copy_within(from, to.start);
        Ok(())
    }
}
