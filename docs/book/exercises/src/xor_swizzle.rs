//! Bank conflicts, and the swizzle that avoids them.
//!
//! Shared memory has 32 banks. Consecutive words of 4 bytes are in consecutive banks. If the lanes of a warp access different words
//! of one bank, the accesses run one after the other.
//!
//! A tile has rows of 128 bytes, which are 8 chunks of 16 bytes. The tensor cores read the same chunk of 8 consecutive rows at
//! once. Without a swizzle, these chunks are in the same four banks. Place chunk c of row r elsewhere in its row.

/// Returns the number of passes that an access takes: the largest number of different words in one bank.
///
/// `words` has the word index, the address divided by 4, of each word that the lanes access. Several lanes may access the same word.
pub fn passes(words: &[usize]) -> usize {
    unimplemented!("exercise xor_swizzle")
}

/// Returns the place, 0 to 7, at which a row stores a chunk: that of the 128-byte swizzle of TMA and wgmma.
pub fn swizzled_chunk(row: usize, chunk: usize) -> usize {
    unimplemented!("exercise xor_swizzle")
}
