//! sm_90a instructions.

use core::arch::asm;
use core::ptr;

mod wgmma;

pub use wgmma::*;

/// What stands for a pointer to a tile or a barrier from here on: its address in the shared window, which is all that these
/// instructions take. Arithmetic on it is then that of 32 bits; on generic pointers the compiler would compute 64, and
/// take the window's base off again.
#[inline(always)]
pub fn window<T>(pointer: *mut T) -> *mut T {
    ptr::without_provenance_mut(super::shared_address(pointer) as usize)
}

/// The address that [`window`] made.
#[inline(always)]
fn address<T>(window: *const T) -> u32 {
    window.addr() as u32
}

macro_rules! plain {
    ($($name:ident = $instruction:literal)*) => {$(
        #[inline(always)]
        pub fn $name() {
            // SAFETY: a fence, a barrier or a wait: no memory or register of its own.
            unsafe { asm!($instruction, options(nostack, preserves_flags)) }
        }
    )*};
}

plain! {
    fence_async_proxy = "fence.proxy.async.shared::cta;"
    fence_mbarrier_init = "fence.mbarrier_init.release.cluster;"
    cluster_sync = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
    tma_commit = "cp.async.bulk.commit_group;"
    tma_wait = "cp.async.bulk.wait_group 0;"
    wgmma_fence = "wgmma.fence.sync.aligned;"
    wgmma_commit = "wgmma.commit_group.sync.aligned;"
}

#[inline(always)]
pub fn wgmma_wait<const PENDING: u32>() {
    // SAFETY: waits.
    unsafe { asm!("wgmma.wait_group.sync.aligned {};", const PENDING, options(nostack, preserves_flags)) }
}

#[inline(always)]
pub fn tma_wait_read<const PENDING: u32>() {
    // SAFETY: waits.
    unsafe { asm!("cp.async.bulk.wait_group.read {};", const PENDING, options(nostack, preserves_flags)) }
}

#[inline(always)]
pub fn take_registers<const N: u32>() {
    // SAFETY: moves registers between the pool and the warpgroup; contents of those kept are unchanged.
    unsafe { asm!("setmaxnreg.inc.sync.aligned.u32 {};", const N, options(nostack, preserves_flags)) }
}

#[inline(always)]
pub fn give_registers<const N: u32>() {
    // SAFETY: as in `take_registers`; ptxas allocates within N after this point.
    unsafe { asm!("setmaxnreg.dec.sync.aligned.u32 {};", const N, options(nostack, preserves_flags)) }
}

#[inline(always)]
pub fn cluster_rank() -> u32 {
    let rank;
    // SAFETY: reads a special register.
    unsafe { asm!("mov.u32 {}, %cluster_ctarank;", out(reg32) rank, options(pure, nomem, nostack, preserves_flags)) }
    rank
}

#[inline(always)]
pub unsafe fn mbarrier_init(barrier: *mut u64, arrivals: u32) {
    // SAFETY: the caller's: a barrier in shared memory.
    unsafe {
        asm!("mbarrier.init.shared::cta.b64 [{}], {};", in(reg32) address(barrier), in(reg32) arrivals,
            options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn mbarrier_arrive_expect(barrier: *mut u64, bytes: u32) {
    // SAFETY: the caller's: an initialised barrier.
    unsafe {
        asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{}], {};", in(reg32) address(barrier),
            in(reg32) bytes, options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn mbarrier_arrive(barrier: *mut u64) {
    // SAFETY: the caller's: an initialised barrier.
    unsafe {
        asm!("mbarrier.arrive.shared::cta.b64 _, [{}];", in(reg32) address(barrier),
            options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn mbarrier_arrive_cluster(barrier: *mut u64, rank: u32) {
    // SAFETY: the caller's: an initialised barrier, at the same place in every block of the cluster.
    unsafe {
        asm!("{{ .reg .b32 remote; mapa.shared::cluster.u32 remote, {}, {}; mbarrier.arrive.shared::cluster.b64 _, [remote]; }}",
            in(reg32) address(barrier), in(reg32) rank, options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn mbarrier_try_wait(barrier: *mut u64, parity: u32) -> bool {
    let done: u32;
    // SAFETY: the caller's: an initialised barrier.
    unsafe {
        asm!("{{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{}], {}; selp.u32 {}, 1, 0, p; }}",
            in(reg32) address(barrier), in(reg32) parity, out(reg32) done, options(nostack, preserves_flags));
    }
    done != 0
}

#[inline(always)]
pub unsafe fn tma_prefetch(map: *const u8) {
    // SAFETY: the caller's: a tensor map in global memory.
    unsafe { asm!("prefetch.tensormap [{}];", in(reg64) map, options(nostack, preserves_flags)) }
}

#[inline(always)]
pub unsafe fn tma_load_2d(to: *mut u8, map: *const u8, x: u32, y: u32, barrier: *mut u64) {
    // SAFETY: the caller's: a tile the size of the map's box in shared memory, an initialised barrier.
    unsafe {
        asm!("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}, {{{}, {}}}], [{}];",
            in(reg32) address(to), in(reg64) map, in(reg32) x, in(reg32) y, in(reg32) address(barrier),
            options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn tma_load_3d(to: *mut u8, map: *const u8, x: u32, y: u32, z: u32, barrier: *mut u64) {
    // SAFETY: the caller's: as in `tma_load_2d`, with a map of three dimensions.
    unsafe {
        asm!("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}, {{{}, {}, {}}}], [{}];",
            in(reg32) address(to), in(reg64) map, in(reg32) x, in(reg32) y, in(reg32) z,
            in(reg32) address(barrier), options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn tma_load_2d_multicast(to: *mut u8, map: *const u8, x: u32, y: u32, barrier: *mut u64, blocks: u16) {
    // SAFETY: the caller's: as in `tma_load_2d` for every block named.
    unsafe {
        asm!("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [{}], [{}, {{{}, {}}}], [{}], {};",
            in(reg32) address(to), in(reg64) map, in(reg32) x, in(reg32) y, in(reg32) address(barrier),
            in(reg16) blocks, options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn tma_store_2d(map: *const u8, x: u32, y: u32, from: *const u8) {
    // SAFETY: the caller's: a tile the size of the map's box in shared memory.
    unsafe {
        asm!("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [{}, {{{}, {}}}], [{}];",
            in(reg64) map, in(reg32) x, in(reg32) y, in(reg32) address(from), options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub unsafe fn stmatrix_x4(row: *mut u32, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the caller's: 16 bytes of shared memory, 16-byte aligned.
    unsafe {
        asm!("stmatrix.sync.aligned.m8n8.x4.shared.b16 [{}], {{{}, {}, {}, {}}};", in(reg32) address(row),
            in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack, preserves_flags));
    }
}

/// `ldmatrix.sync.aligned.m8n8.x4.shared.b16`, as a warp's part of a left operand.
#[inline(always)]
pub unsafe fn left_x4(row: *const u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller's: 16 bytes of shared memory, 16-byte aligned.
    unsafe {
        asm!("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{}, {}, {}, {}}}, [{}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) address(row),
            options(nostack, preserves_flags, readonly));
    }
    [a, b, c, d]
}

#[inline(always)]
pub unsafe fn load_x4(piece: *const u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller's: 16 bytes of shared memory, 16-byte aligned.
    unsafe {
        asm!("ld.shared.v4.b32 {{{}, {}, {}, {}}}, [{}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) address(piece),
            options(nostack, preserves_flags, readonly));
    }
    [a, b, c, d]
}

/// Descriptor of a K-major operand in 128-byte swizzle, `offset` pieces of 16 bytes into the tile's first row: address / 16
/// in bits 0..14, stride between groups of eight rows (1024 bytes) / 16 in bits 32..46, swizzle mode 1 in bits 62..64; the
/// leading offset is not used and conventionally 1.
#[inline(always)]
pub fn operand<T>(tile: *const T, offset: u32) -> u64 {
    descriptor(tile, 1, offset)
}

/// Descriptor of an operand by rows in 128-byte swizzle: as [`operand`], and `leading` bytes from 64 columns to the next.
#[inline(always)]
pub fn operand_by_rows<T>(tile: *const T, leading: u32, offset: u32) -> u64 {
    descriptor(tile, leading >> 4, offset)
}

/// The address changes in the low word alone: 32-bit arithmetic.
#[inline(always)]
fn descriptor<T>(tile: *const T, leading: u32, offset: u32) -> u64 {
    const HIGH: u64 = 64 << 32 | 1 << 62;
    let low = ((address(tile) & 0x3_ffff) >> 4 | leading << 16) + offset;
    low as u64 | HIGH
}
