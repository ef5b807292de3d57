//! Muon's elementwise kernels against an f64 reference, for lengths that are not multiples of the vector size.

use crate::common::{Tolerance, assert_close, assert_same, noise, rounded, run, wide};
use cuda_std::emulate::Memory;
use cuda_std::{Element, GlobalMut, bf16};
use gpu::column_sum;
use gpu::muon::small::{self, Iteration};
use gpu::muon::variance::{self, Variance};
use gpu::muon::{self, Scalars, Scaling};
use gpu::noise::{Stream, round};
use gpu::remainder;

tests! {
    kernels of "muon.rs", "muon";
    for both types: momentum_matches_f64_reference, scale_matches_f64_reference, rows_match_f64_reference, apply_matches_f64_reference,
        variance_matches_f64_reference, small_matrices_match_f64_reference,
        non_finite_loss_or_norm_skips_the_step, nan_stays_in_its_element, parameters_are_rounded_masters;
    slow in f32: matrices_are_scaled_independently, result_does_not_depend_on_length, a_zero_matrix_stays_zero;
    once: bf16_momentum_is_rounded_f32_momentum, remainders_are_exact_master_weights,
        remainders_keep_nan_in_its_element_and_skip_steps, bf16_means_are_rounded_f32_means, a_skipped_step_keeps_the_means;
}

/// All lengths up to two packets, all remainders around one block's tile, and several blocks.
fn lengths() -> impl Iterator<Item = usize> {
    (1..=17).chain(1017..=1025).chain(2041..=2049).chain([5003])
}

const MOMENTUM: f64 = 0.9;
/// Factor of the gradients, and the threshold of clipping.
const CLIP: [f32; 2] = [1.0, 1.0];
/// Sum of losses, and a norm below the threshold.
const STATS: [f32; 2] = [7.0, 0.5];

/// Returns m and the update after [`muon::muon_momentum`]. The update is 5 before.
fn momentum<T: Tolerance, M: Tolerance>(
    m: &[M],
    grads: &[T],
    stats: [f32; 2],
    [factor, clip]: [f32; 2],
) -> (Vec<M>, Vec<T>) {
    let mut memory = Memory::new();
    let n = grads.len();
    let update = memory.buffer("update", &vec![T::from_f32(5.0); n]);
    let m = memory.buffer("m", m);
    let grads = memory.input("grads", grads);
    let stats = memory.input("stats", &stats);
    let launch = muon::muon_momentum(update, m, grads, stats, MOMENTUM as f32, factor, clip, SCALARS.seed, n as u64);
    run(&mut memory, &launch, muon::grid::<T>(n), 0);
    (memory.read(m), memory.read(update))
}

/// Returns matrices after [`muon::muon_squared_sums`] and [`muon::muon_scale`]. They begin at odd multiples of 8 elements, and
/// the elements between them are not written.
fn scaled<T: Tolerance>(matrices: &[&[T]], factor: f32, epsilon: f32) -> Vec<Vec<T>> {
    let mut memory = Memory::new();
    let (n, count) = (matrices[0].len(), matrices.len());
    let (inp_stride, out_stride) = (n.next_multiple_of(8) + 8, n.next_multiple_of(8) + 24);
    // A NaN between the matrices would spread.
    let mut all = vec![T::from_f32(f32::NAN); count * inp_stride];
    for (at, matrix) in all.chunks_mut(inp_stride).zip(matrices) {
        at[..n].copy_from_slice(matrix);
    }
    let inp = memory.input("inp", &all);
    let out = memory.buffer("out", &vec![T::from_f32(5.0); count * out_stride]);
    let partials = memory.output("partials", count * muon::PARTIALS as usize);
    let (blocks, bytes) = (count as u32, crate::common::shared_bytes(muon::shared));
    let sums = muon::muon_squared_sums(partials, inp, inp_stride as u64, n as u64);
    run(&mut memory, &sums, [muon::PARTIALS, blocks, 1], bytes);
    let (strides, scaling) = ([out_stride, inp_stride].map(|x| x as u64), Scaling { factor, epsilon });
    let scale = muon::muon_scale(out, inp, partials.reader(), scaling, strides[0], strides[1], n as u64);
    run(&mut memory, &scale, [muon::grid::<T>(n), blocks, 1], bytes);
    let split = |out: &[T]| {
        assert!(wide(&out[n..]).iter().all(|x| x.to_bits() == 5f64.to_bits()), "n {n}: writes behind a matrix");
        out[..n].to_vec()
    };
    memory.read(out).chunks(out_stride).map(split).collect()
}

const SCALARS: Scalars =
    Scalars { learning_rate: 0.02, scale: 1.5, weight_decay: 0.1, cautious_decay: 0, grad_factor: 1.0, seed: 9 };

/// Returns parameters and masters after [`muon::muon_apply`].
fn applied<T: Tolerance>(
    params: &[T],
    masters: Option<&[f32]>,
    x: &[T],
    stats: [f32; 2],
    scalars: Scalars,
) -> (Vec<T>, Option<Vec<f32>>) {
    let mut memory = Memory::new();
    let n = x.len();
    let params = memory.buffer("params", params);
    let masters = masters.map(|masters| memory.buffer("masters", masters));
    let x = memory.input("x", x);
    let stats = memory.input("stats", &stats);
    let masters_or_null = masters.unwrap_or(GlobalMut::new(std::ptr::null_mut()));
    let launch = muon::muon_apply(params, masters_or_null, x, stats, scalars, n as u64);
    run(&mut memory, &launch, muon::grid::<T>(n), 0);
    (memory.read(params), masters.map(|masters| memory.read(masters)))
}

/// Returns parameters and remainders after [`muon::muon_apply`].
fn applied_to_remainders(
    params: &[bf16],
    remainders: &[u16],
    x: &[bf16],
    stats: [f32; 2],
    scalars: Scalars,
) -> (Vec<bf16>, Vec<u16>) {
    let mut memory = Memory::new();
    let n = x.len();
    let params = memory.buffer("params", params);
    let remainders = memory.buffer("remainders", remainders);
    let x = memory.input("x", x);
    let stats = memory.input("stats", &stats);
    let launch = muon::muon_apply(params, remainders, x, stats, scalars, n as u64);
    run(&mut memory, &launch, muon::grid::<bf16>(n), 0);
    (memory.read(params), memory.read(remainders))
}

fn values<T: Tolerance>(n: usize, seed: u32) -> Vec<T> {
    rounded(&noise(n, seed))
}

fn momentum_matches_f64_reference<T: Tolerance>() {
    for n in lengths() {
        for (norm, factor, clip) in
            [(0.5f32, 1.0f32, 1.0f32), (4.0, 1.0, 1.0), (4.0, 1.0, f32::INFINITY), (0.5, 1.5, 1.0), (0.5, 3.0, 1.0)]
        {
            let (m, grads): (Vec<f32>, Vec<T>) = (values(n, 1), values(n, 2));
            let (got_m, got_update) = momentum(&m, &grads, [7.0, norm], [factor, clip]);
            let norm = norm * factor;
            let scale = f64::from(factor) * if norm > clip { f64::from(clip / norm) } else { 1.0 };
            let grads: Vec<f64> = wide(&grads).iter().map(|g| g * scale).collect();
            let want_m: Vec<f64> = wide(&m).iter().zip(&grads).map(|(m, g)| m + (1.0 - MOMENTUM) * (g - m)).collect();
            let want: Vec<f64> = want_m.iter().zip(&grads).map(|(m, g)| g + MOMENTUM * (m - g)).collect();
            assert_close("m", &wide(&got_m), &want_m, 1e-6, 0.5);
            assert_close("update", &wide(&got_update), &want, T::ROUNDING, 0.1);
        }
    }
}

/// Returns matrices of n elements with norms of different magnitudes.
fn matrices<T: Tolerance>(n: usize) -> [Vec<T>; 3] {
    [(1.0, 3), (1e-3, 4), (300.0, 5)].map(|(scale, seed)| {
        let values: Vec<f64> = noise(n, seed).iter().map(|x| x * scale).collect();
        rounded(&values)
    })
}

fn scale_matches_f64_reference<T: Tolerance>() {
    // Each matrix has 128 blocks, most of them idle, so few lengths have more than one. Epsilon matters where the norm is small.
    let one = lengths().map(|n| (n, 1, if n % 2 == 0 { (1.01, 1e-6) } else { (1.0, 0.5) }));
    let three = [17, 2048].map(|n| (n, 3, (1.0, 0.5)));
    // In the longest matrix, each block sums more than once.
    for (n, count, (factor, epsilon)) in one.chain(three).chain([(300_001, 1, (1.01, 1e-6))]) {
        let matrices = matrices::<T>(n);
        let matrices: Vec<&[T]> = matrices.iter().take(count).map(Vec::as_slice).collect();
        let got = scaled(&matrices, factor, epsilon);
        for (got, matrix) in got.iter().zip(matrices) {
            let norm = wide(matrix).iter().map(|x| x * x).sum::<f64>().sqrt();
            let divisor = norm * f64::from(factor) + f64::from(epsilon);
            let want: Vec<f64> = wide(matrix).iter().map(|x| x / divisor).collect();
            assert_close("out", &wide(got), &want, 2.0 * T::ROUNDING, 1e-6);
        }
    }
}

/// Returns matrices (rows, cols) after [`muon::muon_row_sums`] and [`muon::muon_scale_rows`]. NaN lies between them, and is not written.
fn scaled_rows<T: Tolerance>(matrices: &[Vec<T>], rows: usize, cols: usize) -> Vec<Vec<T>> {
    let mut memory = Memory::new();
    let (n, count) = (rows * cols, matrices.len());
    let (inp_stride, out_stride) = (n + 3, n + 5);
    let mut all = vec![T::from_f32(f32::NAN); count * inp_stride];
    for (at, matrix) in all.chunks_mut(inp_stride).zip(matrices) {
        at[..n].copy_from_slice(matrix);
    }
    let inp = memory.input("inp", &all);
    let out = memory.buffer("out", &vec![T::from_f32(5.0); count * out_stride]);
    let row_sums = memory.output("row_sums", count * rows);
    let grid = [muon::row_grid(rows), count as u32, 1];
    let sums = muon::muon_row_sums(row_sums, inp, inp_stride as u64, rows as u32, cols as u32);
    run(&mut memory, &sums, grid, 0);
    let (scaling, strides) = (Scaling { factor: 1.01, epsilon: 1e-6 }, [out_stride, inp_stride].map(|x| x as u64));
    let (sums, shape) = (row_sums.reader(), [rows, cols].map(|x| x as u32));
    let scale = muon::muon_scale_rows(out, inp, sums, scaling, SMALLEST, strides[0], strides[1], shape[0], shape[1]);
    run(&mut memory, &scale, grid, crate::common::shared_bytes(muon::shared));
    let split = |out: &[T]| {
        assert!(wide(&out[n..]).iter().all(|x| x.to_bits() == 5f64.to_bits()), "{rows}x{cols}: writes behind a matrix");
        out[..n].to_vec()
    };
    memory.read(out).chunks(out_stride).map(split).collect()
}

const SMALLEST: f32 = 1e-3;

/// The first row of each matrix is 0, or below the smallest norm.
fn rows_match_f64_reference<T: Tolerance>() {
    for (rows, cols) in [(1, 1), (2, 33), (5, 7), (8, 32), (9, 100), (300, 40)] {
        let small = |(i, x): (usize, T)| if i < cols { T::from_f32(x.to_f32() * 1e-5) } else { x };
        let mut matrices =
            matrices::<T>(rows * cols).map(|matrix| matrix.into_iter().enumerate().map(small).collect::<Vec<_>>());
        matrices[0][..cols].fill(T::from_f32(0.0));
        let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
        for (got, matrix) in scaled_rows(&matrices, rows, cols).iter().zip(&matrices) {
            let mut want = wide(matrix);
            let target = norm(&want) / (rows as f64).sqrt();
            for row in want.chunks_mut(cols) {
                let scale = target / norm(row).max(f64::from(SMALLEST));
                for x in row {
                    *x *= scale;
                }
            }
            let divisor = norm(&want) * f64::from(1.01f32) + f64::from(1e-6f32);
            let want: Vec<f64> = want.iter().map(|x| x / divisor).collect();
            assert_close("out", &wide(got), &want, 3.0 * T::ROUNDING, 1e-6);
        }
        let alone = scaled_rows(&matrices[1..2], rows, cols);
        assert_same("alone", &wide(&alone[0]), &wide(&scaled_rows(&matrices, rows, cols)[1]));
    }
}

const VARIANCE: Variance = Variance { beta2: 0.9, smallest: 1e-10, grad_factor: 1.0, seed: 9 };

/// Returns x (rows, cols) and the running means `second` after the kernels of [`variance`].
fn with_variance<T: Tolerance, M: Tolerance>(x: &[T], second: &[M], cols: usize, stats: [f32; 2]) -> (Vec<T>, Vec<M>) {
    let mut memory = Memory::new();
    let (rows, n) = (x.len() / cols, second.len());
    let x = memory.buffer("x", x);
    let second = memory.buffer("second", second);
    let sums = memory.output("sums", n);
    let stats = memory.input("stats", &stats);
    let (grid, shape) = ([muon::row_grid(rows), 1, 1], [rows, cols].map(|side| side as u32));
    if rows >= cols {
        let launch = muon::muon_row_sums(sums, x.reader(), (rows * cols) as u64, shape[0], shape[1]);
        run(&mut memory, &launch, grid, 0);
    } else {
        let launch = variance::muon_column_sums(sums, x.reader(), shape[0], shape[1]);
        run(&mut memory, &launch, column_sum::grid(cols), crate::common::shared_bytes(column_sum::shared));
    }
    let elements = shape[0].min(shape[1]);
    let launch = variance::muon_variance_factors(second, sums, stats, VARIANCE, elements, n as u32);
    run(&mut memory, &launch, 1, crate::common::shared_bytes(muon::shared));
    let launch = variance::muon_scale_by_factors(x, sums.reader(), shape[0], shape[1]);
    run(&mut memory, &launch, grid, 0);
    (memory.read(x), memory.read(second))
}

/// Returns x (rows, cols) and running means as nanochat computes them.
fn reference_variance(x: &[f64], second: &[f64], cols: usize) -> (Vec<f64>, Vec<f64>) {
    let rows = x.len() / cols;
    let side = |i: usize| if rows >= cols { i / cols } else { i % cols };
    let (beta2, count) = (f64::from(VARIANCE.beta2), rows.min(cols) as f64);
    let mut means = vec![0.0; second.len()];
    x.iter().enumerate().for_each(|(i, x)| means[side(i)] += x * x / count);
    let second: Vec<f64> = second.iter().zip(&means).map(|(old, mean)| old + (1.0 - beta2) * (mean - old)).collect();
    let steps: Vec<f64> = second.iter().map(|x| 1.0 / x.max(1e-10).sqrt()).collect();
    let before = means.iter().map(|mean| mean * count).sum::<f64>().sqrt();
    let after = means.iter().zip(&steps).map(|(mean, step)| mean * count * step * step).sum::<f64>().sqrt();
    let scaled = x.iter().enumerate().map(|(i, x)| x * steps[side(i)] * before / after.max(1e-10)).collect();
    (scaled, second)
}

/// Shapes with more, equally many and fewer rows than columns, and with more rows or columns than a block has threads.
const VARIANCE_SHAPES: [(usize, usize); 8] =
    [(1, 1), (1, 12), (12, 1), (9, 9), (33, 20), (20, 33), (300, 7), (70, 300)];

/// Returns a matrix whose rows and columns differ in size, and running means. The first mean is 0.
fn uneven<T: Tolerance>(rows: usize, cols: usize) -> (Vec<T>, Vec<f32>) {
    let x: Vec<f64> = noise(rows * cols, 3);
    let x: Vec<f64> = x.iter().enumerate().map(|(i, x)| x * (1 + i / cols % 3 + i % cols % 2) as f64).collect();
    let mut second: Vec<f32> = values::<f32>(rows.max(cols), 4).iter().map(|x| x.abs() + 0.01).collect();
    second[0] = 0.0;
    (rounded(&x), second)
}

fn variance_matches_f64_reference<T: Tolerance>() {
    for (rows, cols) in VARIANCE_SHAPES {
        let (x, second) = uneven::<T>(rows, cols);
        let (got, got_second) = with_variance(&x, &second, cols, STATS);
        let (want, want_second) = reference_variance(&wide(&x), &wide(&second), cols);
        assert_close("second", &wide(&got_second), &want_second, 1e-5, 1e-6);
        assert_close("x", &wide(&got), &want, 2.0 * T::ROUNDING, 1e-6);
        let zeros = vec![T::from_f32(0.0); rows * cols];
        let (got, _) = with_variance(&zeros, &vec![0f32; rows.max(cols)], cols, STATS);
        assert_same("zero matrix", &wide(&got), &wide(&zeros));
    }
}

/// The matrix does not depend on the type of the means. bf16 means are those in f32, rounded with the bits of their stream.
fn bf16_means_are_rounded_f32_means() {
    for (rows, cols) in VARIANCE_SHAPES {
        let (x, second) = uneven::<bf16>(rows, cols);
        let second: Vec<bf16> = rounded(&wide(&second));
        let wider: Vec<f32> = second.iter().map(|x| x.to_f32()).collect();
        let (got, got_second) = with_variance(&x, &second, cols, STATS);
        let (want, exact) = with_variance(&x, &wider, cols, STATS);
        let want_second: Vec<bf16> =
            exact.iter().enumerate().map(|(i, &x)| round(Stream::V, x, i, VARIANCE.seed)).collect();
        assert_same("x", &wide(&got), &wide(&want));
        assert_same("second", &wide(&got_second), &wide(&want_second));
    }
}

fn a_skipped_step_keeps_the_means() {
    let (x, second) = uneven::<f32>(20, 33);
    let (_, got) = with_variance(&x, &second, 33, [7.0, f32::INFINITY]);
    assert_same("second", &wide(&got), &wide(&second));
}

/// The coefficients of Polar Express.
const COEFFICIENTS: [[f32; 3]; 5] = [
    [8.156_554, -22.483_293, 15.878_77],
    [4.042_93, -2.808_917_5, 0.500_017_8],
    [3.891_667_8, -2.772_484, 0.506_064_82],
    [3.285_753_7, -2.368_129_5, 0.464_490_23],
    [2.346_541_3, -1.709_782_8, 0.423_235_5],
];

/// Returns matrices (rows, cols) after [`small::muon_orthogonalize_small`]. NaN lies between them, and is not written.
fn orthogonalized<T: Tolerance>(matrices: &[Vec<T>], rows: usize, cols: usize, additions: bool) -> Vec<Vec<T>> {
    let mut memory = Memory::new();
    let (n, count) = (rows * cols, matrices.len());
    let (inp_stride, out_stride) = (n + 3, n + 5);
    let mut all = vec![T::from_f32(f32::NAN); count * inp_stride];
    for (at, matrix) in all.chunks_mut(inp_stride).zip(matrices) {
        at[..n].copy_from_slice(matrix);
    }
    let inp = memory.input("inp", &all);
    let out = memory.buffer("out", &vec![T::from_f32(5.0); count * out_stride]);
    let iteration = Iteration {
        coefficients: COEFFICIENTS,
        scaling: Scaling { factor: 1.01, epsilon: 1e-6 },
        smallest: SMALLEST,
        equilibrate: additions.into(),
        renormalize: additions.into(),
    };
    let (strides, shape) = ([out_stride, inp_stride].map(|x| x as u64), [rows, cols].map(|side| side as u32));
    let launch = small::muon_orthogonalize_small(out, inp, iteration, strides[0], strides[1], shape[0], shape[1]);
    run(&mut memory, &launch, count as u32, crate::common::shared_bytes(small::shared));
    let split = |out: &[T]| {
        assert!(wide(&out[n..]).iter().all(|x| x.to_bits() == 5f64.to_bits()), "{rows}x{cols}: writes behind a matrix");
        out[..n].to_vec()
    };
    memory.read(out).chunks(out_stride).map(split).collect()
}

/// Returns the product of row-major matrices with `inner` columns and rows.
fn times(a: &[f64], b: &[f64], inner: usize) -> Vec<f64> {
    let cols = b.len() / inner;
    let dot = |i: usize, j: usize| (0..inner).map(|k| a[i * inner + k] * b[k * cols + j]).sum();
    (0..a.len() / inner * cols).map(|at| dot(at / cols, at % cols)).collect()
}

/// The first row of the second matrix is below the smallest norm.
fn small_matrices_match_f64_reference<T: Tolerance>() {
    let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    for (rows, cols) in [(1, 1), (1, 12), (2, 12), (12, 12), (32, 12), (12, 32), (7, 5), (32, 64), (64, 31)] {
        let [first, mut second, _] = matrices::<T>(rows * cols);
        if rows > 2 {
            second[..cols].iter_mut().for_each(|x| *x = T::from_f32(x.to_f32() * 1e-4));
        }
        let matrices = [first, second];
        for additions in [false, true] {
            let got = orthogonalized(&matrices, rows, cols, additions);
            for (got, matrix) in got.iter().zip(&matrices) {
                let mut x = wide(matrix);
                if additions {
                    let target = norm(&x) / (rows as f64).sqrt();
                    for row in x.chunks_mut(cols) {
                        let scale = target / norm(row).max(f64::from(SMALLEST));
                        for x in row.iter_mut() {
                            *x *= scale;
                        }
                    }
                }
                let divisor = norm(&x) * f64::from(1.01f32) + f64::from(1e-6f32);
                for x in &mut x {
                    *x /= divisor;
                }
                for coefficients in COEFFICIENTS {
                    let [a, b, c] = coefficients.map(f64::from);
                    let transposed: Vec<f64> = (0..rows * cols).map(|at| x[at % rows * cols + at / rows]).collect();
                    let gram = times(&x, &transposed, cols);
                    let (once, twice) = (times(&gram, &x, rows), times(&gram, &times(&gram, &x, rows), rows));
                    let terms = once.iter().zip(&twice);
                    x.iter_mut().zip(terms).for_each(|(x, (once, twice))| *x = a * *x + b * once + c * twice);
                }
                if additions {
                    let scale = (rows.min(cols) as f64).sqrt() / norm(&x).max(f64::from(SMALLEST));
                    for x in &mut x {
                        *x *= scale;
                    }
                }
                // Rounding errors grow in directions of small singular values.
                assert_close(
                    &format!("{rows}x{cols}, {additions}"),
                    &wide(got),
                    &x,
                    T::ROUNDING,
                    if T::ROUNDING < 1e-4 { 250.0 } else { 1.0 },
                );
            }
            let alone = orthogonalized(&matrices[1..], rows, cols, additions);
            assert_same("alone", &wide(&alone[0]), &wide(&got[1]));
        }
    }
}

/// The result for a matrix has the same bits in any batch. NaN stays in its matrix.
fn matrices_are_scaled_independently<T: Tolerance>() {
    for n in [17, 5003] {
        let mut matrices = matrices::<T>(n);
        let together = scaled(&matrices.each_ref().map(|matrix| &matrix[..]), 1.01, 1e-6);
        for (matrix, want) in matrices.iter().zip(&together) {
            assert_same("alone", &wide(&scaled(&[matrix], 1.01, 1e-6)[0]), &wide(want));
        }
        matrices[1][n - 1] = T::from_f32(f32::NAN);
        let got = scaled(&matrices.each_ref().map(|matrix| &matrix[..]), 1.01, 1e-6);
        assert_same("first", &wide(&got[0]), &wide(&together[0]));
        assert_same("last", &wide(&got[2]), &wide(&together[2]));
        assert!(got[1].iter().all(|x| x.to_f32().is_nan()));
    }
}

fn apply_matches_f64_reference<T: Tolerance>() {
    for n in lengths() {
        for (mastered, cautious_decay) in [(false, 0), (true, 0), (false, 1), (true, 1)] {
            let (params, x): (Vec<T>, Vec<T>) = (values(n, 4), values(n, 5));
            let masters: Vec<f32> = values(n, 6);
            let masters = mastered.then_some(&masters[..]);
            let (got, got_masters) = applied(&params, masters, &x, STATS, Scalars { cautious_decay, ..SCALARS });
            let Scalars { learning_rate, scale, weight_decay, .. } = SCALARS;
            let [rate, scale, decay] = [learning_rate, scale, weight_decay].map(f64::from);
            let old = masters.map_or_else(|| wide(&params), wide);
            let step = |(old, x): (&f64, f64)| {
                let decay = if cautious_decay == 1 && x * old < 0.0 { 0.0 } else { decay };
                old - rate * (scale * x + decay * old)
            };
            let want: Vec<f64> = old.iter().zip(wide(&x)).map(step).collect();
            assert_close("params", &wide(&got), &want, T::STEP, 1e-2);
            if let Some(masters) = got_masters {
                assert_close("masters", &wide(&masters), &want, 1e-6, 1e-1);
            }
        }
    }
}

/// A non-finite loss or norm suffices to skip the step, for full tiles and for the tail.
fn non_finite_loss_or_norm_skips_the_step<T: Tolerance>() {
    for n in [3, 2051] {
        let bad = [[f32::NAN, 1.0], [7.0, f32::NAN], [f32::INFINITY, 1.0], [7.0, f32::INFINITY]];
        for (stats, grad_factor) in bad.map(|stats| (stats, 1.0)).into_iter().chain([([7.0, f32::MAX], 2.0)]) {
            let (m, grads) = (values::<f32>(n, 1), vec![T::from_f32(f32::NAN); n]);
            let (got_m, got_update) = momentum(&m, &grads, stats, [grad_factor, CLIP[1]]);
            assert_same("m", &wide(&got_m), &wide(&m));
            assert_same("update", &wide(&got_update), &vec![5.0; n]);
            let (params, masters) = (values::<T>(n, 4), values::<f32>(n, 6));
            let scalars = Scalars { grad_factor, ..SCALARS };
            let (got, got_masters) = applied(&params, Some(&masters), &grads, stats, scalars);
            assert_same("params", &wide(&got), &wide(&params));
            assert_same("masters", &wide(&got_masters.unwrap()), &wide(&masters));
        }
    }
    let (m, _) = momentum(&[0.5], &[T::from_f32(1.0)], [f32::MAX, f32::MAX], [1.0, f32::INFINITY]);
    assert_ne!(m, [0.5], "the largest finite loss and norm do not skip the step");
}

fn nan_stays_in_its_element<T: Tolerance>() {
    for (n, at) in [(1, 0), (17, 16), (2049, 1031)] {
        let (m, mut grads) = (values::<f32>(n, 1), values::<T>(n, 2));
        let (mut want_m, mut want_update) = momentum(&m, &grads, STATS, CLIP);
        let (params, masters) = (values::<T>(n, 4), values::<f32>(n, 6));
        let (mut want, want_masters) = applied(&params, Some(&masters), &grads, STATS, SCALARS);
        let (nan, mut want_masters) = (T::from_f32(f32::NAN), want_masters.unwrap());
        (grads[at], want_m[at], want_update[at]) = (nan, f32::NAN, nan);
        (want[at], want_masters[at]) = (nan, f32::NAN);
        let (got_m, got_update) = momentum(&m, &grads, STATS, CLIP);
        assert_same("m", &wide(&got_m), &wide(&want_m));
        assert_same("update", &wide(&got_update), &wide(&want_update));
        let (got, got_masters) = applied(&params, Some(&masters), &grads, STATS, SCALARS);
        assert_same("params", &wide(&got), &wide(&want));
        assert_same("masters", &wide(&got_masters.unwrap()), &wide(&want_masters));
    }
}

/// Full tiles and tails agree bit for bit.
fn result_does_not_depend_on_length<T: Tolerance>() {
    const ALL: usize = 5003;
    let (m, grads) = (values::<f32>(ALL, 1), values::<T>(ALL, 2));
    let (params, masters) = (values::<T>(ALL, 4), values::<f32>(ALL, 6));
    let (all_m, all_update) = momentum(&m, &grads, STATS, CLIP);
    let (all_params, all_masters) = applied(&params, Some(&masters), &grads, STATS, SCALARS);
    let (all_alone, _) = applied(&params, None, &grads, STATS, SCALARS);
    for n in lengths() {
        let (got_m, got_update) = momentum(&m[..n], &grads[..n], STATS, CLIP);
        assert_same("m", &wide(&got_m), &wide(&all_m[..n]));
        assert_same("update", &wide(&got_update), &wide(&all_update[..n]));
        let (got, got_masters) = applied(&params[..n], Some(&masters[..n]), &grads[..n], STATS, SCALARS);
        assert_same("params", &wide(&got), &wide(&all_params[..n]));
        assert_same("masters", &wide(&got_masters.unwrap()), &wide(&all_masters.as_ref().unwrap()[..n]));
        let (alone, _) = applied(&params[..n], None, &grads[..n], STATS, SCALARS);
        assert_same("without masters", &wide(&alone), &wide(&all_alone[..n]));
    }
}

/// Each parameter is its master weight, stochastically rounded with its index and the seed.
fn parameters_are_rounded_masters<T: Tolerance>() {
    for (seed, n) in lengths().enumerate() {
        let (params, masters, x) = (values::<T>(n, 4), values::<f32>(n, 6), values::<T>(n, 5));
        let scalars = Scalars { seed: seed as u32, ..SCALARS };
        let (got, masters) = applied(&params, Some(&masters), &x, STATS, scalars);
        let masters = masters.unwrap();
        let want: Vec<T> =
            masters.iter().enumerate().map(|(i, &x)| round(Stream::Params, x, i, scalars.seed)).collect();
        assert_same("params", &wide(&got), &wide(&want));
    }
}

/// Epsilon keeps the scaled zero matrix from becoming NaN.
fn a_zero_matrix_stays_zero<T: Tolerance>() {
    let zeros = vec![T::from_f32(0.0); 1030];
    assert_same("scaled", &wide(&scaled(&[&zeros], 1.01, 1e-6)[0]), &[0.0; 1030]);
}

/// The update does not depend on the type of m. bf16 m is that in f32, rounded with the bits of its stream.
fn bf16_momentum_is_rounded_f32_momentum() {
    for n in lengths() {
        let (m, grads) = (values::<bf16>(n, 1), values::<bf16>(n, 2));
        let wider: Vec<f32> = m.iter().map(|m| m.to_f32()).collect();
        let (got_m, got_update) = momentum(&m, &grads, STATS, CLIP);
        let (exact_m, want_update) = momentum(&wider, &grads, STATS, CLIP);
        let want_m: Vec<bf16> =
            exact_m.iter().enumerate().map(|(i, &m)| round(Stream::M, m, i, SCALARS.seed)).collect();
        assert_same("update", &wide(&got_update), &wide(&want_update));
        assert_same("m", &wide(&got_m), &wide(&want_m));
    }
    let (m, grads) = (values::<bf16>(2051, 1), values::<bf16>(2051, 2));
    let (skipped, _) = momentum(&m, &grads, [7.0, f32::INFINITY], CLIP);
    assert_same("m of a skipped step", &wide(&skipped), &wide(&m));
}

/// Returns parameters and remainders of `n` master weights.
fn split(masters: &[f32]) -> (Vec<bf16>, Vec<u16>) {
    masters.iter().map(|&master| remainder::split(master)).map(|(param, low)| (bf16::from_f32(param), low)).unzip()
}

/// Parameters and remainders have the bits of f32 master weights.
fn remainders_are_exact_master_weights() {
    for n in lengths() {
        let (masters, x) = (values::<f32>(n, 6), values::<bf16>(n, 5));
        let (params, remainders) = split(&masters);
        let (_, want) = applied(&params, Some(&masters), &x, STATS, SCALARS);
        let want = split(&want.unwrap());
        assert!(n < 100 || want.1.iter().any(|&low| low >= 0x8000), "some parameters are rounded up");
        let got = applied_to_remainders(&params, &remainders, &x, STATS, SCALARS);
        assert_same("params", &wide(&got.0), &wide(&want.0));
        assert_eq!(got.1, want.1);
    }
}

fn remainders_keep_nan_in_its_element_and_skip_steps() {
    for (n, at) in [(1, 0), (17, 16), (2049, 1031)] {
        let (masters, mut x) = (values::<f32>(n, 6), values::<bf16>(n, 5));
        let (params, remainders) = split(&masters);
        let mut want = applied_to_remainders(&params, &remainders, &x, STATS, SCALARS);
        x[at] = bf16::from_f32(f32::NAN);
        (want.0[at], want.1[at]) = (x[at], 0);
        let got = applied_to_remainders(&params, &remainders, &x, STATS, SCALARS);
        assert_same("params", &wide(&got.0), &wide(&want.0));
        assert_eq!(got.1, want.1);
        let got = applied_to_remainders(&params, &remainders, &x, [f32::NAN, 1.0], SCALARS);
        assert_same("skipped params", &wide(&got.0), &wide(&params));
        assert_eq!(got.1, remainders);
    }
}
