//! Handles to regions of an engine's memory.

use anyhow::{Result, ensure};

/// Storage type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float
    F32,
    /// bfloat16
    Bf16,
    /// 32-bit integer
    I32,
    /// 16-bit unsigned integer
    U16,
    /// 8-bit float: E4M3 or E5M2, as the operation says
    Fp8,
    /// 8 bits per value, in blocks of eight that are aligned to 8 bytes ([`gpu::block_float`])
    Block8 {
        /// True for first moments, false for second moments, which are not negative.
        signed: bool,
    },
}

impl DType {
    /// Returns the bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::Bf16 | Self::U16 => 2,
            Self::Fp8 | Self::Block8 { .. } => 1,
        }
    }

    /// Returns the name: `f32`, `bf16`, `i32`, `u16`, `fp8` or `8bit`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::I32 => "i32",
            Self::U16 => "u16",
            Self::Fp8 => "fp8",
            Self::Block8 { .. } => "8bit",
        }
    }
}

/// A handle to `len` elements that begin `offset` bytes into an engine's arena.
///
/// Copying a handle copies no memory. A handle is meaningless to another engine. Shapes are part of the operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Bytes from the start of the arena.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
    /// Storage type.
    pub dtype: DType,
}

impl Tensor {
    /// Returns the size in bytes.
    pub const fn bytes(self) -> usize {
        self.len * self.dtype.bytes()
    }

    /// Returns the elements `start .. start + len`.
    ///
    /// # Panics
    /// If the range exceeds the tensor.
    pub fn slice(self, start: usize, len: usize) -> Self {
        assert!(start + len <= self.len, "elements {start}..{} of a tensor of {}", start + len, self.len);
        Self { offset: self.offset + start * self.dtype.bytes(), len, dtype: self.dtype }
    }

    /// Returns the memory of this tensor as `len` elements of another type.
    ///
    /// # Panics
    /// If they exceed the tensor.
    pub fn reinterpret(self, len: usize, dtype: DType) -> Self {
        assert!(len * dtype.bytes() <= self.bytes(), "{len} {} in {} bytes", dtype.name(), self.bytes());
        Self { len, dtype, ..self }
    }

    /// Returns part `i` of `n` equal parts, for example one layer of a tensor that holds all layers.
    pub fn part(self, i: usize, n: usize) -> Self {
        self.slice(i * (self.len / n), self.len / n)
    }
}

/// A tensor that ranks shard evenly. This rank's shard is part of `whole` or a tensor of its own.
#[derive(Clone, Copy, Debug)]
pub struct Sharded {
    /// The tensor as all ranks together see it.
    pub whole: Tensor,
    /// This rank's shard.
    pub shard: Tensor,
}

impl Sharded {
    /// Checks that there is one shard for each of `ranks` ranks.
    pub fn over(self, ranks: usize) -> Result<Self> {
        let Self { whole, shard } = self;
        ensure!(
            whole.len == ranks * shard.len && whole.dtype == shard.dtype,
            "{} {} cannot be sharded into {} {} over {ranks} ranks",
            whole.len,
            whole.dtype.name(),
            shard.len,
            shard.dtype.name()
        );
        Ok(self)
    }
}
