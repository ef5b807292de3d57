//! The bias gradient against column sums in f64.

use crate::common::{
    Tolerance, assert_close, assert_same, for_all, integers, noise, read, rounded, run, shared_bytes, wide,
};
use cuda_std::emulate::Memory;
use cuda_std::{Element, bf16};
use gpu::bias::{
    bias_add, bias_add_grid, bias_backward, bias_backward_grid, bias_backward_reduce, bias_backward_shared,
    bias_backward_slices,
};
use gpu::column_sum;

tests! {
    kernels of "bias.rs";
    for both types: bias_gradient_matches_f64_sums, random_shapes_and_slices_are_exact,
        nan_and_infinity_stay_in_their_column;
    once: bias_is_added_to_every_row;
}

/// Runs both kernels and returns the new dbias, with the rows of dout in `slices` slices.
fn bias_gradient<T: Tolerance>(dbias: &[T], dout: &[T], slices: usize) -> Vec<f64> {
    let (rows, columns) = (dout.len() / dbias.len(), dbias.len());
    let mut memory = Memory::new();
    let dout = memory.input("dout", dout);
    let dbias = memory.buffer("dbias", dbias);
    let partials = memory.output::<f32>("partials", slices * columns);
    let sum = bias_backward(partials, dout, rows as u32, columns as u32);
    run(&mut memory, &sum, bias_backward_grid::<T>(columns, slices), shared_bytes(bias_backward_shared::<T>));
    let reduce = bias_backward_reduce(dbias, partials.reader(), slices as u32, columns as u32);
    run(&mut memory, &reduce, column_sum::grid(columns), shared_bytes(column_sum::shared));
    read(&memory, dbias)
}

/// Returns dbias plus the column sums of dout.
fn sums(dbias: &[f64], dout: &[f64]) -> Vec<f64> {
    let mut sums = dbias.to_vec();
    for (i, d) in dout.iter().enumerate() {
        sums[i % dbias.len()] += d;
    }
    sums
}

fn bias_gradient_matches_f64_sums<T: Tolerance>() {
    for (rows, columns) in [(1, 8), (7, 80), (63, 160), (301, 240), (130, 520), (1000, 72)] {
        let (dbias, dout) = (rounded::<T>(&noise(columns, 2)), rounded::<T>(&noise(rows * columns, 1)));
        let got = bias_gradient(&dbias, &dout, bias_backward_slices::<T>(rows, columns, 3));
        // The f32 rounding errors of up to 1000 values near 1 are visible where the sum cancels.
        assert_close("dbias", &got, &sums(&wide(&dbias), &wide(&dout)), T::ROUNDING, 4.0);
    }
}

/// Sums of integers are exact. The cases include empty slices, and more slices than the second stage has warps.
fn random_shapes_and_slices_are_exact<T: Tolerance>() {
    for_all(48, (1..200usize, 1..50usize, 1..20usize, 0..9u32), |(rows, packets, slices, seed)| {
        let columns = packets * T::PACKET;
        let (dbias, dout) = (integers(columns, seed), integers(rows * columns, seed + 1));
        let want = rounded::<T>(&sums(&dbias, &dout));
        assert_same("dbias", &bias_gradient(&rounded::<T>(&dbias), &rounded(&dout), slices), &wide(&want));
    });
}

fn bias_is_added_to_every_row() {
    for_all(24, (1..70usize, 1..70usize, 0..9u32), |(rows, packets, seed)| {
        let columns = 8 * packets;
        let (out, bias) = (rounded::<bf16>(&noise(rows * columns, seed)), rounded::<bf16>(&noise(columns, seed + 1)));
        let mut memory = Memory::new();
        let (to, added) = (memory.buffer("out", &out), memory.input("bias", &bias));
        run(&mut memory, &bias_add(to, added, out.len() as u64, columns as u32), bias_add_grid(out.len()), 0);
        let sum = |(i, x): (usize, &bf16)| f64::from(x.to_f32() + bias[i % columns].to_f32());
        let want = rounded::<bf16>(&out.iter().enumerate().map(sum).collect::<Vec<_>>());
        assert_same("out", &read(&memory, to), &wide(&want));
    });
}

fn nan_and_infinity_stay_in_their_column<T: Tolerance>() {
    let (rows, columns) = (63, 80);
    let mut dout = noise(rows * columns, 1);
    let clean = bias_gradient(&rounded::<T>(&vec![0.0; columns]), &rounded::<T>(&dout), 2);
    for (row, column, x) in [(0, 3, f64::NAN), (62, 79, f64::INFINITY), (5, 8, f64::INFINITY), (40, 8, -f64::INFINITY)]
    {
        dout[row * columns + column] = x;
    }
    let mut want = clean;
    (want[3], want[79], want[8]) = (f64::NAN, f64::INFINITY, f64::NAN);
    let got = bias_gradient(&rounded::<T>(&vec![0.0; columns]), &rounded::<T>(&dout), 2);
    assert_close("dbias", &got, &want, 0.0, 0.0);
}
