//! What the CPU back end's rendezvous cost: `cargo bench -p cuda_std`.

use cuda_std::mma::TensorCore;
use cuda_std::{GlobalMut, bf16, kernel, thread, warp};
use std::time::Instant;

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
fn products<T: TensorCore>(out: GlobalMut<f32>) {
    let x = thread::thread_idx_x() as f32;
    let a = T::a_from_accumulators([x; 4], [1.0 - x; 4]);
    let mut d = [0.0; 4];
    // SAFETY: all bit patterns are fragments of either type, and B's is half of A's.
    let b = unsafe { std::mem::transmute_copy(&a) };
    for _ in 0..ROUNDS {
        T::mma(&mut d, a, b);
    }
    out.set(thread::index_1d(), d[0]);
}

/// Nanoseconds per round and `lanes` threads, on one OS thread.
fn time(name: &str, per: &str, lanes: u32, launch: &cuda_std::launch::Launch) {
    let start = Instant::now();
    // SAFETY: `out` covers every thread.
    unsafe { launch.emulate([BLOCKS, 1, 1], 0) }.expect("the kernel runs");
    let rounds = u64::from(BLOCKS * ROUNDS * launch.threads() / lanes);
    println!("{name}: {:.1} ns per {per}", start.elapsed().as_nanos() as f64 / rounds as f64);
}

fn main() {
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global().expect("first use of the pool");
    let mut out = vec![0.0f32; 256 * BLOCKS as usize];
    let out = GlobalMut::new(out.as_mut_ptr());
    for _ in 0..2 {
        time("sync_threads of 256", "thread", 1, &barriers());
        time("shuffle", "thread", 1, &shuffles(out));
        time("mma bf16", "warp", 32, &products::<bf16>(out));
        time("mma f32", "warp", 32, &products::<f32>(out));
    }
}
