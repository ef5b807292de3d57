//! Views of global memory that know their length: the buffer parameters of checked kernels (`#[kernel(checked)]`).
//!
//! On a GPU, an access beyond the end stops the kernel with an error. In the emulator it is reported like any other access beyond the
//! end of a buffer.

use crate::backend;
use crate::element::{Element, Packet};
use crate::global::{Global, GlobalMut};
use core::marker::PhantomData;

/// The owner of views of an emulated memory.
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) const EMULATOR: usize = 0;

/// A read-only view of `len` elements of global memory, which nothing writes while the kernel runs.
pub struct GlobalSlice<'a, T> {
    pub(crate) view: Global<T>,
    len: usize,
    #[cfg(not(target_arch = "nvptx64"))]
    owner: usize,
    lifetime: PhantomData<&'a T>,
}

/// A writable view of `len` elements of global memory.
///
/// All threads share it. If two threads access one element without an order and one of them writes, a read returns some value of the
/// element type; the emulator reports the data race.
pub struct GlobalSliceMut<'a, T> {
    pub(crate) view: GlobalMut<T>,
    len: usize,
    #[cfg(not(target_arch = "nvptx64"))]
    owner: usize,
    lifetime: PhantomData<&'a mut T>,
}

/// Defines what both views have.
macro_rules! view {
    ($slice:ident, $view:ident) => {
        impl<T> Clone for $slice<'_, T> {
            #[inline(always)]
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<T> Copy for $slice<'_, T> {}

        impl<T> $slice<'_, T> {
            /// Creates a view of `len` elements.
            ///
            /// # Safety
            /// `view` must start a range of `len` elements of device memory that is aligned to 256 bytes and initialized. `owner` must
            /// identify the stream that all accesses to the range are ordered in, for the lifetime of the view.
            #[doc(hidden)]
            #[cfg(not(target_arch = "nvptx64"))]
            pub const unsafe fn from_parts(view: $view<T>, len: usize, owner: usize) -> Self {
                Self { view, len, owner, lifetime: PhantomData }
            }

            /// Creates a view of `len` elements in a kernel.
            ///
            /// # Safety
            /// The launch must have checked the range, as for a `#[kernel(checked)]`.
            #[doc(hidden)]
            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            pub const unsafe fn from_parts(view: $view<T>, len: u64) -> Self {
                Self { view, len: len as usize, lifetime: PhantomData }
            }

            /// Returns the number of elements.
            #[inline(always)]
            pub const fn len(self) -> usize {
                self.len
            }

            /// Returns whether the view has no elements.
            #[inline(always)]
            pub const fn is_empty(self) -> bool {
                self.len == 0
            }

            #[cfg(not(target_arch = "nvptx64"))]
            pub(crate) const fn view(self) -> $view<T> {
                self.view
            }

            #[cfg(not(target_arch = "nvptx64"))]
            pub(crate) const fn owner(self) -> usize {
                self.owner
            }

            /// Returns the view without its lifetime, for a launch that keeps the lifetime itself.
            #[cfg(not(target_arch = "nvptx64"))]
            pub(crate) const fn without_lifetime(self) -> $slice<'static, T> {
                $slice { view: self.view, len: self.len, owner: self.owner, lifetime: PhantomData }
            }

            /// Stops the kernel unless elements `i` to `i + count - 1` exist.
            #[inline(always)]
            #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
            pub(crate) fn check(self, i: usize, count: usize) {
                if i >= self.len || count > self.len - i {
                    #[cfg(target_arch = "nvptx64")]
                    backend::trap();
                    #[cfg(not(target_arch = "nvptx64"))]
                    backend::beyond_slice(self.view.0.cast::<T>(), i, self.len);
                }
            }
        }
    };
}

view!(GlobalSlice, Global);
view!(GlobalSliceMut, GlobalMut);

impl<T: Copy> GlobalSlice<'_, T> {
    /// Reads element `i`.
    #[inline(always)]
    #[track_caller]
    pub fn at(self, i: usize) -> T {
        self.check(i, 1);
        self.view.at(i)
    }

    /// Reads element `i`, or returns `None` if there is no such element.
    #[inline(always)]
    #[track_caller]
    pub fn get(self, i: usize) -> Option<T> {
        if i < self.len { Some(self.view.at(i)) } else { None }
    }
}

impl<T: Element> GlobalSlice<'_, T> {
    /// Reads the packet that starts at element `i`, a multiple of `T::PACKET` (`ld.global.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn packet(self, i: usize) -> Packet<T> {
        self.check(i, T::PACKET);
        self.view.packet(i)
    }
}

impl<T: Copy> GlobalSliceMut<'_, T> {
    /// Reads element `i`. The load is an ordinary one, which the compiler may merge with others or move out of a loop: to wait for a
    /// value that another thread writes, use `load_relaxed` or `load_acquire`.
    #[inline(always)]
    #[track_caller]
    pub fn at(self, i: usize) -> T {
        self.check(i, 1);
        // SAFETY: the element exists.
        unsafe { backend::load_frozen(self.view.0.wrapping_add(i)) }
    }

    /// Writes element `i`.
    #[inline(always)]
    #[track_caller]
    pub fn set(self, i: usize, value: T) {
        self.check(i, 1);
        self.view.set(i, value);
    }
}

impl<T: Element> GlobalSliceMut<'_, T> {
    /// Reads the packet that starts at element `i`, a multiple of `T::PACKET` (`ld.global.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn packet(self, i: usize) -> Packet<T> {
        self.check(i, T::PACKET);
        // SAFETY: the elements exist, and `i` is a multiple of `T::PACKET`.
        Packet::from_words(unsafe { backend::load128_frozen(self.view.0.wrapping_add(i).cast()) })
    }

    /// Writes the packet that starts at element `i`, a multiple of `T::PACKET` (`st.global.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn set_packet(self, i: usize, packet: Packet<T>) {
        self.check(i, T::PACKET);
        self.view.set_packet(i, packet);
    }
}

/// A view of global memory that asynchronous copies read: [`Global`], or [`GlobalSlice`] and [`GlobalSliceMut`], which stop the kernel if
/// an element does not exist.
///
/// No thread may write the elements of a [`GlobalSliceMut`] from the start of the copy to its wait. Otherwise the copy gets the old or the new
/// bytes, and the emulator reports it. A write of another thread before the copy needs a barrier in between.
pub trait CopySource<T>: private::Sealed {
    /// Returns the view, which has elements `i` to `i` + `count` - 1 if they are read (`valid`).
    #[doc(hidden)]
    #[track_caller]
    fn checked(self, i: usize, count: usize, valid: bool) -> Global<T>;
}

mod private {
    pub trait Sealed {}
    impl<T> Sealed for super::Global<T> {}
    impl<T> Sealed for super::GlobalSlice<'_, T> {}
    impl<T> Sealed for super::GlobalSliceMut<'_, T> {}
}

impl<T> CopySource<T> for Global<T> {
    #[inline(always)]
    fn checked(self, _: usize, _: usize, _: bool) -> Self {
        self
    }
}

impl<T> CopySource<T> for GlobalSlice<'_, T> {
    #[inline(always)]
    #[track_caller]
    fn checked(self, i: usize, count: usize, valid: bool) -> Global<T> {
        if valid {
            self.check(i, count);
        }
        self.view
    }
}

impl<T> CopySource<T> for GlobalSliceMut<'_, T> {
    #[inline(always)]
    #[track_caller]
    fn checked(self, i: usize, count: usize, valid: bool) -> Global<T> {
        if valid {
            self.check(i, count);
        }
        self.view.reader()
    }
}
