//! Exercise: waves of tiles.
//!
//! A GEMM kernel computes its output in tiles. Each SM computes one tile at a time, so the tiles run in waves: as many as there are SMs, then
//! as many again. The last wave may be partly empty, and tiles at the edges may be partly outside of the output, but they take as long as
//! full ones. Count before you build: the chapter "What did not work" has an example.

/// Rows and columns of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
}

/// Returns the number of tiles that cover an output of `m` rows and `n` columns.
pub fn tiles(m: usize, n: usize, tile: Tile) -> usize {
    m.div_ceil(tile.rows) * n.div_ceil(tile.columns)
}

/// Returns the number of waves in which `tiles` tiles run on `sms` SMs.
pub fn waves(tiles: usize, sms: usize) -> usize {
    tiles.div_ceil(sms)
}

/// Returns the elements that the busiest SM computes, with those outside of the output. It is proportional to the time, if a tile takes a
/// time in proportion to its elements.
pub fn work(m: usize, n: usize, tile: Tile, sms: usize) -> usize {
    waves(tiles(m, n, tile), sms) * tile.rows * tile.columns
}

/// Returns the share of the SMs' work that computes elements of the output, between 0 and 1.
pub fn utilization(m: usize, n: usize, tile: Tile, sms: usize) -> f64 {
    (m * n) as f64 / (work(m, n, tile, sms) * sms) as f64
}

/// Returns the tile with the least work, and the first one of those with equal work.
///
/// # Panics
/// If there are no tiles.
pub fn best(m: usize, n: usize, tiles: &[Tile], sms: usize) -> Tile {
    *tiles.iter().min_by_key(|tile| work(m, n, **tile, sms)).expect("there is a tile")
}
