//! Handles to regions of an engine's memory.

use anyhow::{Result, ensure};

/// Storage type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    F32,
    Bf16,
    I32,
}

impl DType {
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::Bf16 => 2,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::I32 => "i32",
        }
    }
}

/// `len` elements that begin `offset` bytes into an engine's arena. Plain data: copying it copies no memory, and it means
/// nothing to another engine. Shapes are the operations' business.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub offset: usize,
    pub len: usize,
    pub dtype: DType,
}

impl Tensor {
    pub const fn bytes(self) -> usize {
        self.len * self.dtype.bytes()
    }

    /// Elements `start .. start + len`.
    ///
    /// # Panics
    /// If they are not all in this tensor.
    pub fn slice(self, start: usize, len: usize) -> Self {
        assert!(start + len <= self.len, "elements {start}..{} of a tensor of {}", start + len, self.len);
        Self { offset: self.offset + start * self.dtype.bytes(), len, dtype: self.dtype }
    }

    /// Part `i` of `n` equal parts, for tensors kept for every layer.
    pub fn part(self, i: usize, n: usize) -> Self {
        self.slice(i * (self.len / n), self.len / n)
    }
}

/// A tensor that ranks divide evenly, and what holds this rank's part: that part of `whole` itself, or a tensor of its own.
#[derive(Clone, Copy, Debug)]
pub struct Divided {
    pub whole: Tensor,
    pub part: Tensor,
}

impl Divided {
    /// Itself, if there is a part for each of so many ranks.
    pub fn over(self, ranks: usize) -> Result<Self> {
        let Self { whole, part } = self;
        ensure!(
            whole.len == ranks * part.len && whole.dtype == part.dtype,
            "{} {} in parts of {} {}, over {ranks} ranks",
            whole.len,
            whole.dtype.name(),
            part.len,
            part.dtype.name()
        );
        Ok(self)
    }
}
