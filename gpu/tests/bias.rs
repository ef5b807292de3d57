//! The bias gradient against f64 column sums.

mod common;

use common::{Buffer, Tolerance, assert_close, emulate, noise, shared_bytes};
use gpu::bias::{bias_backward, bias_backward_grid, bias_backward_reduce, bias_backward_shared, bias_backward_slices};
use gpu::column_sum;

for_both_types!(column_sums);

fn column_sums<T: Tolerance>() {
    for (rows, columns) in [(1, 8), (7, 80), (301, 240), (130, 520), (1000, 72)] {
        let slices = bias_backward_slices::<T>(rows, columns, 3);
        let dout = Buffer::<T>::of(&noise(rows * columns, 1));
        let mut dbias = Buffer::<T>::of(&noise(columns, 2));
        let mut want = dbias.to_f64();
        for (i, d) in dout.to_f64().iter().enumerate() {
            want[i % columns] += d;
        }
        let mut partials = Buffer::<f32>::filled(slices * columns, f32::NAN);
        let first = bias_backward(partials.view_mut(), dout.view(), rows as u32, columns as u32);
        emulate(&first, bias_backward_grid::<T>(columns, slices), shared_bytes(bias_backward_shared::<T>));
        let second = bias_backward_reduce(dbias.view_mut(), partials.view(), slices as u32, columns as u32);
        emulate(&second, column_sum::grid(columns), shared_bytes(column_sum::shared));
        // Sums of up to 1000 values near 1: their f32 rounding counts where they cancel.
        assert_close("dbias", &dbias.to_f64(), &want, T::ROUNDING, 4.0);
    }
}
