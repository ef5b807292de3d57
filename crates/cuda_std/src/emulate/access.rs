//! Loads, stores, atomics and `cp.async`, and the checks of addresses and values that other instructions share.

use super::async_copy::AsyncCopy;
use super::block::{Block, Mode, Polling, fail, is_checked, is_running, mode, outside_kernel, with};
use super::checker::{Finding, Kind, Request};
use super::report::{Fault, Line, Site};
use super::warpgroup::{LINES, PENDING, QUIET, THREADS};
use super::watchdog;
use std::panic::Location;
use std::{mem, ptr};

/// Returns the address of the block's dynamic shared memory. Returns null outside a kernel, where layouts are only
/// measured.
#[inline]
pub fn shared_base() -> *mut u8 {
    if is_running() { with(Block::shared_base) } else { ptr::null_mut() }
}

/// Stops the kernel if it runs in a checked launch and this access is invalid.
///
/// # Panics
/// Outside a kernel, where no launch guarantees that the access is valid.
#[inline(always)]
#[track_caller]
pub fn check(kind: Kind, address: usize, bytes: usize, align: usize, at: Site) {
    match mode() {
        Mode::Unchecked => (),
        Mode::Checked => {
            check_access(Request { kind, address, bytes, align, at });
        }
        Mode::Outside => outside_kernel(),
    }
}

/// Checks an access, and returns the address of an older value that a read returns, if any.
#[inline(never)]
fn check_access(request: Request) -> Option<*const u8> {
    let Request { kind, address, at, .. } = request;
    watchdog::beat();
    let (result, old, polls) = with(|block| {
        let polls = kind == Kind::Read && block.polling.record_read(address, at);
        if kind != Kind::Read {
            block.polling = Polling::default();
        }
        let thread = block.reader.unwrap_or(block.current);
        match &mut block.checker {
            Some(checker) => (checker.access(thread, request), checker.take_old(), polls),
            None => (Ok(()), None, polls),
        }
    });
    if let Err(Finding { fault, other, message }) = result {
        fail(fault, at, other, message);
    }
    if polls {
        let place = with(|block| block.checker.as_ref().map_or_else(String::new, |checker| checker.name_of(address)));
        let message = format!(
            "livelock: the thread polls {place} with ordinary reads ({}), which do not let other threads run; use load_relaxed or \
             load_acquire",
            Line(at)
        );
        fail(Fault::Livelock, at, None, message);
    }
    old
}

/// Checks a read of `bytes` bytes, and returns the address of the value: that of an older one if the schedule shows a race.
#[inline(always)]
#[track_caller]
fn check_read<T>(pointer: *const T, bytes: usize, align: usize) -> *const T {
    let (kind, address, at) = (Kind::Read, pointer.addr(), Location::caller());
    match mode() {
        Mode::Unchecked => pointer,
        Mode::Checked => check_access(Request { kind, address, bytes, align, at }).map_or(pointer, <*const u8>::cast),
        Mode::Outside => outside_kernel(),
    }
}

/// Returns the offset of `pointer` in the running block's shared memory. Stops the kernel if the `bytes` bytes there
/// are out of bounds or misaligned.
pub fn shared_offset<T>(pointer: *const T, bytes: usize, align: usize, at: Site, what: &str) -> usize {
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

/// Stops the kernel if this value was computed from accumulators that were read before their wait.
#[inline]
pub fn check_accumulator_read(bits: u32, at: Site) {
    if bits & !(QUIET | (LINES - 1)) == PENDING & !QUIET {
        premature_read(bits, at);
    }
}

#[cold]
fn premature_read(bits: u32, at: Site) {
    let line = with(|block| {
        let (group, number) = (block.current / THREADS, bits & (LINES - 1));
        block.hopper.warpgroups.get(&group)?.lines.get(number as usize).copied()
    });
    // Without a known line, the NaN was computed by the kernel itself.
    if let Some(wgmma) = line {
        let message = format!(
            "premature accumulator access: the value used at {} was computed from accumulators that were read between \
             their wgmma ({}) and the fence_accumulators after its wait",
            Line(at),
            Line(wgmma)
        );
        fail(Fault::Accumulators, at, Some(wgmma), message);
    }
}

/// Stops a checked launch at an access to element `i` of a view of `len` elements from `start`, if the access itself would not be
/// reported: `i` times the size of an element overflows, or the address is that of another buffer.
#[cold]
#[track_caller]
pub fn beyond_slice<T>(start: *const T, i: usize, len: usize) {
    if mode() != Mode::Checked {
        return;
    }
    let at = Location::caller();
    let place = with(|block| {
        let checker = block.checker.as_ref()?;
        let offset = i.cast_signed().checked_mul(size_of::<T>().cast_signed());
        let is_near =
            offset.is_some_and(|offset| checker.is_near(start.addr(), start.addr().wrapping_add_signed(offset)));
        (!is_near).then(|| checker.buffer_name(start.addr()))
    });
    if let Some(name) = place {
        let message = format!("out-of-bounds access: index {i} of {name}, which has {len} elements ({})", Line(at));
        fail(Fault::OutOfBounds, at, None, message);
    }
}

/// # Safety
/// `pointer` must be valid for reads of a `T`.
#[inline]
#[track_caller]
pub unsafe fn load<T: Copy>(pointer: *const T) -> T {
    let pointer = check_read(pointer, size_of::<T>(), align_of::<T>());
    // SAFETY: guaranteed by the caller. Older values may be less aligned.
    unsafe { pointer.read_unaligned() }
}

pub use load as load_shared;
pub use load as load_frozen;
pub use load128 as load128_frozen;
pub use load128 as load128_shared;

/// # Safety
/// `pointer` must be valid for writes of a `T`.
#[inline]
#[track_caller]
pub unsafe fn store<T: Copy>(pointer: *mut T, value: T) {
    if size_of::<T>() == 4 {
        // SAFETY: both types have four bytes, and no `T` of this size has padding.
        check_accumulator_read(unsafe { mem::transmute_copy(&value) }, Location::caller());
    }
    check(Kind::Write, pointer.addr(), size_of::<T>(), align_of::<T>(), Location::caller());
    // SAFETY: guaranteed by the caller.
    unsafe { *pointer = value }
}

/// Reads 16 bytes without a check.
///
/// # Safety
/// `pointer` must be valid for reads of 16 bytes.
#[inline]
pub unsafe fn words(pointer: *const u32) -> [u32; 4] {
    // SAFETY: guaranteed by the caller.
    unsafe { pointer.cast::<[u32; 4]>().read_unaligned() }
}

/// # Safety
/// `pointer` must be valid for reads of 16 bytes and 16-byte aligned.
#[inline]
#[track_caller]
pub unsafe fn load128(pointer: *const u32) -> [u32; 4] {
    let pointer = check_read(pointer, 16, 16);
    // SAFETY: guaranteed by the caller.
    unsafe { words(pointer) }
}

/// # Safety
/// `pointer` must be valid for writes of 16 bytes and 16-byte aligned.
#[inline]
#[track_caller]
pub unsafe fn store128(pointer: *mut u32, value: [u32; 4]) {
    let at = Location::caller();
    for word in value {
        check_accumulator_read(word, at);
    }
    check(Kind::Write, pointer.addr(), 16, 16, at);
    // SAFETY: guaranteed by the caller.
    unsafe { pointer.cast::<[u32; 4]>().write_unaligned(value) }
}

/// # Safety
/// `pointer` must be valid for reads of 8 bytes and 8-byte aligned.
#[inline]
#[track_caller]
pub unsafe fn load64(pointer: *const u32) -> [u32; 2] {
    let pointer = check_read(pointer, 8, 8);
    // SAFETY: guaranteed by the caller.
    unsafe { pointer.cast::<[u32; 2]>().read_unaligned() }
}

/// # Safety
/// `pointer` must be valid for writes of 8 bytes and 8-byte aligned.
#[inline]
#[track_caller]
pub unsafe fn store64(pointer: *mut u32, value: [u32; 2]) {
    let at = Location::caller();
    for word in value {
        check_accumulator_read(word, at);
    }
    check(Kind::Write, pointer.addr(), 8, 8, at);
    // SAFETY: guaranteed by the caller.
    unsafe { pointer.cast::<[u32; 2]>().write_unaligned(value) }
}

/// # Safety
/// Same as [`load128`].
#[inline]
#[track_caller]
pub unsafe fn load128_streaming(pointer: *const u32) -> [u32; 4] {
    // SAFETY: guaranteed by the caller.
    unsafe { load128(pointer) }
}

/// # Safety
/// Same as [`store128`].
#[inline]
#[track_caller]
pub unsafe fn store128_streaming(pointer: *mut u32, value: [u32; 4]) {
    // SAFETY: guaranteed by the caller.
    unsafe { store128(pointer, value) }
}

/// The emulator has no L2 cache, so all policies are equal.
#[inline]
pub fn evict_first() -> u64 {
    0
}

/// Same as [`evict_first`].
#[inline]
pub fn evict_last(_fraction: f32) -> u64 {
    0
}

/// # Safety
/// Same as [`load128`].
#[inline]
#[track_caller]
pub unsafe fn load128_streaming_with(pointer: *const u32, _policy: u64) -> [u32; 4] {
    // SAFETY: guaranteed by the caller.
    unsafe { load128(pointer) }
}

/// # Safety
/// Same as [`load128`].
#[inline]
#[track_caller]
pub unsafe fn load128_with(pointer: *const u32, _policy: u64) -> [u32; 4] {
    // SAFETY: guaranteed by the caller.
    unsafe { load128(pointer) }
}

/// # Safety
/// Same as [`store128`].
#[inline]
#[track_caller]
pub unsafe fn store128_with(pointer: *mut u32, value: [u32; 4], _policy: u64) {
    // SAFETY: guaranteed by the caller.
    unsafe { store128(pointer, value) }
}

/// # Safety
/// Until the copy is waited for, `to` must be valid for writes of 16 bytes, and `from` for reads if `valid` is true.
/// Both must be 16-byte aligned.
#[inline]
#[track_caller]
pub unsafe fn async_copy_16(to: *mut u32, from: *const u32, valid: bool) {
    let at = Location::caller();
    if valid {
        check(Kind::Read, from.addr(), 16, 16, at);
    }
    check(Kind::AsyncWrite, to.addr(), 16, 16, at);
    // SAFETY: guaranteed by the caller.
    let from = valid.then(|| (from, unsafe { words(from) }));
    with(|block| {
        let mine = &mut block.copies[block.current];
        mine.copies.push(AsyncCopy { to, from, group: mine.groups, at });
    });
}

#[inline]
pub fn async_copy_commit() {
    with(|block| block.copies[block.current].groups += 1);
}

#[inline]
#[track_caller]
pub fn async_copy_wait<const PENDING: u32>() {
    let changed = with(|block| {
        let mine = &mut block.copies[block.current];
        let done = mine.copies.partition_point(|copy| copy.group + PENDING < mine.groups);
        let mut changed = None;
        for AsyncCopy { to, from, at, .. } in mine.copies.drain(..done) {
            // SAFETY: guaranteed by the caller of `async_copy_16`.
            unsafe {
                let bytes = from.map_or([0; 4], |(from, _)| words(from));
                if from.is_some_and(|(_, before)| before != bytes) {
                    changed = Some(at);
                }
                to.cast::<[u32; 4]>().write_unaligned(bytes);
            }
            if let Some(checker) = &mut block.checker {
                checker.async_copy_completed(block.current, to.addr(), 16);
            }
        }
        changed.filter(|_| is_checked())
    });
    if let Some(copy) = changed {
        let wait = Location::caller();
        let message = format!(
            "asynchronous copy in flight: the source of a cp.async ({}) was overwritten before its wait ({})",
            Line(copy),
            Line(wait)
        );
        fail(Fault::AsyncCopy, copy, Some(wait), message);
    }
}
