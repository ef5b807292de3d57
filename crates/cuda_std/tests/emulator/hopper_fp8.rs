//! wgmma and TMA with FP8 operands, compared with scalar loops.

use cuda_std::emulate::{Fault, Memory};
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{self, MBarrier, NarrowTile, SwizzledTile, TensorMap, tma, wgmma};
use cuda_std::launch::Launch;
use cuda_std::shared::Layout;
use cuda_std::{E4m3, E5m2, Fp8, Global, GlobalMut, kernel, thread};

/// Rows of a, and K. Both are less than a tile's.
const M: usize = 60;
const K: usize = 112;
/// Columns of the FP8 output. The store must not write past them.
const OUT_COLUMNS: usize = 48;
const SCALE: f32 = 0.125;

/// Computes sums (64, N) = a (M, K) · b (N, K)ᵀ and out (M, `OUT_COLUMNS`) = the first columns of sums · `SCALE` in FP8.
/// N is twice the number of floats in `D`. `fault` plants a fault: 1 stores without a proxy fence, 2 reads accumulators
/// before the wait.
#[kernel(threads = 128, instances(
    n64 = <E4m3, E4m3, [f32; 32], 64>, n128 = <E5m2, E4m3, [f32; 64], 128>, n192 = <E4m3, E5m2, [f32; 96], 192>,
    n256 = <E5m2, E5m2, [f32; 128], 256>, n320 = <E5m2, E4m3, [f32; 160], 320>))]
fn matmul<A: Fp8, B: Fp8, D: Accumulators + AsMut<[f32]> + 'static, const N: usize>(
    sums: GlobalMut<f32>,
    out: Global<TensorMap>,
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    fault: u32,
) {
    let mut layout = Layout::new();
    let (tile_a, tile_b) = (layout.swizzled::<64>(), layout.swizzled::<N>());
    let tile_out: NarrowTile<64> = layout.swizzled::<32>().narrow(0);
    let full = layout.mbarriers(1).at(0);
    let thread = thread::thread_idx_x();
    if thread == 0 {
        full.init(1);
        MBarrier::fence_init();
    }
    thread::sync_threads();
    if thread == 0 {
        full.arrive_expect_tx(SwizzledTile::<64>::BYTES + SwizzledTile::<N>::BYTES);
        tile_a.load(a, 0, 0, full);
        for i in 0..N as u32 / 64 {
            tile_b.rows::<64>(i * 64).load(b, 0, i * 64, full);
        }
    }
    full.wait(0);
    let mut d = D::ZERO;
    wgmma::fence();
    for k in 0..4 {
        d.mma_fp8::<A, B>(tile_a.k_major_operand(k), tile_b.k_major_operand(k), k > 0);
    }
    wgmma::commit();
    if fault == 2 {
        E4m3::pack_pair(d[0], d[1]);
    }
    wgmma::wait::<0>();
    d.fence_accumulators();
    let (row, first) = (thread / 32 * 16 + thread % 32 / 4, thread % 4 * 2);
    for j in 0..N as u32 / 8 {
        for half in 0..2 {
            let (row, column) = (row + half * 8, j * 8 + first);
            let i = (j * 4 + half * 2) as usize;
            sums.set_pair(row as usize * N + column as usize, [d[i], d[i + 1]]);
            if column < 64 {
                tile_out.set_fp8_pair(row, column, A::pack_pair(d[i] * SCALE, d[i + 1] * SCALE));
            }
        }
    }
    if fault != 1 {
        hopper::fence_async_proxy();
    }
    thread::sync_threads();
    if thread == 0 {
        tile_out.store(out, 0, 0);
        tma::commit_stores();
        tma::wait_stores();
    }
}

/// Returns small integers, which are exact in both formats.
fn values<T: Fp8>(count: usize, salt: u32) -> Vec<T> {
    let value = |i: u32| ((i.wrapping_mul(2_654_435_761).wrapping_add(salt) >> 16) % 15) as f32 - 7.0;
    (0..count as u32).map(|i| T::from_f32(value(i))).collect()
}

fn check<A: Fp8 + bytemuck::Pod, B: Fp8 + bytemuck::Pod>(
    n: usize,
    fault: u32,
    launch: impl Fn(GlobalMut<f32>, Global<TensorMap>, Global<TensorMap>, Global<TensorMap>, u32) -> Launch,
) -> Result<(), cuda_std::emulate::Report> {
    let (a, b) = (values::<A>(M * K, 1), values::<B>(n * K, 2));
    let mut memory = Memory::new();
    let (a_, b_) = (memory.input("a", &a), memory.input("b", &b));
    let untouched = A::from_bits(0x55);
    let (sums, out) = (memory.output("sums", 64 * n), memory.buffer("out", &[untouched; M * 64]));
    let maps = [
        memory.input("map of a", &[TensorMap::emulated(a_, M, K, K, 64, 128)]),
        memory.input("map of b", &[TensorMap::emulated(b_, n, K, K, 64, 128)]),
        memory.input("map of out", &[TensorMap::emulated(out.reader(), M, OUT_COLUMNS, 64, 64, 64)]),
    ];
    launch(sums, maps[2], maps[0], maps[1], fault).emulate_checked(&mut memory, [1, 1, 1], 64 << 10)?;
    let want = |row: usize, column: usize| -> f32 {
        let term = |k: usize| a[row * K + k].to_f32() * b[column * K + k].to_f32();
        if row < M { (0..K).map(term).sum() } else { 0.0 }
    };
    for (i, got) in memory.read(sums).into_iter().enumerate() {
        assert_eq!(got.to_bits(), (want(i / n, i % n) + 0.0).to_bits(), "N = {n}: sum ({}, {})", i / n, i % n);
    }
    for (i, got) in memory.read(out).into_iter().enumerate() {
        let (row, column) = (i / 64, i % 64);
        let want = if column < OUT_COLUMNS { A::from_f32(want(row, column) * SCALE) } else { untouched };
        assert_eq!(got.to_bits(), want.to_bits(), "N = {n}: out ({row}, {column})");
    }
    Ok(())
}

#[test]
fn fp8_wgmma_and_tma_match_scalar_loops() {
    check::<E4m3, E4m3>(64, 0, matmul::<E4m3, E4m3, [f32; 32], 64>).unwrap();
    check::<E5m2, E4m3>(128, 0, matmul::<E5m2, E4m3, [f32; 64], 128>).unwrap();
    check::<E4m3, E5m2>(192, 0, matmul::<E4m3, E5m2, [f32; 96], 192>).unwrap();
    check::<E5m2, E5m2>(256, 0, matmul::<E5m2, E5m2, [f32; 128], 256>).unwrap();
    check::<E5m2, E4m3>(320, 0, matmul::<E5m2, E4m3, [f32; 160], 320>).unwrap();
}

#[test]
fn planted_faults_are_reported() {
    let run = |fault| check::<E4m3, E4m3>(64, fault, matmul::<E4m3, E4m3, [f32; 32], 64>).unwrap_err();
    assert_eq!(run(1).fault, Fault::DataRace);
    assert_eq!(run(2).fault, Fault::Accumulators);
}

#[test]
#[should_panic(expected = "rows of 64 or 128 bytes, found 64 elements of 4 bytes")]
fn boxes_with_other_rows_are_rejected() {
    TensorMap::emulated(Memory::new().input("a", &[0.0f32; 64]), 1, 64, 256, 1, 64);
}
