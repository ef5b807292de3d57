//! Loads, stores, atomics and asynchronous copies.

use super::block::{is_running, with};
use std::ptr;
use std::sync::atomic::{self, AtomicU32, Ordering};

/// Generic address of the block's dynamic shared memory; null on the host, where layouts are only measured.
#[inline]
pub fn shared_base() -> *mut u8 {
    if is_running() { with(super::block::Block::shared_base) } else { ptr::null_mut() }
}

/// # Safety
/// `pointer` must be valid for reads of a `T`.
#[inline]
pub unsafe fn load<T: Copy>(pointer: *const T) -> T {
    // SAFETY: the caller's.
    unsafe { *pointer }
}

/// # Safety
/// `pointer` must be valid for writes of a `T`.
#[inline]
pub unsafe fn store<T: Copy>(pointer: *mut T, value: T) {
    // SAFETY: the caller's.
    unsafe { *pointer = value }
}

/// # Safety
/// `pointer` must be valid for reads of 16 bytes and 16-byte aligned.
#[inline]
pub unsafe fn load128(pointer: *const u32) -> [u32; 4] {
    // SAFETY: the caller's.
    unsafe { load::<[u32; 4]>(pointer.cast()) }
}

/// # Safety
/// `pointer` must be valid for writes of 16 bytes and 16-byte aligned.
#[inline]
pub unsafe fn store128(pointer: *mut u32, value: [u32; 4]) {
    // SAFETY: the caller's.
    unsafe { store::<[u32; 4]>(pointer.cast(), value) }
}

/// # Safety
/// As [`load128`].
#[inline]
pub unsafe fn load128_streaming(pointer: *const u32) -> [u32; 4] {
    // SAFETY: the caller's.
    unsafe { load128(pointer) }
}

/// # Safety
/// As [`store128`].
#[inline]
pub unsafe fn store128_streaming(pointer: *mut u32, value: [u32; 4]) {
    // SAFETY: the caller's.
    unsafe { store128(pointer, value) }
}

/// # Safety
/// `pointer` must be valid for reads and writes, and accessed only atomically meanwhile.
#[inline]
pub unsafe fn atomic_add_u32(pointer: *mut u32, value: u32) -> u32 {
    // SAFETY: the caller's.
    unsafe { AtomicU32::from_ptr(pointer) }.fetch_add(value, Ordering::Relaxed)
}

/// # Safety
/// As [`atomic_add_u32`].
#[inline]
pub unsafe fn atomic_add_f32(pointer: *mut f32, value: f32) {
    // SAFETY: the caller's; f32 and u32 have one layout.
    let word = unsafe { AtomicU32::from_ptr(pointer.cast()) };
    let add = |bits| Some((f32::from_bits(bits) + value).to_bits());
    let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
}

#[inline]
pub fn fence_device() {
    atomic::fence(Ordering::AcqRel);
}

/// A thread's `cp.async`s under way. Their bytes move when the thread waits for them, the latest moment there is.
#[derive(Default)]
pub struct AsyncCopies {
    /// Oldest first.
    copies: Vec<AsyncCopy>,
    /// Groups closed so far.
    groups: u32,
}

#[derive(Clone, Copy)]
struct AsyncCopy {
    to: *mut u32,
    /// None: zeros.
    from: Option<*const u32>,
    group: u32,
}

impl AsyncCopies {
    pub fn clear(&mut self) {
        self.copies.clear();
        self.groups = 0;
    }
}

/// # Safety
/// `to` must stay valid for writes of 16 bytes, and if `valid` `from` for reads, until the copy is waited for; both
/// 16-byte aligned.
#[inline]
pub unsafe fn async_copy_16(to: *mut u32, from: *const u32, valid: bool) {
    with(|block| {
        let mine = &mut block.copies[block.current];
        mine.copies.push(AsyncCopy { to, from: valid.then_some(from), group: mine.groups });
    });
}

#[inline]
pub fn async_copy_commit() {
    with(|block| block.copies[block.current].groups += 1);
}

#[inline]
pub fn async_copy_wait<const PENDING: u32>() {
    with(|block| {
        let mine = &mut block.copies[block.current];
        let done = mine.copies.partition_point(|copy| copy.group + PENDING < mine.groups);
        for copy in mine.copies.drain(..done) {
            // SAFETY: the contract of `async_copy_16`.
            unsafe { store128(copy.to, copy.from.map_or([0; 4], |from| load128(from))) };
        }
    });
}
