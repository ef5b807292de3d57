//! Tensor maps of TMA, and the layout of tiles in shared memory.

use std::ops::Range;

/// First word of an encoded tensor map.
pub const MAGIC: u64 = u64::from_le_bytes(*b"tensor2d");

/// A decoded tensor map.
#[derive(Clone, Copy)]
pub struct Map {
    pub base: u64,
    pub rows: u64,
    pub columns: u64,
    pub row_bytes: u64,
    pub box_rows: u64,
    pub box_columns: u64,
    pub element_bytes: u64,
    /// Number of matrices and the distance of one to the next in bytes, for a map with three dimensions.
    pub matrices: Option<[u64; 2]>,
}

/// Encodes a tensor map of two dimensions, or of three if `matrices` gives their number and distance in bytes, as the
/// 128 bytes that the emulator reads.
pub fn tensor_map<T>(
    base: *const T,
    [rows, columns]: [u64; 2],
    row_bytes: u64,
    matrices: Option<[u64; 2]>,
    [box_rows, box_columns]: [u32; 2],
) -> [u64; 16] {
    let element_bytes = size_of::<T>() as u64;
    assert!(base.addr().is_multiple_of(16), "tensor map: the base must be aligned to 16 bytes");
    assert!(
        (1..1 << 32).contains(&rows) && (1..1 << 32).contains(&columns),
        "tensor map: expected 1 to 2^32-1 rows and columns, found {rows} x {columns}"
    );
    assert!(
        row_bytes.is_multiple_of(16) && (element_bytes * columns..1 << 40).contains(&row_bytes),
        "tensor map: expected a row stride of a multiple of 16 bytes for {columns} elements of {element_bytes} bytes, \
         found {row_bytes} bytes"
    );
    assert!((1..=256).contains(&box_rows), "tensor map: expected a box of 1 to 256 rows, found {box_rows}");
    assert!(
        [64, 128].contains(&(u64::from(box_columns) * element_bytes)),
        "tensor map: expected a box with rows of 64 or 128 bytes, found {box_columns} elements of {element_bytes} bytes"
    );
    assert!(
        matrices.is_none_or(|[count, bytes]| (1..1 << 32).contains(&count)
            && bytes.is_multiple_of(16)
            && (1..1 << 40).contains(&bytes)),
        "tensor map: expected 1 to 2^32-1 matrices, a multiple of 16 bytes below 2^40 apart, found {matrices:?}"
    );
    let [matrices, matrix_bytes] = matrices.unwrap_or_default();
    let mut words = [0; 16];
    words[..10].copy_from_slice(&[
        MAGIC,
        base.expose_provenance() as u64,
        rows,
        columns,
        row_bytes,
        u64::from(box_rows),
        u64::from(box_columns),
        matrices,
        matrix_bytes,
        element_bytes,
    ]);
    words
}

impl Map {
    pub fn element_bytes(&self) -> usize {
        self.element_bytes as usize
    }

    /// Returns the bytes of a row of the box.
    pub fn box_row_bytes(&self) -> usize {
        self.element_bytes() * self.box_columns as usize
    }

    pub fn bytes(&self) -> usize {
        self.box_rows as usize * self.box_row_bytes()
    }

    /// Returns the alignment of a tile: the bytes after which the swizzle repeats.
    pub fn alignment(&self) -> usize {
        8 * self.box_row_bytes()
    }

    /// Returns the offset in the tile of byte `byte` of `row`.
    pub fn swizzled(&self, row: usize, byte: usize) -> usize {
        let at = row * self.box_row_bytes() + byte;
        if self.box_row_bytes() == 128 { swizzle(at) } else { at ^ (at >> 7 & 3) << 4 }
    }

    /// Returns the part of the box at column `x` and row `y` that is inside the tensor: the row of the box, the columns
    /// of the box, and the address of the first of these columns.
    pub fn inside(self, x: i32, y: i32) -> impl Iterator<Item = (usize, Range<usize>, usize)> {
        let (x, y, box_columns) = (i64::from(x), i64::from(y), self.box_columns as i64);
        let first = (-x).clamp(0, box_columns);
        let last = (self.columns as i64 - x).clamp(first, box_columns);
        let rows = (-y).max(0)..(self.rows as i64 - y).min(self.box_rows as i64);
        rows.filter(move |_| first < last).map(move |row| {
            let at = self.base as i64 + (y + row) * self.row_bytes as i64 + self.element_bytes as i64 * (x + first);
            (row as usize, first as usize..last as usize, at as usize)
        })
    }
}

/// Applies the 128-byte swizzle to the address of a byte in 128-byte rows, as TMA and wgmma do.
#[inline(always)]
pub fn swizzle(address: usize) -> usize {
    address ^ (address >> 7 & 7) << 4
}
