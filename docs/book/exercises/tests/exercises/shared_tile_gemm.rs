//! Tests of the exercise `shared_tile_gemm`.

use cuda_std::emulate::Memory;
use cuda_std::launch::Launch;
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray};

/// The kernel to test.
type Kernel = fn(GlobalMut<f32>, Global<f32>, Global<f32>, u32, u32, u32) -> Launch;
/// The function that lays out its shared memory.
type Shared = fn(&mut Layout) -> [[SharedArray<f32>; 2]; 2];

/// Runs the kernel in the emulator with every access checked, and compares the result.
fn run(kernel: Kernel, shared: Shared, [m, n, k]: [usize; 3]) {
    let mut layout = Layout::new();
    shared(&mut layout);
    let a: Vec<f32> = (0..m * k).map(|i| (i % 7) as f32 - 3.0).collect();
    let b: Vec<f32> = (0..k * n).map(|i| (i % 5) as f32 - 2.0).collect();
    let mut memory = Memory::new();
    let (views, out) = ((memory.input("a", &a), memory.input("b", &b)), memory.output("out", m * n));
    let launch = kernel(out, views.0, views.1, m as u32, n as u32, k as u32);
    let grid = [n.div_ceil(16) as u32, m.div_ceil(16) as u32, 1];
    launch.emulate_checked(&mut memory, grid, layout.bytes()).unwrap_or_else(|report| panic!("{report}"));
    // The elements are small integers, so sums in any order are exact.
    let element = |i: usize| (0..k).map(|l| a[i / n * k + l] * b[l * n + i % n]).sum::<f32>();
    assert_eq!(memory.read(out), (0..m * n).map(element).collect::<Vec<_>>());
}

exercises::tests! {
    shared_tile_gemm: {
        /// One step: the reads of a tile follow its writes.
        fn one_step_has_no_race() {
            run(solution::shared_tile_gemm, solution::shared, [16, 16, 16]);
        }

        /// Several steps: each pair of tiles is overwritten while other threads may still be one step behind.
        fn several_steps_have_no_race() {
            run(solution::shared_tile_gemm, solution::shared, [16, 16, 80]);
        }

        /// Sizes that are not multiples of the tile: threads outside of the matrices reach the same barriers.
        fn tails_have_no_race() {
            run(solution::shared_tile_gemm, solution::shared, [20, 35, 41]);
        }
    }
}
