//! Shadow memory: the access history of every two bytes, or of every byte where one was accessed alone (the last write and the reads
//! since), and one bit per byte that states whether it was ever written.

use super::LANES;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// One access to one cell. `thread` also holds the flags.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Access {
    pub block: u32,
    /// Tick of the clock of the thread's warp at the time of the access.
    pub clock: u32,
    thread: u16,
    pub site: u16,
}

impl Access {
    pub const NONE: Self = Self { block: 0, clock: 0, thread: u16::MAX, site: 0 };
    /// The access is atomic.
    pub const ATOMIC: u16 = 1 << 15;
    /// The access is an asynchronous copy that has not completed.
    pub const PENDING: u16 = 1 << 14;
    /// The access is part of a warp-wide instruction, which completes for all lanes at once.
    pub const WARP: u16 = 1 << 13;
    /// The access was made by TMA.
    pub const BULK: u16 = 1 << 12;
    /// Flag of a cell's second read: further reads of the cell are in the overflow table.
    const OVERFLOWED: u16 = 1 << 11;
    const THREAD: u16 = (LANES * LANES) as u16 - 1;

    pub fn new(block: u32, clock: u32, thread: usize, flags: u16, site: u16) -> Self {
        Self { block, clock, thread: thread as u16 | flags, site }
    }

    /// Returns the access from another line of the source.
    pub fn from(self, site: u16) -> Self {
        Self { site, ..self }
    }

    pub fn is_none(self) -> bool {
        self.thread == u16::MAX
    }

    pub fn is(self, flag: u16) -> bool {
        self.thread & flag != 0 && !self.is_none()
    }

    /// Marks the asynchronous copy as completed.
    pub fn complete(&mut self) {
        self.thread = self.thread & !Self::PENDING | Self::BULK;
    }

    pub fn thread(self) -> usize {
        usize::from(self.thread & Self::THREAD)
    }

    pub fn warp(self) -> usize {
        self.thread() / LANES
    }

    fn is_of_warp_of(self, other: Self) -> bool {
        (self.block, self.warp()) == (other.block, other.warp())
    }
}

/// Access history of two bytes, or of one.
#[derive(Clone, Copy)]
pub struct Cell {
    pub write: Access,
    /// Reads since that write: the last one, and one by a different thread, from another warp if there is one.
    pub reads: [Access; 2],
}

impl Cell {
    const EMPTY: Self = Self { write: Access::NONE, reads: [Access::NONE; 2] };

    /// Records a read. `ordered` tells for each of the two recorded reads whether it happens before this one. Returns a
    /// read that was evicted although a later write by another warp could race with it; one of another block only if `of_all_blocks`.
    fn read(&mut self, access: Access, ordered: [bool; 2], of_all_blocks: bool) -> Option<Access> {
        let [last, other] = &mut self.reads;
        let same_block = last.block == access.block;
        let keep_other = last.is_none()
            || same_block && last.thread() == access.thread()
            || !other.is_none() && !ordered[1] && (ordered[0] || same_block && last.warp() == access.warp());
        let mut evicted = None;
        if !keep_other {
            let unordered = !other.is_none() && !ordered[1] && (of_all_blocks || other.block == access.block);
            evicted = (unordered && !other.is_of_warp_of(*last) && !other.is_of_warp_of(access)).then_some(*other);
            let overflowed = if other.is_none() { 0 } else { other.thread & Access::OVERFLOWED };
            *other = *last;
            other.thread |= overflowed;
        }
        *last = access;
        evicted
    }
}

/// Bytes in a cell, unless a single byte of its page was accessed.
const CELL: usize = 2;
/// Bytes in a group: those of the largest access of a thread. Most groups have one history, which is then stored once.
const GROUP: usize = 16;
/// Groups in a page.
const GROUPS: usize = u64::BITS as usize;
/// Bytes in a page.
const PAGE: usize = GROUP * GROUPS;

/// Cells of a range of memory, allocated on the first access.
#[derive(Default)]
struct Page {
    cells: Vec<Cell>,
    /// One bit per group: whether its first cell stands for all of its cells.
    uniform: u64,
    touched: bool,
    /// Whether there is a cell for each byte.
    of_bytes: bool,
}

/// Further reads since the last write of cells that have had more than two unordered readers: one per warp. The key is the offset of the
/// cell.
#[derive(Default)]
pub struct Overflow(HashMap<usize, Vec<Access>, BuildHasherDefault<CellHasher>>);

/// Maximum number of further reads of a cell, more than a block has warps. Beyond it, older reads of other blocks are forgotten.
const MAX_OVERFLOW: usize = 48;

/// Shadow of a range of memory.
pub struct Shadow {
    pages: Vec<Page>,
    /// Indices of the pages with cells that are not empty.
    touched: Vec<usize>,
    /// One bit per byte: whether it was ever written.
    written: Vec<u64>,
    overflow: Overflow,
}

/// Multiplicative hasher for cell indices.
#[derive(Default)]
struct CellHasher(u64);

impl Hasher for CellHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_usize(usize::from(*byte));
        }
    }

    fn write_usize(&mut self, i: usize) {
        self.0 = (self.0 ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0.rotate_left(32)
    }
}

impl Overflow {
    /// Records a read of the cell at offset `i`. See [`Cell::read`].
    #[inline]
    pub fn read(&mut self, i: usize, cell: &mut Cell, access: Access, ordered: [bool; 2], of_all_blocks: bool) {
        if let Some(evicted) = cell.read(access, ordered, of_all_blocks) {
            cell.reads[1].thread |= Access::OVERFLOWED;
            let reads = self.0.entry(i).or_default();
            reads.retain(|read| !read.is_of_warp_of(evicted) && (of_all_blocks || read.block == evicted.block));
            if reads.len() == MAX_OVERFLOW {
                reads.remove(0);
            }
            reads.push(evicted);
        }
    }

    /// Records a write to the cell at offset `i` and clears the reads before it.
    #[inline]
    pub fn wrote(&mut self, i: usize, cell: &mut Cell, access: Access) {
        if cell.reads[1].is(Access::OVERFLOWED) {
            self.0.remove(&i);
        }
        *cell = Cell { write: access, reads: [Access::NONE; 2] };
    }

    /// Returns the reads of the cell at offset `i` that did not fit into the cell.
    #[inline]
    pub fn of(&self, i: usize, cell: &Cell) -> &[Access] {
        if cell.reads[1].is(Access::OVERFLOWED) { self.0.get(&i).map_or(&[], Vec::as_slice) } else { &[] }
    }

    /// Copies the reads of the cell at offset `from` to those at `to`.
    #[cold]
    fn copy(&mut self, from: usize, to: impl Iterator<Item = usize>) {
        for to in to {
            let reads = self.0[&from].clone();
            self.0.insert(to, reads);
        }
    }
}

impl Shadow {
    /// Creates the shadow of `bytes` bytes of uninitialized memory.
    pub fn new(bytes: usize) -> Self {
        let pages = (0..bytes.div_ceil(PAGE)).map(|_| Page::default()).collect();
        Self { pages, touched: Vec::new(), written: vec![0; bytes.div_ceil(64)], overflow: Overflow::default() }
    }

    /// Clears the access history. Initialized bytes stay initialized.
    pub fn forget_accesses(&mut self) {
        for page in self.touched.drain(..) {
            self.pages[page].touched = false;
        }
        self.overflow.0.clear();
    }

    /// Marks all bytes as uninitialized.
    pub fn forget_contents(&mut self) {
        self.written.fill(0);
    }

    /// Applies `f` to the cells of `bytes` bytes from `offset` until it fails: one access to all of them. It gets the offset of a cell and
    /// runs once for neighbors that have the same history. `replaces` tells that the history of a cell afterwards does not depend on the
    /// one before.
    #[inline]
    pub fn update<E>(
        &mut self,
        (offset, bytes): (usize, usize),
        replaces: bool,
        mut f: impl FnMut(usize, &mut Cell, &mut Overflow) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut at, end) = (offset, offset + bytes);
        while at < end {
            let group = at / GROUP * GROUP;
            let stop = end.min(group + GROUP);
            let is_whole = stop - at == GROUP;
            let Self { pages, touched, overflow, .. } = self;
            let page = &mut pages[at / PAGE];
            if !page.touched {
                page.touch();
                touched.push(at / PAGE);
            }
            if (at | stop) % CELL != 0 && !page.of_bytes {
                page.refine(at / PAGE * PAGE, overflow);
            }
            let bit = 1 << (group % PAGE / GROUP);
            let size = if page.of_bytes { 1 } else { CELL };
            let cells = &mut page.cells[group % PAGE / size..][..GROUP / size];
            if page.uniform & bit != 0 {
                if is_whole {
                    f(at, &mut cells[0], overflow)?;
                    at = stop;
                    continue;
                }
                page.uniform &= !bit;
                let first = cells[0];
                cells.fill(first);
                if first.reads[1].is(Access::OVERFLOWED) {
                    overflow.copy(group, (group..group + GROUP).step_by(size).skip(1));
                }
            }
            for (cell, at) in cells[(at - group) / size..(stop - group) / size].iter_mut().zip((at..).step_by(size)) {
                f(at, cell, overflow)?;
            }
            if is_whole && replaces {
                page.uniform |= bit;
            }
            at = stop;
        }
        Ok(())
    }

    /// Returns one bit per byte: whether it is initialized.
    pub fn written(&self) -> &[u64] {
        &self.written
    }

    pub fn restore_written(&mut self, written: &[u64]) {
        self.written.copy_from_slice(written);
    }

    /// Marks a range of bytes as initialized.
    #[inline]
    pub fn set_written(&mut self, offset: usize, bytes: usize) {
        for_words(offset, bytes, |word, bits| {
            self.written[word] |= bits;
            true
        });
    }

    /// Returns the offset of the first uninitialized byte in the range.
    #[inline]
    pub fn first_unwritten(&self, offset: usize, bytes: usize) -> Option<usize> {
        let mut first = None;
        for_words(offset, bytes, |word, bits| {
            let missing = bits & !self.written[word];
            if missing != 0 {
                first = Some(word * 64 + missing.trailing_zeros() as usize);
            }
            missing == 0
        });
        first
    }
}

impl Page {
    /// Makes all cells empty.
    #[cold]
    fn touch(&mut self) {
        if self.cells.len() == PAGE / CELL {
            self.cells.iter_mut().step_by(GROUP / CELL).for_each(|cell| *cell = Cell::EMPTY);
        } else {
            self.cells = vec![Cell::EMPTY; PAGE / CELL];
        }
        self.uniform = u64::MAX;
        self.touched = true;
        self.of_bytes = false;
    }

    /// Gives each byte its own cell. `start` is the offset of the page.
    #[cold]
    fn refine(&mut self, start: usize, overflow: &mut Overflow) {
        self.of_bytes = true;
        self.cells = self.cells.iter().flat_map(|cell| [*cell; CELL]).collect();
        for group in 0..GROUPS {
            let is_uniform = self.uniform >> group & 1 != 0;
            let cells = if is_uniform { 1 } else { GROUP };
            for i in (group * GROUP..group * GROUP + cells).step_by(CELL) {
                if !is_uniform && self.cells[i].reads[1].is(Access::OVERFLOWED) {
                    overflow.copy(start + i, [start + i + 1].into_iter());
                }
            }
        }
    }
}

/// Calls `f` with the index of each 64-bit word that the range overlaps and the mask of the range's bits in it, until
/// `f` returns false.
#[inline]
fn for_words(offset: usize, bytes: usize, mut f: impl FnMut(usize, u64) -> bool) {
    let (mut at, end) = (offset, offset + bytes);
    while at < end {
        let count = (64 - at % 64).min(end - at);
        let bits = u64::MAX >> (64 - count) << (at % 64);
        if !f(at / 64, bits) {
            return;
        }
        at += count;
    }
}
