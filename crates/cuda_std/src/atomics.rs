//! Atomic operations on elements of global and shared memory: methods of [`GlobalMut`], [`GlobalSliceMut`] and [`SharedArray`].

use crate::backend;
use crate::global::GlobalMut;
use crate::shared::SharedArray;
use crate::slice::GlobalSliceMut;

/// Defines atomic methods of views of global memory, checked or not, and of arrays in shared memory.
macro_rules! atomics {
    ($($(#[$doc:meta])* $method:ident($($operand:ident),*) of $type:ty = $global:ident, $shared:ident;)*) => {$(
        impl GlobalMut<$type> {
            $(#[$doc])*
            /// Relaxed, at device scope. Returns the old value.
            #[inline(always)]
            #[track_caller]
            pub fn $method(self, i: usize, $($operand: $type),*) -> $type {
                // SAFETY: see `at`.
                unsafe { backend::$global(self.0.wrapping_add(i), $($operand),*) }
            }
        }

        impl GlobalSliceMut<'_, $type> {
            $(#[$doc])*
            /// Relaxed, at device scope. Returns the old value.
            #[inline(always)]
            #[track_caller]
            pub fn $method(self, i: usize, $($operand: $type),*) -> $type {
                self.check(i, 1);
                self.view.$method(i, $($operand),*)
            }
        }

        impl SharedArray<$type> {
            $(#[$doc])*
            /// Relaxed, at block scope. Returns the old value.
            #[inline(always)]
            #[track_caller]
            pub fn $method(self, i: usize, $($operand: $type),*) -> $type {
                // SAFETY: see `at`.
                unsafe { backend::$shared(self.elements(i, 1).cast_mut(), $($operand),*) }
            }
        }
    )*};
}

atomics! {
    /// Adds `value` to element `i` atomically, modulo 2^32.
    fetch_add(value) of u32 = fetch_add_u32, shared_add_u32;
    /// Adds `value` to element `i` atomically, modulo 2^32.
    fetch_add(value) of i32 = fetch_add_i32, shared_add_i32;
    /// Adds `value` to element `i` atomically, modulo 2^64.
    fetch_add(value) of u64 = fetch_add_u64, shared_add_u64;
    /// Adds `value` to element `i` atomically. The order of additions varies between runs, so the result is not deterministic.
    fetch_add(value) of f32 = fetch_add_f32, shared_add_f32;
    /// Adds `value` to element `i` atomically. The order of additions varies between runs, so the result is not deterministic.
    fetch_add(value) of f64 = fetch_add_f64, shared_add_f64;
    /// Replaces element `i` atomically by the smaller of it and `value`.
    fetch_min(value) of u32 = fetch_min_u32, shared_min_u32;
    /// Replaces element `i` atomically by the smaller of it and `value`.
    fetch_min(value) of i32 = fetch_min_i32, shared_min_i32;
    /// Replaces element `i` atomically by the smaller of it and `value`.
    fetch_min(value) of u64 = fetch_min_u64, shared_min_u64;
    /// Replaces element `i` atomically by the larger of it and `value`.
    fetch_max(value) of u32 = fetch_max_u32, shared_max_u32;
    /// Replaces element `i` atomically by the larger of it and `value`.
    fetch_max(value) of i32 = fetch_max_i32, shared_max_i32;
    /// Replaces element `i` atomically by the larger of it and `value`.
    fetch_max(value) of u64 = fetch_max_u64, shared_max_u64;
    /// Replaces element `i` atomically by its bitwise and with `value`.
    fetch_and(value) of u32 = fetch_and_u32, shared_and_u32;
    /// Replaces element `i` atomically by its bitwise and with `value`.
    fetch_and(value) of u64 = fetch_and_u64, shared_and_u64;
    /// Replaces element `i` atomically by its bitwise or with `value`.
    fetch_or(value) of u32 = fetch_or_u32, shared_or_u32;
    /// Replaces element `i` atomically by its bitwise or with `value`.
    fetch_or(value) of u64 = fetch_or_u64, shared_or_u64;
    /// Replaces element `i` atomically by its bitwise exclusive or with `value`.
    fetch_xor(value) of u32 = fetch_xor_u32, shared_xor_u32;
    /// Replaces element `i` atomically by its bitwise exclusive or with `value`.
    fetch_xor(value) of u64 = fetch_xor_u64, shared_xor_u64;
    /// Replaces element `i` atomically by `value`.
    exchange(value) of u32 = exchange_u32, shared_exchange_u32;
    /// Replaces element `i` atomically by `value`.
    exchange(value) of u64 = exchange_u64, shared_exchange_u64;
    /// Replaces element `i` atomically by `value` if it is `expected`.
    compare_exchange(expected, value) of u32 = compare_exchange_u32, shared_compare_exchange_u32;
    /// Replaces element `i` atomically by `value` if it is `expected`.
    compare_exchange(expected, value) of u64 = compare_exchange_u64, shared_compare_exchange_u64;
}

/// Defines atomic reads and writes of views of global memory, checked or not, and of arrays in shared memory.
macro_rules! accesses {
    ($($type:ty: $load:ident, $load_acquire:ident, $store:ident, $store_release:ident,
        $shared_load:ident, $shared_load_acquire:ident, $shared_store:ident, $shared_store_release:ident;)*) => {$(
        impl SharedArray<$type> {
            /// Reads element `i` atomically: relaxed, block scope (`ld.relaxed.cta.shared`). See [`GlobalMut::load_relaxed`].
            #[inline(always)]
            #[track_caller]
            pub fn load_relaxed(self, i: usize) -> $type {
                // SAFETY: see `at`.
                unsafe { backend::$shared_load(self.elements(i, 1)) }
            }

            /// Reads element `i` atomically: acquire, block scope (`ld.acquire.cta.shared`). See [`GlobalMut::load_acquire`].
            #[inline(always)]
            #[track_caller]
            pub fn load_acquire(self, i: usize) -> $type {
                // SAFETY: see `at`.
                unsafe { backend::$shared_load_acquire(self.elements(i, 1)) }
            }

            /// Writes element `i` atomically: relaxed, block scope (`st.relaxed.cta.shared`). See [`GlobalMut::store_relaxed`].
            #[inline(always)]
            #[track_caller]
            pub fn store_relaxed(self, i: usize, value: $type) {
                // SAFETY: see `at`.
                unsafe { backend::$shared_store(self.elements(i, 1).cast_mut(), value) }
            }

            /// Writes element `i` atomically: release, block scope (`st.release.cta.shared`). See [`GlobalMut::store_release`].
            #[inline(always)]
            #[track_caller]
            pub fn store_release(self, i: usize, value: $type) {
                // SAFETY: see `at`.
                unsafe { backend::$shared_store_release(self.elements(i, 1).cast_mut(), value) }
            }
        }

        impl GlobalMut<$type> {
            /// Reads element `i` atomically: relaxed, device scope (`ld.relaxed.gpu.global`). It orders nothing by itself, but a
            /// [fence](crate::fence) after it acquires what the write of the value has released.
            #[inline(always)]
            #[track_caller]
            pub fn load_relaxed(self, i: usize) -> $type {
                // SAFETY: see `at`.
                unsafe { backend::$load(self.0.wrapping_add(i)) }
            }

            /// Reads element `i` atomically, before all later memory accesses of this thread: acquire, device scope
            /// (`ld.acquire.gpu.global`). Later accesses see everything that the write of the value has released.
            #[inline(always)]
            #[track_caller]
            pub fn load_acquire(self, i: usize) -> $type {
                // SAFETY: see `at`.
                unsafe { backend::$load_acquire(self.0.wrapping_add(i)) }
            }

            /// Writes element `i` atomically: relaxed, device scope (`st.relaxed.gpu.global`). It orders nothing by itself, but it
            /// releases what precedes a [fence](crate::fence) before it.
            #[inline(always)]
            #[track_caller]
            pub fn store_relaxed(self, i: usize, value: $type) {
                // SAFETY: see `at`.
                unsafe { backend::$store(self.0.wrapping_add(i), value) }
            }

            /// Writes element `i` atomically, after all earlier memory accesses of this thread: release, device scope
            /// (`st.release.gpu.global`). A thread that reads the value with [`load_acquire`](Self::load_acquire) sees them.
            #[inline(always)]
            #[track_caller]
            pub fn store_release(self, i: usize, value: $type) {
                // SAFETY: see `at`.
                unsafe { backend::$store_release(self.0.wrapping_add(i), value) }
            }
        }

        impl GlobalSliceMut<'_, $type> {
            /// See [`GlobalMut::load_relaxed`].
            #[inline(always)]
            #[track_caller]
            pub fn load_relaxed(self, i: usize) -> $type {
                self.check(i, 1);
                self.view.load_relaxed(i)
            }

            /// See [`GlobalMut::load_acquire`].
            #[inline(always)]
            #[track_caller]
            pub fn load_acquire(self, i: usize) -> $type {
                self.check(i, 1);
                self.view.load_acquire(i)
            }

            /// See [`GlobalMut::store_relaxed`].
            #[inline(always)]
            #[track_caller]
            pub fn store_relaxed(self, i: usize, value: $type) {
                self.check(i, 1);
                self.view.store_relaxed(i, value);
            }

            /// See [`GlobalMut::store_release`].
            #[inline(always)]
            #[track_caller]
            pub fn store_release(self, i: usize, value: $type) {
                self.check(i, 1);
                self.view.store_release(i, value);
            }
        }
    )*};
}

accesses! {
    u32: load_relaxed_u32, load_acquire_u32, store_relaxed_u32, store_release_u32,
        shared_load_relaxed_u32, shared_load_acquire_u32, shared_store_relaxed_u32, shared_store_release_u32;
    u64: load_relaxed_u64, load_acquire_u64, store_relaxed_u64, store_release_u64,
        shared_load_relaxed_u64, shared_load_acquire_u64, shared_store_relaxed_u64, shared_store_release_u64;
}

impl GlobalMut<u64> {
    /// Reads elements `i` and `i` + 1 in one instruction (`ld.relaxed.gpu.global.v2.u64`). Each of them is read atomically, like
    /// [`load_relaxed`](Self::load_relaxed), but not both together: one may be newer than the other. `i` must be even.
    #[inline(always)]
    #[track_caller]
    pub fn load_relaxed_two(self, i: usize) -> [u64; 2] {
        // SAFETY: see `at`; the launch contract guarantees a 16-byte aligned base, so an even index is 16-byte aligned.
        unsafe { backend::load_relaxed_two_u64(self.0.wrapping_add(i)) }
    }
}

impl GlobalMut<u32> {
    /// Adds `value` to element `i` atomically, after all earlier memory accesses of this thread: release, device scope
    /// (`red.release.gpu.global.add.u32`).
    ///
    /// With [`acquire_wait`](Self::acquire_wait), it orders accesses of different blocks. Asynchronous stores are included
    /// once the thread has [waited for them](crate::hopper::tma::wait_stores).
    #[inline(always)]
    #[track_caller]
    pub fn release_add(self, i: usize, value: u32) {
        // SAFETY: see `at`.
        unsafe { backend::release_add_u32(self.0.wrapping_add(i), value) }
    }

    /// Waits until element `i` equals `value`, before all later memory accesses of this thread: acquire, device scope
    /// (`ld.acquire.gpu.global.u32` in a loop).
    ///
    /// The wait must not depend on a block that may not have started. Work that is assigned by an atomic ticket meets this
    /// condition if each work item depends only on items with lower tickets.
    #[inline(always)]
    #[track_caller]
    pub fn acquire_wait(self, i: usize, value: u32) {
        // SAFETY: see `at`.
        unsafe { backend::acquire_wait_u32(self.0.wrapping_add(i), |found| found == value, Some(value)) };
    }

    /// Waits until `condition` holds for element `i`, and returns the element. Otherwise like [`acquire_wait`](Self::acquire_wait).
    ///
    /// The condition should hold for all later values, too: the wait may miss a value that another one follows.
    #[inline(always)]
    #[track_caller]
    pub fn acquire_wait_until(self, i: usize, condition: impl Fn(u32) -> bool) -> u32 {
        // SAFETY: see `at`.
        unsafe { backend::acquire_wait_u32(self.0.wrapping_add(i), condition, None) }
    }
}

impl GlobalSliceMut<'_, u32> {
    /// See [`GlobalMut::release_add`].
    #[inline(always)]
    #[track_caller]
    pub fn release_add(self, i: usize, value: u32) {
        self.check(i, 1);
        self.view.release_add(i, value);
    }

    /// See [`GlobalMut::acquire_wait`].
    #[inline(always)]
    #[track_caller]
    pub fn acquire_wait(self, i: usize, value: u32) {
        self.check(i, 1);
        self.view.acquire_wait(i, value);
    }

    /// See [`GlobalMut::acquire_wait_until`].
    #[inline(always)]
    #[track_caller]
    pub fn acquire_wait_until(self, i: usize, condition: impl Fn(u32) -> bool) -> u32 {
        self.check(i, 1);
        self.view.acquire_wait_until(i, condition)
    }
}
