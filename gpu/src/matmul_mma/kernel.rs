//! The kernel and its instances.

use super::epilogue::{Bf16Matrices, Output, WarpEpilogue};
use super::mainloop::{Operand, TILE, TILE_K, multiply, warp_position};
use crate::activation::{Gelu, ReluSquared};
use crate::matmul::epilogue::{Elementwise, EpilogueOperands, Forward, Linear, RoundedBackward, ScaleFactors};
use crate::matmul::gemm::{GemmEpilogue, GemmOutput};
use crate::matmul::tile::{Scheduler, SplitKScheduler};
use cuda_std::fp8::Fp8Format;
use cuda_std::shared::Layout;
use cuda_std::{E4m3, E5m2, Fp8, Global, GlobalMut, bf16, kernel, thread};

/// out (M, N) = epilogue(a (M, K) · b (N, K)ᵀ), where a has the format of `T` and b is E4M3.
///
/// Operands that the instance does not use may be arbitrary. K is a multiple of 16, N of 8. If out is FP8, M and N are multiples of 16.
/// * `out`, `aux` and `second` are (M, N). The residual may be out itself.
/// * `bias` (N) is added to the sums. `scale_a`, `scale_b` and `scale_out` are the factors that restore FP8 tensors.
/// * `amax` = max(`amax`, largest magnitude of an FP8 out before it is divided by its scale) as f32 bits.
/// * `fp8_out` (M, N): an FP8 out. `transposed` (N, M): its transpose, or null.
/// * `activation` (N, M): the transpose of the activation that is recomputed beside an FP8 out, divided by `scale_activation`.
/// * `sums` (M, N): an f32 out.
/// * The sums over every `columns` of K, a multiple of 64, are added in f32, unless `columns` is 0.
///
/// Grid: tiles of 128 x 128.
#[kernel(
    threads = 256,
    blocks_per_sm = 1,
    axes(
        linear = [
            _ = Linear<false, false>, bias = Linear<true, false>, residual = Linear<false, true>,
            bias_residual = Linear<true, true>
        ],
        gradient = [_ = Linear<false, false>, residual = Linear<false, true>],
        forward = [bias_gelu = Forward<Gelu, true>, relu_squared = Forward<ReluSquared, false>],
        backward = [
            gelu_backward = RoundedBackward<Gelu, false>, gelu_backward_and_value = RoundedBackward<Gelu, true>,
            relu_squared_backward = RoundedBackward<ReluSquared, false>,
            relu_squared_backward_and_value = RoundedBackward<ReluSquared, true>
        ],
        e4m3 = [e4m3 = E4m3],
        e5m2 = [e5m2 = E5m2]
    ),
    instances(
        e4m3 * linear * [_ = bf16],
        e4m3 * forward * [to_fp8 = E4m3],
        e5m2 * gradient * [_ = bf16],
        e5m2 * [_ = Linear<false, true>] * [to_f32 = f32],
        e5m2 * backward * [to_fp8 = E5m2]
    ),
    select(T::FORMAT: Fp8Format, E::EPILOGUE: GemmEpilogue, O::OUTPUT: GemmOutput)
)]
pub fn matmul_mma<T: Fp8, E: Elementwise, O: Output>(
    a: Global<E4m3>,
    b: Global<E4m3>,
    out: GlobalMut<bf16>,
    aux: Global<bf16>,
    second: GlobalMut<bf16>,
    bias: Global<bf16>,
    scale_a: Global<f32>,
    scale_b: Global<f32>,
    scale_out: Global<f32>,
    amax: GlobalMut<u32>,
    fp8_out: GlobalMut<E4m3>,
    transposed: GlobalMut<E4m3>,
    activation: GlobalMut<E4m3>,
    scale_activation: Global<f32>,
    sums: GlobalMut<f32>,
    m: u32,
    n: u32,
    k: u32,
    columns: u32,
) {
    let tile = TILE as u32;
    let scheduler = SplitKScheduler::new([tile, tile, TILE_K as u32], [m, n, k], 1, Global::null());
    let (row, column) = scheduler.tile(thread::block_idx_x());
    let operands = EpilogueOperands {
        out: Global::null(),
        aux: Global::null(),
        second: Global::null(),
        bias,
        scale: scale_a.at(0) * scale_b.at(0),
        sums,
        m,
        n,
        factors: ScaleFactors::default(),
        scale_out,
        amax,
        fp8_out,
        transposed,
        activation,
        scale_activation,
    };
    let [warp_row, warp_column] = warp_position();
    let position = [row + warp_row as u32, column + warp_column as u32];
    let epilogue = WarpEpilogue::<O>::new::<E>(operands, Bf16Matrices { out, aux, second }, position);
    let mut layout = Layout::new();
    let (a, b) = (Operand::new(&mut layout, a, row, m, k), Operand::new(&mut layout, b, column, n, k));
    let d = multiply::<T>(a, b, columns);
    // The buffers of the epilogue overlap with the stages.
    thread::sync_threads();
    epilogue.store::<E>(&d);
}
