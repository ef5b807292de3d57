//! Views of device memory: what a kernel's pointer arguments are. See the crate's safety model.

use crate::backend;
use crate::cache::CachePolicy;
use crate::element::{Element, Packet};

/// Read-only view; nobody writes this memory while the kernel runs. Passed as a 64-bit pointer.
#[repr(transparent)]
pub struct Global<T>(pub(crate) *const T);

/// View for reading and writing. Passed as a 64-bit pointer.
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

// SAFETY: a view is an address; the launch contract covers who reads and writes behind it.
unsafe impl<T> Send for Global<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Global<T> {}
// SAFETY: as above.
unsafe impl<T> Send for GlobalMut<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for GlobalMut<T> {}

impl<T> Global<T> {
    #[inline(always)]
    pub const fn new(pointer: *const T) -> Self {
        Self(pointer)
    }

    /// What lies at a device address, as the driver has it.
    #[inline(always)]
    pub const fn from_address(address: u64) -> Self {
        Self(core::ptr::without_provenance(address as usize))
    }

    /// Where it begins: a device address, or (emulated) one of the host's.
    #[inline(always)]
    pub const fn pointer(self) -> *const T {
        self.0
    }

    /// The view that starts `count` elements further on.
    #[must_use]
    #[inline(always)]
    pub fn skip(self, count: usize) -> Self {
        Self(self.0.wrapping_add(count))
    }

    #[inline(always)]
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }
}

impl<T: Copy> Global<T> {
    /// Element `i`.
    #[inline(always)]
    #[track_caller]
    pub fn at(self, i: usize) -> T {
        // SAFETY: the launch contract puts every index a kernel forms inside the allocation.
        unsafe { backend::load(self.0.wrapping_add(i)) }
    }
}

impl<T: Element> Global<T> {
    /// The 16 bytes that begin at element `i`, a multiple of `T::PACKET` (`ld.global.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn packet(self, i: usize) -> Packet<T> {
        // SAFETY: as in `at`, for T::PACKET elements; the base is 16-byte aligned by the launch contract.
        Packet::from_words(unsafe { backend::load128(self.0.wrapping_add(i).cast()) })
    }

    /// As [`packet`](Self::packet), for data read once: no line is kept in L1 (`ld.global.nc.L1::no_allocate.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn packet_streaming(self, i: usize) -> Packet<T> {
        // SAFETY: as in `packet`; this view is read-only for the kernel's life, which `.nc` asks for.
        Packet::from_words(unsafe { backend::load128_streaming(self.0.wrapping_add(i).cast()) })
    }

    /// As [`packet_streaming`](Self::packet_streaming), with `policy` for L2.
    #[inline(always)]
    #[track_caller]
    pub fn packet_streaming_with(self, i: usize, policy: CachePolicy) -> Packet<T> {
        // SAFETY: as in `packet_streaming`.
        Packet::from_words(unsafe { backend::load128_streaming_with(self.0.wrapping_add(i).cast(), policy.0) })
    }
}

impl<T: Element> Global<T> {
    /// Elements `i` to `i` + 3, `i` a multiple of 4, widened: 8 bytes of bf16, 16 of f32.
    #[inline(always)]
    #[track_caller]
    pub fn four(self, i: usize) -> [f32; 4] {
        // SAFETY: as in `packet`, for four elements.
        unsafe { T::load_four(self.0.wrapping_add(i)) }
    }
}

impl<T: Element> GlobalMut<T> {
    /// As [`Global::four`].
    #[inline(always)]
    #[track_caller]
    pub fn four(self, i: usize) -> [f32; 4] {
        self.reader().four(i)
    }

    /// Writes elements `i` to `i` + 3, `i` a multiple of 4, rounded to nearest even.
    #[inline(always)]
    #[track_caller]
    pub fn set_four(self, i: usize, values: [f32; 4]) {
        // SAFETY: as in `packet`, for four elements.
        unsafe { T::store_four(self.0.wrapping_add(i), values) }
    }
}

impl<T> GlobalMut<T> {
    #[inline(always)]
    pub const fn new(pointer: *mut T) -> Self {
        Self(pointer)
    }

    /// What lies at a device address, as the driver has it.
    #[inline(always)]
    pub const fn from_address(address: u64) -> Self {
        Self(core::ptr::without_provenance_mut(address as usize))
    }

    /// Where it begins: a device address, or (emulated) one of the host's.
    #[inline(always)]
    pub const fn pointer(self) -> *mut T {
        self.0
    }

    /// The view that starts `count` elements further on.
    #[must_use]
    #[inline(always)]
    pub fn skip(self, count: usize) -> Self {
        Self(self.0.wrapping_add(count))
    }

    #[inline(always)]
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }
}

impl<T> GlobalMut<T> {
    /// A view for reading only, for what this kernel writes no sooner than it has read it through the view for the last
    /// time. Not for [`Global::packet_streaming`], which asks for memory that is never written.
    #[inline(always)]
    pub const fn reader(self) -> Global<T> {
        Global(self.0)
    }
}

impl<T: Copy> GlobalMut<T> {
    /// Element `i`.
    #[inline(always)]
    #[track_caller]
    pub fn at(self, i: usize) -> T {
        // SAFETY: the launch contract puts every index a kernel forms inside the allocation.
        unsafe { backend::load(self.0.wrapping_add(i)) }
    }

    /// Writes element `i`.
    #[inline(always)]
    #[track_caller]
    pub fn set(self, i: usize, value: T) {
        // SAFETY: as in `at`.
        unsafe { backend::store(self.0.wrapping_add(i), value) }
    }
}

impl<T: Element> GlobalMut<T> {
    /// The 16 bytes that begin at element `i`, a multiple of `T::PACKET` (`ld.global.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn packet(self, i: usize) -> Packet<T> {
        // SAFETY: as in `at`, for T::PACKET elements; the base is 16-byte aligned by the launch contract.
        Packet::from_words(unsafe { backend::load128(self.0.wrapping_add(i).cast()) })
    }

    /// As [`packet`](Self::packet), with `policy` for L2.
    #[inline(always)]
    #[track_caller]
    pub fn packet_with(self, i: usize, policy: CachePolicy) -> Packet<T> {
        // SAFETY: as in `packet`.
        Packet::from_words(unsafe { backend::load128_with(self.0.wrapping_add(i).cast(), policy.0) })
    }

    /// Writes the 16 bytes that begin at element `i`, a multiple of `T::PACKET` (`st.global.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn set_packet(self, i: usize, packet: Packet<T>) {
        // SAFETY: as in `packet`.
        unsafe { backend::store128(self.0.wrapping_add(i).cast(), packet.words) }
    }

    /// As [`set_packet`](Self::set_packet), with `policy` for L2.
    #[inline(always)]
    #[track_caller]
    pub fn set_packet_with(self, i: usize, packet: Packet<T>, policy: CachePolicy) {
        // SAFETY: as in `packet`.
        unsafe { backend::store128_with(self.0.wrapping_add(i).cast(), packet.words, policy.0) }
    }

    /// As [`set_packet`](Self::set_packet), for data not read again soon: first to be evicted (`st.global.cs.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn set_packet_streaming(self, i: usize, packet: Packet<T>) {
        // SAFETY: as in `packet`.
        unsafe { backend::store128_streaming(self.0.wrapping_add(i).cast(), packet.words) }
    }
}

impl Global<crate::bf16> {
    /// Elements `i` and `i` + 1, `i` even, widened (`ld.global.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn pair(self, i: usize) -> [f32; 2] {
        // SAFETY: as in `at`; an even index is 4-byte aligned.
        crate::element::unpack_pair(unsafe { backend::load(self.0.wrapping_add(i).cast::<u32>()) })
    }
}

impl GlobalMut<crate::bf16> {
    /// Writes elements `i` (low half of `pair`) and `i` + 1, `i` even (`st.global.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn set_pair(self, i: usize, pair: u32) {
        // SAFETY: as in `at`; an even index is 4-byte aligned.
        unsafe { backend::store(self.0.wrapping_add(i).cast::<u32>(), pair) }
    }
}

impl Global<f32> {
    /// Elements `i` and `i` + 1, `i` even (`ld.global.b64`).
    #[inline(always)]
    #[track_caller]
    pub fn pair(self, i: usize) -> [f32; 2] {
        // SAFETY: as in `at`; the base is 16-byte aligned by the launch contract, so an even index is 8-byte aligned.
        let pair: u64 = unsafe { backend::load(self.0.wrapping_add(i).cast()) };
        [f32::from_bits(pair as u32), f32::from_bits((pair >> 32) as u32)]
    }
}

impl GlobalMut<f32> {
    /// Writes elements `i` and `i` + 1, `i` even (`st.global.b64`).
    #[inline(always)]
    #[track_caller]
    pub fn set_pair(self, i: usize, [low, high]: [f32; 2]) {
        let pair = u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32;
        // SAFETY: as in `Global::pair`.
        unsafe { backend::store(self.0.wrapping_add(i).cast(), pair) }
    }
}

impl GlobalMut<u32> {
    /// Adds to element `i` and returns its old value, relaxed, device scope (`atom.add.relaxed.gpu.global.u32`).
    #[inline(always)]
    #[track_caller]
    pub fn atomic_add(self, i: usize, value: u32) -> u32 {
        // SAFETY: as in `at`.
        unsafe { backend::atomic_add_u32(self.0.wrapping_add(i), value) }
    }
}

impl GlobalMut<f32> {
    /// Adds to element `i`, relaxed, device scope, result unused (`red.add.relaxed.gpu.global.f32`).
    /// The order of additions varies from run to run: not for anything that must be reproducible.
    #[inline(always)]
    #[track_caller]
    pub fn atomic_add(self, i: usize, value: f32) {
        // SAFETY: as in `at`.
        unsafe { backend::atomic_add_f32(self.0.wrapping_add(i), value) }
    }
}
