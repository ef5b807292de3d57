//! `sm_90a` instructions: mbarriers, TMA and wgmma.
//!
//! Asynchronous operations execute as late as possible. A TMA load completes when no thread of its block can continue;
//! a wgmma or TMA store executes when a thread waits for it. Until then the target of a load and the accumulators of a
//! wgmma contain NaN, so a premature use is visible.

use super::LANES;
use super::access::check;
use super::block::{Block, fail, with};
use super::checker::Kind;
use super::collective::{Operation, Slot, Slots, Wait, collective};
use super::mbarrier::MBarrier;
use super::report::{Fault, Line, Report, Site};
use super::tma::{Load, Store};
use super::wgmma::Warpgroup;
use std::array;
use std::collections::{BTreeMap, VecDeque};
use std::panic::Location;

pub use super::access::load128 as load_x4;
pub use super::mbarrier::{
    fence_mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect, mbarrier_init, mbarrier_try_wait,
};
pub use super::tma::{
    bulk_add_f32, bulk_store, complete_one_load, finish_read_stores, tensor_map, tma_commit, tma_load_2d, tma_load_3d,
    tma_prefetch, tma_store_2d, tma_store_3d, tma_wait, tma_wait_read,
};
pub use super::wgmma::{
    check_accumulator_read, fence_accumulators_n64, fence_accumulators_n128, fence_accumulators_n192,
    fence_accumulators_n256, k_major_operand, load_a_x4, mn_major_operand, wgmma_commit, wgmma_fence, wgmma_fp8_n64,
    wgmma_fp8_n128, wgmma_fp8_n192, wgmma_fp8_n256, wgmma_rs_n64, wgmma_rs_n128, wgmma_rs_n192, wgmma_rs_n256,
    wgmma_ss_n64, wgmma_ss_n128, wgmma_ss_n192, wgmma_ss_n256, wgmma_wait,
};

/// State of a block that belongs to these instructions.
#[derive(Default)]
pub struct State {
    /// mbarriers by offset in shared memory.
    pub(super) barriers: BTreeMap<usize, MBarrier>,
    /// Pending TMA loads, oldest first.
    pub(super) loads: VecDeque<Load>,
    /// Pending TMA stores of each thread, oldest first.
    pub(super) stores: BTreeMap<usize, Vec<Store>>,
    /// Number of committed groups of TMA stores of each thread.
    pub(super) store_groups: BTreeMap<usize, usize>,
    pub(super) warpgroups: BTreeMap<usize, Warpgroup>,
}

impl State {
    /// Returns the fault of a block that ends in this state, if any: (fault, thread, line, message).
    fn incomplete(&self) -> Option<(Fault, Option<usize>, Site, String)> {
        let load = self.loads.front().map(|load| {
            let text = format!(
                "incomplete asynchronous copy: the block ends before its TMA load has completed ({})",
                Line(load.at())
            );
            (Fault::AsyncCopy, None, load.at(), text)
        });
        let store = || {
            let (thread, store) = self.stores.iter().find_map(|(thread, stores)| Some((*thread, stores.first()?)))?;
            let text = format!(
                "incomplete asynchronous copy: the thread ends without waiting for its TMA store ({})",
                Line(store.at())
            );
            Some((Fault::AsyncCopy, Some(thread), store.at(), text))
        };
        let wgmma = || {
            let (thread, at) = self.warpgroups.iter().find_map(|(group, state)| state.pending(*group))?;
            let text = format!("incomplete wgmma: the thread ends without waiting for its wgmma ({})", Line(at));
            Some((Fault::Accumulators, Some(thread), at, text))
        };
        load.or_else(store).or_else(wgmma)
    }

    /// Returns what the mbarrier at this offset is missing to complete its phase.
    pub fn missing(&self, offset: usize) -> String {
        self.barriers.get(&offset).map_or_else(String::new, MBarrier::missing)
    }
}

/// Returns the offset of `pointer` in the running block's shared memory. Stops the kernel if the `bytes` bytes there
/// are out of bounds or misaligned.
pub(super) fn shared_offset<T>(pointer: *const T, bytes: usize, align: usize, at: Site, what: &str) -> usize {
    let (start, size) = with(|block| (block.shared_base().addr(), block.shared().len()));
    let offset = pointer.addr().wrapping_sub(start);
    let line = Line(at);
    if offset >= size || offset + bytes > size {
        let message = format!("out-of-bounds access: {what} of {bytes} bytes outside shared memory ({line})");
        fail(Fault::OutOfBounds, at, None, message);
    }
    if !offset.is_multiple_of(align) {
        let message = format!(
            "misaligned access: {what} at shared memory + {offset}, which is not aligned to {align} bytes ({line})"
        );
        fail(Fault::Misaligned, at, None, message);
    }
    offset
}

/// Applies the 128-byte swizzle to the address of a byte in 128-byte rows, as TMA and wgmma do.
#[inline(always)]
pub(super) fn swizzle(address: usize) -> usize {
    address ^ (address >> 7 & 7) << 4
}

/// Returns the pointer unchanged: the emulator has no shared window.
pub fn window<T>(pointer: *mut T) -> *mut T {
    pointer
}

/// Returns the pointer unchanged.
pub fn opaque<T>(window: *mut T) -> *mut T {
    window
}

pub fn fence_async_proxy_global() {
    with(|block| {
        if let Some(checker) = &mut block.checker {
            checker.global_proxy_fenced(block.current);
        }
    });
}

pub fn fence_async_proxy() {
    with(|block| {
        if let Some(checker) = &mut block.checker {
            checker.proxy_fenced(block.current);
        }
    });
}

/// Asserts that N is a valid operand of `setmaxnreg`.
const fn registers<const N: u32>() {
    const { assert!(N.is_multiple_of(8) && N >= 24 && N <= 256, "setmaxnreg: expected a multiple of 8 in 24..=256") };
}

pub fn increase_registers<const N: u32>() {
    registers::<N>();
}

pub fn decrease_registers<const N: u32>() {
    registers::<N>();
}

/// # Safety
/// `row` must be valid for writes of 16 bytes and 16-byte aligned.
#[track_caller]
pub unsafe fn stmatrix_x4(row: *mut u32, words: [u32; 4]) {
    // A thread holds elements 2 · (lane % 4) and the next of row lane / 4 of each matrix.
    // SAFETY: guaranteed by the caller.
    unsafe {
        store_matrices(row, words, |slots, matrix, row, column| (slots[row * 4 + column / 2].0[matrix], column % 2));
    }
}

/// Stores the transposes of the matrices of [`stmatrix_x4`].
///
/// # Safety
/// See [`stmatrix_x4`].
#[track_caller]
pub unsafe fn stmatrix_x4_trans(row: *mut u32, words: [u32; 4]) {
    // SAFETY: guaranteed by the caller.
    unsafe { store_matrices(row, words, |slots, matrix, row, column| (slots[column * 4 + row / 2].0[matrix], row % 2)) }
}

/// Stores four 8 x 8 matrices of 16-bit elements. `element` returns the word that holds an element of a matrix, and which
/// half of the word it is.
///
/// # Safety
/// See [`stmatrix_x4`].
#[track_caller]
unsafe fn store_matrices(
    row: *mut u32,
    words: [u32; 4],
    element: impl Fn(&Slots, usize, usize, usize) -> (u32, usize),
) {
    let wait = Wait { operation: Operation::StMatrix, at: Location::caller() };
    check(Kind::Write, row.addr(), 16, 16, wait.at);
    let deposit = |slot: &mut Slot| slot.0[..4].copy_from_slice(&words);
    let distribute = |slots: &mut Slots| {
        let half = |slots: &Slots, matrix, row, column| {
            let (word, half) = element(slots, matrix, row, column);
            word >> (16 * half) & 0xffff
        };
        let rows: [[u32; 4]; LANES] = array::from_fn(|lane| {
            let (matrix, row) = (lane / 8, lane % 8);
            array::from_fn(|i| half(slots, matrix, row, 2 * i) | half(slots, matrix, row, 2 * i + 1) << 16)
        });
        for (slot, row) in slots.iter_mut().zip(rows) {
            slot.0[..4].copy_from_slice(&row);
        }
    };
    let row_words =
        collective(wait, deposit, distribute, |slots, lane| array::from_fn::<u32, 4, _>(|i| slots[lane].0[i]));
    // SAFETY: guaranteed by the caller.
    unsafe { row.cast::<[u32; 4]>().write_unaligned(row_words) };
}

/// # Safety
/// `at` must be valid for writes of 2 bytes and 2-byte aligned.
#[track_caller]
pub unsafe fn store_b16(at: *mut u16, value: u16) {
    // SAFETY: guaranteed by the caller.
    unsafe { super::store(at, value) }
}

impl Block {
    /// Returns the report of a block that ended before its asynchronous operations were waited for.
    pub fn incomplete_async_work(&self) -> Option<Report> {
        let copy = || {
            let (thread, at) =
                self.copies.iter().enumerate().find_map(|(thread, copies)| Some((thread, copies.oldest()?)))?;
            let text = format!(
                "incomplete asynchronous copy: the thread ends without waiting for its cp.async ({})",
                Line(at)
            );
            Some((Fault::AsyncCopy, Some(thread), at, text))
        };
        let (fault, thread, at, message) = self.hopper.incomplete().or_else(copy)?;
        let report = self.report_of(fault, Some(at), None, message);
        Some(Report { thread: thread.map(|thread| thread as u32), ..report })
    }
}
