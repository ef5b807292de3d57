//! The PTX back end: each primitive is an instruction.
//!
//! Inline assembly that synchronizes threads (barriers, shuffles, votes, ldmatrix, mma) is never `pure`, because the
//! compiler must not move it into a branch. `cuda_builder` also marks every asm call convergent; otherwise the compiler
//! could duplicate it into both arms of a branch.

use core::arch::{asm, nvptx};

pub mod hopper;

unsafe extern "C" {
    /// Rust has no address spaces, so `cuda_builder` replaces calls of these two functions by the address of dynamic
    /// shared memory: a generic pointer that LLVM knows to be shared, and an address in the shared window.
    fn dynamic_shared_memory() -> *mut u8;
    fn dynamic_shared_address() -> u32;
    /// Prints text; the driver defines it.
    fn vprintf(format: *const u8, arguments: *const u8) -> i32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn shfl_idx(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn shfl_bfly(mask: u32, value: u32, lanes: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.down.i32"]
    fn shfl_down(mask: u32, value: u32, delta: u32, clamp: u32) -> u32;
    // Inline assembly would reach ptxas or the driver's compiler even in code for sm_80, which has no such instruction. llc
    // rejects the intrinsics there.
    #[link_name = "llvm.nvvm.ff.to.e4m3x2.rn"]
    fn convert_e4m3x2(high: f32, low: f32) -> u16;
    #[link_name = "llvm.nvvm.ff.to.e5m2x2.rn"]
    fn convert_e5m2x2(high: f32, low: f32) -> u16;
    #[link_name = "llvm.nvvm.prmt"]
    fn prmt(low: u32, high: u32, selector: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.up.i32"]
    fn shfl_up(mask: u32, value: u32, delta: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.all"]
    fn barrier_all(id: u32);
}

const FULL_WARP: u32 = u32::MAX;

macro_rules! special_register {
    ($($name:ident = $intrinsic:ident)*) => {$(
        #[inline(always)]
        pub fn $name() -> u32 {
            // SAFETY: this reads a special register.
            unsafe { nvptx::$intrinsic() }
        }
    )*};
}

special_register! {
    thread_idx_x = _thread_idx_x
    thread_idx_y = _thread_idx_y
    thread_idx_z = _thread_idx_z
    block_idx_x = _block_idx_x
    block_idx_y = _block_idx_y
    block_idx_z = _block_idx_z
    block_dim_x = _block_dim_x
    block_dim_y = _block_dim_y
    block_dim_z = _block_dim_z
    grid_dim_x = _grid_dim_x
    grid_dim_y = _grid_dim_y
    grid_dim_z = _grid_dim_z
}

/// Returns the index of a thread of a one-dimensional block. The emulator refuses other blocks.
#[inline(always)]
pub fn thread_idx_1d() -> u32 {
    thread_idx_x()
}

#[inline(always)]
pub fn lane_id() -> u32 {
    let lane;
    // SAFETY: this reads a special register.
    unsafe { asm!("mov.u32 {}, %laneid;", out(reg32) lane, options(pure, nomem, nostack, preserves_flags)) }
    lane
}

macro_rules! timers {
    ($($name:ident = $register:literal)*) => {$(
        #[inline(always)]
        pub fn $name() -> u64 {
            let time;
            // SAFETY: this reads a special register. It is not pure, so that readings keep their order.
            unsafe { asm!(concat!("mov.u64 {}, ", $register, ";"), out(reg64) time, options(nostack, preserves_flags)) }
            time
        }
    )*};
}

timers! {
    clock = "%clock64"
    nanoseconds = "%globaltimer"
}

#[inline(always)]
pub fn nanosleep(ns: u32) {
    // SAFETY: the instruction only waits.
    unsafe { asm!("nanosleep.u32 {};", in(reg32) ns, options(nostack, preserves_flags)) }
}

#[inline(always)]
pub fn opaque(mut value: u32) -> u32 {
    // SAFETY: the assembly contains no instruction; its operand keeps dependent computations after this point.
    unsafe { asm!("// {0}", inout(reg32) value, options(nostack, preserves_flags)) }
    value
}

/// Defines functions of f32 that are one instruction without side effects.
macro_rules! unary {
    ($($name:ident = $instruction:literal)*) => {$(
        #[inline(always)]
        pub fn $name(x: f32) -> f32 {
            let y;
            // SAFETY: the instruction only operates on registers.
            unsafe {
                asm!(concat!($instruction, " {}, {};"), out(reg32) y, in(reg32) x,
                    options(pure, nomem, nostack, preserves_flags));
            }
            y
        }
    )*};
}

unary! {
    exp2 = "ex2.approx.ftz.f32"
    log2 = "lg2.approx.ftz.f32"
    recip = "rcp.approx.ftz.f32"
    rsqrt = "rsqrt.approx.ftz.f32"
    sqrt = "sqrt.approx.ftz.f32"
    sin_approx = "sin.approx.ftz.f32"
    cos_approx = "cos.approx.ftz.f32"
    sqrt_rn = "sqrt.rn.f32"
    tf32 = "cvt.rna.tf32.f32"
}

#[inline(always)]
pub fn max(a: f32, b: f32) -> f32 {
    a.max(b)
}

#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    core::intrinsics::fmaf32(a, b, c)
}

#[inline(always)]
pub fn fma_f64(a: f64, b: f64, c: f64) -> f64 {
    core::intrinsics::fmaf64(a, b, c)
}

#[inline(always)]
pub fn sqrt_f64(x: f64) -> f64 {
    let root;
    // SAFETY: the instruction only operates on registers.
    unsafe { asm!("sqrt.rn.f64 {}, {};", out(reg64) root, in(reg64) x, options(pure, nomem, nostack, preserves_flags)) }
    root
}

#[inline(always)]
pub fn div_rn(a: f32, b: f32) -> f32 {
    let quotient;
    // SAFETY: the instruction only operates on registers.
    unsafe {
        asm!("div.rn.f32 {}, {}, {};", out(reg32) quotient, in(reg32) a, in(reg32) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    quotient
}

/// Returns the smaller operand, or NaN if one operand is NaN.
#[inline(always)]
pub fn min_or_nan(a: f32, b: f32) -> f32 {
    let smaller;
    // SAFETY: the instruction only operates on registers.
    unsafe {
        asm!("min.NaN.f32 {}, {}, {};", out(reg32) smaller, in(reg32) a, in(reg32) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    smaller
}

/// Rounds `low` and `high` to bf16 and packs them into one word, with `high` in the upper half.
#[inline(always)]
pub fn bf16x2(low: f32, high: f32) -> u32 {
    let packed;
    // SAFETY: the instruction only operates on registers.
    unsafe {
        asm!("cvt.rn.bf16x2.f32 {}, {}, {};", out(reg32) packed, in(reg32) high, in(reg32) low,
            options(pure, nomem, nostack, preserves_flags));
    }
    packed
}

/// Returns the larger magnitude of each half, or NaN if one is NaN. The signs have no meaning.
#[inline(always)]
pub fn larger_magnitudes(a: u32, b: u32) -> u32 {
    let larger;
    // SAFETY: the instruction only operates on registers.
    unsafe {
        asm!("max.NaN.xorsign.abs.bf16x2 {}, {}, {};", out(reg32) larger, in(reg32) a, in(reg32) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    larger
}

/// Multiplies each half of `a` by that of `b`, as bf16, rounded to nearest even.
#[inline(always)]
pub fn multiply_bf16x2(a: u32, b: u32) -> u32 {
    let product;
    // `mul.bf16x2` does not exist for sm_80. The addition of -0 changes no result.
    // SAFETY: the instruction only operates on registers.
    unsafe {
        asm!("fma.rn.bf16x2 {}, {}, {}, {};", out(reg32) product, in(reg32) a, in(reg32) b, in(reg32) 0x8000_8000u32,
            options(pure, nomem, nostack, preserves_flags));
    }
    product
}

/// Rounds `low` and `high` to E4M3, saturating, and packs them with `high` in the upper byte.
#[inline(always)]
pub fn e4m3x2(low: f32, high: f32) -> u16 {
    // SAFETY: the instruction only operates on registers.
    unsafe { convert_e4m3x2(high, low) }
}

/// Rounds `low` and `high` to E5M2, saturating, and packs them with `high` in the upper byte.
#[inline(always)]
pub fn e5m2x2(low: f32, high: f32) -> u16 {
    // SAFETY: the instruction only operates on registers.
    unsafe { convert_e5m2x2(high, low) }
}

/// Returns the four bytes of `low` and `high` that the hexadecimal digits of `selector` name, the lowest first.
#[inline(always)]
pub fn permute_bytes(low: u32, high: u32, selector: u32) -> u32 {
    // SAFETY: the instruction only operates on registers.
    unsafe { prmt(low, high, selector) }
}

/// Rounds `low` and `high` to f16 and packs them into one word, with `high` in the upper half.
#[inline(always)]
pub fn f16x2(low: f32, high: f32) -> u32 {
    let packed;
    // SAFETY: the instruction only operates on registers.
    unsafe {
        asm!("cvt.rn.f16x2.f32 {}, {}, {};", out(reg32) packed, in(reg32) high, in(reg32) low,
            options(pure, nomem, nostack, preserves_flags));
    }
    packed
}

/// Converts the bits of an f16 to f32.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let value;
    // SAFETY: the instruction only operates on registers.
    unsafe {
        asm!("cvt.f32.f16 {}, {};", out(reg32) value, in(reg16) bits, options(pure, nomem, nostack, preserves_flags));
    }
    value
}

#[inline(always)]
pub fn sync_threads() {
    // SAFETY: the instruction only synchronizes threads.
    unsafe { barrier_all(0) }
}

macro_rules! barrier_votes {
    ($($name:ident = $instruction:literal)*) => {$(
        #[inline(always)]
        pub fn $name(predicate: bool) -> bool {
            let result: u32;
            // SAFETY: the instruction only synchronizes threads.
            unsafe {
                asm!(concat!("{{ .reg .pred p, q; setp.ne.b32 p, {}, 0; ", $instruction, " q, 0, p; selp.b32 {}, 1, 0, q; }}"),
                    in(reg32) predicate as u32, out(reg32) result, options(nostack, preserves_flags));
            }
            result != 0
        }
    )*};
}

barrier_votes! {
    sync_threads_or = "bar.red.or.pred"
    sync_threads_and = "bar.red.and.pred"
}

#[inline(always)]
pub fn sync_threads_count(predicate: bool) -> u32 {
    let count;
    // SAFETY: the instruction only synchronizes threads.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.b32 p, {}, 0; bar.red.popc.u32 {}, 0, p; }}",
            in(reg32) predicate as u32, out(reg32) count, options(nostack, preserves_flags));
    }
    count
}

#[inline(always)]
pub fn sync_named(id: u32, threads: u32) {
    // SAFETY: the instruction only synchronizes threads.
    unsafe { asm!("bar.sync {}, {};", in(reg32) id, in(reg32) threads, options(nostack, preserves_flags)) }
}

#[inline(always)]
pub fn arrive_named(id: u32, threads: u32) {
    // SAFETY: the instruction only synchronizes threads.
    unsafe { asm!("bar.arrive {}, {};", in(reg32) id, in(reg32) threads, options(nostack, preserves_flags)) }
}

#[inline(always)]
pub fn sync_warp() {
    // SAFETY: the instruction only synchronizes threads.
    unsafe { asm!("bar.warp.sync -1;", options(nostack, preserves_flags)) }
}

#[inline(always)]
pub fn shuffle_idx(value: u32, from: u32) -> u32 {
    // SAFETY: the instruction only exchanges registers within the warp.
    unsafe { shfl_idx(FULL_WARP, value, from, 31) }
}

#[inline(always)]
pub fn shuffle_xor(value: u32, mask: u32) -> u32 {
    // SAFETY: the instruction only exchanges registers within the warp.
    unsafe { shfl_bfly(FULL_WARP, value, mask, 31) }
}

#[inline(always)]
pub fn shuffle_down(value: u32, delta: u32) -> u32 {
    // SAFETY: the instruction only exchanges registers within the warp.
    unsafe { shfl_down(FULL_WARP, value, delta, 31) }
}

#[inline(always)]
pub fn shuffle_up(value: u32, delta: u32) -> u32 {
    // SAFETY: the instruction only exchanges registers within the warp. The clamp of an upward shuffle is the first lane.
    unsafe { shfl_up(FULL_WARP, value, delta, 0) }
}

#[inline(always)]
pub fn shuffle_masked(value: u32, from: u32, mask: u32) -> u32 {
    // SAFETY: the instruction only exchanges registers within the warp.
    unsafe { shfl_idx(mask, value, from, 31) }
}

#[inline(always)]
pub fn ballot_masked(predicate: bool, mask: u32) -> u32 {
    let bits;
    // SAFETY: the instruction only exchanges registers within the warp.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.b32 p, {}, 0; vote.sync.ballot.b32 {}, p, {}; }}",
            in(reg32) predicate as u32, out(reg32) bits, in(reg32) mask, options(nomem, nostack, preserves_flags));
    }
    bits
}

#[inline(always)]
pub fn active_mask() -> u32 {
    let mask;
    // SAFETY: the instruction reads the state of the warp.
    unsafe { asm!("activemask.b32 {};", out(reg32) mask, options(nostack, preserves_flags)) }
    mask
}

#[inline(always)]
pub fn sync_masked(mask: u32) {
    // SAFETY: the instruction only synchronizes threads.
    unsafe { asm!("bar.warp.sync {};", in(reg32) mask, options(nostack, preserves_flags)) }
}

#[inline(always)]
pub fn ballot(predicate: bool) -> u32 {
    let bits;
    // SAFETY: the instruction only exchanges registers within the warp.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.b32 p, {}, 0; vote.sync.ballot.b32 {}, p, -1; }}",
            in(reg32) predicate as u32, out(reg32) bits, options(nomem, nostack, preserves_flags));
    }
    bits
}

#[inline(always)]
pub fn match_any(value: u32) -> u32 {
    let lanes;
    // SAFETY: the instruction only exchanges registers within the warp.
    unsafe {
        asm!("match.any.sync.b32 {}, {}, -1;", out(reg32) lanes, in(reg32) value, options(nomem, nostack, preserves_flags));
    }
    lanes
}

#[inline(always)]
pub fn match_low_bits<const BITS: u32>(value: u32) -> u32 {
    let mut lanes = u32::MAX;
    for bit in 0..BITS {
        // The lanes whose bit is the same as this lane's. As a vote of `ballot`, LLVM would shift each bit to bit 0 first.
        let same: u32;
        // SAFETY: the instruction only exchanges registers within the warp.
        unsafe {
            asm!("{{ .reg .pred p; setp.ne.b32 p, {0}, 0; vote.sync.ballot.b32 {1}, p, -1; @!p not.b32 {1}, {1}; }}",
                in(reg32) value & 1 << bit, out(reg32) same, options(nomem, nostack, preserves_flags));
        }
        lanes &= same;
    }
    lanes
}

#[inline(always)]
pub fn match_all(value: u32) -> bool {
    let lanes: u32;
    // SAFETY: the instruction only exchanges registers within the warp.
    unsafe {
        asm!("match.all.sync.b32 {}, {}, -1;", out(reg32) lanes, in(reg32) value, options(nomem, nostack, preserves_flags));
    }
    lanes != 0
}

/// Defines reductions of integers over the warp.
macro_rules! warp_reductions {
    ($($name:ident($type:ty) = $instruction:literal)*) => {$(
        #[inline(always)]
        pub fn $name(value: $type) -> $type {
            let reduced;
            // SAFETY: the instruction only exchanges registers within the warp.
            unsafe {
                asm!(concat!("redux.sync.", $instruction, " {}, {}, -1;"), out(reg32) reduced, in(reg32) value,
                    options(nomem, nostack, preserves_flags));
            }
            reduced
        }
    )*};
}

warp_reductions! {
    reduce_add_u32(u32) = "add.u32"
    reduce_min_u32(u32) = "min.u32"
    reduce_max_u32(u32) = "max.u32"
    reduce_add_i32(i32) = "add.s32"
    reduce_min_i32(i32) = "min.s32"
    reduce_max_i32(i32) = "max.s32"
    reduce_and(u32) = "and.b32"
    reduce_or(u32) = "or.b32"
    reduce_xor(u32) = "xor.b32"
}

/// Returns the generic address of dynamic shared memory.
#[inline(always)]
pub fn shared_base() -> *mut u8 {
    // SAFETY: the function returns an address.
    unsafe { dynamic_shared_memory() }
}

/// Returns the 32-bit shared-window address of a generic pointer into dynamic shared memory.
///
/// It is computed from the distance to the base, which the compiler can fold. `cvta.to.shared` would be opaque to it.
#[inline(always)]
pub fn shared_address<T>(pointer: *const T) -> u32 {
    // SAFETY: the function returns an address.
    let base = unsafe { dynamic_shared_address() };
    base.wrapping_add((pointer.addr() - shared_base().addr()) as u32)
}

#[inline(always)]
pub unsafe fn load<T: Copy>(pointer: *const T) -> T {
    // SAFETY: guaranteed by the caller.
    unsafe { *pointer }
}

#[inline(always)]
pub unsafe fn store<T: Copy>(pointer: *mut T, value: T) {
    // SAFETY: guaranteed by the caller.
    unsafe { *pointer = value }
}

/// Reads a value that another thread may write at the same time, with an ordinary load, which the compiler may merge with others.
///
/// In a data race, LLVM leaves the value of such a load open, and could choose it again at each use: a check of bounds could see another
/// value than the access after it. The empty assembly makes it one value.
#[inline(always)]
pub unsafe fn load_frozen<T: Copy>(pointer: *const T) -> T {
    macro_rules! load {
        ($type:ty, $register:ident) => {{
            // SAFETY: guaranteed by the caller. Both types have the same size, and `T` has at least the alignment of `$type`.
            unsafe {
                let mut value = *pointer.cast::<$type>();
                asm!("// {0}", inout($register) value, options(pure, nomem, nostack, preserves_flags));
                core::mem::transmute_copy(&value)
            }
        }};
    }
    match (size_of::<T>(), align_of::<T>()) {
        (2, 2) => load!(u16, reg16),
        (4, 4) => load!(u32, reg32),
        (8, 8) => load!(u64, reg64),
        // SAFETY: guaranteed by the caller.
        _ => unsafe { pointer.read_volatile() },
    }
}

/// Reads four words like [`load_frozen`].
#[inline(always)]
pub unsafe fn load128_frozen(pointer: *const u32) -> [u32; 4] {
    // SAFETY: guaranteed by the caller.
    let [mut a, mut b, mut c, mut d] = unsafe { load128(pointer) };
    // SAFETY: the assembly contains no instruction.
    unsafe {
        asm!("// {0} {1} {2} {3}", inout(reg32) a, inout(reg32) b, inout(reg32) c, inout(reg32) d,
            options(pure, nomem, nostack, preserves_flags));
    }
    [a, b, c, d]
}

#[cfg(feature = "checked")]
#[path = "shared_checked.rs"]
mod shared;
#[cfg(not(feature = "checked"))]
#[path = "shared.rs"]
mod shared;

pub use shared::{SharedView, load_shared, load128_shared, reserve};

/// Four words. Only a SIMD type guarantees a single 128-bit access; the compiler may split an aligned struct.
#[repr(simd)]
#[derive(Clone, Copy)]
struct Words([u32; 4]);

#[inline(always)]
fn words(w: Words) -> [u32; 4] {
    // SAFETY: both types have the same size and no padding.
    unsafe { core::mem::transmute(w) }
}

#[inline(always)]
pub unsafe fn load128(pointer: *const u32) -> [u32; 4] {
    // SAFETY: the caller guarantees 16 readable bytes, aligned to 16 bytes.
    words(unsafe { *pointer.cast::<Words>() })
}

#[inline(always)]
pub unsafe fn store128(pointer: *mut u32, value: [u32; 4]) {
    // SAFETY: the caller guarantees 16 writable bytes, aligned to 16 bytes.
    unsafe { *pointer.cast::<Words>() = Words(value) }
}

/// Two words, for single 64-bit accesses.
#[repr(simd)]
#[derive(Clone, Copy)]
struct HalfWords([u32; 2]);

#[inline(always)]
pub unsafe fn load64(pointer: *const u32) -> [u32; 2] {
    // SAFETY: the caller guarantees 8 readable bytes, aligned to 8 bytes. Both types have the same size and no padding.
    unsafe { core::mem::transmute(*pointer.cast::<HalfWords>()) }
}

#[inline(always)]
pub unsafe fn store64(pointer: *mut u32, value: [u32; 2]) {
    // SAFETY: the caller guarantees 8 writable bytes, aligned to 8 bytes.
    unsafe { *pointer.cast::<HalfWords>() = HalfWords(value) }
}

#[inline(always)]
pub unsafe fn load128_streaming(pointer: *const u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller guarantees 16 readable bytes of global memory, aligned to 16 bytes and not written by the
    // kernel.
    unsafe {
        asm!("ld.global.nc.L1::no_allocate.v4.b32 {{{}, {}, {}, {}}}, [{}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) pointer,
            options(pure, readonly, nostack, preserves_flags));
    }
    [a, b, c, d]
}

#[inline(always)]
pub unsafe fn store128_streaming(pointer: *mut u32, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the caller guarantees 16 writable bytes of global memory, aligned to 16 bytes.
    unsafe {
        asm!("st.global.cs.v4.b32 [{}], {{{}, {}, {}, {}}};",
            in(reg64) pointer, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub fn evict_first() -> u64 {
    let policy;
    // SAFETY: the instruction only creates a policy value.
    unsafe {
        asm!("createpolicy.fractional.L2::evict_first.b64 {};", out(reg64) policy,
            options(pure, nomem, nostack, preserves_flags));
    }
    policy
}

#[inline(always)]
pub fn evict_last(fraction: f32) -> u64 {
    let policy;
    // SAFETY: the instruction only creates a policy value.
    unsafe {
        asm!("createpolicy.fractional.L2::evict_last.L2::evict_first.b64 {}, {};", out(reg64) policy, in(reg32) fraction,
            options(pure, nomem, nostack, preserves_flags));
    }
    policy
}

#[inline(always)]
pub unsafe fn load128_streaming_with(pointer: *const u32, policy: u64) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: see `load128_streaming`; the policy does not affect the result.
    unsafe {
        asm!("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {{{}, {}, {}, {}}}, [{}], {};",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) pointer, in(reg64) policy,
            options(pure, readonly, nostack, preserves_flags));
    }
    [a, b, c, d]
}

#[inline(always)]
pub unsafe fn load128_with(pointer: *const u32, policy: u64) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller guarantees 16 readable bytes of global memory, aligned to 16 bytes.
    unsafe {
        asm!("ld.global.L2::cache_hint.v4.b32 {{{}, {}, {}, {}}}, [{}], {};",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) pointer, in(reg64) policy,
            options(readonly, nostack, preserves_flags));
    }
    [a, b, c, d]
}

#[inline(always)]
pub unsafe fn store128_with(pointer: *mut u32, [a, b, c, d]: [u32; 4], policy: u64) {
    // SAFETY: the caller guarantees 16 writable bytes of global memory, aligned to 16 bytes.
    unsafe {
        asm!("st.global.L2::cache_hint.v4.b32 [{}], {{{}, {}, {}, {}}}, {};",
            in(reg64) pointer, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, in(reg64) policy,
            options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn atomic_add_u32(pointer: *mut u32, value: u32) -> u32 {
    let old;
    // SAFETY: the caller guarantees a valid word of global memory.
    unsafe {
        asm!("atom.add.relaxed.gpu.global.u32 {}, [{}], {};", out(reg32) old, in(reg64) pointer, in(reg32) value,
            options(nostack, preserves_flags));
    }
    old
}

#[inline(always)]
pub unsafe fn atomic_max_u32(pointer: *mut u32, value: u32) {
    // SAFETY: the caller guarantees a valid word of global memory.
    unsafe {
        asm!("red.max.relaxed.gpu.global.u32 [{}], {};", in(reg64) pointer, in(reg32) value,
            options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn atomic_add_f32(pointer: *mut f32, value: f32) {
    // SAFETY: the caller guarantees a valid word of global memory.
    unsafe {
        asm!("red.add.relaxed.gpu.global.f32 [{}], {};", in(reg64) pointer, in(reg32) value,
            options(nostack, preserves_flags));
    }
}

/// Defines atomic operations that return the old value: relaxed, at device scope in global and at block scope in shared memory.
macro_rules! atomics {
    ($($name:ident, $shared:ident, $type:ty, $register:ident, $instruction:literal, $suffix:literal, ($($operand:ident),*);)*) => {$(
        #[inline(always)]
        pub unsafe fn $name(pointer: *mut $type, $($operand: $type),*) -> $type {
            let old;
            // SAFETY: the caller guarantees a valid word of global memory.
            unsafe {
                asm!(concat!("atom.", $instruction, ".relaxed.gpu.global.", $suffix, " {}, [{}]" $(, ", {", stringify!($operand), "}")*, ";"),
                    out($register) old, in(reg64) pointer, $($operand = in($register) $operand,)*
                    options(nostack, preserves_flags));
            }
            old
        }

        #[inline(always)]
        pub unsafe fn $shared(pointer: *mut $type, $($operand: $type),*) -> $type {
            let old;
            // SAFETY: the caller guarantees a valid word of shared memory.
            unsafe {
                asm!(concat!("atom.", $instruction, ".relaxed.cta.shared.", $suffix, " {}, [{}]" $(, ", {", stringify!($operand), "}")*, ";"),
                    out($register) old, in(reg32) shared_address(pointer), $($operand = in($register) $operand,)*
                    options(nostack, preserves_flags));
            }
            old
        }
    )*};
}

atomics! {
    fetch_add_u32, shared_add_u32, u32, reg32, "add", "u32", (value);
    fetch_add_i32, shared_add_i32, i32, reg32, "add", "s32", (value);
    fetch_add_u64, shared_add_u64, u64, reg64, "add", "u64", (value);
    fetch_add_f32, shared_add_f32, f32, reg32, "add", "f32", (value);
    fetch_add_f64, shared_add_f64, f64, reg64, "add", "f64", (value);
    fetch_min_u32, shared_min_u32, u32, reg32, "min", "u32", (value);
    fetch_min_i32, shared_min_i32, i32, reg32, "min", "s32", (value);
    fetch_min_u64, shared_min_u64, u64, reg64, "min", "u64", (value);
    fetch_max_u32, shared_max_u32, u32, reg32, "max", "u32", (value);
    fetch_max_i32, shared_max_i32, i32, reg32, "max", "s32", (value);
    fetch_max_u64, shared_max_u64, u64, reg64, "max", "u64", (value);
    fetch_and_u32, shared_and_u32, u32, reg32, "and", "b32", (value);
    fetch_and_u64, shared_and_u64, u64, reg64, "and", "b64", (value);
    fetch_or_u32, shared_or_u32, u32, reg32, "or", "b32", (value);
    fetch_or_u64, shared_or_u64, u64, reg64, "or", "b64", (value);
    fetch_xor_u32, shared_xor_u32, u32, reg32, "xor", "b32", (value);
    fetch_xor_u64, shared_xor_u64, u64, reg64, "xor", "b64", (value);
    exchange_u32, shared_exchange_u32, u32, reg32, "exch", "b32", (value);
    exchange_u64, shared_exchange_u64, u64, reg64, "exch", "b64", (value);
    compare_exchange_u32, shared_compare_exchange_u32, u32, reg32, "cas", "b32", (expected, value);
    compare_exchange_u64, shared_compare_exchange_u64, u64, reg64, "cas", "b64", (expected, value);
}

#[inline(always)]
pub unsafe fn release_add_u32(pointer: *mut u32, value: u32) {
    // SAFETY: the caller guarantees a valid word of global memory.
    unsafe {
        asm!("red.release.gpu.global.add.u32 [{}], {};", in(reg64) pointer, in(reg32) value,
            options(nostack, preserves_flags));
    }
}

/// Defines atomic reads and writes: of global memory at device scope, and of shared memory at block scope.
macro_rules! accesses {
    ($($type:ty, $register:ident, $suffix:literal: $load:ident, $shared_load:ident, $store:ident, $shared_store:ident,
        $read:literal, $write:literal;)*) => {$(
        #[inline(always)]
        pub unsafe fn $load(pointer: *const $type) -> $type {
            let value;
            // SAFETY: the caller guarantees a valid word of global memory.
            unsafe {
                asm!(concat!("ld.", $read, ".gpu.global.", $suffix, " {}, [{}];"),
                    out($register) value, in(reg64) pointer, options(nostack, preserves_flags));
            }
            value
        }

        #[inline(always)]
        pub unsafe fn $shared_load(pointer: *const $type) -> $type {
            let value;
            // SAFETY: the caller guarantees a valid word of shared memory.
            unsafe {
                asm!(concat!("ld.", $read, ".cta.shared.", $suffix, " {}, [{}];"),
                    out($register) value, in(reg32) shared_address(pointer), options(nostack, preserves_flags));
            }
            value
        }

        #[inline(always)]
        pub unsafe fn $store(pointer: *mut $type, value: $type) {
            // SAFETY: the caller guarantees a valid word of global memory.
            unsafe {
                asm!(concat!("st.", $write, ".gpu.global.", $suffix, " [{}], {};"),
                    in(reg64) pointer, in($register) value, options(nostack, preserves_flags));
            }
        }

        #[inline(always)]
        pub unsafe fn $shared_store(pointer: *mut $type, value: $type) {
            // SAFETY: the caller guarantees a valid word of shared memory.
            unsafe {
                asm!(concat!("st.", $write, ".cta.shared.", $suffix, " [{}], {};"),
                    in(reg32) shared_address(pointer), in($register) value, options(nostack, preserves_flags));
            }
        }
    )*};
}

accesses! {
    u32, reg32, "u32": load_relaxed_u32, shared_load_relaxed_u32, store_relaxed_u32, shared_store_relaxed_u32, "relaxed", "relaxed";
    u32, reg32, "u32": load_acquire_u32, shared_load_acquire_u32, store_release_u32, shared_store_release_u32, "acquire", "release";
    u64, reg64, "u64": load_relaxed_u64, shared_load_relaxed_u64, store_relaxed_u64, shared_store_relaxed_u64, "relaxed", "relaxed";
    u64, reg64, "u64": load_acquire_u64, shared_load_acquire_u64, store_release_u64, shared_store_release_u64, "acquire", "release";
}

#[inline(always)]
pub unsafe fn load_relaxed_two_u64(pointer: *const u64) -> [u64; 2] {
    let (a, b);
    // SAFETY: the caller guarantees two valid words of global memory, aligned to 16 bytes.
    unsafe {
        asm!("ld.relaxed.gpu.global.v2.u64 {{{}, {}}}, [{}];",
            out(reg64) a, out(reg64) b, in(reg64) pointer, options(nostack, preserves_flags));
    }
    [a, b]
}

/// Waits until `condition` holds for the word.
#[inline(always)]
pub unsafe fn acquire_wait_u32(pointer: *const u32, condition: impl Fn(u32) -> bool, _awaited: Option<u32>) -> u32 {
    loop {
        // SAFETY: guaranteed by the caller.
        let found = unsafe { load_acquire_u32(pointer) };
        if condition(found) {
            return found;
        }
    }
}

macro_rules! fences {
    ($($name:ident = $instruction:literal;)*) => {$(
        #[inline(always)]
        pub fn $name() {
            // SAFETY: the instruction only orders memory accesses.
            unsafe { asm!($instruction, options(nostack, preserves_flags)) }
        }
    )*};
}

fences! {
    fence_block = "fence.acq_rel.cta;";
    fence_device = "fence.acq_rel.gpu;";
    fence_system = "fence.acq_rel.sys;";
    fence_sc_block = "fence.sc.cta;";
    fence_sc_device = "fence.sc.gpu;";
    fence_sc_system = "fence.sc.sys;";
}

#[inline(always)]
pub unsafe fn async_copy_16(to: *mut u32, from: *const u32, valid: bool) {
    let bytes = if valid { 16u32 } else { 0 };
    // SAFETY: the caller guarantees 16 bytes of shared memory and, if `valid`, 16 bytes of global memory, both aligned
    // to 16 bytes.
    unsafe {
        asm!("cp.async.cg.shared.global [{}], [{}], 16, {};",
            in(reg32) shared_address(to), in(reg64) from, in(reg32) bytes, options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub fn async_copy_commit() {
    // SAFETY: the instruction only commits a group.
    unsafe { asm!("cp.async.commit_group;", options(nostack, preserves_flags)) }
}

#[inline(always)]
pub fn async_copy_wait<const PENDING: u32>() {
    // SAFETY: the instruction only waits.
    unsafe { asm!("cp.async.wait_group {};", const PENDING, options(nostack, preserves_flags)) }
}

/// `ldmatrix.sync.aligned.m8n8.x4.shared.b16`: lane l provides row l % 8 of matrix l / 8 and receives from each matrix
/// the elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1).
#[inline(always)]
pub unsafe fn ldmatrix_x4(row: *const u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller guarantees 16 bytes of shared memory, aligned to 16 bytes.
    unsafe {
        asm!("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{}, {}, {}, {}}}, [{}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) shared_address(row),
            options(nostack, preserves_flags, readonly));
    }
    [a, b, c, d]
}

/// Same as [`ldmatrix_x4`], with each 8 x 8 matrix transposed.
#[inline(always)]
pub unsafe fn ldmatrix_x4_trans(row: *const u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller guarantees 16 bytes of shared memory, aligned to 16 bytes.
    unsafe {
        asm!("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{}, {}, {}, {}}}, [{}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) shared_address(row),
            options(nostack, preserves_flags, readonly));
    }
    [a, b, c, d]
}

/// `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`
#[inline(always)]
pub fn mma_bf16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    // SAFETY: the instruction only operates on the warp's registers.
    unsafe {
        asm!(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};",
            inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
            in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg32) b[0], in(reg32) b[1],
            options(nomem, nostack, preserves_flags));
    }
}

/// Defines `mma.sync` of FP8 matrices with b in E4M3.
macro_rules! mma_fp8 {
    ($($name:ident = $a:literal;)*) => {$(
        #[doc = concat!("`mma.sync.aligned.m16n8k32.row.col.f32.", $a, ".e4m3.f32`")]
        #[inline(always)]
        pub fn $name(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
            // SAFETY: the instruction only operates on the warp's registers.
            unsafe {
                asm!(
                    concat!("mma.sync.aligned.m16n8k32.row.col.f32.", $a, ".e4m3.f32 {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};"),
                    inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
                    in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg32) b[0], in(reg32) b[1],
                    options(nomem, nostack, preserves_flags));
            }
        }
    )*};
}

mma_fp8! {
    mma_e4m3 = "e4m3";
    mma_e5m2 = "e5m2";
}

/// `mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32`
#[inline(always)]
fn mma_tf32(d: &mut [f32; 4], a: [f32; 4], b: [f32; 2]) {
    // SAFETY: the instruction only operates on the warp's registers.
    unsafe {
        asm!(
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};",
            inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
            in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg32) b[0], in(reg32) b[1],
            options(nomem, nostack, preserves_flags));
    }
}

/// Computes D (16 x 8) += A (16 x 16) · B (16 x 8) in f32. Each operand is split into two tf32 parts, and for each half
/// of k the three largest partial products are summed, small ones first.
#[inline(always)]
pub fn mma_f32(d: &mut [f32; 4], a: [f32; 8], b: [f32; 4]) {
    let a_big = a.map(tf32);
    let b_big = b.map(tf32);
    let mut a_small = a;
    let mut b_small = b;
    for i in 0..8 {
        a_small[i] = tf32(a[i] - a_big[i]);
    }
    for i in 0..4 {
        b_small[i] = tf32(b[i] - b_big[i]);
    }
    let (low_a, high_a) = (|x: [f32; 8]| [x[0], x[2], x[1], x[3]], |x: [f32; 8]| [x[4], x[6], x[5], x[7]]);
    let (low_b, high_b) = (|x: [f32; 4]| [x[0], x[1]], |x: [f32; 4]| [x[2], x[3]]);
    mma_tf32(d, low_a(a_small), low_b(b_big));
    mma_tf32(d, high_a(a_small), high_b(b_big));
    mma_tf32(d, low_a(a_big), low_b(b_small));
    mma_tf32(d, high_a(a_big), high_b(b_small));
    mma_tf32(d, low_a(a_big), low_b(b_big));
    mma_tf32(d, high_a(a_big), high_b(b_big));
}

/// Prints a line with this format of `printf`.
#[inline(always)]
pub fn print<A: Copy>(format: &'static [u8], arguments: A) {
    // SAFETY: the format ends with a zero and describes the arguments, which have the layout of C's variadic arguments.
    unsafe { vprintf(format.as_ptr(), (&raw const arguments).cast()) };
}

pub fn trap() -> ! {
    // SAFETY: the instruction stops the kernel.
    unsafe { nvptx::trap() }
}
