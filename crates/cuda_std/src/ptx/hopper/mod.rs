//! `sm_90a` instructions.

use core::arch::asm;
use core::ptr;

mod wgmma;

pub use wgmma::*;

/// Converts a generic pointer to a tile or mbarrier into its address in the shared window, stored as a pointer.
///
/// The instructions of this module take shared-window addresses. Pointer arithmetic then uses 32 bits. With generic
/// pointers, the compiler would compute 64-bit addresses and subtract the base of the window again.
#[cfg(not(feature = "checked"))]
#[inline(always)]
pub fn window<T>(pointer: *mut T) -> *mut T {
    ptr::without_provenance_mut(super::shared_address(pointer) as usize)
}

/// Returns the address that [`window`] has stored in the pointer.
#[inline(always)]
fn address<T>(window: *const T) -> u32 {
    window.addr() as u32
}

/// Returns a window address unchanged, but hides it from the compiler.
#[inline(always)]
pub fn opaque<T>(window: *mut T) -> *mut T {
    ptr::without_provenance_mut(super::opaque(address(window)) as usize)
}

macro_rules! plain {
    ($($name:ident = $instruction:literal)*) => {$(
        #[inline(always)]
        pub fn $name() {
            // SAFETY: the instruction is a fence, a commit or a wait; it accesses neither memory nor registers.
            unsafe { asm!($instruction, options(nostack, preserves_flags)) }
        }
    )*};
}

plain! {
    fence_async_proxy = "fence.proxy.async.shared::cta;"
    fence_async_proxy_global = "fence.proxy.async.global;"
    fence_mbarrier_init = "fence.mbarrier_init.release.cluster;"
    tma_commit = "cp.async.bulk.commit_group;"
    tma_wait = "cp.async.bulk.wait_group 0;"
    wgmma_fence = "wgmma.fence.sync.aligned;"
    wgmma_commit = "wgmma.commit_group.sync.aligned;"
}

#[inline(always)]
pub fn wgmma_wait<const PENDING: u32>() {
    // SAFETY: the instruction only waits.
    unsafe { asm!("wgmma.wait_group.sync.aligned {};", const PENDING, options(nostack, preserves_flags)) }
}

#[inline(always)]
pub fn tma_wait_read<const PENDING: u32>() {
    // SAFETY: the instruction only waits.
    unsafe { asm!("cp.async.bulk.wait_group.read {};", const PENDING, options(nostack, preserves_flags)) }
}

#[inline(always)]
pub fn increase_registers<const N: u32>() {
    // SAFETY: the instruction preserves the contents of the registers that the warpgroup keeps.
    unsafe { asm!("setmaxnreg.inc.sync.aligned.u32 {};", const N, options(nostack, preserves_flags)) }
}

#[inline(always)]
pub fn decrease_registers<const N: u32>() {
    // SAFETY: see `increase_registers`; ptxas uses at most N registers after this point.
    unsafe { asm!("setmaxnreg.dec.sync.aligned.u32 {};", const N, options(nostack, preserves_flags)) }
}

#[inline(always)]
pub unsafe fn mbarrier_init(barrier: *mut u64, arrivals: u32) {
    // SAFETY: the caller guarantees an mbarrier in shared memory.
    unsafe {
        asm!("mbarrier.init.shared::cta.b64 [{}], {};", in(reg32) address(barrier), in(reg32) arrivals,
            options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn mbarrier_arrive_expect(barrier: *mut u64, bytes: u32) {
    // SAFETY: the caller guarantees an initialized mbarrier.
    unsafe {
        asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{}], {};", in(reg32) address(barrier),
            in(reg32) bytes, options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn mbarrier_arrive(barrier: *mut u64) {
    // SAFETY: the caller guarantees an initialized mbarrier.
    unsafe {
        asm!("mbarrier.arrive.shared::cta.b64 _, [{}];", in(reg32) address(barrier),
            options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn mbarrier_try_wait(barrier: *mut u64, parity: u32) -> bool {
    let done: u32;
    // SAFETY: the caller guarantees an initialized mbarrier.
    unsafe {
        asm!("{{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{}], {}; selp.u32 {}, 1, 0, p; }}",
            in(reg32) address(barrier), in(reg32) parity, out(reg32) done, options(nostack, preserves_flags));
    }
    done != 0
}

#[inline(always)]
pub unsafe fn tma_prefetch(map: *const u8) {
    // SAFETY: the caller guarantees a tensor map in global memory.
    unsafe { asm!("prefetch.tensormap [{}];", in(reg64) map, options(nostack, preserves_flags)) }
}

#[inline(always)]
pub unsafe fn tma_load_2d(to: *mut u8, map: *const u8, x: u32, y: u32, barrier: *mut u64) {
    // SAFETY: the caller guarantees a tile in shared memory of the size of the map's box, and an initialized mbarrier.
    unsafe {
        asm!("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}, {{{}, {}}}], [{}];",
            in(reg32) address(to), in(reg64) map, in(reg32) x, in(reg32) y, in(reg32) address(barrier),
            options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn tma_load_3d(to: *mut u8, map: *const u8, x: u32, y: u32, z: u32, barrier: *mut u64) {
    // SAFETY: see `tma_load_2d`, with a map of three dimensions.
    unsafe {
        asm!("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}, {{{}, {}, {}}}], [{}];",
            in(reg32) address(to), in(reg64) map, in(reg32) x, in(reg32) y, in(reg32) z,
            in(reg32) address(barrier), options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn tma_store_2d(map: *const u8, x: u32, y: u32, from: *const u8) {
    // SAFETY: the caller guarantees a tile in shared memory of the size of the map's box.
    unsafe {
        asm!("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [{}, {{{}, {}}}], [{}];",
            in(reg64) map, in(reg32) x, in(reg32) y, in(reg32) address(from), options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn tma_store_3d(map: *const u8, x: u32, y: u32, z: u32, from: *const u8) {
    // SAFETY: see `tma_store_2d`, with a map of three dimensions.
    unsafe {
        asm!("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [{}, {{{}, {}, {}}}], [{}];",
            in(reg64) map, in(reg32) x, in(reg32) y, in(reg32) z, in(reg32) address(from),
            options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn bulk_load(to: *mut u8, from: *const u8, bytes: u32, barrier: *mut u64) {
    // SAFETY: the caller guarantees `bytes` bytes of shared and of global memory, and an initialized mbarrier.
    unsafe {
        asm!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}], {}, [{}];",
            in(reg32) super::shared_address(to), in(reg64) from, in(reg32) bytes, in(reg32) address(barrier),
            options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn bulk_load_with(to: *mut u8, from: *const u8, bytes: u32, barrier: *mut u64, policy: u64) {
    // SAFETY: see `bulk_load`; the policy does not affect the result.
    unsafe {
        asm!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [{}], [{}], {}, [{}], {};",
            in(reg32) super::shared_address(to), in(reg64) from, in(reg32) bytes, in(reg32) address(barrier),
            in(reg64) policy, options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn bulk_store(to: *mut u8, from: *const u8, bytes: u32) {
    // SAFETY: the caller guarantees `bytes` bytes of global and of shared memory.
    unsafe {
        asm!("cp.async.bulk.global.shared::cta.bulk_group [{}], [{}], {};",
            in(reg64) to, in(reg32) super::shared_address(from), in(reg32) bytes, options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn bulk_add_f32(to: *mut u8, from: *const u8, bytes: u32) {
    // SAFETY: see `bulk_store`.
    unsafe {
        asm!("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{}], [{}], {};",
            in(reg64) to, in(reg32) super::shared_address(from), in(reg32) bytes, options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn stmatrix_x4(row: *mut u32, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the caller guarantees 16 bytes of shared memory, aligned to 16 bytes.
    unsafe {
        asm!("stmatrix.sync.aligned.m8n8.x4.shared.b16 [{}], {{{}, {}, {}, {}}};", in(reg32) address(row),
            in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn stmatrix_x4_trans(row: *mut u32, [a, b, c, d]: [u32; 4]) {
    // SAFETY: see `stmatrix_x4`.
    unsafe {
        asm!("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{}], {{{}, {}, {}, {}}};", in(reg32) address(row),
            in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack, preserves_flags));
    }
}

/// `ldmatrix.sync.aligned.m8n8.x4.shared.b16`, for a warp's fragment of A in registers.
#[inline(always)]
pub unsafe fn load_a_x4(row: *const u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller guarantees 16 bytes of shared memory, aligned to 16 bytes.
    unsafe {
        asm!("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{}, {}, {}, {}}}, [{}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) address(row),
            options(nostack, preserves_flags, readonly));
    }
    [a, b, c, d]
}

#[inline(always)]
pub unsafe fn load_x4(chunk: *const u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller guarantees 16 bytes of shared memory, aligned to 16 bytes.
    unsafe {
        asm!("ld.shared.v4.b32 {{{}, {}, {}, {}}}, [{}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) address(chunk),
            options(nostack, preserves_flags, readonly));
    }
    [a, b, c, d]
}

#[inline(always)]
pub unsafe fn store_b16(at: *mut u16, value: u16) {
    // SAFETY: the caller guarantees 2 bytes of shared memory, aligned to 2 bytes.
    unsafe {
        asm!("st.shared.b16 [{}], {};", in(reg32) address(at), in(reg16) value, options(nostack, preserves_flags));
    }
}

/// Returns the descriptor of a K-major operand with the 128-byte swizzle. It starts `offset` chunks of 16 bytes after
/// the start of the tile.
///
/// Bits 0..14 hold address / 16, bits 32..46 the stride between groups of eight rows (1024 bytes) / 16, and bits 62..64
/// swizzle mode 1. The leading offset in bits 16..30 is unused and 1 by convention.
#[inline(always)]
pub fn k_major_operand<T>(tile: *const T, offset: u32) -> u64 {
    descriptor(tile, 1, offset)
}

/// Returns the descriptor of an MN-major operand with the 128-byte swizzle. `leading` is the distance in bytes from 64
/// columns to the next 64. See [`k_major_operand`].
#[inline(always)]
pub fn mn_major_operand<T>(tile: *const T, leading: u32, offset: u32) -> u64 {
    descriptor(tile, leading >> 4, offset)
}

/// Encodes a descriptor. Only its low word depends on the address, so 32-bit arithmetic suffices.
#[inline(always)]
fn descriptor<T>(tile: *const T, leading: u32, offset: u32) -> u64 {
    const HIGH: u64 = 64 << 32 | 1 << 62;
    let low = ((address(tile) & 0x3_ffff) >> 4 | leading << 16) + offset;
    low as u64 | HIGH
}
