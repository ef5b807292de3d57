//! Fragment loads and `mma` compared with a scalar matmul, for all operand layouts.

use cuda_std::emulate::Memory;
use cuda_std::mma::{TensorCore, mma_fp8};
use cuda_std::shared::Layout;
use cuda_std::{E4m3, E5m2, Element, Fp8, Global, GlobalMut, SharedTile, bf16, kernel, thread, warp};

const M: usize = 32;
const N: usize = 48;
const K: usize = 64;

/// Computes out (M, N) = a (M, K) · b (K, N) in one warp. B is stored in shared memory as is or transposed.
#[kernel(threads = 32, instances(
    bf16_nn = <bf16, false>, bf16_nt = <bf16, true>, f32_nn = <f32, false>, f32_nt = <f32, true>))]
fn matmul<T: TensorCore, const B_TRANSPOSED: bool>(out: GlobalMut<T>, a: Global<T>, b: Global<T>) {
    let mut layout = Layout::new();
    let tile_a: SharedTile<T, M, K> = layout.tile();
    let tile_b: SharedTile<T, K, N> = layout.tile();
    let tile_b_transposed: SharedTile<T, N, K> = layout.tile();
    let tile_out: SharedTile<T, M, N> = layout.tile();
    let lane = thread::thread_idx_x() as usize;
    for i in (lane..M * K).step_by(32) {
        tile_a.set(i / K, i % K, a.at(i));
    }
    for i in (lane..K * N).step_by(32) {
        tile_b.set(i / N, i % N, b.at(i));
        tile_b_transposed.set(i % N, i / N, b.at(i));
    }
    warp::sync();
    for m in (0..M).step_by(16) {
        for n in (0..N).step_by(16) {
            let mut d = [[0.0; 4]; 2];
            for k in (0..K).step_by(16) {
                let a = tile_a.a(m, k);
                let b = if B_TRANSPOSED { tile_b_transposed.b_transposed(n, k) } else { tile_b.b(k, n) };
                T::mma(&mut d[0], a, b[0]);
                T::mma(&mut d[1], a, b[1]);
            }
            tile_out.set_accumulators(m, n, d[0]);
            tile_out.set_accumulators(m, n + 8, d[1]);
        }
    }
    warp::sync();
    for i in (lane..M * N).step_by(32) {
        out.set(i, tile_out.at(i / N, i % N));
    }
}

fn values<T: Element>(count: usize, salt: u32) -> Vec<T> {
    let value = |i: u32| ((i.wrapping_mul(2_654_435_761).wrapping_add(salt) >> 16) % 2001) as f32 / 1000.0 - 1.0;
    (0..count as u32).map(|i| T::from_f32(value(i))).collect()
}

fn check<T: TensorCore, const B_TRANSPOSED: bool>(tolerance: f64) {
    let (a, b) = (values::<T>(M * K, 7), values::<T>(K * N, 99));
    let mut out = vec![T::default(); M * N];
    let views = (GlobalMut::new(out.as_mut_ptr()), Global::new(a.as_ptr()), Global::new(b.as_ptr()));
    // SAFETY: the kernel's indices are inside the three matrices, and its tiles use less than 100 KiB.
    unsafe { matmul::<T, B_TRANSPOSED>(views.0, views.1, views.2).emulate([1, 1, 1], 100 << 10) }.unwrap();
    for m in 0..M {
        for n in 0..N {
            let want: f64 = (0..K).map(|k| f64::from(a[m * K + k].to_f32()) * f64::from(b[k * N + n].to_f32())).sum();
            let got = f64::from(out[m * N + n].to_f32());
            assert!((got - want).abs() <= tolerance * (1.0 + want.abs()), "({m}, {n}): {got}, expected {want}");
        }
    }
}

#[test]
fn bf16_mma_matches_scalar_matmul() {
    check::<bf16, false>(1.0 / 256.0);
    check::<bf16, true>(1.0 / 256.0);
}

#[test]
fn f32_mma_matches_scalar_matmul() {
    check::<f32, false>(4e-6);
    check::<f32, true>(4e-6);
}

/// Computes out (16, 8) = a (16, k) · b (8, k)ᵀ in one warp, with rows as they are in memory. k is a multiple of four packets.
#[kernel(threads = 32, instances(bf16 = <bf16>, f32 = <f32>))]
fn matmul_of_packets<T: TensorCore>(out: GlobalMut<f32>, a: Global<T>, b: Global<T>, k: u32) {
    let (k, g, t) = (k as usize, (warp::lane() / 4) as usize, (warp::lane() % 4) as usize);
    let mut d = [[0.0; 4]; 2];
    for first in (0..k).step_by(4 * T::PACKET) {
        let column = first + t * T::PACKET;
        let rows = [a.packet(g * k + column), a.packet((g + 8) * k + column)];
        T::mma_packets(&mut d, rows, b.packet(g * k + column));
    }
    for i in 0..4 {
        out.set((g + i / 2 * 8) * 8 + 2 * t + i % 2, d[0][i] + d[1][i]);
    }
}

fn check_packets<T: TensorCore + bytemuck::Pod>(tolerance: f64) {
    let k = 12 * T::PACKET;
    let (a, b) = (values::<T>(16 * k, 7), values::<T>(8 * k, 99));
    let mut memory = Memory::new();
    let out = memory.output("out", 16 * 8);
    let views = (memory.input("a", &a), memory.input("b", &b));
    matmul_of_packets::<T>(out, views.0, views.1, k as u32).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap();
    for (i, got) in memory.read(out).into_iter().enumerate() {
        let rows = a[i / 8 * k..][..k].iter().zip(&b[i % 8 * k..][..k]);
        let want: f64 = rows.map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32())).sum();
        assert!((f64::from(got) - want).abs() <= tolerance * (1.0 + want.abs()), "{i}: {got}, expected {want}");
    }
}

#[test]
fn mma_of_packets_matches_scalar_matmul() {
    check_packets::<bf16>(1e-5);
    check_packets::<f32>(4e-6);
}

/// Computes out (16, 16) = a (16, 64) · b (16, 64)ᵀ in one warp. The fragments come from tiles in shared memory if `TILES`, or else from
/// global memory in the layout of PTX. Accumulators pass through an A fragment in bf16.
#[kernel(threads = 32, instances(e4m3 = <E4m3, false>, e4m3_tiles = <E4m3, true>, e5m2 = <E5m2, false>, e5m2_tiles = <E5m2, true>))]
fn matmul_fp8<T: Fp8, const TILES: bool>(out: GlobalMut<bf16>, a: Global<T>, b: Global<E4m3>) {
    let mut layout = Layout::new();
    let tile_a: SharedTile<T, 16, 64> = layout.tile();
    let tile_b: SharedTile<E4m3, 16, 64> = layout.tile();
    let staging: SharedTile<bf16, 16, 16> = layout.tile();
    let lane = thread::thread_idx_x() as usize;
    for i in (lane..512).step_by(32) {
        let (row, column) = (i / 32, i % 32 * 2);
        let pair = |low: u8, high: u8| u16::from_le_bytes([low, high]);
        let at = row * 64 + column;
        tile_a.set_fp8_pair(row, column, pair(a.at(at).to_bits(), a.at(at + 1).to_bits()));
        tile_b.set_fp8_pair(row, column, pair(b.at(at).to_bits(), b.at(at + 1).to_bits()));
    }
    warp::sync();
    let (g, t) = (lane / 4, lane % 4);
    let mut d = [[0.0; 4]; 2];
    for k in [0, 32] {
        let word_a = |row: usize, column: usize| {
            u32::from_le_bytes([0, 1, 2, 3].map(|i| a.at((g + row) * 64 + k + 4 * t + column + i).to_bits()))
        };
        let word_b = |row: usize, column: usize| {
            u32::from_le_bytes([0, 1, 2, 3].map(|i| b.at((g + row) * 64 + k + 4 * t + column + i).to_bits()))
        };
        let (left, right) = if TILES {
            (tile_a.fp8_a(0, k), tile_b.fp8_b_transposed(0, k))
        } else {
            let left = [word_a(0, 0), word_a(8, 0), word_a(0, 16), word_a(8, 16)];
            (left, [[word_b(0, 0), word_b(0, 16)], [word_b(8, 0), word_b(8, 16)]])
        };
        mma_fp8::<T>(&mut d[0], left, right[0]);
        mma_fp8::<T>(&mut d[1], left, right[1]);
    }
    staging.set_a(0, 0, bf16::a_from_accumulators(d[0], d[1]));
    warp::sync();
    for i in (lane..256).step_by(32) {
        out.set(i, staging.at(i / 16, i % 16));
    }
}

fn check_fp8<T: Fp8 + bytemuck::Pod, const TILES: bool>() {
    let (a, b) = (values::<T>(16 * 64, 7), values::<E4m3>(16 * 64, 99));
    let mut memory = Memory::new();
    let out = memory.output("out", 256);
    let views = (memory.input("a", &a), memory.input("b", &b));
    matmul_fp8::<T, TILES>(out, views.0, views.1).emulate_checked(&mut memory, [1, 1, 1], 16 << 10).unwrap();
    for (i, got) in memory.read(out).into_iter().enumerate() {
        let rows = a[i / 16 * 64..][..64].iter().zip(&b[i % 16 * 64..][..64]);
        let want: f64 = rows.map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32())).sum();
        let got = f64::from(got.to_f32());
        assert!((got - want).abs() <= (1.0 + want.abs()) / 256.0, "{i}: {got}, expected {want}");
    }
}

#[test]
fn fp8_mma_matches_scalar_matmul() {
    check_fp8::<E4m3, false>();
    check_fp8::<E4m3, true>();
    check_fp8::<E5m2, false>();
    check_fp8::<E5m2, true>();
}
