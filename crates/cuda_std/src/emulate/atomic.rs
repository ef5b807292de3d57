//! Atomic accesses to global and shared memory, fences, and waits for values.

use super::access::check;
use super::block::{Block, Mode, mode, suspend, with};
use super::checker::{Kind, Reading};
use super::order::Scope;
use super::report::Site;
use super::wait::{Operation, ValueWait, Wait};
use std::panic::Location;
use std::sync::atomic::{self, AtomicU32, AtomicU64, Ordering};

/// A type that atomics access.
pub trait Word: Copy {
    fn bits(self) -> u64;
    fn from_bits(bits: u64) -> Self;
}

macro_rules! words {
    ($($type:ty, $unsigned:ty;)*) => {$(
        impl Word for $type {
            fn bits(self) -> u64 {
                u64::from(bytemuck::cast::<$type, $unsigned>(self))
            }
            fn from_bits(bits: u64) -> Self {
                bytemuck::cast(bits as $unsigned)
            }
        }
    )*};
}

words! { u32, u32; i32, u32; f32, u32; u64, u64; f64, u64; }

/// Returns the bits of the word at `pointer`.
///
/// # Safety
/// `pointer` must be valid for reads of a `T`, and all concurrent writes must be atomic.
pub unsafe fn bits_at<T: Word>(pointer: *const T) -> u64 {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match size_of::<T>() {
            4 => u64::from(AtomicU32::from_ptr(pointer.cast_mut().cast()).load(Ordering::Acquire)),
            _ => AtomicU64::from_ptr(pointer.cast_mut().cast()).load(Ordering::Acquire),
        }
    }
}

/// Lets other threads and blocks run, if the schedule of the checked launch switches here.
fn switch_point() {
    if mode() != Mode::Checked {
        return;
    }
    let switches = with(|block| {
        let switches = block.checker.as_mut().is_some_and(|checker| checker.choices.switches());
        if switches {
            block.leave();
        }
        switches
    });
    if switches {
        suspend();
    }
}

/// Waits until other threads have run, if this thread reads the same value at the same line again: it polls.
fn poll(address: usize, bits: u64, at: Site) {
    if with(|block| block.polls.reads(block.current, address, bits, at)) {
        with(|block| {
            block.wait(Wait { operation: Operation::Poll { address, bits }, at });
            block.spinning.push(block.current);
        });
        suspend();
    }
}

/// Reads a word atomically.
///
/// # Safety
/// `pointer` must be valid for reads, and all concurrent writes must be atomic.
unsafe fn read<T: Word>(pointer: *const T, acquires: bool, at: Site) -> T {
    switch_point();
    check(Kind::AtomicRead, pointer.addr(), size_of::<T>(), size_of::<T>(), at);
    // SAFETY: guaranteed by the caller.
    let bits = unsafe { bits_at(pointer) };
    let bits = with(|block| {
        let thread = block.current;
        block
            .checker
            .as_mut()
            .map_or(bits, |checker| checker.atomic_read(thread, (pointer.addr(), bits), (acquires, Reading::Load), at))
    });
    poll(pointer.addr(), bits, at);
    T::from_bits(bits)
}

/// Writes a word atomically.
///
/// # Safety
/// `pointer` must be valid for writes, and all concurrent accesses must be atomic.
unsafe fn write<T: Word>(pointer: *mut T, value: T, releases: bool, at: Site) {
    switch_point();
    check(Kind::AtomicWrite, pointer.addr(), size_of::<T>(), size_of::<T>(), at);
    with(|block| {
        if let Some(checker) = &mut block.checker {
            // SAFETY: guaranteed by the caller.
            let old = unsafe { bits_at(pointer) };
            checker.atomic_write(block.current, (pointer.addr(), old, value.bits()), releases, false);
        }
    });
    // SAFETY: guaranteed by the caller.
    unsafe {
        match size_of::<T>() {
            4 => AtomicU32::from_ptr(pointer.cast()).store(value.bits() as u32, Ordering::Release),
            _ => AtomicU64::from_ptr(pointer.cast()).store(value.bits(), Ordering::Release),
        }
    }
    with(Block::memory_changed);
}

/// Replaces a word atomically by `f` of it, and returns the old value. `reads`: the kernel uses the old value.
///
/// # Safety
/// `pointer` must be valid for reads and writes, and all concurrent accesses must be atomic.
unsafe fn update<T: Word>(pointer: *mut T, [reads, releases]: [bool; 2], at: Site, f: impl Fn(T) -> T) -> T {
    switch_point();
    check(Kind::Atomic, pointer.addr(), size_of::<T>(), size_of::<T>(), at);
    let new = |old: u64| f(T::from_bits(old)).bits();
    // SAFETY: guaranteed by the caller.
    let old = unsafe {
        if size_of::<T>() == 4 {
            let word = AtomicU32::from_ptr(pointer.cast());
            let update = |old: u32| Some(new(u64::from(old)) as u32);
            let old = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, update);
            u64::from(old.unwrap_or_else(|old| old))
        } else {
            let word = AtomicU64::from_ptr(pointer.cast());
            word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| Some(new(old))).unwrap_or_else(|old| old)
        }
    };
    let (address, new) = (pointer.addr(), new(old));
    with(|block| {
        let thread = block.current;
        if let Some(checker) = &mut block.checker {
            if reads {
                let reading = if new == old { Reading::Newest } else { Reading::Change };
                checker.atomic_read(thread, (address, old), (false, reading), at);
            }
            checker.atomic_write(thread, (address, old, new), releases, true);
        }
        if new != old {
            block.memory_changed();
        }
    });
    if reads && new == old {
        poll(address, old, at);
    }
    T::from_bits(old)
}

/// Defines atomic reads and writes.
macro_rules! accesses {
    ($($type:ty: $load:ident, $load_acquire:ident, $store:ident, $store_release:ident;)*) => {$(
        /// # Safety
        /// `pointer` must be valid for reads, and all concurrent writes must be atomic.
        #[track_caller]
        pub unsafe fn $load(pointer: *const $type) -> $type {
            // SAFETY: guaranteed by the caller.
            unsafe { read(pointer, false, Location::caller()) }
        }

        /// # Safety
        /// `pointer` must be valid for reads, and all concurrent writes must be atomic.
        #[track_caller]
        pub unsafe fn $load_acquire(pointer: *const $type) -> $type {
            // SAFETY: guaranteed by the caller.
            unsafe { read(pointer, true, Location::caller()) }
        }

        /// # Safety
        /// `pointer` must be valid for writes, and all concurrent accesses must be atomic.
        #[track_caller]
        pub unsafe fn $store(pointer: *mut $type, value: $type) {
            // SAFETY: guaranteed by the caller.
            unsafe { write(pointer, value, false, Location::caller()) }
        }

        /// # Safety
        /// `pointer` must be valid for writes, and all concurrent accesses must be atomic.
        #[track_caller]
        pub unsafe fn $store_release(pointer: *mut $type, value: $type) {
            // SAFETY: guaranteed by the caller.
            unsafe { write(pointer, value, true, Location::caller()) }
        }
    )*};
}

accesses! {
    u32: load_relaxed_u32, load_acquire_u32, store_relaxed_u32, store_release_u32;
    u32: shared_load_relaxed_u32, shared_load_acquire_u32, shared_store_relaxed_u32, shared_store_release_u32;
    u64: load_relaxed_u64, load_acquire_u64, store_relaxed_u64, store_release_u64;
    u64: shared_load_relaxed_u64, shared_load_acquire_u64, shared_store_relaxed_u64, shared_store_release_u64;
}

/// Reads two words, the second first: a kernel must not depend on their order.
///
/// # Safety
/// `pointer` must be valid for reads of two words and 16-byte aligned, and all concurrent writes must be atomic.
#[track_caller]
pub unsafe fn load_relaxed_two_u64(pointer: *const u64) -> [u64; 2] {
    let at = Location::caller();
    check(Kind::AtomicRead, pointer.addr(), 16, 16, at);
    // SAFETY: guaranteed by the caller.
    unsafe {
        let second = read(pointer.wrapping_add(1), false, at);
        [read(pointer, false, at), second]
    }
}

/// Defines atomic updates of global and shared memory that return the old value.
macro_rules! updates {
    ($($name:ident, $shared:ident, $type:ty, ($($operand:ident),*), |$old:ident| $new:expr;)*) => {$(
        /// # Safety
        /// `pointer` must be valid for reads and writes, and all concurrent accesses must be atomic.
        #[track_caller]
        pub unsafe fn $name(pointer: *mut $type, $($operand: $type),*) -> $type {
            // SAFETY: guaranteed by the caller.
            unsafe { update(pointer, [true, false], Location::caller(), |$old: $type| $new) }
        }

        /// # Safety
        /// The pointer is valid for the operation.
        #[track_caller]
        pub unsafe fn $shared(pointer: *mut $type, $($operand: $type),*) -> $type {
            // SAFETY: guaranteed by the caller.
            unsafe { $name(pointer, $($operand),*) }
        }
    )*};
}

updates! {
    fetch_add_u32, shared_add_u32, u32, (value), |old| old.wrapping_add(value);
    fetch_add_i32, shared_add_i32, i32, (value), |old| old.wrapping_add(value);
    fetch_add_u64, shared_add_u64, u64, (value), |old| old.wrapping_add(value);
    fetch_add_f32, shared_add_f32, f32, (value), |old| old + value;
    fetch_add_f64, shared_add_f64, f64, (value), |old| old + value;
    fetch_min_u32, shared_min_u32, u32, (value), |old| old.min(value);
    fetch_min_i32, shared_min_i32, i32, (value), |old| old.min(value);
    fetch_min_u64, shared_min_u64, u64, (value), |old| old.min(value);
    fetch_max_u32, shared_max_u32, u32, (value), |old| old.max(value);
    fetch_max_i32, shared_max_i32, i32, (value), |old| old.max(value);
    fetch_max_u64, shared_max_u64, u64, (value), |old| old.max(value);
    fetch_and_u32, shared_and_u32, u32, (value), |old| old & value;
    fetch_and_u64, shared_and_u64, u64, (value), |old| old & value;
    fetch_or_u32, shared_or_u32, u32, (value), |old| old | value;
    fetch_or_u64, shared_or_u64, u64, (value), |old| old | value;
    fetch_xor_u32, shared_xor_u32, u32, (value), |old| old ^ value;
    fetch_xor_u64, shared_xor_u64, u64, (value), |old| old ^ value;
    exchange_u32, shared_exchange_u32, u32, (value), |_old| value;
    exchange_u64, shared_exchange_u64, u64, (value), |_old| value;
    compare_exchange_u32, shared_compare_exchange_u32, u32, (expected, value),
        |old| if old == expected { value } else { old };
    compare_exchange_u64, shared_compare_exchange_u64, u64, (expected, value),
        |old| if old == expected { value } else { old };
}

/// Defines atomic updates of global memory without a result.
macro_rules! reductions {
    ($($name:ident, $type:ty, $releases:literal, |$old:ident, $value:ident| $new:expr;)*) => {$(
        /// # Safety
        /// `pointer` must be valid for reads and writes, and all concurrent accesses must be atomic.
        #[track_caller]
        pub unsafe fn $name(pointer: *mut $type, $value: $type) {
            // SAFETY: guaranteed by the caller.
            unsafe { update(pointer, [false, $releases], Location::caller(), |$old: $type| $new) };
        }
    )*};
}

reductions! {
    atomic_max_u32, u32, false, |old, value| old.max(value);
    atomic_add_f32, f32, false, |old, value| old + value;
    release_add_u32, u32, true, |old, value| old.wrapping_add(value);
}

/// # Safety
/// Same as [`fetch_add_u32`].
#[track_caller]
pub unsafe fn atomic_add_u32(pointer: *mut u32, value: u32) -> u32 {
    // SAFETY: guaranteed by the caller.
    unsafe { fetch_add_u32(pointer, value) }
}

/// Waits until `condition` holds for the word at `pointer`, and returns the word.
///
/// # Safety
/// `pointer` must be valid for reads until the wait ends, and all concurrent writes must be atomic.
#[track_caller]
pub unsafe fn acquire_wait_u32(pointer: *const u32, condition: impl Fn(u32) -> bool, awaited: Option<u32>) -> u32 {
    let at = Location::caller();
    switch_point();
    let operation = Operation::Value { address: pointer.addr(), awaited };
    let condition: &dyn Fn(u32) -> bool = &condition;
    loop {
        check(Kind::AtomicRead, pointer.addr(), 4, 4, at);
        let found = with(|block| {
            let thread = block.current;
            // SAFETY: the fiber is suspended while the block uses the condition.
            let condition =
                unsafe { std::mem::transmute::<&dyn Fn(u32) -> bool, &'static dyn Fn(u32) -> bool>(condition) };
            let wait = ValueWait { thread, word: pointer, condition };
            let found = wait.found();
            if !condition(found) {
                block.value_waits.push(wait);
                block.wait(Wait { operation, at });
                return None;
            }
            if let Some(checker) = &mut block.checker {
                checker.atomic_read(thread, (pointer.addr(), u64::from(found)), (true, Reading::Newest), at);
            }
            Some(found)
        });
        match found {
            Some(found) => return found,
            None => suspend(),
        }
    }
}

fn fence(scope: Scope, is_sequential: bool) {
    switch_point();
    atomic::fence(Ordering::SeqCst);
    with(|block| {
        if let Some(checker) = &mut block.checker {
            checker.fenced(block.current, scope, is_sequential);
        }
    });
}

pub fn fence_block() {
    fence(Scope::Block, false);
}

pub fn fence_device() {
    fence(Scope::Device, false);
}

/// The emulator has one GPU and no host threads, so this is a fence of device scope.
pub fn fence_system() {
    fence(Scope::Device, false);
}

pub fn fence_sc_block() {
    fence(Scope::Block, true);
}

pub fn fence_sc_device() {
    fence(Scope::Device, true);
}

/// Same as [`fence_system`], sequentially consistent.
pub fn fence_sc_system() {
    fence(Scope::Device, true);
}

/// Recent atomic reads of each thread, which show whether it polls.
#[derive(Default)]
pub struct Polls(Vec<Recent>);

/// Reads of a thread since it last found a new value: address, bits and line.
#[derive(Clone, Default)]
struct Recent {
    reads: [Option<(usize, u64, Site)>; Self::COUNT],
    next: usize,
}

impl Recent {
    /// Number of addresses that one loop may poll.
    const COUNT: usize = 16;
}

impl Polls {
    pub fn new(threads: usize) -> Self {
        Self(vec![Recent::default(); threads])
    }

    pub fn clear(&mut self) {
        self.0.fill(Recent::default());
    }

    /// Records a read, and returns whether the thread has recently read the same value of this address at the same line.
    fn reads(&mut self, thread: usize, address: usize, bits: u64, at: Site) -> bool {
        let recent = &mut self.0[thread];
        let same = |read: &Option<(usize, u64, Site)>| {
            read.is_some_and(|read| (read.0, read.1) == (address, bits) && std::ptr::eq(read.2, at))
        };
        if recent.reads.iter().any(same) {
            return true;
        }
        recent.reads[recent.next] = Some((address, bits, at));
        recent.next = (recent.next + 1) % Recent::COUNT;
        false
    }
}

/// Wakes each thread of `block` that waits for a value which its word has. Returns whether it woke any.
pub fn wake_satisfied(block: &mut Block) -> bool {
    if block.value_waits.is_empty() {
        return false;
    }
    let (satisfied, waiting): (Vec<_>, Vec<_>) = block.value_waits.iter().partition(|wait| wait.is_satisfied());
    block.value_waits = waiting;
    for wait in &satisfied {
        block.wake(wait.thread);
    }
    !satisfied.is_empty()
}

/// Lets the threads of `block` that poll continue.
pub fn wake_spinning(block: &mut Block) {
    for thread in std::mem::take(&mut block.spinning) {
        block.wake(thread);
    }
}
