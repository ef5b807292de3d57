//! GEMM.

use super::file;
use crate::registry::{Family, Kernel};
use crate::session::{Gemm, Session, Tolerance, blocks, shared_bytes};
use anyhow::Result;
use cuda_std::hopper::Extents;
use cuda_std::{Global, GlobalMut, bf16};
use gpu::matmul::gemm::{Batching, Gemm as Description, GemmEpilogue, GemmLayout, GemmPrecision};
use gpu::matmul::launch::{KernelOperands, Map, StridedBatch, TileConfig, TileShape, launches, maps};
use kernels_gpu::gemm;

/// Launches a kernel with one block for each `$rows` x `$columns` elements of out.
macro_rules! launch {
    ($kernel:path, $rows:expr, $columns:expr, $shared:expr) => {
        |s| {
            let Problem { out, a, b, mnk: [m, n, k] } = problem(s)?;
            let launch = $kernel(out, a, b, m as u32, n as u32, k as u32);
            s.launch(launch, grid([m, n], [$rows, $columns]), $shared);
            Ok(())
        }
    };
}

/// Launches a kernel that takes tensor maps of a and b, with 64 x 64 elements in a box.
macro_rules! launch_with_maps {
    ($kernel:path, $grid:expr, $shared:expr) => {
        |s| {
            let Problem { out, a, b, mnk: mnk @ [m, n, k] } = problem(s)?;
            let a = s.tensor_map(a, Extents::Matrix([m, k]), (64, 64))?;
            let b = s.tensor_map(b, Extents::Matrix([k, n]), (64, 64))?;
            let grid: [u32; 3] = $grid(&*s, mnk);
            s.launch($kernel(out, a, b, m as u32, n as u32, k as u32), grid, shared_bytes($shared));
            Ok(())
        }
    };
}

pub const FAMILY: Family = Family {
    name: "gemm",
    problem: "out (M, N) = a (M, K) · b (K, N), bf16 with f32 accumulation.",
    kernels: &[
        Kernel::new(45, "gemm_naive", file!("gemm/naive.rs"), "One thread for each element, in column order.", |s| {
            let Problem { out, a, b, mnk: [m, n, k] } = problem(s)?;
            s.launch(gemm::naive::gemm_naive(out, a, b, m as u32, n as u32, k as u32), blocks(m * n, 256), 0);
            Ok(())
        }),
        Kernel::new(
            46,
            "gemm_coalesced",
            file!("gemm/coalesced.rs"),
            "Consecutive threads have consecutive columns.",
            |s| {
                let Problem { out, a, b, mnk: [m, n, k] } = problem(s)?;
                s.launch(
                    gemm::coalesced::gemm_coalesced(out, a, b, m as u32, n as u32, k as u32),
                    blocks(m * n, 256),
                    0,
                );
                Ok(())
            },
        ),
        Kernel::new(
            47,
            "gemm_shared",
            file!("gemm/shared.rs"),
            "Tiles in shared memory: each element is loaded from global memory 32 times less often.",
            launch!(gemm::shared::gemm_shared, 32, 32, shared_bytes(gemm::shared::shared)),
        ),
        Kernel::new(
            48,
            "gemm_registers",
            file!("gemm/registers.rs"),
            "Eight results for each thread: an element of b is used 8 times from a register.",
            launch!(gemm::registers::gemm_registers, 64, 64, shared_bytes(gemm::registers::shared)),
        ),
        Kernel::new(
            49,
            "gemm_registers_2d",
            file!("gemm/registers_2d.rs"),
            "8 x 8 results for each thread: 16 loads for 64 multiply-adds.",
            launch!(gemm::registers_2d::gemm_registers_2d, 128, 128, shared_bytes(gemm::registers_2d::shared)),
        ),
        Kernel::new(
            50,
            "gemm_vectorized",
            file!("gemm/vectorized.rs"),
            "Loads and stores of 16 bytes, with a transposed in shared memory.",
            launch!(gemm::vectorized::gemm_vectorized, 128, 128, shared_bytes(gemm::vectorized::shared)),
        ),
        Kernel::new(
            51,
            "gemm_mma",
            file!("gemm/mma.rs"),
            "Tensor cores with mma.sync, on fragments in registers.",
            launch!(gemm::mma::gemm_mma, 128, 128, shared_bytes(gemm::mma::shared)),
        ),
        Kernel::new(
            52,
            "gemm_cp_async",
            file!("gemm/cp_async.rs"),
            "A double buffer: cp.async copies the next tiles during the multiplication.",
            launch!(gemm::cp_async::gemm_cp_async, 128, 128, shared_bytes(gemm::cp_async::shared)),
        ),
        Kernel::new(
            53,
            "gemm_wgmma",
            file!("gemm/wgmma.rs"),
            "wgmma reads both operands from swizzled tiles in shared memory; threads copy pairs of elements there.",
            launch!(gemm::wgmma::gemm_wgmma, 128, 256, shared_bytes(gemm::wgmma::shared)),
        )
        .hopper(),
        Kernel::new(
            54,
            "gemm_tma",
            file!("gemm/tma.rs"),
            "One thread starts the copy of whole tiles with TMA, and an mbarrier counts the bytes.",
            launch_with_maps!(gemm::tma::gemm_tma, wide_grid, gemm::tma::shared),
        )
        .hopper(),
        Kernel::new(
            55,
            "gemm_tma_pipeline",
            file!("gemm/tma_pipeline.rs"),
            "Four stages: copies run ahead of the multiplication.",
            launch_with_maps!(gemm::tma_pipeline::gemm_tma_pipeline, wide_grid, gemm::tma_pipeline::shared),
        )
        .hopper(),
        Kernel::new(
            56,
            "gemm_warp_specialized",
            file!("gemm/warp_specialized.rs"),
            "One warpgroup copies and two multiply, with mbarriers in both directions.",
            launch_with_maps!(gemm::warp_specialized::gemm_warp_specialized, wide_grid, gemm::warp_specialized::shared),
        )
        .hopper(),
        Kernel::new(
            57,
            "gemm_persistent",
            file!("gemm/persistent.rs"),
            "One block for each SM computes many tiles: copies of the next tile overlap with the stores of this one.",
            launch_with_maps!(gemm::persistent::gemm_persistent, one_block_per_sm, gemm::warp_specialized::shared),
        )
        .hopper(),
        Kernel::new(
            58,
            "gemm_pingpong_128x128",
            "gpu/src/matmul/kernel.rs",
            "Ping-pong: two consumers with a tile each, one multiplies while the other stores with TMA.",
            |s| production(s, TileShape::T128x128),
        )
        .hopper(),
        Kernel::new(
            59,
            "gemm_pingpong_128x192",
            "gpu/src/matmul/kernel.rs",
            "A larger ping-pong tile loads fewer bytes for each FLOP.",
            |s| production(s, TileShape::T128x192),
        )
        .hopper(),
        Kernel::new(
            60,
            "gemm_cooperative_256x128",
            "gpu/src/matmul/kernel.rs",
            "Cooperative: both consumers share a tile, which can be twice as large.",
            |s| production(s, TileShape::T256x128),
        )
        .hopper(),
    ],
};

/// Returns the grid (N / columns, M / rows).
fn grid([m, n]: [usize; 2], [rows, columns]: [usize; 2]) -> [u32; 3] {
    [n.div_ceil(columns) as u32, m.div_ceil(rows) as u32, 1]
}

/// Returns the grid of the kernels with tiles of 128 x 256.
fn wide_grid(_: &Session, [m, n, _]: [usize; 3]) -> [u32; 3] {
    grid([m, n], [gemm::wgmma::TILE_M, gemm::wgmma::TILE_N])
}

/// Returns the grid of a persistent kernel.
fn one_block_per_sm(s: &Session, _: [usize; 3]) -> [u32; 3] {
    [s.sm_count() as u32, 1, 1]
}

struct Problem {
    out: GlobalMut<bf16>,
    a: Global<bf16>,
    b: Global<bf16>,
    mnk: [usize; 3],
}

fn problem(s: &mut Session) -> Result<Problem> {
    let mnk @ [m, n, k] = s.pick([200, 264, 104], [4096; 3]);
    let (a, b) = (s.noise::<bf16>("a", m * k, 1.0)?, s.noise::<bf16>("b", k * n, 1.0)?);
    let out = s.output::<bf16>("out", m * n)?;
    s.work.bytes = 2 * (m * k + k * n + m * n);
    s.work.flops = 2 * m * n * k;
    let address = |pointer: *const bf16| pointer.addr() as u64;
    s.gemm =
        Some(Gemm { a: address(a.view.pointer()), b: address(b.view.pointer()), out: address(out.pointer()), mnk });
    let (x, y) = (a.values, b.values);
    s.expect("out", out, m * n, Tolerance::BF16, move |i| {
        let (row, column) = (i / n, i % n);
        (0..k).map(|l| x.at(row * k + l) * y.at(l * n + column)).sum()
    });
    Ok(Problem { out, a: a.view, b: b.view, mnk })
}

/// Launches the kernel of training with a tile shape.
fn production(s: &mut Session, tile: TileShape) -> Result<()> {
    let Problem { out, a, b, mnk: [m, n, k] } = problem(s)?;
    let (layout, precision) = (GemmLayout::Nn, GemmPrecision::Bf16);
    let gemm = Description { m, n, k, layout, precision, batching: Batching::One, epilogue: GemmEpilogue::NONE };
    let maps = maps(&gemm, StridedBatch::default(), tile);
    let mut encode = |tensor, Map { extents, tile, .. }| s.tensor_map(tensor, extents, tile);
    let (a, b, out_map) = (encode(a, maps.a)?, encode(b, maps.b)?, encode(out.reader(), maps.out)?);
    let out_address = out.pointer().addr() as u64;
    let operands = KernelOperands { a, b, out: out_map, out_address, ..KernelOperands::default() };
    let config = TileConfig { tile, split_k: 1 };
    s.launch_all(launches(&gemm, config, operands, s.sm_count()));
    Ok(())
}
