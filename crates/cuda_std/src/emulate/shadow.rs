//! What is remembered of every two bytes of memory: who wrote it last and who read it since, and of every byte whether it
//! was ever written.

use super::LANES;

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
        usize::from(self.thread & (Self::BULK - 1))
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

    pub fn wrote(&mut self, access: Access) {
        *self = Self { write: access, reads: [Access::NONE; 2] };
    }

    /// `past`: for each of the two reads, whether it is ordered before this one.
    pub fn read(&mut self, access: Access, past: [bool; 2]) {
        let [last, other] = &mut self.reads;
        let same_block = last.block == access.block;
        let keep_other = last.is_none()
            || same_block && last.thread() == access.thread()
            || !other.is_none() && !past[1] && (past[0] || same_block && last.warp() == access.warp());
        if !keep_other {
            *other = *last;
        }
        *last = access;
    }
}

/// Bytes of a cell: the smallest element. What lies at an odd address or has an odd size is not watched for races.
pub const CELL: usize = 2;
const PAGE: usize = 512;

/// Shadow of a stretch of memory. Cells are made when first touched.
pub struct Shadow {
    pages: Vec<Option<Box<[Cell]>>>,
    /// One bit per byte.
    written: Vec<u64>,
}

impl Shadow {
    pub fn new(bytes: usize) -> Self {
        let pages = (0..bytes.div_ceil(CELL * PAGE)).map(|_| None).collect();
        Self { pages, written: vec![0; bytes.div_ceil(64)] }
    }

    /// Forgets all accesses; what is written stays so.
    pub fn forget_accesses(&mut self) {
        for page in self.pages.iter_mut().flatten() {
            page.fill(Cell::EMPTY);
        }
    }

    pub fn forget_contents(&mut self) {
        self.written.fill(0);
    }

    /// Cell `i`, the bytes from `CELL * i`.
    #[inline]
    pub fn cell(&mut self, i: usize) -> &mut Cell {
        &mut self.pages[i / PAGE].get_or_insert_with(|| vec![Cell::EMPTY; PAGE].into_boxed_slice())[i % PAGE]
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
