//! `sm_90a` instructions: mbarriers, TMA and wgmma.
//!
//! Asynchronous operations execute as late as possible. A TMA load completes when no thread of its block can continue;
//! a wgmma or TMA store executes when a thread waits for it. Until then the target of a load and the accumulators of a
//! wgmma contain NaN, so a premature use is visible.

use super::LANES;
use super::access::{check, store};
use super::block::with;
use super::checker::Kind;
use super::collective::collective;
use super::wait::{Operation, Wait};
use super::warp::{Slot, Slots};
use std::array;
use std::panic::Location;

pub use super::access::load128 as load_x4;
pub use super::mbarrier::{
    fence_mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect, mbarrier_init, mbarrier_try_wait,
};
pub use super::tensor_map::tensor_map;
pub use super::tma::{
    bulk_add_f32, bulk_load, bulk_load_with, bulk_store, tma_commit, tma_load_2d, tma_load_3d, tma_prefetch,
    tma_store_2d, tma_store_3d, tma_wait, tma_wait_read,
};
pub use super::wgmma::{
    fence_accumulators_n64, fence_accumulators_n128, fence_accumulators_n192, fence_accumulators_n256, k_major_operand,
    load_a_x4, mn_major_operand, wgmma_commit, wgmma_fence, wgmma_fp8_n64, wgmma_fp8_n128, wgmma_fp8_n192,
    wgmma_fp8_n256, wgmma_rs_n64, wgmma_rs_n128, wgmma_rs_n192, wgmma_rs_n256, wgmma_ss_n64, wgmma_ss_n128,
    wgmma_ss_n192, wgmma_ss_n256, wgmma_wait,
};

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
            checker.order().global_proxy_fenced(block.current);
        }
    });
}

pub fn fence_async_proxy() {
    with(|block| {
        if let Some(checker) = &mut block.checker {
            checker.order().proxy_fenced(block.current);
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
    unsafe { store(at, value) }
}
