//! The block of host memory that contains every tensor.

use crate::Result;
use crate::tensor::{DType, Tensor};
use anyhow::{anyhow, ensure};
use std::ops::Range;

/// Bytes of a cache line and of the widest vector: the alignment of the arena.
const LINE: usize = 64;

/// f32 words; i32 tensors reinterpret the same words.
#[derive(Debug, Default)]
pub(super) struct Arena {
    memory: Vec<f32>,
    start: usize,
    words: usize,
}

/// An operand: its name, the tensor, and the number of elements that it must have.
pub(super) type Operand = (&'static str, Tensor, usize);

/// Returns an operand that may be absent. It is empty then.
pub(super) fn optional(name: &'static str, tensor: Option<Tensor>, len: usize) -> Operand {
    let absent = Tensor { offset: 0, len: 0, dtype: DType::F32 };
    (name, tensor.unwrap_or(absent), tensor.map_or(0, |_| len))
}

impl Arena {
    /// Allocates `bytes` zeros.
    pub(super) fn new(bytes: usize) -> Result<Self> {
        let words = bytes.div_ceil(size_of::<f32>());
        let memory = super::memory::zeros::<f32>(words + LINE / size_of::<f32>())?;
        let start = memory.as_ptr().align_offset(LINE);
        Ok(Self { memory, start, words })
    }

    fn words(&self, name: &str, tensor: Tensor) -> Result<Range<usize>> {
        let start = tensor.offset / size_of::<f32>();
        ensure!(
            matches!(tensor.dtype, DType::F32 | DType::I32 | DType::U16),
            "tensor {name}: expected f32 on the CPU engine, found {}",
            tensor.dtype.name()
        );
        ensure!(
            tensor.offset.is_multiple_of(size_of::<f32>()) && start + tensor.len <= self.words,
            "tensor {name} ({} elements at byte {}) does not lie in the CPU engine's arena of {} bytes; \
             allocate its plan first",
            tensor.len,
            tensor.offset,
            self.words * size_of::<f32>(),
        );
        Ok(self.start + start..self.start + start + tensor.len)
    }

    /// Returns the words of the operands, which must not overlap.
    pub(super) fn split<const N: usize>(&mut self, operation: &str, operands: [Operand; N]) -> Result<[&mut [f32]; N]> {
        let mut ranges = [const { 0..0 }; N];
        for (range, (name, tensor, len)) in ranges.iter_mut().zip(operands) {
            ensure!(tensor.len == len, "{operation}: tensor {name}: expected {len} elements, found {}", tensor.len);
            *range = self.words(name, tensor)?;
        }
        self.memory.get_disjoint_mut(ranges).map_err(|_| {
            let names = operands.map(|(name, ..)| name).join(", ");
            anyhow!("{operation}: two of the tensors {names} overlap; give each its own memory")
        })
    }

    /// Returns the words of a tensor.
    pub(super) fn get(&self, tensor: Tensor) -> Result<&[f32]> {
        Ok(&self.memory[self.words("from", tensor)?])
    }

    /// Copies one tensor to another of the same length; they may overlap.
    pub(super) fn copy(&mut self, to: Tensor, from: Tensor) -> Result<()> {
        let (to, from) = (self.words("to", to)?, self.words("from", from)?);
        ensure!(to.len() == from.len(), "copy: expected {} elements, found {}", to.len(), from.len());
        self.memory.copy_within(from, to.start);
        Ok(())
    }
}
