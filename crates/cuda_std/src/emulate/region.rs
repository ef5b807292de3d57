//! Bounds of the arrays and tiles in shared memory. An access beyond the end of one may be inside of another.

use super::report::{Line, Site};

/// An array or a tile in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Offset of the first byte in shared memory.
    pub start: usize,
    pub bytes: usize,
    /// Size of an element in bytes.
    pub element: usize,
    /// Number of elements in a row and between the starts of two rows of a tile, or `None` for an array.
    pub row: Option<(usize, usize)>,
    /// The type of the view, with its path. Shortened only for a report: kernels reserve regions often.
    pub kind: &'static str,
    /// The name that the kernel has given.
    pub name: Option<&'static str>,
    /// The line that reserves the memory.
    pub reserved: Site,
}

impl Region {
    /// Returns whether the byte at `offset` of shared memory is in this region.
    pub fn contains(&self, offset: usize) -> bool {
        offset.wrapping_sub(self.start) < self.bytes
    }

    /// Returns whether both regions have the same start and length.
    pub fn covers_same_bytes(&self, other: &Self) -> bool {
        (self.start, self.bytes) == (other.start, other.bytes)
    }

    /// Returns the element at `offset` of shared memory in words: its index, and the array.
    pub fn place(&self, offset: usize) -> String {
        let element = (offset as isize - self.start as isize).div_euclid(self.element as isize);
        let index = match self.row {
            Some((_, stride)) => {
                format!("({}, {})", element.div_euclid(stride as isize), element.rem_euclid(stride as isize))
            }
            None => element.to_string(),
        };
        format!("index {index} of {}", self.describe())
    }

    pub fn describe(&self) -> String {
        let name = self.name.map_or_else(|| "a".to_owned(), |name| format!("{name}, a"));
        let elements = self.bytes / self.element;
        let extent = match self.row {
            Some((columns, stride)) => format!("{} x {columns}", elements / stride),
            None => elements.to_string(),
        };
        format!("{name} {} of {extent} elements reserved at {}", short_name(self.kind), Line(self.reserved))
    }
}

/// Returns the name of a type of this crate without its path and its parameters.
fn short_name(name: &'static str) -> &'static str {
    let name = name.split('<').next().unwrap_or(name);
    name.rsplit("::").next().unwrap_or(name)
}
