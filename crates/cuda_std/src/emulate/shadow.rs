//! What is remembered of every two bytes of memory: who wrote it last and who read it since, and of every byte whether it
//! was ever written.

use super::LANES;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// One access to one cell. `thread` carries the flags.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Access {
    pub block: u32,
    /// The accessing thread's warp's clock: how many synchronisations it had behind it.
    pub clock: u32,
    thread: u16,
    pub site: u16,
}

impl Access {
    pub const NONE: Self = Self { block: 0, clock: 0, thread: u16::MAX, site: 0 };
    /// By an atomic instruction.
    pub const ATOMIC: u16 = 1 << 15;
    /// By an asynchronous copy that was not waited for.
    pub const PENDING: u16 = 1 << 14;
    /// By an instruction of the whole warp, which is over for all of its lanes at once.
    pub const WARP: u16 = 1 << 13;
    /// By TMA.
    pub const BULK: u16 = 1 << 12;
    /// On a cell's second read: the cell has had more readers than it holds.
    const CROWDED: u16 = 1 << 11;
    const THREAD: u16 = (LANES * LANES) as u16 - 1;

    pub fn new(block: u32, clock: u32, thread: usize, flags: u16, site: u16) -> Self {
        Self { block, clock, thread: thread as u16 | flags, site }
    }

    pub fn is_none(self) -> bool {
        self.thread == u16::MAX
    }

    pub fn is(self, flag: u16) -> bool {
        self.thread & flag != 0 && !self.is_none()
    }

    /// The asynchronous copy is over.
    pub fn land(&mut self) {
        self.thread = self.thread & !Self::PENDING | Self::BULK;
    }

    pub fn thread(self) -> usize {
        usize::from(self.thread & Self::THREAD)
    }

    pub fn warp(self) -> usize {
        self.thread() / LANES
    }
}

#[derive(Clone, Copy)]
pub struct Cell {
    pub write: Access,
    /// Of the reads since that write the last one, and one by a different thread, from another warp if there is one.
    pub reads: [Access; 2],
}

impl Cell {
    const EMPTY: Self = Self { write: Access::NONE, reads: [Access::NONE; 2] };

    /// `past`: for each of the two reads, whether it is ordered before this one. Gives back a read that another warp's
    /// writer may yet race with, where there is no room for it any more.
    fn read(&mut self, access: Access, past: [bool; 2]) -> Option<Access> {
        let [last, other] = &mut self.reads;
        let same_block = last.block == access.block;
        let keep_other = last.is_none()
            || same_block && last.thread() == access.thread()
            || !other.is_none() && !past[1] && (past[0] || same_block && last.warp() == access.warp());
        let mut lost = None;
        if !keep_other {
            let lives = !other.is_none() && !past[1] && other.block == access.block;
            lost = (lives && other.warp() != last.warp() && other.warp() != access.warp()).then_some(*other);
            let crowded = if other.is_none() { 0 } else { other.thread & Access::CROWDED };
            *other = *last;
            other.thread |= crowded;
        }
        *last = access;
        lost
    }
}

/// Bytes of a cell: the smallest element. What lies at an odd address or has an odd size is not watched for races.
pub const CELL: usize = 2;
const PAGE: usize = 512;

/// Cells of a stretch of memory; none until the first is touched.
#[derive(Default)]
struct Page {
    cells: Box<[Cell]>,
    touched: bool,
}

/// Shadow of a stretch of memory. Cells are made when first touched.
pub struct Shadow {
    pages: Vec<Page>,
    /// Numbers of the pages with cells that are not empty.
    touched: Vec<usize>,
    /// One bit per byte.
    written: Vec<u64>,
    /// Of cells with more readers than they hold, further reads since the last write: one of each warp.
    crowds: HashMap<usize, Vec<Access>, BuildHasherDefault<Multiply>>,
}

/// Hashes the number of a cell.
#[derive(Default)]
struct Multiply(u64);

impl Hasher for Multiply {
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

impl Shadow {
    pub fn new(bytes: usize) -> Self {
        let pages = (0..bytes.div_ceil(CELL * PAGE)).map(|_| Page::default()).collect();
        Self { pages, touched: Vec::new(), written: vec![0; bytes.div_ceil(64)], crowds: HashMap::default() }
    }

    /// Forgets all accesses; what is written stays so.
    pub fn forget_accesses(&mut self) {
        for page in self.touched.drain(..) {
            let Page { cells, touched } = &mut self.pages[page];
            cells.fill(Cell::EMPTY);
            *touched = false;
        }
        self.crowds.clear();
    }

    pub fn forget_contents(&mut self) {
        self.written.fill(0);
    }

    /// Cell `i`, the bytes from `CELL * i`.
    #[inline]
    pub fn cell(&mut self, i: usize) -> &mut Cell {
        let page = &mut self.pages[i / PAGE];
        if !page.touched {
            page.touched = true;
            self.touched.push(i / PAGE);
            if page.cells.is_empty() {
                page.cells = vec![Cell::EMPTY; PAGE].into_boxed_slice();
            }
        }
        &mut page.cells[i % PAGE]
    }

    /// Remembers a write to cell `i`, and no read before it.
    #[inline]
    pub fn wrote(&mut self, i: usize, access: Access) {
        let cell = self.cell(i);
        let crowded = cell.reads[1].is(Access::CROWDED);
        *cell = Cell { write: access, reads: [Access::NONE; 2] };
        if crowded {
            self.crowds.remove(&i);
        }
    }

    /// Remembers a read of cell `i`; `past`: for each of the reads it holds, whether it is ordered before this one.
    #[inline]
    pub fn read(&mut self, i: usize, access: Access, past: [bool; 2]) {
        let cell = self.cell(i);
        if let Some(lost) = cell.read(access, past) {
            cell.reads[1].thread |= Access::CROWDED;
            let crowd = self.crowds.entry(i).or_default();
            crowd.retain(|read| read.block == lost.block && read.warp() != lost.warp());
            crowd.push(lost);
        }
    }

    /// Further reads of this cell `i` of the shadow.
    #[inline]
    pub fn crowd(&self, i: usize, cell: Cell) -> &[Access] {
        if cell.reads[1].is(Access::CROWDED) { self.crowds.get(&i).map_or(&[], Vec::as_slice) } else { &[] }
    }

    #[inline]
    pub fn set_written(&mut self, offset: usize, bytes: usize) {
        for_words(offset, bytes, |word, bits| {
            self.written[word] |= bits;
            true
        });
    }

    /// The first byte of the range that was never written.
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

/// Calls `f` with each word of a bit set that the range touches and the range's bits in it, until it says no.
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
