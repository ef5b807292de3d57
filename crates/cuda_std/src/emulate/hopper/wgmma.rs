//! `wgmma.mma_async`: the threads of a warpgroup issue the same products; a group of them is computed once all 128 have
//! closed it and one waits for it. Ownership of accumulators is that of [`crate::hopper::wgmma`].
//!
//! From its first product to the `settle` that follows the wait, an accumulator lives here, and what the thread has in
//! its place is a signalling NaN that tells which product: whether a thread wrote there meanwhile can be told, and where a
//! value that came of reading it goes ([`catch_early`]), for arithmetic keeps all but the NaN's signalling bit.

use super::super::LANES;
use super::super::access::check;
use super::super::block::{Block, fail, suspend, with};
use super::super::checker::{Clocks, Kind, learn};
use super::super::collective::{Operation, Wait};
use super::super::report::{Fault, Line, Site};
use super::super::tensor::{a_place, ldmatrix_x4};
use super::swizzle;
use std::collections::{BTreeMap, VecDeque};
use std::panic::Location;

const THREADS: usize = 128;
/// Rows of A and D.
const M: usize = 64;
const K: usize = 16;
/// What a thread has in place of accumulators that live here, and the number of their first product's line.
const UNDER_WAY: u32 = 0x7fad_c000;
const LINES: u32 = 1 << 12;
/// Set by arithmetic.
const QUIET: u32 = 1 << 22;

pub struct Warpgroup {
    /// Number of the oldest group that is not computed.
    first: usize,
    /// From that one on.
    groups: VecDeque<Group>,
    accumulators: VecDeque<Accumulators>,
    /// Number of the first of these.
    first_accumulators: usize,
    threads: Vec<Thread>,
    waiting: Vec<usize>,
    /// What was known when groups were computed.
    known: Clocks,
    /// Lines of products.
    lines: Vec<Site>,
}

#[derive(Clone, Default)]
struct Thread {
    /// Groups closed.
    groups: usize,
    /// Products in the open group.
    products: usize,
    /// Groups waited for.
    done: usize,
    /// Sets of accumulators that live here: address and number.
    under_way: Vec<(usize, usize)>,
    /// Number of the next set.
    next: usize,
    /// `wgmma::fence`s so far.
    fences: usize,
    /// By address of accumulators: fences and line when they were last settled.
    settled: BTreeMap<usize, (usize, Site)>,
    /// Left operands loaded since the last fence.
    loaded: Vec<([u32; 4], Site)>,
}

#[derive(Default)]
struct Group {
    products: Vec<Product>,
    closed: usize,
    known: Clocks,
}

struct Product {
    kind: Kinds,
    /// Left operands in registers.
    left: Vec<[u32; 4]>,
    accumulators: usize,
    at: Site,
}

/// What all threads must agree on.
#[derive(Clone, Copy, PartialEq)]
struct Kinds {
    n: usize,
    /// None: in registers.
    a: Option<u64>,
    b: u64,
    a_by_rows: bool,
    b_by_rows: bool,
    accumulate: bool,
}

struct Accumulators {
    n: usize,
    /// M x n.
    values: Vec<f32>,
    /// Newest group with a product that adds to these.
    group: usize,
    settled: usize,
    at: Site,
}

impl Default for Warpgroup {
    fn default() -> Self {
        Self {
            first: 0,
            groups: VecDeque::new(),
            accumulators: VecDeque::new(),
            first_accumulators: 0,
            threads: vec![Thread::default(); THREADS],
            waiting: Vec::new(),
            known: Clocks::default(),
            lines: Vec::new(),
        }
    }
}

impl Warpgroup {
    /// What a thread gets in place of accumulators whose first product is on this line.
    fn placeholder(&mut self, at: Site) -> f32 {
        let known = self.lines.iter().position(|line| *line == at);
        let number = known.unwrap_or_else(|| {
            self.lines.push(at);
            self.lines.len() - 1
        });
        f32::from_bits(UNDER_WAY | (number as u32).min(LINES - 1))
    }

    /// The first thread with a product under way, and its line. `group`: number of this warpgroup in its block.
    pub fn under_way(&self, group: usize) -> Option<(usize, Site)> {
        let (thread, number) = self
            .threads
            .iter()
            .enumerate()
            .find_map(|(thread, state)| state.under_way.first().map(|&(_, number)| (thread, number)))?;
        Some((group * THREADS + thread, self.accumulators.get(number - self.first_accumulators)?.at))
    }
}

/// Stops the kernel if this value came of accumulators that were read before their wait.
#[inline]
pub fn catch_early(bits: u32, at: Site) {
    if bits & !(QUIET | (LINES - 1)) == UNDER_WAY & !QUIET {
        read_early(bits, at);
    }
}

#[cold]
fn read_early(bits: u32, at: Site) {
    let line = with(|block| {
        let (group, number) = (block.current / THREADS, bits & (LINES - 1));
        block.hopper.warpgroups.get(&group)?.lines.get(number as usize).copied()
    });
    // Otherwise a NaN of the kernel's own.
    if let Some(product) = line {
        let message = format!(
            "a value at {} was computed from accumulators read between their product at {} and its wait and settle",
            Line(at),
            Line(product)
        );
        fail(Fault::Accumulators, at, Some(product), message);
    }
}

impl Block {
    /// The running thread's warpgroup, and its number there.
    fn warpgroup(&mut self) -> (&mut Warpgroup, usize) {
        let (group, thread) = (self.current / THREADS, self.current % THREADS);
        (self.hopper.warpgroups.entry(group).or_default(), thread)
    }
}

/// Row and column of a thread's accumulator `i`.
#[inline(always)]
fn place(thread: usize, i: usize) -> (usize, usize) {
    let lane = thread % LANES;
    (thread / LANES * 16 + lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2)
}

/// Descriptor of an operand in 128-byte swizzle, as on the device.
pub fn operand<T>(tile: *const T, offset: u32) -> u64 {
    descriptor(tile, 1, offset)
}

/// Descriptor of an operand by rows, as on the device.
pub fn operand_by_rows<T>(tile: *const T, leading: u32, offset: u32) -> u64 {
    descriptor(tile, leading >> 4, offset)
}

fn descriptor<T>(tile: *const T, leading: u32, offset: u32) -> u64 {
    let start = with(Block::shared_base).addr();
    let address = (tile.addr().wrapping_sub(start) & 0x3_ffff) as u64;
    ((address >> 4) | u64::from(leading) << 16 | (64 << 32) | (1 << 62)) + u64::from(offset)
}

/// Columns of a tile.
const COLUMNS: usize = 64;

/// An operand in shared memory: 32 bytes in each row where k runs along memory, else 16 whole rows of as many tiles as it
/// has 64 columns.
#[derive(Clone, Copy)]
struct Tile {
    start: usize,
    /// From a group of eight rows to the next.
    stride: usize,
    /// From 64 columns to the next, by rows.
    leading: usize,
}

impl Tile {
    fn of(descriptor: u64) -> Self {
        let bytes = |bit: u32| (descriptor as usize >> bit & 0x3fff) << 4;
        Self { start: bytes(0), stride: bytes(32), leading: bytes(16) }
    }

    /// Past the last byte of `rows` rows of `length` elements.
    fn end(self, rows: usize, length: usize) -> usize {
        let tiles = length.div_ceil(COLUMNS);
        (self.start & !1023) + (tiles - 1) * self.leading + (rows - 1) / 8 * self.stride + 1024
    }

    /// Where element `i` of `row` lies.
    #[inline(always)]
    fn place(self, row: usize, i: usize) -> usize {
        let tile = self.start + i / COLUMNS * self.leading;
        swizzle(tile + row / 8 * self.stride + row % 8 * 128 + 2 * (i % COLUMNS))
    }

    fn rows(self, shared: &[u8], rows: usize, length: usize) -> Vec<f32> {
        let mut values = Vec::with_capacity(rows * length);
        for row in 0..rows {
            for piece in (0..length).step_by(8) {
                let bytes = &shared[self.place(row, piece)..][..16];
                let value = |pair: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16);
                values.extend(bytes.chunks_exact(2).map(value));
            }
        }
        values
    }

    fn check(self, rows: usize, length: usize, base: usize, at: Site) {
        for row in 0..rows {
            for piece in (0..length).step_by(8) {
                check(Kind::AsyncRead, base + self.place(row, piece), 16, 16, at);
            }
        }
    }
}

impl Kinds {
    /// Rows and their lengths of the right operand in shared memory.
    fn b_shape(self) -> (usize, usize) {
        if self.b_by_rows { (K, self.n) } else { (self.n, K) }
    }

    /// As [`b_shape`](Self::b_shape), of the left operand.
    fn a_shape(self) -> (usize, usize) {
        if self.a_by_rows { (K, M) } else { (M, K) }
    }
}

fn issue(d: &mut [f32], left: [u32; 4], kind: Kinds, at: Site) {
    let fits = |descriptor: u64, (rows, length): (usize, usize), shared: usize| {
        Tile::of(descriptor).end(rows, length) <= shared
    };
    let (threads, shared) = with(|block| (block.threads as usize, block.shared().len()));
    if threads < (with(|block| block.current) / THREADS + 1) * THREADS {
        let message = format!("a warpgroup product in a warpgroup of fewer than {THREADS} threads, at {}", Line(at));
        fail(Fault::Operand, at, None, message);
    }
    if kind.a.is_some_and(|a| !fits(a, kind.a_shape(), shared)) || !fits(kind.b, kind.b_shape(), shared) {
        let start = |descriptor: u64| Tile::of(descriptor).start;
        let a = kind.a.map_or_else(String::new, |a| format!("shared memory + {} or ", start(a)));
        let message = format!(
            "out of bounds: operand of a product at {a}shared memory + {}, of which the launch gave {shared} bytes, at {}",
            start(kind.b),
            Line(at)
        );
        fail(Fault::OutOfBounds, at, None, message);
    }
    let address = d.as_ptr().addr();
    let issued = with(|block| {
        let (warpgroup, index) = block.warpgroup();
        let thread = &mut warpgroup.threads[index];
        let known = thread.under_way.iter().find(|(known, _)| *known == address).map(|(_, number)| *number);
        let settled = thread.settled.get(&address).copied();
        if known.is_none() && settled.map_or(0, |(fences, _)| fences) == thread.fences {
            return Err(Wrong::Unfenced(settled.map(|(_, at)| at)));
        }
        if let Some(&(_, loaded)) = thread.loaded.iter().find(|(words, _)| kind.a.is_none() && *words == left) {
            return Err(Wrong::Unfenced(Some(loaded)));
        }
        let number = known.unwrap_or_else(|| {
            thread.under_way.push((address, thread.next));
            thread.next += 1;
            thread.next - 1
        });
        let (group, product) = (thread.groups - warpgroup.first, thread.products);
        thread.products += 1;
        let i = number - warpgroup.first_accumulators;
        if warpgroup.accumulators.len() == i {
            let values = vec![0.0; M * kind.n];
            warpgroup.accumulators.push_back(Accumulators { n: kind.n, values, group: 0, settled: 0, at });
        }
        let accumulators = &mut warpgroup.accumulators[i];
        if accumulators.n != kind.n {
            return Err(Wrong::Differs(accumulators.at));
        }
        if known.is_some() != is_under_way(d) {
            return Err(Wrong::Touched(accumulators.at));
        }
        if known.is_none() {
            for (i, d) in d.iter().enumerate() {
                let (row, column) = place(index, i);
                accumulators.values[row * kind.n + column] = *d;
            }
        }
        accumulators.group = warpgroup.first + group;
        if known.is_none() {
            d.fill(warpgroup.placeholder(at));
        }
        if warpgroup.groups.len() == group {
            warpgroup.groups.push_back(Group::default());
        }
        let products = &mut warpgroup.groups[group].products;
        if products.len() == product {
            let left = vec![[0; 4]; if kind.a.is_none() { THREADS } else { 0 }];
            products.push(Product { kind, left, accumulators: number, at });
        }
        let product = &mut products[product];
        if product.kind != kind || product.accumulators != number || product.at != at {
            return Err(Wrong::Differs(product.at));
        }
        if kind.a.is_none() {
            product.left[index] = left;
        }
        Ok(())
    });
    match issued {
        Ok(()) => (),
        Err(Wrong::Differs(other)) => {
            let message = format!(
                "its product at {} is not the one that its warpgroup's other threads issued at {}, with the same operands",
                Line(at),
                Line(other)
            );
            fail(Fault::Divergence, at, Some(other), message);
        }
        Err(Wrong::Touched(other)) => touched(at, other),
        Err(Wrong::Unfenced(other)) => {
            let since =
                other.map_or_else(String::new, |other| format!(" since {}, where they were the thread's", Line(other)));
            let message = format!("the product at {} takes registers with no wgmma::fence{since}", Line(at));
            fail(Fault::Accumulators, at, other, message);
        }
    }
}

enum Wrong {
    Differs(Site),
    Touched(Site),
    Unfenced(Option<Site>),
}

/// Whether these accumulators live in the warpgroup.
fn is_under_way(d: &[f32]) -> bool {
    d.iter().all(|d| d.to_bits() & !(LINES - 1) == UNDER_WAY)
}

fn touched(at: Site, other: Site) -> ! {
    let message =
        format!("accumulators touched between the product at {} and its wait, as found at {}", Line(other), Line(at));
    fail(Fault::Accumulators, at, Some(other), message)
}

pub fn wgmma_fence() {
    with(|block| {
        let (warpgroup, index) = block.warpgroup();
        let thread = &mut warpgroup.threads[index];
        thread.fences += 1;
        thread.loaded.clear();
    });
}

/// `ldmatrix_x4` for a left operand.
///
/// # Safety
/// As `ldmatrix_x4`.
#[track_caller]
pub unsafe fn left_x4(row: *const u32) -> [u32; 4] {
    // SAFETY: the caller's.
    let words = unsafe { ldmatrix_x4(row) };
    let at = Location::caller();
    with(|block| {
        let (warpgroup, index) = block.warpgroup();
        warpgroup.threads[index].loaded.push((words, at));
    });
    words
}

pub fn wgmma_commit() {
    with(|block| {
        let known = block.publish();
        let (warpgroup, index) = block.warpgroup();
        let thread = &mut warpgroup.threads[index];
        let group = thread.groups - warpgroup.first;
        (thread.groups, thread.products) = (thread.groups + 1, 0);
        if warpgroup.groups.len() == group {
            warpgroup.groups.push_back(Group::default());
        }
        let group = &mut warpgroup.groups[group];
        group.closed += 1;
        learn(&mut group.known, &known);
        if group.closed == THREADS {
            for thread in std::mem::take(&mut warpgroup.waiting) {
                block.wake(thread);
            }
        }
    });
}

#[track_caller]
pub fn wgmma_wait<const PENDING: u32>() {
    let wait = Wait { operation: Operation::WgmmaWait, at: Location::caller() };
    let target = with(|block| {
        let (warpgroup, index) = block.warpgroup();
        warpgroup.threads[index].groups.saturating_sub(PENDING as usize)
    });
    loop {
        let group = with(|block| {
            let current = block.current;
            let (warpgroup, _) = block.warpgroup();
            if warpgroup.first >= target {
                return None;
            }
            if warpgroup.groups[0].closed == THREADS {
                warpgroup.first += 1;
                return Some(warpgroup.groups.pop_front());
            }
            warpgroup.waiting.push(current);
            block.wait(wait);
            Some(None)
        });
        match group {
            None => break,
            Some(None) => suspend(),
            Some(Some(group)) => compute(&group),
        }
    }
    with(|block| {
        let warp = block.place().0;
        let (warpgroup, index) = block.warpgroup();
        warpgroup.threads[index].done = target;
        let known = warpgroup.known;
        block.acquire(warp, &known);
    });
}

fn compute(group: &Group) {
    let base = with(Block::shared_base).addr();
    for product in &group.products {
        let (rows, length) = product.kind.b_shape();
        if super::super::block::is_checked() {
            Tile::of(product.kind.b).check(rows, length, base, product.at);
            if let Some(a) = product.kind.a {
                let (rows, length) = product.kind.a_shape();
                Tile::of(a).check(rows, length, base, product.at);
            }
        }
        with(|block| {
            let a = left_of(product, block.shared());
            let b = Tile::of(product.kind.b).rows(block.shared(), rows, length);
            let (warpgroup, _) = block.warpgroup();
            let i = product.accumulators - warpgroup.first_accumulators;
            multiply(&mut warpgroup.accumulators[i].values, &a, &b, product.kind);
        });
    }
    with(|block| {
        let known = block.publish();
        let (warpgroup, _) = block.warpgroup();
        learn(&mut warpgroup.known, &group.known);
        learn(&mut warpgroup.known, &known);
    });
}

/// A, M x K.
fn left_of(product: &Product, shared: &[u8]) -> Vec<f32> {
    if let Some(a) = product.kind.a {
        let (rows, length) = product.kind.a_shape();
        let values = Tile::of(a).rows(shared, rows, length);
        return if product.kind.a_by_rows { transposed(&values, length) } else { values };
    }
    let mut a = vec![0.0; M * K];
    for (thread, words) in product.left.iter().enumerate() {
        for i in 0..8 {
            let (row, k) = a_place(thread % LANES, i);
            let half = words[i / 2] >> (i % 2 * 16) << 16;
            a[(thread / LANES * 16 + row) * K + k] = f32::from_bits(half);
        }
    }
    a
}

/// Rows of `length`, as columns.
fn transposed(values: &[f32], length: usize) -> Vec<f32> {
    (0..length).flat_map(|i| values.iter().skip(i).step_by(length).copied()).collect()
}

fn multiply(d: &mut [f32], a: &[f32], b: &[f32], kind: Kinds) {
    let n = kind.n;
    let by_rows;
    let b = if kind.b_by_rows {
        b
    } else {
        by_rows = transposed(b, K);
        &by_rows
    };
    for (d, a) in d.chunks_exact_mut(n).zip(a.chunks_exact(K)) {
        if !kind.accumulate {
            d.fill(0.0);
        }
        for (a, b) in a.iter().zip(b.chunks_exact(n)) {
            for (d, b) in d.iter_mut().zip(b) {
                *d += a * b;
            }
        }
    }
}

fn settle(d: &mut [f32], at: Site) {
    let address = d.as_ptr().addr();
    let other = with(|block| {
        let (warpgroup, index) = block.warpgroup();
        let thread = &mut warpgroup.threads[index];
        let i = thread.under_way.iter().position(|(known, _)| *known == address)?;
        let (_, number) = thread.under_way[i];
        let accumulators = &mut warpgroup.accumulators[number - warpgroup.first_accumulators];
        if accumulators.group >= thread.done || !is_under_way(d) {
            return Some(accumulators.at);
        }
        thread.under_way.swap_remove(i);
        thread.settled.insert(address, (thread.fences, at));
        for (i, d) in d.iter_mut().enumerate() {
            let (row, column) = place(index, i);
            *d = accumulators.values[row * accumulators.n + column];
        }
        accumulators.settled += 1;
        while warpgroup.accumulators.front().is_some_and(|first| first.settled == THREADS) {
            warpgroup.accumulators.pop_front();
            warpgroup.first_accumulators += 1;
        }
        None
    });
    if let Some(other) = other {
        touched(at, other);
    }
}

macro_rules! wgmma {
    ($($floats:literal $product:ident $product_with:ident $settle:ident)*) => {$(
        #[track_caller]
        pub fn $product<const TRANSPOSE_A: u32, const TRANSPOSE_B: u32>(
            d: &mut [f32; $floats],
            a: u64,
            b: u64,
            accumulate: bool,
        ) {
            let (a_by_rows, b_by_rows) = (TRANSPOSE_A == 1, TRANSPOSE_B == 1);
            let kind = Kinds { n: 2 * $floats, a: Some(a), b, a_by_rows, b_by_rows, accumulate };
            issue(d, [0; 4], kind, Location::caller());
        }

        #[track_caller]
        pub fn $product_with<const TRANSPOSE_B: u32>(d: &mut [f32; $floats], a: [u32; 4], b: u64, accumulate: bool) {
            let b_by_rows = TRANSPOSE_B == 1;
            let kind = Kinds { n: 2 * $floats, a: None, b, a_by_rows: false, b_by_rows, accumulate };
            issue(d, a, kind, Location::caller());
        }

        #[track_caller]
        pub fn $settle(d: &mut [f32; $floats]) {
            settle(d, Location::caller());
        }
    )*};
}

wgmma! {
    32 wgmma_n64 wgmma_with_n64 settle_n64
    64 wgmma_n128 wgmma_with_n128 settle_n128
    96 wgmma_n192 wgmma_with_n192 settle_n192
    128 wgmma_n256 wgmma_with_n256 settle_n256
}
