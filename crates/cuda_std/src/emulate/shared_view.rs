//! Views of arrays and tiles in shared memory, which check the bounds of each access in a checked launch.

use super::block::{Block, fail, is_checked, is_running, with};
use super::region::Region;
use super::report::{Fault, Line, Site};
use std::any::type_name;
use std::panic::Location;

/// Returns the address of an array or tile `V` of elements `T` at `offset` in shared memory, with its bounds.
#[track_caller]
pub fn reserve<V, T>(base: *mut u8, offset: usize, bytes: usize, row: Option<(usize, usize)>) -> SharedView<T> {
    let element = size_of::<T>().max(1);
    let (kind, reserved) = (type_name::<V>(), Location::caller());
    let region = Region { start: offset, bytes, element, row, kind, name: None, reserved };
    region.register();
    SharedView { pointer: base.wrapping_add(offset).cast(), region }
}

impl Region {
    fn register(self) {
        if is_checked() && is_running() {
            with(|block| {
                if let Some(checker) = &mut block.checker {
                    checker.reserve(self);
                }
            });
        }
    }
}

/// The address of an element of an array or tile in shared memory, with the bounds of the array.
pub struct SharedView<T> {
    pointer: *mut T,
    region: Region,
}

impl<T> Clone for SharedView<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedView<T> {}

impl<T> SharedView<T> {
    /// Returns the address.
    pub fn pointer(self) -> *mut T {
        self.pointer
    }

    /// Returns the address of element `i` for an access to `count` elements. Stops a checked kernel if they are not all in the array.
    #[inline(always)]
    #[track_caller]
    pub fn element(self, i: usize, count: usize) -> *mut T {
        let pointer = self.pointer.wrapping_add(i);
        if is_checked() {
            self.check(pointer.addr(), i, count, Location::caller());
        }
        pointer
    }

    /// Returns the address of element (`row`, `col`) of a tile with this row stride. Stops a checked kernel if the tile does not
    /// contain the `rows` x `cols` elements from there.
    #[inline(always)]
    #[track_caller]
    pub fn tile(self, [row, col]: [usize; 2], stride: usize, [rows, cols]: [usize; 2]) -> *mut T {
        if is_checked() {
            self.check_tile([row, col], [rows, cols], Location::caller());
        }
        self.pointer.wrapping_add(row.wrapping_mul(stride).wrapping_add(col))
    }

    /// Returns the view that starts `count` elements later.
    #[inline(always)]
    pub fn skip(self, count: usize) -> Self {
        Self { pointer: self.pointer.wrapping_add(count), region: self.region }
    }

    /// Returns the view with a name for reports.
    #[must_use]
    pub fn named(self, name: &'static str) -> Self {
        let region = Region { name: Some(name), ..self.region };
        region.register();
        Self { pointer: self.pointer, region }
    }

    /// Stops the kernel unless the `count` elements from `address`, that of element `i`, are in the array.
    #[inline(never)]
    fn check(self, address: usize, i: usize, count: usize, at: Site) {
        let region = self.region;
        if i.cast_signed().checked_mul(region.element.cast_signed()).is_none() {
            // The address wraps around, perhaps to one in the array.
            let message = format!("out-of-bounds access: index {i} of {} ({})", region.describe(), Line(at));
            fail(Fault::OutOfBounds, at, None, message);
        }
        let start = with(Block::shared_base).addr();
        let offset = address.wrapping_sub(start);
        let (bytes, inner) = (count * size_of::<T>(), offset.wrapping_sub(region.start));
        if inner <= region.bytes && bytes <= region.bytes - inner {
            return;
        }
        let elements = if count == 1 { String::new() } else { format!("{count} elements at ") };
        let message = format!("out-of-bounds access: {elements}{} ({})", region.place(offset), Line(at));
        fail(Fault::OutOfBounds, at, None, message);
    }

    #[inline(never)]
    fn check_tile(self, [row, col]: [usize; 2], [rows, cols]: [usize; 2], at: Site) {
        let Some((columns, stride)) = self.region.row else { return };
        let all_rows = self.region.bytes / self.region.element / stride;
        let inside = |first: usize, count: usize, all: usize| first <= all && count <= all - first;
        if inside(row, rows, all_rows) && inside(col, cols, columns) {
            return;
        }
        let elements = if rows * cols == 1 { String::new() } else { format!("{rows} x {cols} elements at ") };
        let place = format!("index ({}, {}) of {}", row as isize, col as isize, self.region.describe());
        fail(Fault::OutOfBounds, at, None, format!("out-of-bounds access: {elements}{place} ({})", Line(at)));
    }
}
