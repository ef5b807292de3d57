//! Loads, stores, atomics and asynchronous copies.

use super::block::{Polling, fail, is_checked, is_running, with};
use super::checker::{Finding, Kind, Request};
use super::hopper::catch_early;
use super::report::{Fault, Line, Site};
use std::panic::Location;
use std::sync::atomic::{self, AtomicU32, Ordering};
use std::{mem, ptr};

/// Generic address of the block's dynamic shared memory; null on the host, where layouts are only measured.
#[inline]
pub fn shared_base() -> *mut u8 {
    if is_running() { with(super::block::Block::shared_base) } else { ptr::null_mut() }
}

/// In a checked launch, stops the kernel if this access must not be.
#[inline(always)]
pub fn check(kind: Kind, address: usize, bytes: usize, align: usize, at: Site) {
    if is_checked() {
        check_slowly(Request { kind, address, bytes, align, at });
    }
}

#[inline(never)]
fn check_slowly(request: Request) {
    let Request { kind, address, at, .. } = request;
    let (found, polls) = with(|block| {
        let polls = match kind {
            Kind::Read | Kind::Atomic => block.polling.reads(address, at),
            _ => {
                block.polling = Polling::default();
                false
            }
        };
        let thread = block.current;
        (block.checker.as_mut().map_or(Ok(()), |checker| checker.access(thread, request)), polls)
    });
    if let Err(Finding { fault, other, message }) = found {
        fail(fault, at, other, message);
    }
    if polls {
        let place = with(|block| block.checker.as_ref().map_or_else(String::new, |checker| checker.place(address)));
        let message = format!(
            "livelock: polls {place} at {}; an emulated thread runs until it waits, so nobody can write there meanwhile",
            Line(at)
        );
        fail(Fault::Livelock, at, None, message);
    }
}

/// # Safety
/// `pointer` must be valid for reads of a `T`.
#[inline]
#[track_caller]
pub unsafe fn load<T: Copy>(pointer: *const T) -> T {
    check(Kind::Read, pointer.addr(), size_of::<T>(), align_of::<T>(), Location::caller());
    // SAFETY: the caller's.
    unsafe { *pointer }
}

/// # Safety
/// `pointer` must be valid for writes of a `T`.
#[inline]
#[track_caller]
pub unsafe fn store<T: Copy>(pointer: *mut T, value: T) {
    if size_of::<T>() == 4 {
        // SAFETY: as many bytes, of a type that has no padding in this size.
        catch_early(unsafe { mem::transmute_copy(&value) }, Location::caller());
    }
    check(Kind::Write, pointer.addr(), size_of::<T>(), align_of::<T>(), Location::caller());
    // SAFETY: the caller's.
    unsafe { *pointer = value }
}

/// 16 bytes without asking the checker.
///
/// # Safety
/// `pointer` must be valid for reads of 16 bytes.
#[inline]
pub unsafe fn words(pointer: *const u32) -> [u32; 4] {
    // SAFETY: the caller's.
    unsafe { pointer.cast::<[u32; 4]>().read_unaligned() }
}

/// # Safety
/// `pointer` must be valid for reads of 16 bytes and 16-byte aligned.
#[inline]
#[track_caller]
pub unsafe fn load128(pointer: *const u32) -> [u32; 4] {
    check(Kind::Read, pointer.addr(), 16, 16, Location::caller());
    // SAFETY: the caller's.
    unsafe { words(pointer) }
}

/// # Safety
/// `pointer` must be valid for writes of 16 bytes and 16-byte aligned.
#[inline]
#[track_caller]
pub unsafe fn store128(pointer: *mut u32, value: [u32; 4]) {
    let at = Location::caller();
    for word in value {
        catch_early(word, at);
    }
    check(Kind::Write, pointer.addr(), 16, 16, at);
    // SAFETY: the caller's.
    unsafe { pointer.cast::<[u32; 4]>().write_unaligned(value) }
}

/// # Safety
/// `pointer` must be valid for reads of 8 bytes and 8-byte aligned.
#[inline]
#[track_caller]
pub unsafe fn load64(pointer: *const u32) -> [u32; 2] {
    check(Kind::Read, pointer.addr(), 8, 8, Location::caller());
    // SAFETY: the caller's.
    unsafe { pointer.cast::<[u32; 2]>().read_unaligned() }
}

/// # Safety
/// `pointer` must be valid for writes of 8 bytes and 8-byte aligned.
#[inline]
#[track_caller]
pub unsafe fn store64(pointer: *mut u32, value: [u32; 2]) {
    let at = Location::caller();
    for word in value {
        catch_early(word, at);
    }
    check(Kind::Write, pointer.addr(), 8, 8, at);
    // SAFETY: the caller's.
    unsafe { pointer.cast::<[u32; 2]>().write_unaligned(value) }
}

/// # Safety
/// As [`load128`].
#[inline]
#[track_caller]
pub unsafe fn load128_streaming(pointer: *const u32) -> [u32; 4] {
    // SAFETY: the caller's.
    unsafe { load128(pointer) }
}

/// # Safety
/// As [`store128`].
#[inline]
#[track_caller]
pub unsafe fn store128_streaming(pointer: *mut u32, value: [u32; 4]) {
    // SAFETY: the caller's.
    unsafe { store128(pointer, value) }
}

/// There is no L2 here: all policies are one.
#[inline]
pub fn evict_first() -> u64 {
    0
}

/// As [`evict_first`].
#[inline]
pub fn evict_last(_fraction: f32) -> u64 {
    0
}

/// # Safety
/// As [`load128`].
#[inline]
#[track_caller]
pub unsafe fn load128_streaming_with(pointer: *const u32, _policy: u64) -> [u32; 4] {
    // SAFETY: the caller's.
    unsafe { load128(pointer) }
}

/// # Safety
/// As [`load128`].
#[inline]
#[track_caller]
pub unsafe fn load128_with(pointer: *const u32, _policy: u64) -> [u32; 4] {
    // SAFETY: the caller's.
    unsafe { load128(pointer) }
}

/// # Safety
/// As [`store128`].
#[inline]
#[track_caller]
pub unsafe fn store128_with(pointer: *mut u32, value: [u32; 4], _policy: u64) {
    // SAFETY: the caller's.
    unsafe { store128(pointer, value) }
}

/// # Safety
/// `pointer` must be valid for reads and writes, and accessed only atomically meanwhile.
#[inline]
#[track_caller]
pub unsafe fn atomic_add_u32(pointer: *mut u32, value: u32) -> u32 {
    check(Kind::Atomic, pointer.addr(), 4, 4, Location::caller());
    // SAFETY: the caller's.
    unsafe { AtomicU32::from_ptr(pointer) }.fetch_add(value, Ordering::Relaxed)
}

/// # Safety
/// As [`atomic_add_u32`].
#[inline]
#[track_caller]
pub unsafe fn atomic_add_f32(pointer: *mut f32, value: f32) {
    check(Kind::Atomic, pointer.addr(), 4, 4, Location::caller());
    // SAFETY: the caller's; f32 and u32 have one layout.
    let word = unsafe { AtomicU32::from_ptr(pointer.cast()) };
    let add = |bits| Some((f32::from_bits(bits) + value).to_bits());
    let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
}

pub fn fence_device() {
    atomic::fence(Ordering::AcqRel);
    with(|block| {
        if let Some(checker) = &mut block.checker {
            checker.fenced();
        }
    });
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
    at: Site,
}

impl AsyncCopies {
    pub fn clear(&mut self) {
        self.copies.clear();
        self.groups = 0;
    }

    /// Line of the oldest copy under way.
    pub fn oldest(&self) -> Option<Site> {
        Some(self.copies.first()?.at)
    }
}

/// # Safety
/// `to` must stay valid for writes of 16 bytes, and if `valid` `from` for reads, until the copy is waited for; both
/// 16-byte aligned.
#[inline]
#[track_caller]
pub unsafe fn async_copy_16(to: *mut u32, from: *const u32, valid: bool) {
    let at = Location::caller();
    if valid {
        check(Kind::Read, from.addr(), 16, 16, at);
    }
    check(Kind::AsyncWrite, to.addr(), 16, 16, at);
    with(|block| {
        let mine = &mut block.copies[block.current];
        mine.copies.push(AsyncCopy { to, from: valid.then_some(from), group: mine.groups, at });
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
            unsafe {
                let bytes = copy.from.map_or([0; 4], |from| words(from));
                copy.to.cast::<[u32; 4]>().write_unaligned(bytes);
            }
            if let Some(checker) = &mut block.checker {
                checker.landed(block.current, copy.to.addr());
            }
        }
    });
}
