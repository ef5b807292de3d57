//! Tests of the exercise column_sums.
use cuda_std::emulate::Memory;

/// Returns numbers in ±1 that look random.
fn numbers(n: usize) -> Vec<f32> {
    (0..n as u32).map(|i| i.wrapping_mul(2_654_435_761) as i32 as f32 / 2f32.powi(31)).collect()
}

/// Returns the sums of the columns of some rows, in order.
fn sums<'a>(rows: impl Iterator<Item = &'a [f32]>, channels: usize) -> Vec<f32> {
    rows.fold(vec![0.0; channels], |sums, row| sums.iter().zip(row).map(|(sum, x)| sum + x).collect())
}

exercises::tests! {
    column_sums: {
        /// Each block adds up every third row, in order. More columns than threads, and a tail.
        fn partial_sums_have_the_bits_of_the_stated_order() {
            let (rows, channels, grid) = (10, 200, 3);
            let inp = numbers(rows * channels);
            let mut memory = Memory::new();
            let (partials, view) = (memory.output("partials", grid * channels), memory.input("inp", &inp));
            let launch = solution::partial_sums(partials, view, rows as u32, channels as u32);
            launch.emulate_checked(&mut memory, [grid as u32, 1, 1], 0).unwrap();
            let of_block = |block: usize| sums(inp.chunks(channels).skip(block).step_by(grid), channels);
            let expected: Vec<f32> = (0..grid).flat_map(of_block).collect();
            assert_eq!(memory.read(partials), expected);
        }

        /// A block without rows writes zeros: the second kernel reads them.
        fn more_blocks_than_rows() {
            let inp = numbers(2 * 5);
            let mut memory = Memory::new();
            let (partials, view) = (memory.output("partials", 4 * 5), memory.input("inp", &inp));
            solution::partial_sums(partials, view, 2, 5).emulate_checked(&mut memory, [4, 1, 1], 0).unwrap();
            assert_eq!(memory.read(partials), [inp, vec![0.0; 10]].concat());
        }

        /// The second kernel adds up the rows in order, for two blocks with a tail.
        fn totals_have_the_bits_of_the_stated_order() {
            let (blocks, channels) = (7, 130);
            let partials = numbers(blocks * channels);
            let mut memory = Memory::new();
            let (out, view) = (memory.output("out", channels), memory.input("partials", &partials));
            let launch = solution::add_partial_sums(out, view, blocks as u32, channels as u32);
            launch.emulate_checked(&mut memory, [2, 1, 1], 0).unwrap();
            assert_eq!(memory.read(out), sums(partials.chunks(channels), channels));
        }
    }
}
