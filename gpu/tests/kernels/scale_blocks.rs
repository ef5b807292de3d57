//! Scaling of a matrix and of the blocks on its diagonal, against the definition.

use crate::common::{Tolerance, assert_close, for_all, noise, read, rounded, run, wide};
use cuda_std::emulate::Memory;
use gpu::scale_blocks::{Blocks, grid, scale_blocks};

tests! {
    kernels of "scale_blocks.rs";
    for both types: blocks_are_scaled_and_the_rest_is_zero, a_whole_matrix_is_scaled;
    slow in f32: random_blocks_match_the_definition;
}

/// Scales `rows` rows, and checks every element.
fn check<T: Tolerance>(rows: usize, blocks: Blocks, factor: f32, seed: u32) {
    let columns = blocks.columns as usize;
    let values = rounded::<T>(&noise(rows * columns, seed));
    let mut memory = Memory::new();
    let found = memory.buffer("values", &values);
    run(&mut memory, &scale_blocks(found, blocks, factor, values.len() as u64), grid(values.len()), 0);
    let expected = wide(&values).into_iter().enumerate().map(|(i, value)| {
        let (row, column) = ((i / columns) as u32, (i % columns) as u32);
        let block = blocks.ends.iter().filter(|&&end| end <= row).count() as u32;
        let is_kept = column / blocks.block_columns == block && blocks.kept & 1 << block != 0;
        if is_kept { f64::from(factor) * value } else { 0.0 }
    });
    assert_close("values", &read(&memory, found), &expected.collect::<Vec<_>>(), T::ROUNDING, 0.0);
}

fn blocks_are_scaled_and_the_rest_is_zero<T: Tolerance>() {
    for (rows, ends, block_columns) in [(9, [5, 5], 8), (300, [120, 200], 16), (3, [1, 2], 1), (40, [40, 40], 8)] {
        for kept in 0..8 {
            check::<T>(rows, Blocks { columns: 3 * block_columns, ends, block_columns, kept }, 1.75, kept);
        }
    }
}

fn a_whole_matrix_is_scaled<T: Tolerance>() {
    for (rows, columns) in [(1, 1), (7, 37), (257, 8)] {
        let ends = [rows as u32; 2];
        check::<T>(rows, Blocks { columns, ends, block_columns: columns, kept: 7 }, -0.3, columns);
    }
}

fn random_blocks_match_the_definition<T: Tolerance>() {
    for_all(60, (1..40u32, 0..40u32, 0..40u32, 1..20u32, 0..8u32), |(a, b, c, block_columns, kept)| {
        let blocks = Blocks { columns: 3 * block_columns, ends: [a, a + b], block_columns, kept };
        check::<T>((a + b + c) as usize, blocks, 0.7, a);
    });
}
