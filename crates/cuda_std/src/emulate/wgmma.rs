//! `wgmma.mma_async`: all threads of a warpgroup issue the same instructions. A group of them is computed once all 128
//! threads have committed it and one thread waits for it. [`crate::hopper::wgmma`] documents the accumulator layout.
//!
//! From the first wgmma to the `fence_accumulators` after the wait, the emulator holds the accumulator values itself.
//! The thread's array contains a signaling NaN that encodes the source line of the wgmma. `fence_accumulators` detects
//! a write to the array in the meantime. [`check_accumulator_read`](super::access::check_accumulator_read) detects a
//! value computed from the array, because arithmetic preserves all bits of the NaN except the signaling bit.

use super::LANES;
use super::access::check;
use super::block::{Block, fail, is_checked, suspend, with};
use super::checker::Kind;
use super::collective::collective;
use super::order::Clock;
use super::report::{Fault, Line, Site};
use super::tensor::{a_position, ldmatrix_x4};
use super::tensor_map::swizzle;
use super::wait::{Operation, Wait};
use super::warpgroup::{
    Format, Group, Instruction, IssueError, K, M, Operands, THREADS, Warpgroup, is_pending, position,
};
use crate::fp8::Fp8Format;
use std::panic::Location;

impl Block {
    /// Returns the running thread's warpgroup and the thread's index in it.
    fn warpgroup(&mut self) -> (&mut Warpgroup, usize) {
        let (group, thread) = (self.current / THREADS, self.current % THREADS);
        (self.hopper.warpgroups.entry(group).or_default(), thread)
    }

    /// Returns the warp of the tensor cores of the running thread's warpgroup in the race check: the last warp numbers, which
    /// smaller blocks do not use. Without a free number, it is the running thread's warp, and fewer races are found.
    fn tensor_core_warp(&self) -> usize {
        let warp = LANES - 1 - self.current / THREADS;
        if warp < (self.threads as usize).div_ceil(LANES) { self.current / LANES } else { warp }
    }

    /// Lets the tensor cores read operands after `committed`.
    fn start_reads(&mut self, committed: &Clock) {
        let warp = self.tensor_core_warp();
        self.acquire(warp, committed);
        if warp != self.current / LANES {
            self.reader = Some(warp * LANES);
        }
    }

    /// Ends the reads of the tensor cores and returns their clock, without what they have waited for.
    fn finish_reads(&mut self) -> Clock {
        self.reader = None;
        let warp = self.tensor_core_warp();
        let finished = self.checker.as_mut().map_or_else(Clock::default, |checker| checker.order().release(warp));
        finished.of_warp(warp)
    }
}

/// Returns the descriptor of a K-major operand with the 128-byte swizzle, encoded as on the device.
pub fn k_major_operand<T>(tile: *const T, offset: u32) -> u64 {
    descriptor(tile, 1, offset)
}

/// Returns the descriptor of an MN-major operand with the 128-byte swizzle, encoded as on the device.
pub fn mn_major_operand<T>(tile: *const T, leading: u32, offset: u32) -> u64 {
    descriptor(tile, leading >> 4, offset)
}

fn descriptor<T>(tile: *const T, leading: u32, offset: u32) -> u64 {
    let start = with(Block::shared_base).addr();
    let address = (tile.addr().wrapping_sub(start) & 0x3_ffff) as u64;
    ((address >> 4) | u64::from(leading) << 16 | (64 << 32) | (1 << 62)) + u64::from(offset)
}

/// Bytes in a row of a tile.
const ROW_BYTES: usize = 128;

/// A decoded descriptor of an operand in shared memory. A K-major operand is 32 bytes of each row; an MN-major operand
/// is 16 full rows of one tile per 64 columns of bf16.
#[derive(Clone, Copy)]
struct Tile {
    start: usize,
    /// Bytes from one group of eight rows to the next.
    stride: usize,
    /// Bytes from one tile of 64 columns to the next, if MN-major.
    leading: usize,
}

impl Tile {
    fn decode(descriptor: u64) -> Self {
        let bytes = |bit: u32| (descriptor as usize >> bit & 0x3fff) << 4;
        Self { start: bytes(0), stride: bytes(32), leading: bytes(16) }
    }

    /// Returns the offset past the last byte of `rows` rows of `length` bytes.
    fn end(self, rows: usize, length: usize) -> usize {
        let tiles = length.div_ceil(ROW_BYTES);
        (self.start & !1023) + (tiles - 1) * self.leading + (rows - 1) / 8 * self.stride + 1024
    }

    /// Returns the offset of byte `i` of `row`.
    #[inline(always)]
    fn offset(self, row: usize, i: usize) -> usize {
        let tile = self.start + i / ROW_BYTES * self.leading;
        swizzle(tile + row / 8 * self.stride + row % 8 * ROW_BYTES + i % ROW_BYTES)
    }

    /// Reads `rows` rows of `length` bytes.
    fn rows(self, shared: &[u8], (rows, length): (usize, usize), format: Format) -> Vec<f32> {
        let mut values = Vec::with_capacity(rows * length / format.bytes());
        for row in 0..rows {
            for chunk in (0..length).step_by(16) {
                format.decode(&shared[self.offset(row, chunk)..][..16], &mut values);
            }
        }
        values
    }

    /// Checks the access to `rows` rows of `length` bytes in shared memory at `base`.
    fn check(self, rows: usize, length: usize, base: usize, at: Site) {
        for row in 0..rows {
            for chunk in (0..length).step_by(16) {
                check(Kind::AsyncRead, base + self.offset(row, chunk), 16, 16, at);
            }
        }
    }
}

/// Stops the kernel if the warpgroup is incomplete or an operand is outside shared memory.
fn check_issue(operands: Operands, at: Site) {
    let fits = |descriptor: u64, (rows, length): (usize, usize), shared: usize| {
        Tile::decode(descriptor).end(rows, length) <= shared
    };
    let (threads, shared) = with(|block| (block.threads as usize, block.shared().len()));
    if threads < (with(|block| block.current) / THREADS + 1) * THREADS {
        let message = format!("invalid operand: wgmma in a warpgroup of fewer than {THREADS} threads ({})", Line(at));
        fail(Fault::Operand, at, None, message);
    }
    if operands.a.is_some_and(|a| !fits(a, operands.a_shape(), shared)) || !fits(operands.b, operands.b_shape(), shared)
    {
        let start = |descriptor: u64| Tile::decode(descriptor).start;
        let a = operands.a.map_or_else(String::new, |a| format!("shared memory + {} or ", start(a)));
        let message = format!(
            "out-of-bounds access: wgmma operand at {a}shared memory + {}, which has {shared} bytes ({})",
            start(operands.b),
            Line(at)
        );
        fail(Fault::OutOfBounds, at, None, message);
    }
}

/// Issues a wgmma of the running thread.
fn issue(d: &mut [f32], a_registers: [u32; 4], operands: Operands, at: Site) {
    check_issue(operands, at);
    let issued = with(|block| {
        let (warpgroup, index) = block.warpgroup();
        let number = warpgroup.pending_accumulators(index, d, operands, at)?;
        if let Some(&(_, loaded)) =
            warpgroup.threads[index].loaded.iter().find(|(words, _)| operands.a.is_none() && *words == a_registers)
        {
            return Err(IssueError::Unfenced(Some(loaded)));
        }
        warpgroup.record(index, number, a_registers, operands, at)
    });
    match issued {
        Ok(()) => (),
        Err(IssueError::Mismatch(other)) => {
            let message = format!(
                "warpgroup divergence: the wgmma at {} differs from the one that other threads of the warpgroup issued at \
                 {}; all threads must issue the same instructions with the same operands",
                Line(at),
                Line(other)
            );
            fail(Fault::Divergence, at, Some(other), message);
        }
        Err(IssueError::Modified(other)) => modified(at, other),
        Err(IssueError::Unfenced(other)) => {
            let since = other
                .map_or_else(String::new, |other| format!(" after their last access by the thread ({})", Line(other)));
            let message =
                format!("missing wgmma::fence: the wgmma at {} uses registers with no wgmma::fence{since}", Line(at));
            fail(Fault::Accumulators, at, other, message);
        }
    }
}

/// Stops the kernel, which has modified accumulators of the wgmma at `other` before the wait.
fn modified(at: Site, other: Site) -> ! {
    let message = format!(
        "premature accumulator access: the accumulators of the wgmma at {} were accessed before its wait \
         (detected at {})",
        Line(other),
        Line(at)
    );
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

/// Loads a fragment of an A operand in registers, like `ldmatrix_x4`.
///
/// # Safety
/// Same as `ldmatrix_x4`.
#[track_caller]
pub unsafe fn load_a_x4(row: *const u32) -> [u32; 4] {
    // SAFETY: guaranteed by the caller.
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
        let clock = block.release();
        let (warpgroup, index) = block.warpgroup();
        let thread = &mut warpgroup.threads[index];
        let group = thread.groups - warpgroup.first;
        (thread.groups, thread.issued) = (thread.groups + 1, 0);
        if warpgroup.groups.len() == group {
            warpgroup.groups.push_back(Group::default());
        }
        let group = &mut warpgroup.groups[group];
        group.committed += 1;
        group.clock.join(&clock);
        if group.committed == THREADS {
            for thread in std::mem::take(&mut warpgroup.waiting) {
                block.wake(thread);
            }
        }
    });
}

#[track_caller]
pub fn wgmma_wait<const N: u32>() {
    let wait = Wait { operation: Operation::WgmmaWait, at: Location::caller() };
    // The instruction is `.sync.aligned`. Lanes share a clock, so a lane that has not waited yet would otherwise know what
    // another lane has waited for.
    collective(wait, |_| (), |_| (), |_, _| ());
    let target = with(|block| {
        let (warpgroup, index) = block.warpgroup();
        warpgroup.threads[index].groups.saturating_sub(N as usize)
    });
    loop {
        let group = with(|block| {
            let current = block.current;
            let (warpgroup, _) = block.warpgroup();
            if warpgroup.first >= target {
                return None;
            }
            if warpgroup.groups[0].committed == THREADS {
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
        let warp = block.warp_and_lane().0;
        let (warpgroup, index) = block.warpgroup();
        warpgroup.threads[index].done = target;
        // Another thread may already have computed later groups. This thread has not waited for them.
        let newest = target.checked_sub(1 + warpgroup.first_clock).and_then(|i| warpgroup.clocks.get(i).cloned());
        let unneeded = warpgroup.threads.iter().map(|thread| thread.done).min().unwrap_or(0);
        while warpgroup.first_clock + 1 < unneeded {
            warpgroup.clocks.pop_front();
            warpgroup.first_clock += 1;
        }
        if let Some(clock) = newest {
            block.acquire(warp, &clock);
        }
    });
}

/// Computes all instructions of a group.
///
/// The tensor cores read the operands at any time between the commits and the wait. For the race check, they are therefore a
/// warp of their own: its reads follow the commits of all threads, and precede only what a thread does after its wait. A wait
/// orders nothing else: ordinary loads of other warps before their commits may still be on their way.
fn compute(group: &Group) {
    let base = with(Block::shared_base).addr();
    with(|block| block.start_reads(&group.clock));
    for instruction in &group.instructions {
        let operands = instruction.operands;
        let (rows, length) = operands.b_shape();
        if is_checked() {
            Tile::decode(operands.b).check(rows, length, base, instruction.at);
            if let Some(a) = operands.a {
                let (rows, length) = operands.a_shape();
                Tile::decode(a).check(rows, length, base, instruction.at);
            }
        }
        with(|block| {
            let a = a_values(instruction, block.shared());
            let b = Tile::decode(operands.b).rows(block.shared(), (rows, length), operands.formats[1]);
            let (warpgroup, _) = block.warpgroup();
            let i = instruction.accumulators - warpgroup.first_accumulators;
            multiply(&mut warpgroup.accumulators[i].values, &a, &b, operands);
        });
    }
    with(|block| {
        let clock = block.finish_reads();
        let (warpgroup, _) = block.warpgroup();
        warpgroup.clock.join(&clock);
        warpgroup.clocks.push_back(warpgroup.clock.clone());
    });
}

/// Returns A as rows of K values.
fn a_values(instruction: &Instruction, shared: &[u8]) -> Vec<f32> {
    let operands = instruction.operands;
    if let Some(a) = operands.a {
        let values = Tile::decode(a).rows(shared, operands.a_shape(), operands.formats[0]);
        return if operands.a_mn_major { transposed(&values, M) } else { values };
    }
    let mut a = vec![0.0; M * K];
    for (thread, words) in instruction.a_registers.iter().enumerate() {
        for i in 0..8 {
            let (row, k) = a_position(thread % LANES, i);
            let half = words[i / 2] >> (i % 2 * 16) << 16;
            a[(thread / LANES * 16 + row) * K + k] = f32::from_bits(half);
        }
    }
    a
}

/// Transposes a matrix with rows of `length` values.
fn transposed(values: &[f32], length: usize) -> Vec<f32> {
    (0..length).flat_map(|i| values.iter().skip(i).step_by(length).copied()).collect()
}

/// Computes D = A · B + (D if `accumulate`).
fn multiply(d: &mut [f32], a: &[f32], b: &[f32], operands: Operands) {
    let (n, k) = (operands.n, operands.k());
    let transposed_b;
    let b = if operands.b_mn_major {
        b
    } else {
        transposed_b = transposed(b, k);
        &transposed_b
    };
    for (d, a) in d.chunks_exact_mut(n).zip(a.chunks_exact(k)) {
        if !operands.accumulate {
            d.fill(0.0);
        }
        for (a, b) in a.iter().zip(b.chunks_exact(n)) {
            for (d, b) in d.iter_mut().zip(b) {
                *d += a * b;
            }
        }
    }
}

/// Moves the values of pending accumulators back into the thread's array.
fn fence_accumulators(d: &mut [f32], at: Site) {
    let address = d.as_ptr().addr();
    let other = with(|block| {
        let (warpgroup, index) = block.warpgroup();
        let thread = &mut warpgroup.threads[index];
        let i = thread.pending.iter().position(|(known, _)| *known == address)?;
        let (_, number) = thread.pending[i];
        let accumulators = &mut warpgroup.accumulators[number - warpgroup.first_accumulators];
        if accumulators.group >= thread.done || !is_pending(d) {
            return Some(accumulators.at);
        }
        thread.pending.swap_remove(i);
        thread.completed.insert(address, (thread.fences, at));
        for (i, d) in d.iter_mut().enumerate() {
            let (row, column) = position(index, i);
            *d = accumulators.values[row * accumulators.n + column];
        }
        accumulators.completed += 1;
        while warpgroup.accumulators.front().is_some_and(|first| first.completed == THREADS) {
            warpgroup.accumulators.pop_front();
            warpgroup.first_accumulators += 1;
        }
        None
    });
    if let Some(other) = other {
        modified(at, other);
    }
}

macro_rules! wgmma {
    ($($floats:literal $wgmma_ss:ident $wgmma_rs:ident $wgmma_fp8:ident $fence:ident)*) => {$(
        #[track_caller]
        pub fn $wgmma_ss<const TRANSPOSE_A: u32, const TRANSPOSE_B: u32>(
            d: &mut [f32; $floats],
            a: u64,
            b: u64,
            accumulate: bool,
        ) {
            let (a_mn_major, b_mn_major) = (TRANSPOSE_A == 1, TRANSPOSE_B == 1);
            let formats = [Format::Bf16; 2];
            let operands = Operands { n: 2 * $floats, formats, a: Some(a), b, a_mn_major, b_mn_major, accumulate };
            issue(d, [0; 4], operands, Location::caller());
        }

        #[track_caller]
        pub fn $wgmma_rs<const TRANSPOSE_B: u32>(d: &mut [f32; $floats], a: [u32; 4], b: u64, accumulate: bool) {
            let b_mn_major = TRANSPOSE_B == 1;
            let formats = [Format::Bf16; 2];
            let operands =
                Operands { n: 2 * $floats, formats, a: None, b, a_mn_major: false, b_mn_major, accumulate };
            issue(d, a, operands, Location::caller());
        }

        #[track_caller]
        pub fn $wgmma_fp8<const A_E5M2: bool, const B_E5M2: bool>(
            d: &mut [f32; $floats],
            a: u64,
            b: u64,
            accumulate: bool,
        ) {
            let format = |e5m2| Format::Fp8(if e5m2 { Fp8Format::E5m2 } else { Fp8Format::E4m3 });
            let (formats, n) = ([format(A_E5M2), format(B_E5M2)], 2 * $floats);
            let operands = Operands { n, formats, a: Some(a), b, a_mn_major: false, b_mn_major: false, accumulate };
            issue(d, [0; 4], operands, Location::caller());
        }

        #[track_caller]
        pub fn $fence(d: &mut [f32; $floats]) {
            fence_accumulators(d, Location::caller());
        }
    )*};
}

wgmma! {
    32 wgmma_ss_n64 wgmma_rs_n64 wgmma_fp8_n64 fence_accumulators_n64
    64 wgmma_ss_n128 wgmma_rs_n128 wgmma_fp8_n128 fence_accumulators_n128
    96 wgmma_ss_n192 wgmma_rs_n192 wgmma_fp8_n192 fence_accumulators_n192
    128 wgmma_ss_n256 wgmma_rs_n256 wgmma_fp8_n256 fence_accumulators_n256
}
