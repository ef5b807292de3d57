//! GEMMs with FP8 operands: out (M, N) = epilogue(`scale_a` · `scale_b` · a (M, K) · b (N, K)ᵀ).
//!
//! FP8 wgmma takes K-major operands only, so a GEMM whose operands are stored otherwise needs transposed copies. Pipeline,
//! scheduler and epilogues are those of the bf16 kernels: a stage holds 128 columns of K instead of 64, in as many bytes.
//!
//! The scales are f32 in device memory, so that a CUDA graph need not change when they do. They are the factors that
//! restore a tensor from its FP8 values.
//!
//! Hopper's tensor cores accumulate FP8 products with about 14 bits ([`cuda_std::hopper::wgmma`]). There are two modes:
//! * fast: tensor cores accumulate over all of K.
//! * exact: tensor cores accumulate over 128 columns of K, and their sums are added in f32. This takes a second set of
//!   accumulators, so a consumer has 64 rows and tiles have 128 x 128 or 128 x 192 elements.

use super::accumulate::AccumulateF32;
use super::epilogue::{
    Accumulate, Bias, BiasGelu, BiasResidual, Epilogue, EpilogueOperands, EpilogueStore, GeluBackward, Plain, Scale,
    TmaEpilogue,
};
use super::fp8_epilogue::{QuantizedEpilogue, TmaFp8Epilogue};
use super::kernel::{NO_COLUMN_SUMS, run_persistent};
use super::mainloop::{ConsumerAccumulators, OperandLayout};
use super::split_k::StorePartials;
use super::tile::{
    Cooperative128x128, Cooperative128x192, Cooperative128x256, Cooperative128x320, Cooperative256x128,
    Cooperative256x192, Pingpong128x128, Pingpong128x192, TILE_K_FP8, Tile, TileScheduler, WorkTile,
};
use core::marker::PhantomData;
use cuda_std::hopper::TensorMap;
use cuda_std::hopper::wgmma::{Accumulators, KMajorOperand};
use cuda_std::{E4m3, E5m2, Fp8, Global, GlobalMut, bf16, kernel, thread};

/// a (M, K) · b (N, K)ᵀ with FP8 operands of the types `A` and `B`.
pub struct Fp8ABt<A, B, const EXACT: bool>(PhantomData<(A, B)>);

impl<A: Fp8, B: Fp8, const EXACT: bool> OperandLayout for Fp8ABt<A, B, EXACT> {
    const A_M_MAJOR: bool = false;
    const B_N_MAJOR: bool = false;
    const TILE_K: u32 = TILE_K_FP8;
    const PROMOTED: bool = EXACT;

    #[inline(always)]
    #[track_caller]
    fn mma_k_major<D: Accumulators>(d: &mut D, a: KMajorOperand, b: KMajorOperand, accumulate: bool) {
        d.mma_fp8::<A, B>(a, b, accumulate);
    }
}

/// Activations or gradients by weights or activations, fast.
pub type E4m3ByE4m3 = Fp8ABt<E4m3, E4m3, false>;
/// Gradients in E5M2 by weights or activations, fast.
pub type E5m2ByE4m3 = Fp8ABt<E5m2, E4m3, false>;
/// [`E4m3ByE4m3`], exact.
pub type E4m3ByE4m3Exact = Fp8ABt<E4m3, E4m3, true>;
/// [`E5m2ByE4m3`], exact.
pub type E5m2ByE4m3Exact = Fp8ABt<E5m2, E4m3, true>;

/// Multiplies accumulators by a scale before the epilogue `S`.
struct ScaledEpilogue<S> {
    scale: f32,
    epilogue: S,
}

impl<T: Tile, S: EpilogueStore<T>> EpilogueStore<T> for ScaledEpilogue<S> {
    #[inline(always)]
    fn prefetch(&self, tile: WorkTile) {
        self.epilogue.prefetch(tile);
    }

    #[inline(always)]
    fn store(&mut self, d: &ConsumerAccumulators<T::Accumulator>, tile: WorkTile) {
        let mut d = *d;
        for i in 0..T::TILE_N as usize / 2 {
            d.upper[i] *= self.scale;
            if T::CONSUMER_M > 64 {
                d.lower[i] *= self.scale;
            }
        }
        self.epilogue.store(&d, tile);
    }

    #[inline(always)]
    fn finish(&self) {
        self.epilogue.finish();
    }
}

/// Runs the persistent kernel with operands of layout `L` and a scaled epilogue.
#[inline(always)]
fn run_scaled<L: OperandLayout, T: Tile, S: EpilogueStore<T>>(
    [a, b]: [Global<TensorMap>; 2],
    [scale_a, scale_b]: [Global<f32>; 2],
    [m, n, k, split_k]: [u32; 4],
    epilogue: impl FnOnce(super::shared::SharedStorage, u32) -> S,
) {
    let scheduler = TileScheduler::with_tile_k([T::TILE_M, T::TILE_N], m, n, k, split_k, L::TILE_K);
    let scaled = |shared, consumer| ScaledEpilogue {
        scale: scale_a.at(0) * scale_b.at(0),
        epilogue: epilogue(shared, consumer),
    };
    run_persistent::<L, T, _, false>(a, b, scheduler, NO_COLUMN_SUMS, scaled);
}

/// out (M, N) = epilogue(`scale_a` · `scale_b` · a (M, K) · b (N, K)ᵀ) in bf16.
///
/// The epilogue may read `aux` (M, N) and `bias` (N), and may write `second` (M, N), all bf16. Maps that it does not use
/// may be arbitrary. `fp8_launch::maps` describes the tensor maps. `n` is a multiple of 8, `k` of 16.
///
/// Grid: (number of SMs).
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a", instances(
    e4m3_128x128 = <E4m3ByE4m3, Plain, Pingpong128x128>,
    e4m3_128x192 = <E4m3ByE4m3, Plain, Pingpong128x192>,
    e4m3_256x128 = <E4m3ByE4m3, Plain, Cooperative256x128>,
    e4m3_256x192 = <E4m3ByE4m3, Plain, Cooperative256x192>,
    e4m3_128x256 = <E4m3ByE4m3, Plain, Cooperative128x256>,
    e4m3_128x320 = <E4m3ByE4m3, Plain, Cooperative128x320>,
    e4m3_bias_128x128 = <E4m3ByE4m3, Bias, Pingpong128x128>,
    e4m3_bias_128x192 = <E4m3ByE4m3, Bias, Pingpong128x192>,
    e4m3_bias_256x128 = <E4m3ByE4m3, Bias, Cooperative256x128>,
    e4m3_bias_256x192 = <E4m3ByE4m3, Bias, Cooperative256x192>,
    e4m3_bias_128x256 = <E4m3ByE4m3, Bias, Cooperative128x256>,
    e4m3_bias_128x320 = <E4m3ByE4m3, Bias, Cooperative128x320>,
    e4m3_bias_residual_128x128 = <E4m3ByE4m3, BiasResidual, Pingpong128x128>,
    e4m3_bias_residual_128x192 = <E4m3ByE4m3, BiasResidual, Pingpong128x192>,
    e4m3_bias_residual_256x128 = <E4m3ByE4m3, BiasResidual, Cooperative256x128>,
    e4m3_bias_residual_256x192 = <E4m3ByE4m3, BiasResidual, Cooperative256x192>,
    e4m3_bias_residual_128x256 = <E4m3ByE4m3, BiasResidual, Cooperative128x256>,
    e4m3_bias_residual_128x320 = <E4m3ByE4m3, BiasResidual, Cooperative128x320>,
    e4m3_residual_128x128 = <E4m3ByE4m3, Accumulate, Pingpong128x128>,
    e4m3_residual_128x192 = <E4m3ByE4m3, Accumulate, Pingpong128x192>,
    e4m3_residual_256x128 = <E4m3ByE4m3, Accumulate, Cooperative256x128>,
    e4m3_residual_256x192 = <E4m3ByE4m3, Accumulate, Cooperative256x192>,
    e4m3_residual_128x256 = <E4m3ByE4m3, Accumulate, Cooperative128x256>,
    e4m3_residual_128x320 = <E4m3ByE4m3, Accumulate, Cooperative128x320>,
    e4m3_bias_gelu_128x128 = <E4m3ByE4m3, BiasGelu, Pingpong128x128>,
    e4m3_bias_gelu_128x192 = <E4m3ByE4m3, BiasGelu, Pingpong128x192>,
    e4m3_gelu_backward_128x128 = <E4m3ByE4m3, GeluBackward, Pingpong128x128>,
    e4m3_gelu_backward_128x192 = <E4m3ByE4m3, GeluBackward, Pingpong128x192>,
    e5m2_128x128 = <E5m2ByE4m3, Plain, Pingpong128x128>,
    e5m2_128x192 = <E5m2ByE4m3, Plain, Pingpong128x192>,
    e5m2_256x128 = <E5m2ByE4m3, Plain, Cooperative256x128>,
    e5m2_256x192 = <E5m2ByE4m3, Plain, Cooperative256x192>,
    e5m2_128x256 = <E5m2ByE4m3, Plain, Cooperative128x256>,
    e5m2_128x320 = <E5m2ByE4m3, Plain, Cooperative128x320>,
    e5m2_residual_128x128 = <E5m2ByE4m3, Accumulate, Pingpong128x128>,
    e5m2_residual_128x192 = <E5m2ByE4m3, Accumulate, Pingpong128x192>,
    e5m2_residual_256x128 = <E5m2ByE4m3, Accumulate, Cooperative256x128>,
    e5m2_residual_256x192 = <E5m2ByE4m3, Accumulate, Cooperative256x192>,
    e5m2_residual_128x256 = <E5m2ByE4m3, Accumulate, Cooperative128x256>,
    e5m2_residual_128x320 = <E5m2ByE4m3, Accumulate, Cooperative128x320>,
    e5m2_gelu_backward_128x128 = <E5m2ByE4m3, GeluBackward, Pingpong128x128>,
    e5m2_gelu_backward_128x192 = <E5m2ByE4m3, GeluBackward, Pingpong128x192>,
    e4m3_exact_128x128 = <E4m3ByE4m3Exact, Plain, Cooperative128x128>,
    e4m3_exact_128x192 = <E4m3ByE4m3Exact, Plain, Cooperative128x192>,
    e4m3_exact_bias_128x128 = <E4m3ByE4m3Exact, Bias, Cooperative128x128>,
    e4m3_exact_bias_128x192 = <E4m3ByE4m3Exact, Bias, Cooperative128x192>,
    e4m3_exact_bias_residual_128x128 = <E4m3ByE4m3Exact, BiasResidual, Cooperative128x128>,
    e4m3_exact_bias_residual_128x192 = <E4m3ByE4m3Exact, BiasResidual, Cooperative128x192>,
    e4m3_exact_residual_128x128 = <E4m3ByE4m3Exact, Accumulate, Cooperative128x128>,
    e4m3_exact_residual_128x192 = <E4m3ByE4m3Exact, Accumulate, Cooperative128x192>,
    e4m3_exact_bias_gelu_128x128 = <E4m3ByE4m3Exact, BiasGelu, Cooperative128x128>,
    e4m3_exact_bias_gelu_128x192 = <E4m3ByE4m3Exact, BiasGelu, Cooperative128x192>,
    e4m3_exact_gelu_backward_128x128 = <E4m3ByE4m3Exact, GeluBackward, Cooperative128x128>,
    e4m3_exact_gelu_backward_128x192 = <E4m3ByE4m3Exact, GeluBackward, Cooperative128x192>,
    e5m2_exact_128x128 = <E5m2ByE4m3Exact, Plain, Cooperative128x128>,
    e5m2_exact_128x192 = <E5m2ByE4m3Exact, Plain, Cooperative128x192>,
    e5m2_exact_residual_128x128 = <E5m2ByE4m3Exact, Accumulate, Cooperative128x128>,
    e5m2_exact_residual_128x192 = <E5m2ByE4m3Exact, Accumulate, Cooperative128x192>,
    e5m2_exact_gelu_backward_128x128 = <E5m2ByE4m3Exact, GeluBackward, Cooperative128x128>,
    e5m2_exact_gelu_backward_128x192 = <E5m2ByE4m3Exact, GeluBackward, Cooperative128x192>))]
pub fn matmul_fp8<L: OperandLayout, E: Epilogue, T: Tile>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    out: Global<TensorMap>,
    aux: Global<TensorMap>,
    second: Global<TensorMap>,
    bias: Global<bf16>,
    scale_a: Global<f32>,
    scale_b: Global<f32>,
    m: u32,
    n: u32,
    k: u32,
) {
    if thread::thread_idx_x() == 0 {
        out.prefetch();
        if E::AUX {
            aux.prefetch();
        }
        if E::SECOND {
            second.prefetch();
        }
    }
    let operands = EpilogueOperands { out, aux, second, bias, n, scale: Scale::ONE };
    let epilogue = |shared, consumer| TmaEpilogue::<E, T>::new(shared, operands, consumer);
    run_scaled::<L, T, _>([a, b], [scale_a, scale_b], [m, n, k, 1], epilogue);
}

/// out (M, N) = epilogue(`scale_a` · `scale_b` · a (M, K) · b (N, K)ᵀ) / `scale_out` in FP8, saturating.
///
/// `amax` = max(`amax`, largest magnitude of the epilogue's result) as f32 bits. See [`matmul_fp8`]. `n` is a multiple of
/// 16.
///
/// Grid: (number of SMs).
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a", instances(
    e4m3_bias_gelu_128x128 = <E4m3ByE4m3, BiasGelu, E4m3, Pingpong128x128>,
    e4m3_bias_gelu_128x192 = <E4m3ByE4m3, BiasGelu, E4m3, Pingpong128x192>,
    e4m3_exact_bias_gelu_128x128 = <E4m3ByE4m3Exact, BiasGelu, E4m3, Cooperative128x128>,
    e4m3_exact_bias_gelu_128x192 = <E4m3ByE4m3Exact, BiasGelu, E4m3, Cooperative128x192>,
    e4m3_gelu_backward_128x128 = <E4m3ByE4m3, GeluBackward, E4m3, Pingpong128x128>,
    e4m3_gelu_backward_128x192 = <E4m3ByE4m3, GeluBackward, E4m3, Pingpong128x192>,
    e4m3_exact_gelu_backward_128x128 = <E4m3ByE4m3Exact, GeluBackward, E4m3, Cooperative128x128>,
    e4m3_exact_gelu_backward_128x192 = <E4m3ByE4m3Exact, GeluBackward, E4m3, Cooperative128x192>,
    e5m2_gelu_backward_128x128 = <E5m2ByE4m3, GeluBackward, E5m2, Pingpong128x128>,
    e5m2_gelu_backward_128x192 = <E5m2ByE4m3, GeluBackward, E5m2, Pingpong128x192>,
    e5m2_exact_gelu_backward_128x128 = <E5m2ByE4m3Exact, GeluBackward, E5m2, Cooperative128x128>,
    e5m2_exact_gelu_backward_128x192 = <E5m2ByE4m3Exact, GeluBackward, E5m2, Cooperative128x192>))]
pub fn matmul_fp8_to_fp8<L: OperandLayout, E: QuantizedEpilogue, O: Fp8, T: Tile>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    out: Global<TensorMap>,
    aux: Global<TensorMap>,
    second: Global<TensorMap>,
    bias: Global<bf16>,
    scale_a: Global<f32>,
    scale_b: Global<f32>,
    scale_out: Global<f32>,
    amax: GlobalMut<u32>,
    m: u32,
    n: u32,
    k: u32,
) {
    if thread::thread_idx_x() == 0 {
        out.prefetch();
        if E::AUX {
            aux.prefetch();
        }
        if E::SECOND {
            second.prefetch();
        }
    }
    let operands = EpilogueOperands { out, aux, second, bias, n, scale: Scale::ONE };
    let epilogue = |shared, consumer| TmaFp8Epilogue::<E, O, T>::new(shared, operands, consumer, scale_out, amax);
    run_scaled::<L, T, _>([a, b], [scale_a, scale_b], [m, n, k, 1], epilogue);
}

/// out (M, N) f32 += `scale_a` · `scale_b` · a (M, K) · b (N, K)ᵀ. `n` is a multiple of 8, `k` of 16.
///
/// Grid: (number of SMs).
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a", instances(
    e4m3_128x128 = <E4m3ByE4m3, Pingpong128x128>,
    e4m3_128x192 = <E4m3ByE4m3, Pingpong128x192>,
    e4m3_256x128 = <E4m3ByE4m3, Cooperative256x128>,
    e4m3_256x192 = <E4m3ByE4m3, Cooperative256x192>,
    e4m3_128x256 = <E4m3ByE4m3, Cooperative128x256>,
    e4m3_128x320 = <E4m3ByE4m3, Cooperative128x320>,
    e4m3_exact_128x128 = <E4m3ByE4m3Exact, Cooperative128x128>,
    e4m3_exact_128x192 = <E4m3ByE4m3Exact, Cooperative128x192>,
    e5m2_128x128 = <E5m2ByE4m3, Pingpong128x128>,
    e5m2_128x192 = <E5m2ByE4m3, Pingpong128x192>,
    e5m2_256x128 = <E5m2ByE4m3, Cooperative256x128>,
    e5m2_256x192 = <E5m2ByE4m3, Cooperative256x192>,
    e5m2_128x256 = <E5m2ByE4m3, Cooperative128x256>,
    e5m2_128x320 = <E5m2ByE4m3, Cooperative128x320>,
    e5m2_exact_128x128 = <E5m2ByE4m3Exact, Cooperative128x128>,
    e5m2_exact_128x192 = <E5m2ByE4m3Exact, Cooperative128x192>))]
pub fn matmul_fp8_accumulate_f32<L: OperandLayout, T: Tile>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    out: GlobalMut<f32>,
    scale_a: Global<f32>,
    scale_b: Global<f32>,
    m: u32,
    n: u32,
    k: u32,
) {
    let epilogue = |_, _| AccumulateF32::<T>::new(out, m, n);
    run_scaled::<L, T, _>([a, b], [scale_a, scale_b], [m, n, k, 1], epilogue);
}

/// Partial sums of `scale_a` · `scale_b` · a (M, K) · b (N, K)ᵀ over `split_k` slices of K, for
/// [`matmul_split_k_reduce`](super::matmul_split_k_reduce). `n` is a multiple of 8, `k` of 16.
///
/// `partials` has `split_k` · tiles · `TILE_M` · `TILE_N` elements.
///
/// Grid: (number of SMs).
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a", instances(
    e4m3_128x128 = <E4m3ByE4m3, Pingpong128x128>,
    e4m3_128x192 = <E4m3ByE4m3, Pingpong128x192>,
    e4m3_256x128 = <E4m3ByE4m3, Cooperative256x128>,
    e4m3_256x192 = <E4m3ByE4m3, Cooperative256x192>,
    e4m3_128x256 = <E4m3ByE4m3, Cooperative128x256>,
    e4m3_128x320 = <E4m3ByE4m3, Cooperative128x320>,
    e4m3_exact_128x128 = <E4m3ByE4m3Exact, Cooperative128x128>,
    e4m3_exact_128x192 = <E4m3ByE4m3Exact, Cooperative128x192>,
    e5m2_128x128 = <E5m2ByE4m3, Pingpong128x128>,
    e5m2_128x192 = <E5m2ByE4m3, Pingpong128x192>,
    e5m2_256x128 = <E5m2ByE4m3, Cooperative256x128>,
    e5m2_256x192 = <E5m2ByE4m3, Cooperative256x192>,
    e5m2_128x256 = <E5m2ByE4m3, Cooperative128x256>,
    e5m2_128x320 = <E5m2ByE4m3, Cooperative128x320>,
    e5m2_exact_128x128 = <E5m2ByE4m3Exact, Cooperative128x128>,
    e5m2_exact_128x192 = <E5m2ByE4m3Exact, Cooperative128x192>))]
pub fn matmul_fp8_split_k<L: OperandLayout, T: Tile>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    partials: GlobalMut<f32>,
    scale_a: Global<f32>,
    scale_b: Global<f32>,
    m: u32,
    n: u32,
    k: u32,
    split_k: u32,
) {
    let epilogue = |_, consumer| StorePartials::<T>::new(partials, consumer);
    run_scaled::<L, T, _>([a, b], [scale_a, scale_b], [m, n, k, split_k], epilogue);
}
