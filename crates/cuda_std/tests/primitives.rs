//! Every primitive of the CPU back end, in kernels as one writes them.

use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, block, fence, kernel, thread, warp};

fn emulate(launch: &cuda_std::launch::Launch, grid: [u32; 3], shared: usize) {
    // SAFETY: the tests below size their buffers by the grid.
    unsafe { launch.emulate(grid, shared) }.unwrap();
}

#[kernel(threads = 96)]
fn indices(out: GlobalMut<u32>) {
    let block = (thread::block_idx_z() * thread::grid_dim_y() + thread::block_idx_y()) * thread::grid_dim_x()
        + thread::block_idx_x();
    let i = (block * thread::block_dim_x() + thread::thread_idx_x()) as usize;
    out.set(4 * i, i as u32);
    out.set(4 * i + 1, thread::thread_idx_x() + 1000 * thread::block_idx_x());
    out.set(4 * i + 2, thread::block_idx_y() + 1000 * thread::block_idx_z());
    out.set(4 * i + 3, thread::grid_dim_z() + 1000 * warp::lane());
}

#[test]
fn each_thread_knows_its_place() {
    let mut out = vec![0u32; 4 * 96 * 5 * 3 * 2];
    emulate(&indices(GlobalMut::new(out.as_mut_ptr())), [5, 3, 2], 0);
    for (i, got) in out.chunks(4).enumerate() {
        let (t, b) = (i as u32 % 96, i as u32 / 96);
        let (x, y, z) = (b % 5, b / 5 % 3, b / 15);
        assert_eq!(got, [i as u32, t + 1000 * x, y + 1000 * z, 2 + 1000 * (t % 32)]);
    }
}

#[kernel(threads = 256)]
fn block_sum(out: GlobalMut<f32>, inp: Global<f32>) {
    let scratch: SharedArray<f32> = Layout::new().array(32);
    let i = thread::index_1d();
    let sum = block::sum(inp.at(i), scratch);
    let max = block::max(inp.at(i), scratch);
    out.set(2 * i, sum);
    out.set(2 * i + 1, max);
}

#[test]
fn block_reductions() {
    let inp: Vec<f32> = (0..1024).map(|i| (i * 37 % 101) as f32 - 50.0).collect();
    let mut out = vec![0.0f32; 2048];
    emulate(&block_sum(GlobalMut::new(out.as_mut_ptr()), Global::new(inp.as_ptr())), [4, 1, 1], 128);
    for (block, inp) in inp.chunks(256).enumerate() {
        let (sum, max) = (inp.iter().sum::<f32>(), inp.iter().copied().fold(f32::MIN, f32::max));
        for got in out[512 * block..][..512].chunks(2) {
            assert_eq!(got, [sum, max]);
        }
    }
}

#[kernel(threads = 64)]
fn last_block(total: GlobalMut<f32>, partial: GlobalMut<f32>, counter: GlobalMut<u32>) {
    let (t, b) = (thread::thread_idx_x(), thread::block_idx_x());
    if t == 0 {
        partial.set(b as usize, b as f32);
    }
    fence::device();
    let last = t == 0 && counter.atomic_add(0, 1) == thread::grid_dim_x() - 1;
    if last {
        fence::device();
        let mut sum = 0.0;
        for i in 0..thread::grid_dim_x() as usize {
            sum += partial.at(i);
        }
        total.set(0, sum);
    }
    total.atomic_add(1, 1.0);
}

#[test]
fn atomics_across_blocks() {
    let (mut total, mut partial, mut counter) = ([0.0f32; 2], vec![0.0f32; 500], [0u32]);
    let [t, p] = [total.as_mut_ptr(), partial.as_mut_ptr()].map(GlobalMut::new);
    emulate(&last_block(t, p, GlobalMut::new(counter.as_mut_ptr())), [500, 1, 1], 0);
    assert_eq!((total, counter), ([499.0 * 250.0, 64.0 * 500.0], [500]));
}
