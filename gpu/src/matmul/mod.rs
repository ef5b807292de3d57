//! Matrix products for `sm_90a`, bf16 with f32 sums: TMA, wgmma, and warpgroups with roles.
//!
//! `pingpong` is the kernel that training runs, with tiles of six sizes: two that the consumers take in turns, so that an epilogue is
//! hidden behind the next tile's products, and four that they share. `cooperative` is plainer, with 128 x 256 and clusters.

mod column_sums;
mod cooperative;
mod epilogue;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
mod mainloop;
mod pingpong;
mod split;
mod tiles;

pub use cooperative::{A_BOX, OUT_BOX, TILE_N, matmul_wgmma, shared_bytes};
pub use pingpong::{matmul_add_f32, matmul_parts, matmul_pingpong, matmul_with_column_sums, pingpong_shared_bytes};
pub use split::matmul_add_parts;
