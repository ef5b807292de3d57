//! The `sm_90a` primitives compared with scalar loops, and kernels with deliberate faults.

use cuda_std::emulate::{Fault, Memory, Report};
use cuda_std::hopper::mbarrier::MBarriers;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{self, Extents, MBarrier, NarrowTile, SwizzledTile, TensorMap, tma, wgmma};
use cuda_std::launch::Launch;
use cuda_std::shared::Layout;
use cuda_std::{
    CachePolicy, Element, Global, GlobalMut, Packet, SharedArray, bf16, element, kernel, math, thread, warp,
};

const SHARED: usize = 48 << 10;

/// Returns a tile, the same memory as an array of elements, and two mbarriers.
fn shared<const R: usize>() -> (SwizzledTile<R>, SharedArray<bf16>, MBarriers) {
    let mut layout = Layout::new();
    (layout.swizzled(), Layout::new().array(R * 64), layout.mbarriers(2))
}

fn init_barriers(barriers: MBarriers, arrivals: u32) {
    if thread::thread_idx_x() == 0 {
        barriers.at(0).init(arrivals);
        barriers.at(1).init(arrivals);
        MBarrier::fence_init();
    }
    thread::sync_threads();
}

fn values(count: usize) -> Vec<bf16> {
    let value = |i: u32| ((i.wrapping_mul(2_654_435_761) >> 16) % 2001) as f32 / 1000.0 - 1.0;
    (0..count as u32).map(|i| bf16::from_f32(value(i))).collect()
}

fn wide(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|x| x.to_f32()).collect()
}

/// Adds a map of a 20 x 72 tensor at `base` with a row stride of 80 elements and boxes of 16 rows.
fn map_of(memory: &mut Memory, base: Global<bf16>) -> Global<TensorMap> {
    memory.input("map", &[TensorMap::emulated(base, 20, 72, 160, 16, 64)])
}

#[kernel(threads = 32)]
fn load_box(out: GlobalMut<bf16>, map: Global<TensorMap>, x: u32, y: u32) {
    let (tile, plain, barriers) = shared::<16>();
    init_barriers(barriers, 1);
    if warp::lane() == 0 {
        barriers.at(0).arrive_expect_tx(SwizzledTile::<16>::BYTES);
        tile.load(map, x, y, barriers.at(0));
    }
    barriers.at(0).wait(0);
    for i in (warp::lane() as usize..16 * 64).step_by(32) {
        out.set(i, plain.at(i));
    }
}

#[test]
fn tma_load_swizzles_and_fills_with_zeros() {
    let tensor = values(20 * 80);
    for (x, y) in [(0, 0), (64, 8), (5, 19), (-3i32, -2i32), (72, 0), (0, 20)] {
        let mut memory = Memory::new();
        let base = memory.input("tensor", &tensor);
        let (map, out) = (map_of(&mut memory, base), memory.output("out", 16 * 64));
        load_box(out, map, x as u32, y as u32).emulate_checked(&mut memory, [1, 1, 1], SHARED).unwrap();
        let got = wide(&memory.read(out));
        for (i, got) in got.into_iter().enumerate() {
            let (row, chunk, element) = (i / 64, i / 8 % 8, i % 8);
            let (r, c) = (y + row as i32, x + ((chunk ^ (row % 8)) * 8 + element) as i32);
            let inside = (0..20).contains(&r) && (0..72).contains(&c);
            let want = if inside { tensor[(r * 80 + c) as usize].to_f32() } else { 0.0 };
            assert_eq!(got.to_bits(), want.to_bits(), "({x}, {y}): row {row}, chunk {chunk}, element {element}");
        }
    }
}

/// Faults of `load_contiguous`.
#[derive(Clone, Copy, PartialEq)]
#[repr(u32)]
enum BulkLoad {
    Correct,
    OddSize,
    NotAwaited,
    WrongBytes,
    OverReaders,
}

/// Copies `inp` through shared memory, in two loads of which the second has an L2 policy.
#[kernel(threads = 64)]
fn load_contiguous(out: GlobalMut<bf16>, inp: Global<bf16>, fault: u32) {
    let (_, plain, barriers) = shared::<16>();
    init_barriers(barriers, 1);
    let thread = thread::thread_idx_x() as usize;
    for i in 0..2 {
        if thread == 0 {
            let count = if fault == BulkLoad::OddSize as u32 { 60 } else { 64 };
            barriers.at(0).arrive_expect_tx(if fault == BulkLoad::WrongBytes as u32 { 256 } else { 128 });
            if i == 0 {
                plain.load_bulk(8, count, inp, 64 * i, barriers.at(0)); // bulk_load
            } else {
                plain.load_bulk_with(8, count, inp, 64 * i, barriers.at(0), CachePolicy::evict_first()); // bulk_load_with
            }
        }
        if fault != BulkLoad::NotAwaited as u32 {
            barriers.at(0).wait(i as u32);
        }
        out.set(64 * i + thread, plain.at(8 + thread)); // bulk_read
        if fault != BulkLoad::OverReaders as u32 {
            thread::sync_threads();
        }
    }
}

#[test]
fn bulk_loads_copy_contiguous_memory() {
    let data = values(128);
    let run = |fault| {
        let mut memory = Memory::new();
        let (inp, out) = (memory.input("inp", &data), memory.output("out", 128));
        let result = load_contiguous(out, inp, fault as u32).emulate_checked(&mut memory, [1, 1, 1], SHARED);
        result.map(|()| memory.read(out))
    };
    assert_eq!(run(BulkLoad::Correct).unwrap(), data);
    for (fault, found) in [
        (BulkLoad::OddSize, Fault::Operand),
        (BulkLoad::NotAwaited, Fault::DataRace),
        (BulkLoad::WrongBytes, Fault::Deadlock),
        (BulkLoad::OverReaders, Fault::AsyncCopy),
    ] {
        let report = run(fault).unwrap_err();
        assert_eq!(report.fault, found, "{report}");
    }
}

#[kernel(threads = 32)]
fn load_box_of(out: GlobalMut<bf16>, map: Global<TensorMap>, x: u32, y: u32, z: u32) {
    let (tile, plain, barriers) = shared::<16>();
    init_barriers(barriers, 1);
    if warp::lane() == 0 {
        barriers.at(0).arrive_expect_tx(SwizzledTile::<16>::BYTES);
        tile.load_3d(map, x, y, z, barriers.at(0));
    }
    barriers.at(0).wait(0);
    for i in (warp::lane() as usize..16 * 64).step_by(32) {
        out.set(i, plain.at(i));
    }
}

/// Rows past the end of a matrix must be zeros, not rows of the next matrix.
#[test]
fn tma_load_3d_does_not_cross_matrices() {
    let tensor = values(3 * 20 * 72);
    for (x, y, z) in [(0, 0, 0), (0, 8, 1), (64, 19, 2), (0, 20, 1), (0, 0, 3)] {
        let mut memory = Memory::new();
        let base = memory.input("tensor", &tensor);
        let map = memory.input("map", &[TensorMap::emulated_tensor(base, Extents::Matrices([3, 20, 72]), (16, 64))]);
        let out = memory.output("out", 16 * 64);
        load_box_of(out, map, x, y, z).emulate_checked(&mut memory, [1, 1, 1], SHARED).unwrap();
        for (i, got) in wide(&memory.read(out)).into_iter().enumerate() {
            let (row, chunk, element) = (i / 64, i / 8 % 8, i % 8);
            let (r, c) = (y as usize + row, x as usize + (chunk ^ (row % 8)) * 8 + element);
            let inside = z < 3 && r < 20 && c < 72;
            let want = if inside { tensor[(z as usize * 20 + r) * 72 + c].to_f32() } else { 0.0 };
            assert_eq!(got.to_bits(), want.to_bits(), "({x}, {y}, {z}): row {row}, chunk {chunk}, element {element}");
        }
    }
}

/// Copies a box of 16 rows of 32 columns of matrix `y` to the same place in out through a narrow tile, and doubles its
/// last 16 columns. Also copies the memory of the tile to `seen`.
#[kernel(threads = 32)]
fn double_half_of_narrow_box(
    out: Global<TensorMap>,
    flat: Global<TensorMap>,
    seen: GlobalMut<bf16>,
    map: Global<TensorMap>,
    x: u32,
    y: u32,
    z: u32,
) {
    let (tile, plain, barriers) = shared::<16>();
    let tile = tile.narrow::<16>(8);
    init_barriers(barriers, 1);
    if warp::lane() == 0 {
        barriers.at(0).arrive_expect_tx(NarrowTile::<16>::BYTES);
        tile.load_interleaved(map, x, y, z, barriers.at(0));
    }
    barriers.at(0).wait(0);
    for i in (warp::lane() as usize..16 * 32).step_by(32) {
        seen.set(i, plain.at(8 * 64 + i));
    }
    warp::sync();
    for k in 0..2 {
        let words = tile.load_a_fragment(0, k).map(|word| {
            let [even, odd] = element::unpack_pair(word);
            let factor = (k + 1) as f32;
            element::pack_pair(factor * even, factor * odd)
        });
        tile.store_matrices(warp::lane() % 16, 2 * k + warp::lane() / 16, words);
    }
    hopper::fence_async_proxy();
    warp::sync();
    if warp::lane() == 0 {
        tile.store_interleaved(out, x, y, z);
        tile.store(flat, x, z);
        tma::commit_stores();
        tma::wait_stores();
    }
}

/// The 64-byte swizzle permutes chunks within pairs of rows. Interleaved matrices are clipped at their own last column,
/// not at that of the tensor.
#[test]
fn narrow_boxes_of_interleaved_matrices_are_loaded_and_stored() {
    let (rows, matrices, columns) = (20, 2, 72);
    let tensor = values(rows * matrices * columns);
    for (x, y, z) in [(0, 0, 0), (64, 0, 8), (64, 1, 19), (32, 1, 3), (0, 2, 0)] {
        let mut memory = Memory::new();
        let base = memory.input("tensor", &tensor);
        let untouched = bf16::from_f32(77.0);
        let out = memory.buffer("out", &vec![untouched; tensor.len()]);
        let flat = memory.buffer("flat", &vec![untouched; rows * columns]);
        let seen = memory.output("seen", 16 * 32);
        let mut map = |base| {
            let map = TensorMap::emulated_tensor(base, Extents::Interleaved([rows, matrices, columns]), (16, 32));
            memory.input("map", &[map])
        };
        let (map, out_map) = (map(base), map(out.reader()));
        let flat_map =
            memory.input("flat map", &[TensorMap::emulated(flat.reader(), rows, columns, 2 * columns, 16, 32)]);
        let launch = double_half_of_narrow_box(out_map, flat_map, seen, map, x, y, z);
        launch.emulate_checked(&mut memory, [1, 1, 1], SHARED).unwrap();
        let at = |row: usize, column: usize| (row * matrices + y as usize) * columns + column;
        let inside = |row: usize, column: usize| y < 2 && row < rows && column < columns;
        for (i, got) in wide(&memory.read(seen)).into_iter().enumerate() {
            let (row, chunk, element) = (i / 32, i / 8 % 4, i % 8);
            let (r, c) = (z as usize + row, x as usize + (chunk ^ (row / 2 % 4)) * 8 + element);
            let want = if inside(r, c) { tensor[at(r, c)].to_f32() } else { 0.0 };
            assert_eq!(got.to_bits(), want.to_bits(), "({x}, {y}, {z}): row {row}, chunk {chunk}, element {element}");
        }
        let factor = |column: usize| if column - x as usize >= 16 { 2.0 } else { 1.0 };
        let in_box = |row: usize, column: usize| {
            (z as usize..z as usize + 16).contains(&row) && (x as usize..x as usize + 32).contains(&column)
        };
        for (i, got) in wide(&memory.read(out)).into_iter().enumerate() {
            let (row, matrix, column) = (i / columns / matrices, i / columns % matrices, i % columns);
            let written = matrix == y as usize && in_box(row, column);
            let want = if written { factor(column) * tensor[i].to_f32() } else { 77.0 };
            assert_eq!(got.to_bits(), want.to_bits(), "({x}, {y}, {z}): {row}, {matrix}, {column}");
        }
        for (i, got) in wide(&memory.read(flat)).into_iter().enumerate() {
            let (row, column) = (i / columns, i % columns);
            let value = |column| if y < 2 { factor(column) * tensor[at(row, column)].to_f32() } else { 0.0 };
            let want = if in_box(row, column) { value(column) } else { 77.0 };
            assert_eq!(got.to_bits(), want.to_bits(), "({x}, {y}, {z}): {row}, {column}");
        }
    }
}

#[test]
fn tma_load_rejects_a_map_of_other_dimensions() {
    let mut memory = Memory::new();
    let base = memory.input("tensor", &values(20 * 80));
    let (map, out) = (map_of(&mut memory, base), memory.output("out", 16 * 64));
    let report = load_box_of(out, map, 0, 0, 0).emulate_checked(&mut memory, [1, 1, 1], SHARED).unwrap_err();
    assert_eq!(report.fault, Fault::Operand, "{report}");
    assert!(report.to_string().contains("expected 3 dimensions, found 2"), "{report}");
}

#[kernel(threads = 32)]
fn store_box(out: Global<TensorMap>, inp: Global<bf16>, x: u32, y: u32) {
    let (tile, plain, _) = shared::<16>();
    for i in (warp::lane() as usize..16 * 64).step_by(32) {
        plain.set(i, inp.at(i));
    }
    hopper::fence_async_proxy();
    warp::sync();
    if warp::lane() == 0 {
        tile.store(out, x, y);
        tma::commit_stores();
        tma::wait_stores();
    }
}

#[test]
fn tma_store_clips_at_the_tensor_edge() {
    let tile = values(16 * 64);
    for (x, y) in [(0, 0), (64, 8), (5, 19)] {
        let mut memory = Memory::new();
        let out = memory.buffer("out", &[bf16::from_f32(77.0); 20 * 80]);
        let map = map_of(&mut memory, out.reader());
        let inp = memory.input("inp", &tile);
        store_box(map, inp, x, y).emulate_checked(&mut memory, [1, 1, 1], SHARED).unwrap();
        for (i, got) in wide(&memory.read(out)).into_iter().enumerate() {
            let (row, column) = ((i / 80).wrapping_sub(y as usize), (i % 80).wrapping_sub(x as usize));
            let written = row < 16 && column < 64 && i % 80 < 72;
            let at =
                row.wrapping_mul(64).wrapping_add(((column / 8) ^ (row % 8)).wrapping_mul(8)).wrapping_add(column % 8);
            let want = if written { tile[at].to_f32() } else { 77.0 };
            assert_eq!(got.to_bits(), want.to_bits(), "({x}, {y}): {row}, {column}");
        }
    }
}

/// Operand layouts of the test kernel.
const BOTH_SHARED: u32 = 0;
const A_REGISTERS: u32 = 1;
const A_REGISTERS_B_MN_MAJOR: u32 = 2;
const B_MN_MAJOR: u32 = 3;
const BOTH_MN_MAJOR: u32 = 4;

/// Computes out (64, N) = 2 · a (64, 64) · b (N, 64)^T. An MN-major b is N / 64 tiles (64, 64) that are adjacent in n,
/// and an MN-major a is transposed. N is twice the number of floats in `A`.
#[kernel(threads = 128, instances(
    n64 = <[f32; 32], 64, 0>, n128 = <[f32; 64], 128, 0>, n192 = <[f32; 96], 192, 0>, n256 = <[f32; 128], 256, 0>,
    n320 = <[f32; 160], 320, 0>, a_registers320 = <[f32; 160], 320, 1>, a_registers_b_mn_major320 = <[f32; 160], 320, 2>,
    b_mn_major320 = <[f32; 160], 320, 3>, both_mn_major320 = <[f32; 160], 320, 4>,
    a_registers64 = <[f32; 32], 64, 1>, a_registers128 = <[f32; 64], 128, 1>, a_registers256 = <[f32; 128], 256, 1>,
    a_registers_b_mn_major64 = <[f32; 32], 64, 2>, a_registers_b_mn_major192 = <[f32; 96], 192, 2>,
    b_mn_major128 = <[f32; 64], 128, 3>, b_mn_major256 = <[f32; 128], 256, 3>,
    both_mn_major64 = <[f32; 32], 64, 4>, both_mn_major192 = <[f32; 96], 192, 4>))]
fn matmul<A: Accumulators + AsMut<[f32]> + 'static, const N: usize, const KIND: u32>(
    out: GlobalMut<f32>,
    a: Global<bf16>,
    b: Global<bf16>,
) {
    let mut layout = Layout::new();
    let (tile_a, tile_b) = (layout.swizzled::<64>(), layout.swizzled::<N>());
    let elements: SharedArray<bf16> = Layout::new().array((64 + N) * 64);
    let place = |row: usize, column: usize| row * 64 + ((column / 8) ^ (row % 8)) * 8 + column % 8;
    let thread = thread::thread_idx_x() as usize;
    for i in (thread..(64 + N) * 64).step_by(128) {
        let value = if i < 64 * 64 { a.at(i) } else { b.at(i - 64 * 64) };
        elements.set(place(i / 64, i % 64), value);
    }
    hopper::fence_async_proxy();
    thread::sync_threads();
    let mut d = A::ZERO;
    let a_fragments = [0, 1, 2, 3].map(|k| tile_a.load_a_fragment(thread as u32 / 32 * 16, k));
    wgmma::fence();
    let rows = tile_b.rows::<64>(0);
    for round in 0..2 {
        for k in 0..4 {
            let (accumulate, a_fragment) = (round + k > 0, a_fragments[k as usize]);
            match KIND {
                BOTH_SHARED => d.mma(tile_a.k_major_operand(k), tile_b.k_major_operand(k), accumulate),
                A_REGISTERS => d.mma_with_a_registers(a_fragment, tile_b.k_major_operand(k), accumulate),
                A_REGISTERS_B_MN_MAJOR => d.mma_with_a_registers(a_fragment, rows.mn_major_operand(k), accumulate),
                B_MN_MAJOR => d.mma(tile_a.k_major_operand(k), rows.mn_major_operand(k), accumulate),
                BOTH_MN_MAJOR => d.mma(tile_a.mn_major_operand(k), rows.mn_major_operand(k), accumulate),
                _ => unreachable!("KIND must be one of the five layouts"),
            }
        }
        wgmma::commit();
    }
    wgmma::wait::<0>();
    d.fence_accumulators();
    let (warp, g, c) = (thread / 32, thread % 32 / 4, thread % 4);
    for (i, value) in d.as_mut().iter().enumerate() {
        let (row, column) = (16 * warp + g + i / 2 % 2 * 8, i / 4 * 8 + 2 * c + i % 2);
        out.set(row * N + column, *value);
    }
}

fn check_matmul(n: usize, kind: u32, launch: impl Fn(GlobalMut<f32>, Global<bf16>, Global<bf16>) -> Launch) {
    let (a, b) = (values(64 * 64), values(64 * (64 + n)).split_off(64 * 64));
    let mut memory = Memory::new();
    let (out, a_, b_) = (memory.output("out", 64 * n), memory.input("a", &a), memory.input("b", &b));
    launch(out, a_, b_).emulate_checked(&mut memory, [1, 1, 1], SHARED).unwrap();
    for (i, got) in memory.read(out).into_iter().enumerate() {
        let (row, column) = (i / n, i % n);
        let by_rows = |k: usize, i: usize| i / 64 * 64 * 64 + k * 64 + i % 64;
        let a = |k: usize| a[if kind == BOTH_MN_MAJOR { by_rows(k, row) } else { row * 64 + k }].to_f64();
        let b =
            |k: usize| b[if kind >= A_REGISTERS_B_MN_MAJOR { by_rows(k, column) } else { column * 64 + k }].to_f64();
        let want: f64 = (0..64).map(|k| 2.0 * a(k) * b(k)).sum();
        assert!((f64::from(got) - want).abs() < 1e-4, "N = {n}, {row}, {column}: got {got}, want {want}");
    }
}

trait Wide {
    fn to_f64(self) -> f64;
}

impl Wide for bf16 {
    fn to_f64(self) -> f64 {
        f64::from(self.to_f32())
    }
}

#[test]
fn wgmma_matches_scalar_matmul() {
    check_matmul(64, 0, matmul::<[f32; 32], 64, 0>);
    check_matmul(128, 0, matmul::<[f32; 64], 128, 0>);
    check_matmul(192, 0, matmul::<[f32; 96], 192, 0>);
    check_matmul(256, 0, matmul::<[f32; 128], 256, 0>);
    check_matmul(64, 1, matmul::<[f32; 32], 64, 1>);
    check_matmul(128, 1, matmul::<[f32; 64], 128, 1>);
    check_matmul(256, 1, matmul::<[f32; 128], 256, 1>);
    check_matmul(64, 2, matmul::<[f32; 32], 64, 2>);
    check_matmul(192, 2, matmul::<[f32; 96], 192, 2>);
    check_matmul(128, 3, matmul::<[f32; 64], 128, 3>);
    check_matmul(256, 3, matmul::<[f32; 128], 256, 3>);
    check_matmul(64, 4, matmul::<[f32; 32], 64, 4>);
    check_matmul(192, 4, matmul::<[f32; 96], 192, 4>);
    check_matmul(320, 0, matmul::<[f32; 160], 320, 0>);
    check_matmul(320, 1, matmul::<[f32; 160], 320, 1>);
    check_matmul(320, 2, matmul::<[f32; 160], 320, 2>);
    check_matmul(320, 3, matmul::<[f32; 160], 320, 3>);
    check_matmul(320, 4, matmul::<[f32; 160], 320, 4>);
}

/// Copies a box of matrix `z` of one batch to the same place in another.
#[kernel(threads = 32)]
fn copy_box_of(out: Global<TensorMap>, inp: Global<TensorMap>, x: u32, y: u32, z: u32) {
    let (tile, _, barriers) = shared::<16>();
    init_barriers(barriers, 1);
    if warp::lane() == 0 {
        barriers.at(0).arrive_expect_tx(SwizzledTile::<16>::BYTES);
        tile.load_3d(inp, x, y, z, barriers.at(0));
        barriers.at(0).wait(0);
        tile.store_3d(out, x, y, z);
        tma::commit_stores();
        tma::wait_stores();
    }
}

/// The matrices of both batches have different distances. Rows past the end of a matrix must not be written to what follows.
#[test]
fn boxes_of_a_batch_are_loaded_and_stored() {
    const STRIDES: [usize; 2] = [20 * 72, 20 * 72 + 24];
    let tensor = values(3 * STRIDES[0]);
    for (x, y, z) in [(0, 0, 0), (0, 8, 1), (64, 19, 2), (0, 20, 1), (0, 0, 3)] {
        let mut memory = Memory::new();
        let base = memory.input("tensor", &tensor);
        let out = memory.buffer("out", &[bf16::from_f32(77.0); 3 * STRIDES[1]]);
        let mut map = |base, stride| {
            memory.input("map", &[TensorMap::emulated_tensor(base, Extents::Batch([3, 20, 72], stride), (16, 64))])
        };
        let (inp_map, out_map) = (map(base, STRIDES[0]), map(out.reader(), STRIDES[1]));
        copy_box_of(out_map, inp_map, x, y, z).emulate_checked(&mut memory, [1, 1, 1], SHARED).unwrap();
        for (i, got) in wide(&memory.read(out)).into_iter().enumerate() {
            let (matrix, row, column) = (i / STRIDES[1], i % STRIDES[1] / 72, i % STRIDES[1] % 72);
            let (x, y) = (x as usize, y as usize);
            let in_box = row < 20 && (y..y + 16).contains(&row) && (x..x + 64).contains(&column);
            let want = if matrix == z as usize && in_box {
                tensor[matrix * STRIDES[0] + row * 72 + column].to_f32()
            } else {
                77.0
            };
            assert_eq!(got.to_bits(), want.to_bits(), "({x}, {y}, {z}): {matrix}, {row}, {column}");
        }
    }
}

/// Stores accumulators to a tile with `stmatrix`, or their transpose with `stmatrix.trans`.
#[kernel(threads = 32, instances(plain = <false>, transposed = <true>))]
fn store_fragments<const TRANSPOSED: bool>(out: GlobalMut<bf16>) {
    let (tile, plain, _) = shared::<16>();
    let (g, c) = (warp::lane() / 4, warp::lane() % 4);
    let pair = |row: u32, column: u32| element::pack_pair((row * 16 + column) as f32, (row * 16 + column + 1) as f32);
    let words = [pair(g, 2 * c), pair(g + 8, 2 * c), pair(g, 2 * c + 8), pair(g + 8, 2 * c + 8)];
    if TRANSPOSED {
        let (row, chunk) = (warp::lane() / 16 * 8 + warp::lane() % 8, warp::lane() % 16 / 8);
        tile.store_transposed_matrices(row, 2 + chunk, words);
    } else {
        tile.store_matrices(warp::lane() % 16, 2 + warp::lane() / 16, words);
    }
    warp::sync();
    for i in (warp::lane() as usize..256).step_by(32) {
        let (row, column) = (i / 16, 16 + i % 16);
        out.set(i, plain.at(row * 64 + ((column / 8) ^ (row % 8)) * 8 + column % 8));
    }
}

#[test]
fn stmatrix_stores_the_accumulator_layout_or_its_transpose() {
    let stored = |launch: fn(GlobalMut<bf16>) -> Launch| {
        let mut memory = Memory::new();
        let out = memory.output("out", 256);
        launch(out).emulate_checked(&mut memory, [1, 1, 1], SHARED).unwrap();
        wide(&memory.read(out))
    };
    let want: Vec<f32> = (0..256u16).map(f32::from).collect();
    assert_eq!(stored(store_fragments::<false>), want);
    let transposed: Vec<f32> = (0..256u16).map(|i| f32::from(i % 16 * 16 + i / 16)).collect();
    assert_eq!(stored(store_fragments::<true>), transposed);
}

/// Returns the number of the line of this file that ends with `// <mark>`.
fn line(mark: &str) -> u32 {
    let end = format!("// {mark}");
    let mut found = include_str!("hopper.rs").lines().enumerate().filter(|(_, l)| l.ends_with(&end));
    found.next().unwrap_or_else(|| panic!("expected a line marked {mark}")).0 as u32 + 1
}

/// Asserts the fault and the marked source lines of a report.
#[track_caller]
fn expect(report: &Report, fault: Fault, at: &str, other: Option<&str>) {
    println!("{report}\n");
    assert_eq!(report.fault, fault, "{report}");
    assert_eq!(report.lines(), [Some(line(at)), other.map(line)], "{report}");
}

#[kernel(threads = 64)]
fn waits_for_one_of_two(out: GlobalMut<bf16>, map: Global<TensorMap>, waits: u32) {
    let mut layout = Layout::new();
    let tiles: [SwizzledTile<16>; 2] = [layout.swizzled(), layout.swizzled()];
    let elements: SharedArray<bf16> = Layout::new().array(2 * 16 * 64);
    let barriers = layout.mbarriers(2);
    init_barriers(barriers, 1);
    if thread::thread_idx_x() == 0 {
        for i in 0..2 {
            barriers.at(i as u32).arrive_expect_tx(SwizzledTile::<16>::BYTES);
            tiles[i].load(map, 0, 0, barriers.at(i as u32)); // one_of_two.load
        }
    }
    barriers.at(waits).wait(0);
    let other = elements.at((1 - waits as usize) * 16 * 64); // one_of_two.read
    if thread::thread_idx_x() == 0 {
        out.set(thread::block_idx_x() as usize, other);
    }
    barriers.at(1 - waits).wait(0);
}

/// The fault must be found regardless of which load completes first.
#[test]
fn wait_for_one_tma_load_does_not_cover_another() {
    for waits in 0..2 {
        let mut memory = Memory::new();
        let base = memory.input("tensor", &values(20 * 80));
        let (map, out) = (map_of(&mut memory, base), memory.output("out", 2));
        let report = waits_for_one_of_two(out, map, waits).emulate_checked(&mut memory, [2, 1, 1], SHARED).unwrap_err();
        expect(&report, Fault::AsyncCopy, "one_of_two.read", Some("one_of_two.load"));
    }
}

#[kernel(threads = 64)]
fn used_during_initialization() {
    let (_, _, barriers) = shared::<16>();
    if thread::thread_idx_x() == 0 {
        barriers.at(0).init(1); // init_unseen
        MBarrier::fence_init();
        barriers.at(0).arrive();
    }
    if thread::thread_idx_x() == 32 {
        barriers.at(0).wait(0); // wait_too_early
    }
}

/// The fault must be found even if the initializing thread has used the mbarrier since.
#[test]
fn mbarrier_use_needs_a_barrier_after_initialization() {
    let report = used_during_initialization().emulate_checked(&mut Memory::new(), [1, 1, 1], SHARED).unwrap_err();
    expect(&report, Fault::DataRace, "wait_too_early", Some("init_unseen"));
}

/// Deliberate faults of the kernel `planted`.
#[derive(Clone, Copy, PartialEq)]
#[repr(u32)]
enum Planted {
    TooFewBytes,
    NotInitialized,
    ArrivesTwice,
    ReadBeforeWait,
    NobodyWaits,
    NoProxyFence,
    StoreNotWaited,
    StoreOverwritten,
    OverwrittenTooEarly,
    LoadedWhileRead,
    NobodyArrives,
    NoInitFence,
    WrittenWithoutProxyFence,
}

#[kernel(threads = 64)]
fn planted(map: Global<TensorMap>, out: Global<TensorMap>, fault: u32) {
    let is = |planted: Planted| fault == planted as u32;
    let (tile, plain, barriers) = shared::<16>();
    if !is(Planted::NotInitialized) {
        init_barriers(barriers, 1);
    }
    let thread = thread::thread_idx_x();
    if is(Planted::NoInitFence) {
        if thread == 0 {
            barriers.at(1).init(1); // init
            barriers.at(1).arrive_expect_tx(SwizzledTile::<16>::BYTES);
            tile.load(map, 0, 0, barriers.at(1)); // unfenced_load
        }
        return;
    }
    if is(Planted::WrittenWithoutProxyFence) {
        if thread == 0 {
            plain.set(5, bf16::from_f32(1.0)); // plain_write
            barriers.at(0).arrive_expect_tx(SwizzledTile::<16>::BYTES);
            tile.load(map, 0, 0, barriers.at(0)); // load_over_write
        }
        return;
    }
    if is(Planted::NobodyArrives) {
        if thread == 0 {
            tile.load(map, 0, 0, barriers.at(0));
        }
        barriers.at(0).wait(0); // wait_for_nobody
    }
    if thread == 0 {
        let bytes = SwizzledTile::<16>::BYTES + if is(Planted::TooFewBytes) { 16 } else { 0 };
        barriers.at(0).arrive_expect_tx(bytes); // first_arrival
        if is(Planted::ArrivesTwice) {
            barriers.at(0).arrive(); // second_arrival
        }
        tile.load(map, 0, 0, barriers.at(0)); // load
    }
    if is(Planted::ReadBeforeWait) {
        thread::sync_threads();
        plain.at(0); // read_before_wait
    }
    if is(Planted::NobodyWaits) {
        return;
    }
    barriers.at(0).wait(0); // wait
    let _ = plain.at(thread as usize); // read
    if is(Planted::OverwrittenTooEarly) {
        if thread == 0 {
            barriers.at(0).arrive_expect_tx(SwizzledTile::<16>::BYTES);
            tile.load(map, 0, 0, barriers.at(0)); // load_again
        }
        barriers.at(0).wait(1);
    }
    if is(Planted::LoadedWhileRead) && thread == 63 {
        barriers.at(0).arrive_expect_tx(SwizzledTile::<16>::BYTES);
        tile.load(map, 0, 0, barriers.at(0)); // load_while_read
    }
    thread::sync_threads();
    plain.set(thread as usize, bf16::from_f32(1.0)); // write
    if !is(Planted::NoProxyFence) {
        hopper::fence_async_proxy();
    }
    thread::sync_threads();
    if thread == 0 {
        tile.store(out, 0, 0); // store
        tma::commit_stores();
        if is(Planted::StoreOverwritten) {
            plain.set(0, bf16::from_f32(2.0));
        }
        if !is(Planted::StoreNotWaited) {
            tma::wait_stores(); // wait_stores
        }
    }
}

#[test]
fn mbarrier_and_tma_faults_are_reported() {
    let run = |fault: u32| {
        let mut memory = Memory::new();
        let base = memory.input("tensor", &values(20 * 80));
        let map = map_of(&mut memory, base);
        let out = memory.buffer("out", &values(20 * 80));
        let out = memory.input("map of out", &[TensorMap::emulated(out.reader(), 20, 72, 160, 16, 64)]);
        planted(map, out, fault).emulate_checked(&mut memory, [1, 1, 1], SHARED)
    };
    run(u32::MAX).unwrap();
    let found = |fault: Planted| run(fault as u32).unwrap_err();
    let bytes = found(Planted::TooFewBytes);
    expect(&bytes, Fault::Deadlock, "wait", None);
    assert!(bytes.to_string().contains("16 expected bytes are missing"), "{bytes}");
    expect(&found(Planted::NotInitialized), Fault::Uninitialized, "first_arrival", None);
    expect(&found(Planted::ArrivesTwice), Fault::Operand, "second_arrival", None);
    expect(&found(Planted::ReadBeforeWait), Fault::AsyncCopy, "read_before_wait", Some("load"));
    expect(&found(Planted::NobodyWaits), Fault::AsyncCopy, "load", None);
    expect(&found(Planted::NoProxyFence), Fault::DataRace, "store", Some("write"));
    expect(&found(Planted::StoreNotWaited), Fault::AsyncCopy, "store", None);
    expect(&found(Planted::StoreOverwritten), Fault::AsyncCopy, "store", Some("wait_stores"));
    expect(&found(Planted::OverwrittenTooEarly), Fault::AsyncCopy, "read", Some("load_again"));
    expect(&found(Planted::LoadedWhileRead), Fault::DataRace, "load_while_read", Some("read"));
    expect(&found(Planted::NoInitFence), Fault::DataRace, "unfenced_load", Some("init"));
    expect(&found(Planted::WrittenWithoutProxyFence), Fault::DataRace, "load_over_write", Some("plain_write"));
    let nobody = found(Planted::NobodyArrives);
    expect(&nobody, Fault::Deadlock, "wait_for_nobody", None);
    let missing = "1 of 1 arrivals are missing and 2048 bytes were copied without an arrival that announced them";
    assert!(nobody.to_string().contains(missing) && nobody.to_string().contains("threads 0-63: waiting"), "{nobody}");
}

/// Deliberate faults of the kernel `misused_wgmma`.
#[derive(Clone, Copy, PartialEq)]
#[repr(u32)]
enum Misuse {
    Written,
    FencedEarly,
    Stored,
    Shuffled,
    Packed,
    Exponentiated,
    Compared,
    NotFenced,
    NotFencedAgain,
    ALoadedAfterFence,
    NeverWaited,
    NeverCommitted,
}

#[kernel(threads = 128)]
fn misused_wgmma(out: GlobalMut<f32>, fault: u32) {
    let is = |planted: Misuse| fault == planted as u32;
    let tile = Layout::new().swizzled::<64>();
    let plain: SharedArray<bf16> = Layout::new().array(64 * 64);
    let thread = thread::thread_idx_x() as usize;
    for i in (thread..64 * 64).step_by(128) {
        plain.set(i, bf16::from_f32(1.0));
    }
    hopper::fence_async_proxy();
    thread::sync_threads();
    let mut d = <[f32; 32]>::ZERO;
    if !is(Misuse::NotFenced) {
        wgmma::fence();
    }
    if is(Misuse::ALoadedAfterFence) {
        let a_fragment = tile.load_a_fragment(thread as u32 / 32 * 16, 0); // load_a_fragment
        d.mma_with_a_registers(a_fragment, tile.k_major_operand(0), false); // mma_with_a_registers
    }
    d.mma(tile.k_major_operand(0), tile.k_major_operand(0), false); // mma
    if is(Misuse::NeverCommitted) {
        wgmma::wait::<0>();
        d.fence_accumulators(); // fence_uncommitted
    }
    wgmma::commit();
    if is(Misuse::Written) {
        d[3] += 1.0;
    }
    if is(Misuse::FencedEarly) {
        d.fence_accumulators(); // fence_early
    }
    if is(Misuse::Stored) {
        out.set(thread, d[3] * 2.0); // store_early
    }
    if is(Misuse::Shuffled) {
        warp::sum(d[3]); // shuffle_early
    }
    if is(Misuse::Packed) {
        let _ = Packet::<bf16>::from_fn(|i| d[i]); // pack_early
    }
    if is(Misuse::Exponentiated) {
        math::exp2(d[0] - 1.0); // exp2_early
    }
    if is(Misuse::Compared) {
        math::max(0.0, d[0]); // max_early
    }
    if is(Misuse::NeverWaited) {
        return;
    }
    wgmma::wait::<0>();
    d.fence_accumulators(); // fence_accumulators
    out.set(thread, d[0]);
    if is(Misuse::NotFencedAgain) {
        d.mma(tile.k_major_operand(0), tile.k_major_operand(0), true); // mma_again
        wgmma::commit();
        wgmma::wait::<0>();
        d.fence_accumulators();
    }
}

#[test]
fn premature_accumulator_accesses_are_reported() {
    let run = |fault: u32| {
        let mut memory = Memory::new();
        let out = memory.output("out", 128);
        misused_wgmma(out, fault).emulate_checked(&mut memory, [1, 1, 1], SHARED)
    };
    run(u32::MAX).unwrap();
    let cases = [
        (Misuse::Written, "fence_accumulators", Some("mma")),
        (Misuse::FencedEarly, "fence_early", Some("mma")),
        (Misuse::Stored, "store_early", Some("mma")),
        (Misuse::Shuffled, "shuffle_early", Some("mma")),
        (Misuse::Packed, "pack_early", Some("mma")),
        (Misuse::Exponentiated, "exp2_early", Some("mma")),
        (Misuse::Compared, "max_early", Some("mma")),
        (Misuse::NotFenced, "mma", None),
        (Misuse::NotFencedAgain, "mma_again", Some("fence_accumulators")),
        (Misuse::ALoadedAfterFence, "mma_with_a_registers", Some("load_a_fragment")),
        (Misuse::NeverWaited, "mma", None),
        (Misuse::NeverCommitted, "fence_uncommitted", Some("mma")),
    ];
    for (fault, at, other) in cases {
        expect(&run(fault as u32).unwrap_err(), Fault::Accumulators, at, other);
    }
}

/// A fifth warp loads three tiles into a single stage, one after the other. A warpgroup issues two wgmma for each tile.
/// `early` selects who releases the stage, and when:
///
/// * 0: each warp, after it has waited for both wgmma.
/// * 1: each warp, before it waits. A data race.
/// * 2: one warp, after it has waited for the first wgmma. A data race.
/// * 3: one warp, after it has waited for both wgmma.
#[kernel(threads = 160)]
fn pipeline(out: GlobalMut<f32>, map: Global<TensorMap>, early: u32) {
    let mut layout = Layout::new();
    let (tile, barriers) = (layout.swizzled::<64>(), layout.mbarriers(2));
    let (full, empty) = (barriers.at(0), barriers.at(1));
    let thread = thread::thread_idx_x();
    if thread == 0 {
        full.init(1);
        empty.init(if early < 2 { 4 } else { 1 });
        MBarrier::fence_init();
    }
    thread::sync_threads();
    if thread == 128 {
        for round in 0..3 {
            empty.wait((round + 1) % 2);
            full.arrive_expect_tx(SwizzledTile::<64>::BYTES);
            tile.load(map, 0, 64 * round, full); // refill
        }
    }
    if thread >= 128 {
        return;
    }
    let (mut d, mut again) = (<[f32; 32]>::ZERO, <[f32; 32]>::ZERO);
    for round in 0..3 {
        full.wait(round % 2);
        wgmma::fence();
        d.mma(tile.k_major_operand(0), tile.k_major_operand(1), round > 0); // multiply
        wgmma::commit();
        again.mma(tile.k_major_operand(0), tile.k_major_operand(1), round > 0); // multiply_again
        wgmma::commit();
        if early == 1 && thread.is_multiple_of(32) {
            empty.arrive();
        }
        wgmma::wait::<1>();
        if early == 2 && thread == 0 {
            empty.arrive();
        }
        wgmma::wait::<0>();
        again.fence_accumulators();
        if early == 0 && thread.is_multiple_of(32) || early == 3 && thread == 0 {
            empty.arrive();
        }
        d.fence_accumulators();
    }
    out.set(thread as usize, d[0]);
}

#[test]
fn stage_released_before_the_wgmma_wait_is_a_data_race() {
    let tensor = values(192 * 64);
    let run = |early: u32| {
        let mut memory = Memory::new();
        let base = memory.input("tensor", &tensor);
        let map = memory.input("map", &[TensorMap::emulated(base, 192, 64, 128, 64, 64)]);
        let out = memory.output("out", 128);
        pipeline(out, map, early).emulate_checked(&mut memory, [1, 1, 1], SHARED)?;
        Ok::<_, Report>(memory.read(out)[0])
    };
    let term = |i: usize| tensor[i / 16 * 4096 + i % 16].to_f64() * tensor[i / 16 * 4096 + 16 + i % 16].to_f64();
    let want: f64 = (0..3 * 16).map(term).sum();
    assert!((f64::from(run(0).unwrap()) - want).abs() < 1e-4);
    assert!((f64::from(run(3).unwrap()) - want).abs() < 1e-4);
    expect(&run(1).unwrap_err(), Fault::DataRace, "refill", Some("multiply_again"));
    // Threads that wait later than others have not waited for what those have.
    expect(&run(2).unwrap_err(), Fault::DataRace, "refill", Some("multiply_again"));
}
