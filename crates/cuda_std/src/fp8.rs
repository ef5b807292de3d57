//! The 8-bit floating-point types of the OCP FP8 specification: [`E4m3`] (variant E4M3FN) and [`E5m2`].
//!
//! | type | exponent, mantissa bits | largest finite | smallest normal | smallest subnormal | infinity | NaN |
//! |---|---|---|---|---|---|---|
//! | E4M3 | 4, 3 | 448 | 2^-6 | 2^-9 | none | `S.1111.111` |
//! | E5M2 | 5, 2 | 57344 | 2^-14 | 2^-16 | `S.11111.00` | `S.11111.{01, 10, 11}` |
//!
//! Conversions from f32 round to nearest even and saturate: a finite or infinite value beyond the largest finite number
//! becomes that number with the same sign. A NaN becomes the NaN with bits 0x7f. These are the results of
//! `cvt.rn.satfinite.e4m3x2.f32`, on the device and on the CPU.
//!
//! The conversion instruction exists from `sm_89` on; llc rejects it in code for `sm_80`. [`Fp8Format::encode`] needs no such
//! instruction.

use crate::backend;
use crate::element::{Element, Packet, bf16, pack_pair};
use crate::global::GlobalMut;

/// An FP8 format.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Fp8Format {
    /// 4 exponent bits with bias 7, and 3 mantissa bits.
    E4m3,
    /// 5 exponent bits with bias 15, and 2 mantissa bits.
    E5m2,
}

impl Fp8Format {
    /// Number of mantissa bits.
    pub const fn mantissa_bits(self) -> u32 {
        match self {
            Self::E4m3 => 3,
            Self::E5m2 => 2,
        }
    }

    /// Exponent of the smallest normal number.
    pub const fn min_exponent(self) -> i32 {
        match self {
            Self::E4m3 => -6,
            Self::E5m2 => -14,
        }
    }

    /// Largest magnitude that rounds to 0: half of the smallest subnormal number.
    pub const fn largest_rounded_to_zero(self) -> f32 {
        match self {
            Self::E4m3 => 1.0 / 1024.0,
            Self::E5m2 => 1.0 / 131_072.0,
        }
    }

    /// Largest finite number.
    pub const fn max(self) -> f32 {
        match self {
            Self::E4m3 => 448.0,
            Self::E5m2 => 57344.0,
        }
    }

    /// Converts the number with these bits to f32, which is exact.
    #[inline(always)]
    pub fn decode(self, bits: u8) -> f32 {
        let (sign, magnitude) = (u32::from(bits & 0x80) << 24, u32::from(bits & 0x7f));
        // The mantissa moves to the top of f32's. The exponent field then needs the difference of the two biases.
        let value = f32::from_bits(magnitude << (23 - self.mantissa_bits()));
        let scale = f32::from_bits(((253 + self.min_exponent()) as u32) << 23);
        let (infinity, value) = match self {
            Self::E4m3 => (0x7e, value * scale),
            Self::E5m2 => (0x7c, if magnitude == 0x7c { f32::INFINITY } else { value * scale }),
        };
        let value = if magnitude > infinity { f32::NAN } else { value };
        f32::from_bits(value.to_bits() | sign)
    }

    /// Returns the distance of neighboring numbers of this format at `magnitude`, a finite number of either sign.
    #[inline(always)]
    fn spacing(self, magnitude: f32) -> f32 {
        let exponent = ((magnitude.to_bits() >> 23 & 0xff) as i32 - 127).max(self.min_exponent());
        f32::from_bits(((exponent - self.mantissa_bits() as i32 + 127) as u32) << 23)
    }

    /// Converts from f32 without the conversion instruction: rounds to nearest even, saturating.
    #[inline(always)]
    pub fn encode(self, value: f32) -> u8 {
        let bits = value.to_bits() & 0x7fff_ffff;
        let sign = (value.to_bits() >> 24 & 0x80) as u8;
        let magnitude = f32::from_bits(bits.min(self.max().to_bits()));
        let spacing = self.spacing(magnitude);
        let inverse = f32::from_bits((254 << 23) - spacing.to_bits());
        // The magnitude in units of the spacing; the product is exact. Adding 2^23 rounds it to an integer, which is 2^mantissa_bits
        // for the first number of a binade and for the first normal number.
        let multiple = (magnitude * inverse + 8_388_608.0).to_bits() & 0xff;
        let exponent = (spacing.to_bits() >> 23) as i32 - 127 + self.mantissa_bits() as i32;
        let binade = (exponent - self.min_exponent()) as u32;
        if bits > 0x7f80_0000 { 0x7f } else { sign | ((binade << self.mantissa_bits()) + multiple) as u8 }
    }

    /// Rounds stochastically. See [`Element::round_stochastic`].
    #[inline(always)]
    fn round_stochastic(self, value: f32, noise: u32) -> f32 {
        let magnitude = value.abs();
        if value.is_nan() {
            return value;
        }
        if magnitude >= self.max() {
            return self.max().copysign(value);
        }
        let spacing = self.spacing(magnitude);
        // Both are powers of two or small integers, so every operation is exact.
        let multiples = magnitude * (1.0 / spacing);
        let below = multiples as u32 as f32;
        let up = (multiples - below) * 65536.0 > (noise & 0xffff) as f32;
        ((below + if up { 1.0 } else { 0.0 }) * spacing).copysign(value)
    }
}

/// An FP8 number with 4 exponent bits and 3 mantissa bits. It has no infinities.
#[repr(transparent)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct E4m3(u8);

/// An FP8 number with 5 exponent bits and 2 mantissa bits.
#[repr(transparent)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct E5m2(u8);

/// An FP8 storage type.
pub trait Fp8: Element {
    /// The format.
    const FORMAT: Fp8Format;
    /// Largest finite number.
    const MAX: f32 = Self::FORMAT.max();

    /// Creates a number from its bits.
    fn from_bits(bits: u8) -> Self;

    /// Returns the bits of the number.
    fn to_bits(self) -> u8;

    /// Rounds two numbers and packs them, with `high` in the upper byte (`cvt.rn.satfinite.e4m3x2.f32` or
    /// `cvt.rn.satfinite.e5m2x2.f32`).
    fn pack_pair(low: f32, high: f32) -> u16;

    /// Rounds four numbers and packs them, the first in the lowest byte.
    #[inline(always)]
    #[track_caller]
    fn pack_four([a, b, c, d]: [f32; 4]) -> u32 {
        u32::from(Self::pack_pair(a, b)) | u32::from(Self::pack_pair(c, d)) << 16
    }
}

/// Transposes a 4 x 4 matrix of bytes: word i holds row i, with column 0 in the lowest byte (`prmt.b32`).
#[inline(always)]
pub fn transpose_bytes([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    // The lower, and the upper, two bytes of two words alternate.
    const LOWER: u32 = 0x5140;
    const UPPER: u32 = 0x7362;
    let [ab, cd] = [backend::permute_bytes(a, b, LOWER), backend::permute_bytes(c, d, LOWER)];
    let [ab_upper, cd_upper] = [backend::permute_bytes(a, b, UPPER), backend::permute_bytes(c, d, UPPER)];
    let joined = |low, high| [backend::permute_bytes(low, high, 0x5410), backend::permute_bytes(low, high, 0x7632)];
    let ([first, second], [third, fourth]) = (joined(ab, cd), joined(ab_upper, cd_upper));
    [first, second, third, fourth]
}

/// Interleaves the bytes of two pairs: the low byte of `first`, that of `second`, and then their high bytes (`prmt.b32`).
#[inline(always)]
pub fn interleave_pairs(first: u16, second: u16) -> u32 {
    backend::permute_bytes(first.into(), second.into(), 0x5140)
}

/// Moves the even bytes of 16 before the odd ones (`prmt.b32`).
#[inline(always)]
pub fn separate_bytes([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    let halves = |selector| [backend::permute_bytes(a, b, selector), backend::permute_bytes(c, d, selector)];
    let ([a, b], [c, d]) = (halves(0x6420), halves(0x7531));
    [a, b, c, d]
}

impl<T: Fp8> Packet<T> {
    /// Creates a packet of FP8 numbers, the first in the lowest byte of the first word.
    #[inline(always)]
    pub fn from_packed(words: [u32; 4]) -> Self {
        Self::from_words(words)
    }

    /// Returns the FP8 numbers of the packet.
    #[inline(always)]
    pub fn packed(self) -> [u32; 4] {
        self.words
    }
}

/// A power of two by which E4M3 numbers are multiplied when they are converted to bf16. The results are exact in the range of bf16.
#[derive(Clone, Copy)]
pub struct Bf16Scale(u32);

impl Bf16Scale {
    /// Smallest scale.
    pub const MIN: f32 = f32::from_bits((127 - 100) << 23);
    /// Largest scale.
    pub const MAX: f32 = 128.0;

    /// Creates a scale from a power of two between [`MIN`](Self::MIN) and [`MAX`](Self::MAX).
    #[inline(always)]
    pub fn new(scale: f32) -> Self {
        // 2^120, see `convert`.
        let factor = scale * f32::from_bits((127 + 120) << 23);
        Self(pack_pair(factor, factor))
    }

    /// Converts four numbers, the first in the lowest byte, to two pairs of bf16. NaN becomes 480.
    #[inline(always)]
    fn convert(self, word: u32) -> [u32; 2] {
        // Sign and upper three exponent bits are the upper byte of a bf16, and the other four bits the upper half of its lower byte. That is
        // the number times 2^-120, the difference of the biases, also if it is subnormal.
        let upper = word & 0x8080_8080 | word >> 4 & 0x0707_0707;
        let lower = word << 4 & 0xf0f0_f0f0;
        let pairs = [0x5140, 0x7362].map(|selector| backend::permute_bytes(lower, upper, selector));
        pairs.map(|pair| backend::multiply_bf16x2(pair, self.0))
    }
}

impl Packet<E4m3> {
    /// Converts the numbers to bf16, times a scale. NaN becomes 480 times the scale.
    #[inline(always)]
    pub fn to_bf16(self, scale: Bf16Scale) -> [Packet<bf16>; 2] {
        let [a, b, c, d] = self.words.map(|word| scale.convert(word));
        [[a, b], [c, d]].map(|[[a, b], [c, d]]| Packet::from_words([a, b, c, d]))
    }
}

impl<T: Fp8> GlobalMut<T> {
    /// Writes elements `i` to `i` + 7, packed as in [`Packet::packed`] (`st.global.v2.b32`). `i` must be a multiple of 8.
    #[inline(always)]
    #[track_caller]
    pub fn set_eight(self, i: usize, words: [u32; 2]) {
        // SAFETY: the launch contract guarantees that every index the kernel computes is inside the allocation, and a
        // base that is aligned to 16 bytes.
        unsafe { backend::store64(self.pointer().wrapping_add(i).cast(), words) }
    }
}

macro_rules! fp8 {
    ($($type:ident $convert:ident)*) => {$(
        // SAFETY: the type is a transparent u8, and every bit pattern is valid.
        #[cfg(not(target_arch = "nvptx64"))]
        unsafe impl bytemuck::Zeroable for $type {}
        // SAFETY: as above.
        #[cfg(not(target_arch = "nvptx64"))]
        unsafe impl bytemuck::Pod for $type {}

        impl Fp8 for $type {
            const FORMAT: Fp8Format = Fp8Format::$type;

            #[inline(always)]
            fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            #[inline(always)]
            fn to_bits(self) -> u8 {
                self.0
            }

            #[inline(always)]
            #[track_caller]
            fn pack_pair(low: f32, high: f32) -> u16 {
                backend::$convert(low, high)
            }
        }

        /// `from_f32` saturates. A packet holds 16 numbers.
        impl Element for $type {
            #[inline(always)]
            fn to_f32(self) -> f32 {
                Self::FORMAT.decode(self.0)
            }

            #[inline(always)]
            #[track_caller]
            fn from_f32(value: f32) -> Self {
                Self(backend::$convert(value, 0.0) as u8)
            }

            #[inline(always)]
            fn round_stochastic(value: f32, noise: u32) -> f32 {
                Self::FORMAT.round_stochastic(value, noise)
            }

            #[inline(always)]
            #[track_caller]
            unsafe fn load_four(pointer: *const Self) -> [f32; 4] {
                // SAFETY: guaranteed by the caller.
                let word = unsafe { backend::load(pointer.cast::<u32>()) };
                word.to_le_bytes().map(|bits| Self(bits).to_f32())
            }

            #[inline(always)]
            #[track_caller]
            unsafe fn store_four(pointer: *mut Self, values: [f32; 4]) {
                // SAFETY: guaranteed by the caller.
                unsafe { backend::store(pointer.cast::<u32>(), Self::pack_four(values)) }
            }

            #[inline(always)]
            fn unpack(words: &[u32; 4], i: usize) -> f32 {
                Self((words[i / 4] >> (i % 4 * 8)) as u8).to_f32()
            }

            #[inline(always)]
            #[track_caller]
            fn pack(mut f: impl FnMut(usize) -> f32) -> [u32; 4] {
                let mut word = |i: usize| Self::pack_four([f(i), f(i + 1), f(i + 2), f(i + 3)]);
                [word(0), word(4), word(8), word(12)]
            }
        }
    )*};
}

fp8! {
    E4m3 e4m3x2
    E5m2 e5m2x2
}
