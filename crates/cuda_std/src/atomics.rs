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
    /// Replaces element `i` atomically by `value`.
    exchange(value) of u32 = exchange_u32, shared_exchange_u32;
    /// Replaces element `i` atomically by `value`.
    exchange(value) of u64 = exchange_u64, shared_exchange_u64;
    /// Replaces element `i` atomically by `value` if it is `expected`.
    compare_exchange(expected, value) of u32 = compare_exchange_u32, shared_compare_exchange_u32;
    /// Replaces element `i` atomically by `value` if it is `expected`.
    compare_exchange(expected, value) of u64 = compare_exchange_u64, shared_compare_exchange_u64;
}
