//! Tests of the exercise warp_argmax.
use cuda_std::Global;
use cuda_std::GlobalMut;
use cuda_std::emulate::Memory;
use cuda_std::launch::Launch;

/// Runs the kernel on rows of n elements.
fn run(kernel: fn(GlobalMut<u32>, Global<f32>, u32) -> Launch, values: &[f32], n: usize) -> Vec<u32> {
    let mut memory = Memory::new();
    let rows = values.len() / n;
    let (out, view) = (memory.output("out", rows), memory.input("values", values));
    kernel(out, view, n as u32).emulate_checked(&mut memory, [rows as u32, 1, 1], 0).unwrap();
    memory.read(out)
}

exercises::tests! {
    warp_argmax: {
        /// Rows of several lengths, with the largest element anywhere.
        fn largest_element_is_found() {
            for n in [1, 31, 32, 33, 100] {
                for at in [0, n / 2, n - 1] {
                    let mut row: Vec<f32> = (0..n).map(|i| -1.0 - (i * 37 % 11) as f32).collect();
                    row[at] = -0.5;
                    assert_eq!(run(solution::warp_argmax, &row, n), [at as u32], "{n} elements");
                }
            }
        }

        /// Lane 1 reads index 33 and lane 7 reads index 7: the smallest index wins, whichever lane has it.
        fn the_smallest_index_of_equal_elements_counts() {
            for (low, high) in [(7, 33), (33, 40), (1, 33), (31, 32)] {
                let mut row = vec![0.0; 64];
                (row[low], row[high]) = (2.0, 2.0);
                assert_eq!(run(solution::warp_argmax, &row, 64), [low as u32]);
            }
        }

        /// A row of equal elements, also if they are -infinity, which masked logits are.
        fn all_elements_are_equal() {
            for value in [3.0, f32::NEG_INFINITY] {
                assert_eq!(run(solution::warp_argmax, &[value; 40], 40), [0]);
                assert_eq!(run(solution::warp_argmax, &[value; 10], 5), [0, 0]);
            }
        }

        /// Each block has its own row.
        fn several_rows() {
            assert_eq!(run(solution::warp_argmax, &[1.0, 2.0, 3.0, 9.0, 8.0, 7.0, 4.0, 6.0, 5.0], 3), [2, 0, 1]);
        }
    }
}
