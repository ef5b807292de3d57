//! GEMMs on batches of matrices: the Newton-Schulz iterations of Muon.
//!
//! The matrices of a batch have one shape. They lie at equal distances, and tensor maps have a third dimension for them. A
//! work tile belongs to one matrix, so a result depends on no other matrix of its batch.

use super::epilogue::{Epilogue, EpilogueOperands, Scale, Scaled, Symmetric, SymmetricScaled, TmaEpilogue};
use super::kernel::{NO_COLUMN_SUMS, run_persistent};
use super::mainloop::{AB, ABt, AtB, Batched, OperandLayout};
use super::tile::{
    BatchScheduler, Cooperative128x256, Cooperative128x320, Cooperative256x128, Cooperative256x192, Pingpong128x128,
    Pingpong128x192, SymmetricScheduler, Tile,
};
use cuda_std::hopper::TensorMap;
use cuda_std::{Global, kernel, thread};

/// out (M, N) = beta · aux (M, N) + alpha · a (M, K) · b (K, N) in bf16, for each of `count` matrices. `n` and `k` are
/// multiples of 8.
///
/// The tensor maps are three-dimensional: `launch::maps` describes them. Grid: (number of SMs).
#[kernel(threads = 384, blocks_per_sm = 1, requires = "wgmma", instances(
    tile_128x128 = <Pingpong128x128>,
    tile_128x192 = <Pingpong128x192>,
    tile_256x128 = <Cooperative256x128>,
    tile_256x192 = <Cooperative256x192>,
    tile_128x256 = <Cooperative128x256>,
    tile_128x320 = <Cooperative128x320>))]
pub fn matmul_batched<T: Tile>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    out: Global<TensorMap>,
    aux: Global<TensorMap>,
    alpha: f32,
    beta: f32,
    m: u32,
    n: u32,
    k: u32,
    count: u32,
) {
    if thread::thread_idx_x() == 0 {
        out.prefetch();
        aux.prefetch();
    }
    let scheduler = BatchScheduler::new([T::TILE_M, T::TILE_N], m, n, k, count);
    let (bias, scale) = (Global::null(), Scale { alpha, beta });
    let operands = EpilogueOperands { out, aux, second: out, bias, n, scale };
    let epilogue = |shared, consumer| TmaEpilogue::<Scaled, T>::new(shared, operands, consumer);
    run_persistent::<Batched<AB>, T, _, false>(a, b, scheduler, NO_COLUMN_SUMS, epilogue);
}

/// out (N, N) = a · b in bf16, where b is aᵀ, for each of `count` matrices: with the layout `ABt`, a is (N, K); with
/// `AtB`, a is stored as (K, N). With `SymmetricScaled`, out = beta · aux (N, N) + alpha · a · b for a symmetric aux.
///
/// Computes the tiles that have elements on or above the diagonal, and stores them in the mirrored places, too: elements
/// (i, j) and (j, i) have the same bits. `n` and `k` are multiples of 8.
///
/// The tensor maps are three-dimensional: `launch::maps` describes them. `a` and `b` are the same tensor. Grid: (number
/// of SMs).
#[kernel(threads = 384, blocks_per_sm = 1, requires = "wgmma", instances(
    abt_128x128 = <ABt, Symmetric, Pingpong128x128>,
    abt_128x192 = <ABt, Symmetric, Pingpong128x192>,
    atb_128x128 = <AtB, Symmetric, Pingpong128x128>,
    atb_128x192 = <AtB, Symmetric, Pingpong128x192>,
    abt_scaled_128x128 = <ABt, SymmetricScaled, Pingpong128x128>,
    abt_scaled_128x192 = <ABt, SymmetricScaled, Pingpong128x192>))]
pub fn matmul_symmetric<L: OperandLayout, E: Epilogue, T: Tile>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    out: Global<TensorMap>,
    aux: Global<TensorMap>,
    alpha: f32,
    beta: f32,
    n: u32,
    k: u32,
    count: u32,
) {
    if thread::thread_idx_x() == 0 {
        out.prefetch();
        if E::AUX {
            aux.prefetch();
        }
    }
    let scheduler = SymmetricScheduler::new([T::TILE_M, T::TILE_N], n, k, count);
    let (bias, scale) = (Global::null(), Scale { alpha, beta });
    let operands = EpilogueOperands { out, aux, second: out, bias, n, scale };
    let epilogue = |shared, consumer| TmaEpilogue::<E, T>::new(shared, operands, consumer);
    run_persistent::<Batched<L>, T, _, false>(a, b, scheduler, NO_COLUMN_SUMS, epilogue);
}
