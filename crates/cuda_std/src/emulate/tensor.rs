//! `ldmatrix` and `mma`: the last lane to arrive computes for the whole warp. [`crate::mma`] documents the fragment
//! layouts.

use super::LANES;
use super::access::{check, words};
use super::arithmetic::tf32;
use super::checker::Kind;
use super::collective::collective;
use super::wait::{Operation, Wait};
use super::warp::{Slot, Slots};
use crate::fp8::Fp8Format;
use std::array;
use std::panic::Location;

/// Gathers the rows that the lanes point at. Each lane then receives `pick(matrix rows, lane)` of each matrix.
///
/// # Safety
/// `row` must be valid for reads of 16 bytes and 16-byte aligned.
#[inline]
unsafe fn ldmatrix(row: *const u32, wait: Wait, pick: impl Fn(&[[u32; 4]], usize) -> u32) -> [u32; 4] {
    check(Kind::WarpRead, row.addr(), 16, 16, wait.at);
    let deposit = |slot: &mut Slot| {
        let address = row.expose_provenance() as u64;
        (slot.0[0], slot.0[1]) = (address as u32, (address >> 32) as u32);
    };
    let complete = |slots: &mut Slots| {
        let rows: [[u32; 4]; LANES] = array::from_fn(|lane| {
            let address = u64::from(slots[lane].0[0]) | u64::from(slots[lane].0[1]) << 32;
            // SAFETY: guaranteed by the lane's caller.
            unsafe { words(std::ptr::with_exposed_provenance(address as usize)) }
        });
        for (lane, slot) in slots.iter_mut().enumerate() {
            for matrix in 0..4 {
                slot.0[matrix] = pick(&rows[matrix * 8..][..8], lane);
            }
        }
    };
    collective(wait, deposit, complete, |slots, lane| array::from_fn(|i| slots[lane].0[i]))
}

/// Lane l provides row l % 8 of matrix l / 8 and receives from each matrix the elements (l / 4, 2 (l % 4)) and
/// (l / 4, 2 (l % 4) + 1).
///
/// # Safety
/// `row` must be valid for reads of 16 bytes and 16-byte aligned.
#[track_caller]
pub unsafe fn ldmatrix_x4(row: *const u32) -> [u32; 4] {
    let wait = Wait { operation: Operation::LdMatrix, at: Location::caller() };
    // SAFETY: guaranteed by the caller.
    unsafe { ldmatrix(row, wait, |rows, lane| rows[lane / 4][lane % 4]) }
}

/// Same as [`ldmatrix_x4`], with each 8 x 8 matrix transposed.
///
/// # Safety
/// Same as [`ldmatrix_x4`].
#[track_caller]
pub unsafe fn ldmatrix_x4_trans(row: *const u32) -> [u32; 4] {
    let wait = Wait { operation: Operation::LdMatrix, at: Location::caller() };
    let pick = |rows: &[[u32; 4]], lane: usize| {
        let (row, col) = (lane % 4 * 2, lane / 4);
        let half = |row: usize| rows[row][col / 2] >> (col % 2 * 16) & 0xffff;
        half(row) | half(row + 1) << 16
    };
    // SAFETY: guaranteed by the caller.
    unsafe { ldmatrix(row, wait, pick) }
}

/// Returns (row, column) in A of a lane's element `i`.
#[inline(always)]
pub fn a_position(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + i / 2 % 2 * 8, lane % 4 * 2 + i % 2 + i / 4 * 8)
}

/// Returns (row, column) in B of a lane's element `i`.
#[inline(always)]
fn b_position(lane: usize, i: usize) -> (usize, usize) {
    (lane % 4 * 2 + i % 2 + i / 2 * 8, lane / 4)
}

/// Returns (row, column) in D of a lane's element `i`.
#[inline(always)]
fn d_position(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2)
}

type A<const K: usize> = [[f32; K]; 16];
type B<const K: usize> = [[f32; 8]; K];
type D = [[f32; 8]; 16];

#[inline(always)]
fn multiply<const K: usize>(d: &mut D, a: &A<K>, b: &B<K>) {
    for (d, a) in d.iter_mut().zip(a) {
        for (a, b) in a.iter().zip(b) {
            for (d, b) in d.iter_mut().zip(b) {
                *d += a * b;
            }
        }
    }
}

/// Assembles the lanes' fragments into matrices, calls `f`, and writes D to words 0..4 of the slots. K is 16, or 32 for FP8, where two
/// adjacent numbers have the position of one.
#[inline(always)]
fn with_matrices<const K: usize>(
    slots: &mut Slots,
    a_of: impl Fn(&[u32; 16], usize) -> f32,
    b_of: impl Fn(&[u32; 16], usize) -> f32,
    f: impl FnOnce(&mut D, A<K>, B<K>),
) {
    let (mut a, mut b, mut d) = ([[0.0; K]; 16], [[0.0; 8]; K], [[0.0; 8]; 16]);
    let width = K / 16;
    for (lane, slot) in slots.iter().enumerate() {
        for i in 0..8 * width {
            let (row, col) = a_position(lane, i / width);
            a[row][col * width + i % width] = a_of(&slot.0, i);
        }
        for i in 0..4 * width {
            let (row, col) = b_position(lane, i / width);
            b[row * width + i % width][col] = b_of(&slot.0, i);
        }
        for i in 0..4 {
            let (row, col) = d_position(lane, i);
            d[row][col] = f32::from_bits(slot.0[i]);
        }
    }
    f(&mut d, a, b);
    for (lane, slot) in slots.iter_mut().enumerate() {
        for i in 0..4 {
            let (row, col) = d_position(lane, i);
            slot.0[i] = d[row][col].to_bits();
        }
    }
}

#[inline(always)]
fn take_d(slots: &Slots, lane: usize) -> [f32; 4] {
    array::from_fn(|i| f32::from_bits(slots[lane].0[i]))
}

fn mma_bf16_warp(slots: &mut Slots) {
    let half = |word: u32, i: usize| f32::from_bits(if i.is_multiple_of(2) { word << 16 } else { word & 0xffff_0000 });
    with_matrices::<16>(
        slots,
        |w, i| half(w[4 + i / 2], i),
        |w, i| half(w[8 + i / 2], i),
        |d, a, b| multiply(d, &a, &b),
    );
}

fn mma_fp8_warp(slots: &mut Slots, a_format: Fp8Format) {
    let number = |word: u32, i: usize, format: Fp8Format| format.decode(word.to_le_bytes()[i % 4]);
    with_matrices::<32>(
        slots,
        |w, i| number(w[4 + i / 4], i, a_format),
        |w, i| number(w[8 + i / 4], i, Fp8Format::E4m3),
        |d, a, b| multiply(d, &a, &b),
    );
}

/// Splits each operand into two tf32 parts and sums the three largest partial products, small ones first, as the
/// device.
fn mma_f32_warp(slots: &mut Slots) {
    let word = |w: &[u32; 16], i: usize| f32::from_bits(w[i]);
    with_matrices::<16>(
        slots,
        |w, i| word(w, 4 + i),
        |w, i| word(w, 12 + i),
        |d, a, b| {
            let a_big = a.map(|row| row.map(tf32));
            let b_big = b.map(|row| row.map(tf32));
            let a_small = array::from_fn(|r| array::from_fn(|c| tf32(a[r][c] - a_big[r][c])));
            let b_small = array::from_fn(|r| array::from_fn(|c| tf32(b[r][c] - b_big[r][c])));
            multiply(d, &a_small, &b_big);
            multiply(d, &a_big, &b_small);
            multiply(d, &a_big, &b_big);
        },
    );
}

/// Multiplies matrices of 16-bit or 8-bit numbers. `compute` does it for the whole warp.
#[track_caller]
fn mma_packed(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2], compute: impl FnOnce(&mut Slots)) {
    let wait = Wait { operation: Operation::Mma, at: Location::caller() };
    let deposit = |slot: &mut Slot| {
        slot.0[..4].copy_from_slice(&d.map(f32::to_bits));
        slot.0[4..8].copy_from_slice(&a);
        slot.0[8..10].copy_from_slice(&b);
    };
    *d = collective(wait, deposit, compute, take_d);
}

#[track_caller]
pub fn mma_bf16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    mma_packed(d, a, b, mma_bf16_warp);
}

#[track_caller]
pub fn mma_e4m3(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    mma_packed(d, a, b, |slots| mma_fp8_warp(slots, Fp8Format::E4m3));
}

#[track_caller]
pub fn mma_e5m2(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    mma_packed(d, a, b, |slots| mma_fp8_warp(slots, Fp8Format::E5m2));
}

#[track_caller]
pub fn mma_f32(d: &mut [f32; 4], a: [f32; 8], b: [f32; 4]) {
    let wait = Wait { operation: Operation::Mma, at: Location::caller() };
    let deposit = |slot: &mut Slot| {
        slot.0[..4].copy_from_slice(&d.map(f32::to_bits));
        slot.0[4..12].copy_from_slice(&a.map(f32::to_bits));
        slot.0[12..].copy_from_slice(&b.map(f32::to_bits));
    };
    *d = collective(wait, deposit, mma_f32_warp, take_d);
}
