//! Views of global memory, the pointer arguments of kernels. See the safety model in the crate documentation.

use crate::backend;
use crate::cache::CachePolicy;
use crate::element::{Element, Packet};

/// A read-only view of global memory, which must not be written while the kernel runs. It is passed as a 64-bit
/// pointer.
#[repr(transparent)]
pub struct Global<T>(pub(crate) *const T);

/// A writable view of global memory. It is passed as a 64-bit pointer.
#[repr(transparent)]
pub struct GlobalMut<T>(pub(crate) *mut T);

impl<T> Clone for Global<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Global<T> {}
impl<T> Clone for GlobalMut<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for GlobalMut<T> {}

#[cfg(not(target_arch = "nvptx64"))]
impl<T> Default for Global<T> {
    fn default() -> Self {
        Self::null()
    }
}
#[cfg(not(target_arch = "nvptx64"))]
impl<T> Default for GlobalMut<T> {
    fn default() -> Self {
        Self::null()
    }
}

// SAFETY: a view is an address; the launch contract covers the accesses through it.
unsafe impl<T> Send for Global<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Global<T> {}
// SAFETY: as above.
unsafe impl<T> Send for GlobalMut<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for GlobalMut<T> {}

impl<T> Global<T> {
    /// Creates a view that starts at address 0, for an operand that a kernel does not have.
    #[cfg(not(all(target_arch = "nvptx64", feature = "checked")))]
    #[inline(always)]
    pub const fn null() -> Self {
        Self(core::ptr::null())
    }

    /// Creates a view that starts at `pointer`. Device code cannot: its launch vouches only for the views that it passes.
    #[cfg(not(target_arch = "nvptx64"))]
    #[inline(always)]
    pub const fn new(pointer: *const T) -> Self {
        Self(pointer)
    }

    /// Creates a view that starts at a device address from the driver. Device code cannot.
    #[cfg(not(target_arch = "nvptx64"))]
    #[inline(always)]
    pub const fn from_address(address: u64) -> Self {
        Self(core::ptr::without_provenance(address as usize))
    }

    /// Returns the start of the view: a device address, or a host address in the emulator.
    #[inline(always)]
    pub const fn pointer(self) -> *const T {
        self.0
    }

    /// Returns the view that starts `count` elements after this one.
    #[must_use]
    #[inline(always)]
    pub fn skip(self, count: usize) -> Self {
        Self(self.0.wrapping_add(count))
    }

    /// Returns whether the view starts at address 0.
    #[inline(always)]
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }
}

impl<T: Copy> Global<T> {
    /// Reads element `i`.
    #[inline(always)]
    #[track_caller]
    pub fn at(self, i: usize) -> T {
        // SAFETY: the launch contract guarantees that every index the kernel computes is inside the allocation.
        unsafe { backend::load(self.0.wrapping_add(i)) }
    }
}

impl<T: Element> Global<T> {
    /// Reads the packet that starts at element `i`, a multiple of `T::PACKET` (`ld.global.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn packet(self, i: usize) -> Packet<T> {
        // SAFETY: see `at`, for T::PACKET elements; the launch contract guarantees that the base is 16-byte aligned.
        Packet::from_words(unsafe { backend::load128(self.0.wrapping_add(i).cast()) })
    }

    /// Reads the packet that starts at element `i` without allocating a line in L1, for data that is read once
    /// (`ld.global.nc.L1::no_allocate.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn packet_streaming(self, i: usize) -> Packet<T> {
        // SAFETY: see `packet`; the memory is read-only while the kernel runs, as `.nc` requires.
        Packet::from_words(unsafe { backend::load128_streaming(self.0.wrapping_add(i).cast()) })
    }

    /// Reads a packet like [`packet_streaming`](Self::packet_streaming), with an L2 cache policy.
    #[inline(always)]
    #[track_caller]
    pub fn packet_streaming_with(self, i: usize, policy: CachePolicy) -> Packet<T> {
        // SAFETY: see `packet_streaming`.
        Packet::from_words(unsafe { backend::load128_streaming_with(self.0.wrapping_add(i).cast(), policy.0) })
    }
}

impl<T: Element> Global<T> {
    /// Reads elements `i` to `i` + 3 as f32, in one access of 8 bytes (bf16) or 16 bytes (f32). `i` must be a multiple
    /// of 4.
    #[inline(always)]
    #[track_caller]
    pub fn four(self, i: usize) -> [f32; 4] {
        // SAFETY: see `packet`, for four elements.
        unsafe { T::load_four(self.0.wrapping_add(i)) }
    }
}

impl<T: Element> GlobalMut<T> {
    /// Reads four elements. See [`Global::four`].
    #[inline(always)]
    #[track_caller]
    pub fn four(self, i: usize) -> [f32; 4] {
        self.reader().four(i)
    }

    /// Writes elements `i` to `i` + 3 in one access, rounded to nearest even. `i` must be a multiple of 4.
    #[inline(always)]
    #[track_caller]
    pub fn set_four(self, i: usize, values: [f32; 4]) {
        // SAFETY: see `packet`, for four elements.
        unsafe { T::store_four(self.0.wrapping_add(i), values) }
    }
}

impl<T> GlobalMut<T> {
    /// Creates a view that starts at address 0, for an operand that a kernel does not have.
    #[cfg(not(all(target_arch = "nvptx64", feature = "checked")))]
    #[inline(always)]
    pub const fn null() -> Self {
        Self(core::ptr::null_mut())
    }

    /// Creates a view that starts at `pointer`. Device code cannot: its launch vouches only for the views that it passes.
    #[cfg(not(target_arch = "nvptx64"))]
    #[inline(always)]
    pub const fn new(pointer: *mut T) -> Self {
        Self(pointer)
    }

    /// Creates a view that starts at a device address from the driver. Device code cannot.
    #[cfg(not(target_arch = "nvptx64"))]
    #[inline(always)]
    pub const fn from_address(address: u64) -> Self {
        Self(core::ptr::without_provenance_mut(address as usize))
    }

    /// Returns the start of the view: a device address, or a host address in the emulator.
    #[inline(always)]
    pub const fn pointer(self) -> *mut T {
        self.0
    }

    /// Returns the view that starts `count` elements after this one.
    #[must_use]
    #[inline(always)]
    pub fn skip(self, count: usize) -> Self {
        Self(self.0.wrapping_add(count))
    }

    /// Returns whether the view starts at address 0.
    #[inline(always)]
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }
}

impl<T> GlobalMut<T> {
    /// Returns a read-only view of the same memory.
    ///
    /// The kernel may write the memory only after its last read through the returned view. [`Global::packet_streaming`]
    /// is not allowed on it, because it requires memory that the kernel never writes.
    #[inline(always)]
    pub const fn reader(self) -> Global<T> {
        Global(self.0)
    }
}

impl<T: Copy> GlobalMut<T> {
    /// Reads element `i`.
    #[inline(always)]
    #[track_caller]
    pub fn at(self, i: usize) -> T {
        // SAFETY: the launch contract guarantees that every index the kernel computes is inside the allocation.
        unsafe { backend::load(self.0.wrapping_add(i)) }
    }

    /// Writes element `i`.
    #[inline(always)]
    #[track_caller]
    pub fn set(self, i: usize, value: T) {
        // SAFETY: see `at`.
        unsafe { backend::store(self.0.wrapping_add(i), value) }
    }
}

impl<T: Element> GlobalMut<T> {
    /// Reads the packet that starts at element `i`, a multiple of `T::PACKET` (`ld.global.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn packet(self, i: usize) -> Packet<T> {
        // SAFETY: see `at`, for T::PACKET elements; the launch contract guarantees that the base is 16-byte aligned.
        Packet::from_words(unsafe { backend::load128(self.0.wrapping_add(i).cast()) })
    }

    /// Reads a packet like [`packet`](Self::packet), with an L2 cache policy.
    #[inline(always)]
    #[track_caller]
    pub fn packet_with(self, i: usize, policy: CachePolicy) -> Packet<T> {
        // SAFETY: see `packet`.
        Packet::from_words(unsafe { backend::load128_with(self.0.wrapping_add(i).cast(), policy.0) })
    }

    /// Writes the packet that starts at element `i`, a multiple of `T::PACKET` (`st.global.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn set_packet(self, i: usize, packet: Packet<T>) {
        // SAFETY: see `packet`.
        unsafe { backend::store128(self.0.wrapping_add(i).cast(), packet.words) }
    }

    /// Writes a packet like [`set_packet`](Self::set_packet), with an L2 cache policy.
    #[inline(always)]
    #[track_caller]
    pub fn set_packet_with(self, i: usize, packet: Packet<T>, policy: CachePolicy) {
        // SAFETY: see `packet`.
        unsafe { backend::store128_with(self.0.wrapping_add(i).cast(), packet.words, policy.0) }
    }

    /// Writes a packet like [`set_packet`](Self::set_packet), evict-first, for data that is not reused soon
    /// (`st.global.cs.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn set_packet_streaming(self, i: usize, packet: Packet<T>) {
        // SAFETY: see `packet`.
        unsafe { backend::store128_streaming(self.0.wrapping_add(i).cast(), packet.words) }
    }
}

impl Global<crate::bf16> {
    /// Reads elements `i` and `i` + 1 as f32 (`ld.global.b32`). `i` must be even.
    #[inline(always)]
    #[track_caller]
    pub fn pair(self, i: usize) -> [f32; 2] {
        crate::element::unpack_pair(self.pair_bits(i))
    }

    /// Reads elements `i` (the low half) and `i` + 1 (`ld.global.b32`). `i` must be even.
    #[inline(always)]
    #[track_caller]
    pub fn pair_bits(self, i: usize) -> u32 {
        // SAFETY: see `at`; an even index is 4-byte aligned.
        unsafe { backend::load(self.0.wrapping_add(i).cast::<u32>()) }
    }
}

impl GlobalMut<crate::bf16> {
    /// Writes elements `i` (the low half of `pair`) and `i` + 1 (`st.global.b32`). `i` must be even.
    #[inline(always)]
    #[track_caller]
    pub fn set_pair(self, i: usize, pair: u32) {
        // SAFETY: see `at`; an even index is 4-byte aligned.
        unsafe { backend::store(self.0.wrapping_add(i).cast::<u32>(), pair) }
    }
}

impl GlobalMut<u16> {
    /// Reads elements `i` to `i` + 3 (`ld.global.v2.b32`). `i` must be a multiple of 4.
    #[inline(always)]
    #[track_caller]
    pub fn four(self, i: usize) -> [u16; 4] {
        // SAFETY: see `at`; the launch contract guarantees a 16-byte aligned base.
        let [low, high] = unsafe { backend::load64(self.0.wrapping_add(i).cast()) };
        [low as u16, (low >> 16) as u16, high as u16, (high >> 16) as u16]
    }

    /// Writes elements `i` to `i` + 3 (`st.global.v2.b32`). `i` must be a multiple of 4.
    #[inline(always)]
    #[track_caller]
    pub fn set_four(self, i: usize, [a, b, c, d]: [u16; 4]) {
        let pack = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
        // SAFETY: see `four`.
        unsafe { backend::store64(self.0.wrapping_add(i).cast(), [pack(a, b), pack(c, d)]) }
    }

    /// Reads elements `i` to `i` + 7, two in each word, the lower half first (`ld.global.v4.b32`). `i` must be a multiple of 8.
    #[inline(always)]
    #[track_caller]
    pub fn eight(self, i: usize) -> [u32; 4] {
        // SAFETY: see `four`.
        unsafe { backend::load128(self.0.wrapping_add(i).cast()) }
    }

    /// Writes elements `i` to `i` + 7 (`st.global.v4.b32`). See [`eight`](Self::eight).
    #[inline(always)]
    #[track_caller]
    pub fn set_eight(self, i: usize, words: [u32; 4]) {
        // SAFETY: see `four`.
        unsafe { backend::store128(self.0.wrapping_add(i).cast(), words) }
    }
}

impl Global<u32> {
    /// Reads elements `i` to `i` + 3 without allocating a line in L1, for data that is read once
    /// (`ld.global.nc.L1::no_allocate.v4.b32`). `i` must be a multiple of 4.
    #[inline(always)]
    #[track_caller]
    pub fn four_streaming(self, i: usize) -> [u32; 4] {
        // SAFETY: see `at`; the launch contract guarantees a 16-byte aligned base, and memory that the kernel does not write.
        unsafe { backend::load128_streaming(self.0.wrapping_add(i)) }
    }
}

impl GlobalMut<u32> {
    /// Writes elements `i` to `i` + 3 (`st.global.v4.b32`). `i` must be a multiple of 4.
    #[inline(always)]
    #[track_caller]
    pub fn set_four(self, i: usize, words: [u32; 4]) {
        // SAFETY: see `at`; the launch contract guarantees a 16-byte aligned base.
        unsafe { backend::store128(self.0.wrapping_add(i), words) }
    }
}

impl Global<f32> {
    /// Reads elements `i` and `i` + 1 (`ld.global.b64`). `i` must be even.
    #[inline(always)]
    #[track_caller]
    pub fn pair(self, i: usize) -> [f32; 2] {
        // SAFETY: see `at`; the launch contract guarantees a 16-byte aligned base, so an even index is 8-byte aligned.
        let pair: u64 = unsafe { backend::load(self.0.wrapping_add(i).cast()) };
        [f32::from_bits(pair as u32), f32::from_bits((pair >> 32) as u32)]
    }
}

impl GlobalMut<f32> {
    /// Writes elements `i` and `i` + 1 (`st.global.b64`). `i` must be even.
    #[inline(always)]
    #[track_caller]
    pub fn set_pair(self, i: usize, [low, high]: [f32; 2]) {
        let pair = u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32;
        // SAFETY: see `Global::pair`.
        unsafe { backend::store(self.0.wrapping_add(i).cast(), pair) }
    }
}

impl GlobalMut<u32> {
    /// Adds `value` to element `i` atomically and returns the old value: relaxed, device scope
    /// (`atom.add.relaxed.gpu.global.u32`).
    #[inline(always)]
    #[track_caller]
    pub fn atomic_add(self, i: usize, value: u32) -> u32 {
        // SAFETY: see `at`.
        unsafe { backend::atomic_add_u32(self.0.wrapping_add(i), value) }
    }

    /// Replaces element `i` by the maximum of itself and `value` atomically: relaxed, device scope
    /// (`red.max.relaxed.gpu.global.u32`). The result does not depend on the order.
    #[inline(always)]
    #[track_caller]
    pub fn atomic_max(self, i: usize, value: u32) {
        // SAFETY: see `at`.
        unsafe { backend::atomic_max_u32(self.0.wrapping_add(i), value) }
    }
}

impl GlobalMut<f32> {
    /// Adds `value` to element `i` atomically: relaxed, device scope (`red.add.relaxed.gpu.global.f32`).
    ///
    /// The order of additions varies between runs, so the result is not deterministic.
    #[inline(always)]
    #[track_caller]
    pub fn atomic_add(self, i: usize, value: f32) {
        // SAFETY: see `at`.
        unsafe { backend::atomic_add_f32(self.0.wrapping_add(i), value) }
    }
}
