//! The table of a step: an entry of 32 words for each operation.
//!
//! Addresses are indices of elements, counted from address 0: the kernel reads them through views that start there, because LLVM infers
//! the address space of a kernel parameter, but not of an address in memory. 0 means that there is no such operand. Floats are stored as
//! their bits.

use cuda_std::{Global, device, warp};

/// Words of an entry: one for each lane of a warp.
pub const ENTRY: usize = 32;

/// An embedding.
pub const EMBED: u64 = 0;
/// A linear layer.
pub const MATVEC: u64 = 1;
/// Attention over the cache.
pub const ATTENTION: u64 = 2;

/// Values in memory that no operation of the step computes.
pub const INPUT: u64 = 3;

/// A word that marks a value without a place in scratch memory.
pub const NONE: u32 = u32::MAX;

/// The words of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Field {
    /// The kind of the operation.
    Kind,
    /// The first word of the output in scratch memory, or [`NONE`] if it is stored at `Out`.
    OutWords,
    /// The address of an output that no operation reads.
    Out,
    /// The first word of the input.
    Input,
    /// The first word of the residual, or [`NONE`].
    Residual,
    /// Weight (OC, C), wte (Vp, C), or values in memory (R, C). Two numbers in FP8 count as an element.
    Weight,
    /// Bias (OC) or wpe (max T, C).
    Bias,
    /// Weight of the norm.
    NormWeight,
    /// Bias of the norm.
    NormBias,
    /// C of the input.
    Channels,
    /// Columns of the output: OC, or OC / 2 with a gated activation.
    Columns,
    /// Pairs of columns of a block.
    Share,
    /// Number of blocks, from the first on, that have one more.
    Rest,
    /// [`Activation::code`](crate::activation::Activation::code), or 0.
    Activation,
    /// The code of the norm, as in [`matvec`](crate::decode::matvec).
    Norm,
    /// Eps of the norm, or of QK-norm.
    Eps,
    /// Keys (B, KV, T, HS).
    Keys,
    /// Values (B, KV, T, HS).
    Values,
    /// Weight of the norm of queries (HS).
    QueryWeight,
    /// Weight of the norm of keys (HS).
    KeyWeight,
    /// Table of rotations (T, HS/2, 2), an index of f32.
    Rotations,
    /// First word of the partial results (B, NH, splits, HS + 2).
    Partials,
    /// NH / KV.
    Group,
    /// KV.
    KvHeads,
    /// HS.
    HeadSize,
    /// T, positions of the ring of the cache.
    Capacity,
    /// Maximum number of splits of a slot's positions.
    Splits,
    /// The code of a rotation, as in [`attention`](crate::decode::attention).
    Rotation,
    /// Whether queries and keys are normalized.
    QkNorm,
    /// Factor of normalized queries and keys.
    Gain,
    /// Scale of a weight in FP8, an index of f32.
    Scale,
    /// Positions of a stage.
    Positions,
}

/// An entry, spread over the lanes of a warp.
#[derive(Clone, Copy)]
pub struct Entry(u64);

/// Every lane of the warp must call these functions.
#[device]
impl Entry {
    /// Reads the entry of operation `i`.
    pub fn load(table: Global<u64>, i: u32) -> Self {
        Self(table.at(i as usize * ENTRY + warp::lane() as usize))
    }

    /// Returns a word.
    pub fn word(self, field: Field) -> u64 {
        warp::shuffle(self.0, field as u32)
    }

    /// Returns a word as an index.
    pub fn index(self, field: Field) -> usize {
        self.word(field) as usize
    }

    /// Returns a word below 2^32.
    pub fn scalar(self, field: Field) -> u32 {
        warp::shuffle(self.0 as u32, field as u32)
    }

    /// Returns a word that holds an f32.
    pub fn float(self, field: Field) -> f32 {
        f32::from_bits(self.scalar(field))
    }
}
