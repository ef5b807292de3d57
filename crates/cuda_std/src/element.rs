//! The storage types of tensors, `f32`, [`bf16`] and [`struct@f16`], and 16-byte packets of them. [`crate::fp8`] has the 8-bit types.

use crate::backend;
use core::marker::PhantomData;

/// A bfloat16 number: the upper 16 bits of an f32. It is a storage type; arithmetic uses f32.
#[expect(non_camel_case_types, reason = "named like the primitive types")]
#[repr(transparent)]
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct bf16(u16);

impl bf16 {
    /// Creates a number from its bits.
    #[inline(always)]
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// Returns the bits of the number.
    #[inline(always)]
    pub const fn to_bits(self) -> u16 {
        self.0
    }
}

// SAFETY: bf16 is a transparent u16, and every bit pattern is valid.
#[cfg(not(target_arch = "nvptx64"))]
unsafe impl bytemuck::Zeroable for bf16 {}
// SAFETY: as above.
#[cfg(not(target_arch = "nvptx64"))]
unsafe impl bytemuck::Pod for bf16 {}

/// An IEEE 754 half-precision number. It is a storage type; arithmetic uses f32.
#[expect(non_camel_case_types, reason = "named like the primitive types")]
#[repr(transparent)]
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct f16(u16);

impl f16 {
    /// Creates a number from its bits.
    #[inline(always)]
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// Returns the bits of the number.
    #[inline(always)]
    pub const fn to_bits(self) -> u16 {
        self.0
    }
}

// SAFETY: f16 is a transparent u16, and every bit pattern is valid.
#[cfg(not(target_arch = "nvptx64"))]
unsafe impl bytemuck::Zeroable for f16 {}
// SAFETY: as above.
#[cfg(not(target_arch = "nvptx64"))]
unsafe impl bytemuck::Pod for f16 {}

/// A storage type of tensors. Kernels are generic over it and compute in f32.
pub trait Element: Copy + Default + Send + Sync + 'static {
    /// Number of elements in a 16-byte packet: 8 for bf16 and f16, 4 for f32, 16 for FP8.
    const PACKET: usize = 16 / size_of::<Self>();

    /// Converts to f32, which is exact.
    fn to_f32(self) -> f32;

    /// Converts from f32, rounding to nearest even.
    fn from_f32(value: f32) -> Self;

    /// Rounds `value` stochastically to a number that this type can represent.
    ///
    /// A representable value is unchanged. Any other value is rounded to one of its two neighbors, with a probability
    /// proportional to its proximity. The low half of `noise` holds 16 uniform random bits.
    fn round_stochastic(value: f32, noise: u32) -> f32;

    /// # Safety
    /// `pointer` must be valid for reads of four elements and aligned to their total size.
    #[doc(hidden)]
    unsafe fn load_four(pointer: *const Self) -> [f32; 4];
    /// # Safety
    /// `pointer` must be valid for writes of four elements and aligned to their total size.
    #[doc(hidden)]
    unsafe fn store_four(pointer: *mut Self, values: [f32; 4]);
    #[doc(hidden)]
    fn unpack(words: &[u32; 4], i: usize) -> f32;
    #[doc(hidden)]
    fn pack(f: impl FnMut(usize) -> f32) -> [u32; 4];
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    #[track_caller]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn round_stochastic(value: f32, _noise: u32) -> f32 {
        value
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_four(pointer: *const Self) -> [f32; 4] {
        // SAFETY: guaranteed by the caller.
        unsafe { backend::load128(pointer.cast()) }.map(f32::from_bits)
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_four(pointer: *mut Self, values: [f32; 4]) {
        // SAFETY: guaranteed by the caller.
        unsafe { backend::store128(pointer.cast(), values.map(f32::to_bits)) }
    }

    #[inline(always)]
    fn unpack(words: &[u32; 4], i: usize) -> f32 {
        f32::from_bits(words[i])
    }

    #[inline(always)]
    #[track_caller]
    fn pack(mut f: impl FnMut(usize) -> f32) -> [u32; 4] {
        [f(0).to_bits(), f(1).to_bits(), f(2).to_bits(), f(3).to_bits()]
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits((self.0 as u32) << 16)
    }

    #[inline(always)]
    #[track_caller]
    fn from_f32(value: f32) -> Self {
        Self(backend::bf16x2(value, 0.0) as u16)
    }

    #[inline(always)]
    fn round_stochastic(value: f32, noise: u32) -> f32 {
        // The addition carries into the upper bits if the discarded bits exceed the noise. A NaN is excluded, because
        // the carry could turn it into zero.
        let bits = value.to_bits().wrapping_add(!noise & 0xffff) & 0xffff_0000;
        if value.is_nan() { value } else { f32::from_bits(bits) }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_four(pointer: *const Self) -> [f32; 4] {
        // SAFETY: guaranteed by the caller.
        let [low, high] = unsafe { backend::load64(pointer.cast()) };
        let ([a, b], [c, d]) = (unpack_pair(low), unpack_pair(high));
        [a, b, c, d]
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_four(pointer: *mut Self, [a, b, c, d]: [f32; 4]) {
        // SAFETY: guaranteed by the caller.
        unsafe { backend::store64(pointer.cast(), [backend::bf16x2(a, b), backend::bf16x2(c, d)]) }
    }

    #[inline(always)]
    fn unpack(words: &[u32; 4], i: usize) -> f32 {
        let word = words[i / 2];
        f32::from_bits(if i.is_multiple_of(2) { word << 16 } else { word & 0xffff_0000 })
    }

    #[inline(always)]
    #[track_caller]
    fn pack(mut f: impl FnMut(usize) -> f32) -> [u32; 4] {
        [
            backend::bf16x2(f(0), f(1)),
            backend::bf16x2(f(2), f(3)),
            backend::bf16x2(f(4), f(5)),
            backend::bf16x2(f(6), f(7)),
        ]
    }
}

impl Element for f16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        backend::f16_to_f32(self.0)
    }

    #[inline(always)]
    #[track_caller]
    fn from_f32(value: f32) -> Self {
        Self(backend::f16x2(value, 0.0) as u16)
    }

    /// Values beyond the largest finite number, 65504, are rounded to nearest even.
    #[inline(always)]
    fn round_stochastic(value: f32, noise: u32) -> f32 {
        let magnitude = value.abs();
        if magnitude > 65504.0 || value.is_nan() {
            return Self::from_f32(value).to_f32();
        }
        // The distance of neighbors: 2^-24 for numbers below 2^-14, and above that 2^-10 of the power of two below.
        let exponent = (magnitude.to_bits() >> 23).max(127 - 14);
        let quantum = f32::from_bits((exponent - 10) << 23);
        // Exact: division by a power of two, whose reciprocal is representable.
        let scaled = magnitude * f32::from_bits((254 - (exponent - 10)) << 23);
        let below = scaled as u32;
        let up = scaled - below as f32 > (noise & 0xffff) as f32 * (1.0 / 65536.0);
        let rounded = (below + u32::from(up)) as f32 * quantum;
        if value.is_sign_negative() { -rounded } else { rounded }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_four(pointer: *const Self) -> [f32; 4] {
        // SAFETY: guaranteed by the caller.
        let words = unsafe { backend::load64(pointer.cast()) };
        core::array::from_fn(|i| backend::f16_to_f32((words[i / 2] >> (16 * (i % 2))) as u16))
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_four(pointer: *mut Self, [a, b, c, d]: [f32; 4]) {
        // SAFETY: guaranteed by the caller.
        unsafe { backend::store64(pointer.cast(), [backend::f16x2(a, b), backend::f16x2(c, d)]) }
    }

    #[inline(always)]
    fn unpack(words: &[u32; 4], i: usize) -> f32 {
        backend::f16_to_f32((words[i / 2] >> (16 * (i % 2))) as u16)
    }

    #[inline(always)]
    #[track_caller]
    fn pack(mut f: impl FnMut(usize) -> f32) -> [u32; 4] {
        [backend::f16x2(f(0), f(1)), backend::f16x2(f(2), f(3)), backend::f16x2(f(4), f(5)), backend::f16x2(f(6), f(7))]
    }
}

/// Rounds `low` and `high` to bf16 and packs them into one word, with `high` in the upper half (`cvt.rn.bf16x2.f32`).
#[inline(always)]
#[track_caller]
pub fn pack_pair(low: f32, high: f32) -> u32 {
    backend::bf16x2(low, high)
}

/// Unpacks the two bf16 of a word to f32, the lower half first.
#[inline(always)]
pub fn unpack_pair(word: u32) -> [f32; 2] {
    [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
}

/// Returns the larger magnitude of each half of two words of two bf16, or NaN if one is NaN. The signs of the result have no meaning
/// (`max.NaN.xorsign.abs.bf16x2`, for GPUs of compute capability 8.6 and later).
#[inline(always)]
pub fn larger_magnitudes(a: u32, b: u32) -> u32 {
    backend::larger_magnitudes(a, b)
}

/// A 16-byte vector of `T::PACKET` elements, the unit of a vectorized load or store.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
pub struct Packet<T> {
    pub(crate) words: [u32; 4],
    element: PhantomData<T>,
}

impl<T: Element> Packet<T> {
    /// Creates a packet of `f(0)` to `f(T::PACKET - 1)`, rounded to nearest even.
    #[inline(always)]
    #[track_caller]
    pub fn from_fn(f: impl FnMut(usize) -> f32) -> Self {
        Self::from_words(T::pack(f))
    }

    /// Creates a packet of zeros.
    #[inline(always)]
    pub fn zero() -> Self {
        Self::from_words([0; 4])
    }

    /// Creates a packet from its memory representation. A word holds one f32, or two bf16, the first in the lower half.
    #[inline(always)]
    pub const fn from_words(words: [u32; 4]) -> Self {
        Self { words, element: PhantomData }
    }

    /// Returns the memory representation. See [`from_words`](Self::from_words).
    #[inline(always)]
    pub const fn words(self) -> [u32; 4] {
        self.words
    }

    /// Returns the packet unchanged, but hides its value from the compiler.
    ///
    /// Conversions to f32 are then repeated after this point instead of occupying registers across a loop.
    #[must_use]
    #[inline(always)]
    pub fn opaque(self) -> Self {
        let [a, b, c, d] = self.words;
        Self::from_words([backend::opaque(a), backend::opaque(b), backend::opaque(c), backend::opaque(d)])
    }

    /// Returns element `i` as f32. `i` must be less than `T::PACKET`.
    #[inline(always)]
    pub fn get(&self, i: usize) -> f32 {
        T::unpack(&self.words, i)
    }
}
