//! Fragment loads and `mma` compared with a scalar matmul, for all operand layouts.

use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedTile, bf16, kernel, thread, warp};

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
    let mut memory = cuda_std::emulate::Memory::new();
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
