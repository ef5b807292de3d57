//! Exercise: count the sectors that a load of a warp touches.
//!
//! Global memory is transferred in sectors of 32 bytes, which begin at multiples of 32. A load of a warp needs every sector that
//! contains at least one byte of at least one lane, once. The lanes may have any order, and several may read the same bytes.

/// Returns the number of sectors for lanes that read `bytes` bytes each, from `addresses` on. `bytes` is at least 1.
pub fn sectors(addresses: &[u64; 32], bytes: u64) -> usize {
    unimplemented!("exercise sectors")
}
