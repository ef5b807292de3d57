//! CPU time of the emulator's collective operations and of its checker: `cargo bench -p cuda_std`. Linux only.

use cuda_std::emulate::Memory;
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{GlobalMut, SharedArray, bf16, kernel, thread, warp};
use std::fs;

const BLOCKS: u32 = 8;
const ROUNDS: u32 = 1000;

#[kernel(threads = 256)]
fn barriers() {
    for _ in 0..ROUNDS {
        thread::sync_threads();
    }
}

#[kernel(threads = 256)]
fn shuffles(out: GlobalMut<f32>) {
    let mut x = thread::thread_idx_x();
    for _ in 0..ROUNDS {
        x = warp::shuffle_xor(x, 5);
    }
    out.set(thread::index_1d(), x as f32);
}

#[kernel(threads = 256, instances(bf16 = <bf16>, f32 = <f32>))]
fn mma<T: TensorCore>(out: GlobalMut<f32>) {
    let x = thread::thread_idx_x() as f32;
    let a = T::a_from_accumulators([x; 4], [1.0 - x; 4]);
    let mut d = [0.0; 4];
    // SAFETY: every bit pattern is a valid fragment, and a B fragment is half the size of an A fragment.
    let b = unsafe { std::mem::transmute_copy(&a) };
    for _ in 0..ROUNDS {
        T::mma(&mut d, a, b);
    }
    out.set(thread::index_1d(), d[0]);
}

#[kernel(threads = 256)]
fn accesses(out: GlobalMut<f32>) {
    let array: SharedArray<f32> = Layout::new().array(256);
    let (i, t) = (thread::index_1d(), thread::thread_idx_x() as usize);
    out.set(i, 0.0);
    for _ in 0..ROUNDS / 2 {
        array.set(t, out.at(i));
        out.set(i, array.at(t));
    }
}

/// Returns the CPU time of this thread in nanoseconds, which does not depend on the load of the machine.
fn cpu_time() -> u64 {
    let stat = fs::read_to_string("/proc/thread-self/schedstat").expect("/proc/thread-self/schedstat must be readable");
    stat.split(' ')
        .next()
        .and_then(|ns| ns.parse().ok())
        .expect("the first field of schedstat must be a number of nanoseconds")
}

fn time(name: &str, per: &str, events: u32, run: impl FnOnce()) {
    let start = cpu_time();
    run();
    println!("{name}: {:.1} ns per {per}", (cpu_time() - start) as f64 / f64::from(events));
}

fn main() {
    // This thread is the only worker, so its CPU time is the total.
    rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .use_current_thread()
        .build_global()
        .expect("the global thread pool must not exist yet");
    let mut memory = Memory::new();
    let out = memory.output("out", (256 * BLOCKS) as usize);
    let (threads, grid) = (BLOCKS * ROUNDS * 256, [BLOCKS, 1, 1]);
    // SAFETY: `out` has one element per thread.
    let run = |launch: &cuda_std::launch::Launch| unsafe { launch.emulate(grid, 1024) }.expect("the kernel must run");
    for _ in 0..2 {
        time("sync_threads of 256", "thread", threads, || run(&barriers()));
        time("shuffle", "thread", threads, || run(&shuffles(out)));
        time("mma bf16", "warp", threads / 32, || run(&mma::<bf16>(out)));
        time("mma f32", "warp", threads / 32, || run(&mma::<f32>(out)));
    }
    time("checked load and store", "pair", threads, || {
        accesses(out).emulate_checked(&mut memory, grid, 1024).expect("the kernel must not fault");
    });
}
