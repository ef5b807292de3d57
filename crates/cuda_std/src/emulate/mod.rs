//! The CPU back end.
#![allow(unused_variables, clippy::missing_safety_doc)]
macro_rules! later { ($($(#[$m:meta])* fn $n:ident $(<$g:tt $(: $gt:ty)?>)? ($($a:ident : $t:ty),*) $(-> $r:ty)?;)*) => { $( pub fn $n ($($a: $t),*) $(-> $r)? { panic!("not emulated yet") } )* } }
later! {
    fn thread_idx_x() -> u32; fn block_idx_x() -> u32; fn block_idx_y() -> u32; fn block_idx_z() -> u32;
    fn block_dim_x() -> u32; fn grid_dim_x() -> u32; fn grid_dim_y() -> u32; fn grid_dim_z() -> u32;
    fn exp2(x: f32) -> f32; fn log2(x: f32) -> f32; fn recip(x: f32) -> f32; fn rsqrt(x: f32) -> f32; fn sqrt(x: f32) -> f32; fn tanh(x: f32) -> f32;
    fn fma(a: f32, b: f32, c: f32) -> f32; fn bf16x2(low: f32, high: f32) -> u32;
    fn sync_threads(); fn sync_named(id: u32, threads: u32); fn arrive_named(id: u32, threads: u32); fn sync_warp();
    fn shuffle_idx(value: u32, from: u32) -> u32; fn shuffle_xor(value: u32, mask: u32) -> u32; fn shuffle_down(value: u32, delta: u32) -> u32;
    fn ballot(predicate: bool) -> u32; fn fence_device(); fn async_copy_commit();
    fn mma_bf16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]); fn mma_f32(d: &mut [f32; 4], a: [f32; 8], b: [f32; 4]);
}
pub fn shared_base() -> *mut u8 {
    std::ptr::null_mut()
}
pub fn async_copy_wait<const PENDING: u32>() {}
pub unsafe fn load<T: Copy>(pointer: *const T) -> T {
    unsafe { *pointer }
}
pub unsafe fn store<T: Copy>(pointer: *mut T, value: T) {
    unsafe { *pointer = value }
}
pub unsafe fn load128(pointer: *const u32) -> [u32; 4] {
    unsafe { *pointer.cast() }
}
pub unsafe fn store128(pointer: *mut u32, value: [u32; 4]) {
    unsafe { *pointer.cast() = value }
}
pub unsafe fn load128_streaming(pointer: *const u32) -> [u32; 4] {
    unsafe { *pointer.cast() }
}
pub unsafe fn store128_streaming(pointer: *mut u32, value: [u32; 4]) {
    unsafe { *pointer.cast() = value }
}
pub unsafe fn atomic_add_u32(pointer: *mut u32, value: u32) -> u32 {
    panic!()
}
pub unsafe fn atomic_add_f32(pointer: *mut f32, value: f32) {
    panic!()
}
pub unsafe fn async_copy_16(to: *mut u32, from: *const u32, valid: bool) {
    panic!()
}
pub unsafe fn ldmatrix_x4(row: *const u32) -> [u32; 4] {
    panic!()
}
pub unsafe fn ldmatrix_x4_trans(row: *const u32) -> [u32; 4] {
    panic!()
}
pub fn run(body: &(dyn Fn() + Sync), grid: [u32; 3], threads: u32, shared_bytes: usize) {
    panic!("not emulated yet")
}
