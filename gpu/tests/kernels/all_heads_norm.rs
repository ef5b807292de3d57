//! QK-norm of all heads, and its gradients, against f64.

use crate::common::{Tolerance, assert_close, assert_same, for_all, noise, rounded, run, shared_bytes, wide};
use cuda_std::Global;
use cuda_std::emulate::Memory;
use gpu::all_heads_norm::{
    all_heads_norm_backward_exists, all_heads_norm_backward_select, all_heads_norm_forward_exists,
    all_heads_norm_forward_select, backward_grid, max_channels, packets, partials, shared,
};
use gpu::rotary::{NormScalars, Sizes};
use gpu::{bias, column_sum};

tests! {
    kernels of "all_heads_norm.rs";
    for both types: norm_and_gradients_match_f64_reference, norm_of_random_shapes_matches_f64_reference,
        weight_gradient_is_deterministic, nan_stays_in_the_queries_or_keys_of_its_row, saved_is_optional,
        wider_rows_have_no_instance;
}

const NORM: NormScalars = NormScalars { eps: 1e-3, gain: 1.25 };

/// The shape of a launch.
#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: usize,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
}

impl Shape {
    fn sizes(self) -> Sizes {
        let [rows, heads, kv_heads, head_size] =
            [self.rows, self.heads, self.kv_heads, self.head_size].map(|size| size as u32);
        Sizes { rows, sequence: rows, heads, kv_heads, head_size }
    }

    fn widths(self) -> [usize; 2] {
        [self.heads * self.head_size, self.kv_heads * self.head_size]
    }

    /// Returns the elements of a row of qkv.
    fn packed(self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_size
    }

    /// Returns the elements of a row of saved.
    fn saved(self) -> usize {
        (self.heads + self.kv_heads) * self.head_size
    }

    /// Calls `f` for the queries (0) and keys (1) of each row with their range in qkv and in saved.
    fn for_each(self, mut f: impl FnMut(usize, std::ops::Range<usize>, std::ops::Range<usize>)) {
        let [queries, keys] = self.widths();
        for row in 0..self.rows {
            let (at, saved) = (row * self.packed(), row * self.saved());
            f(0, at..at + queries, saved..saved + queries);
            f(1, at + queries..at + queries + keys, saved + queries..saved + queries + keys);
        }
    }

    fn random<T: Tolerance>(self, seed: u32) -> Vec<T> {
        rounded(&noise(self.rows * self.packed(), seed))
    }

    fn random_weights<T: Tolerance>(self, seed: u32) -> [Vec<T>; 2] {
        let [queries, keys] = self.widths();
        [(queries, seed), (keys, seed + 50)]
            .map(|(width, seed)| rounded(&noise(width, seed).iter().map(|w| 1.0 + w / 2.0).collect::<Vec<_>>()))
    }
}

fn weight_views<T: Tolerance>(memory: &mut Memory, weights: Option<&[Vec<T>; 2]>) -> [Global<T>; 2] {
    match weights {
        Some([q, k]) => [memory.input("q weight", q), memory.input("k weight", k)],
        None => [Global::null(); 2],
    }
}

/// Returns qkv and saved after the forward kernel.
fn forward<T: Tolerance>(qkv: &[T], weights: Option<&[Vec<T>; 2]>, shape: Shape) -> [Vec<T>; 2] {
    let (mut memory, sizes) = (Memory::new(), shape.sizes());
    let (qkv, saved) = (memory.buffer("qkv", qkv), memory.output::<T>("saved", shape.rows * shape.saved()));
    let [q, k] = weight_views(&mut memory, weights);
    let launch = all_heads_norm_forward_select((packets::<T>(sizes),), qkv, saved, q, k, sizes, NORM).unwrap();
    run(&mut memory, &launch, sizes.rows, shared_bytes(shared));
    [memory.read(qkv), memory.read(saved)]
}

/// Returns dqkv and the gradients of the weights, which start at `dweights`.
fn backward<T: Tolerance>(
    dqkv: &[T],
    saved: &[T],
    weights: Option<&[Vec<T>; 2]>,
    dweights: &[Vec<T>; 2],
    (shape, sm_count): (Shape, usize),
) -> [Vec<T>; 3] {
    let (mut memory, sizes) = (Memory::new(), shape.sizes());
    let blocks = backward_grid(sizes, sm_count);
    let [of_queries, of_keys] = partials(sizes, blocks);
    let sums = memory.output::<f32>("partials", of_queries + of_keys);
    let given = if weights.is_some() { sums } else { cuda_std::GlobalMut::null() };
    let (dqkv, saved) = (memory.buffer("dqkv", dqkv), memory.input("saved", saved));
    let [q, k] = weight_views(&mut memory, weights);
    let keys = (packets::<T>(sizes),);
    let launch = all_heads_norm_backward_select(keys, dqkv, given, saved, q, k, sizes, NORM).unwrap();
    run(&mut memory, &launch, blocks, shared_bytes(shared));
    let [dq, dk] = dweights.each_ref().map(|dweight| memory.buffer("dweight", dweight));
    if weights.is_some() {
        let of_both = [(dq, sums.reader()), (dk, sums.reader().skip(of_queries))];
        for ((dweight, sums), width) in of_both.into_iter().zip(shape.widths()) {
            let launch = bias::bias_backward_reduce(dweight, sums, blocks, width as u32);
            run(&mut memory, &launch, column_sum::grid(width), shared_bytes(column_sum::shared));
        }
    }
    [memory.read(dqkv), memory.read(dq), memory.read(dk)]
}

/// Returns the reciprocal root mean square.
fn reciprocal_rms(x: &[f64]) -> f64 {
    1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + f64::from(NORM.eps)).sqrt()
}

fn check<T: Tolerance>(shape: Shape, weighted: bool, seed: u32) {
    let what = format!("{shape:?} {weighted}");
    let gain = f64::from(NORM.gain);
    let weights = shape.random_weights::<T>(seed + 1);
    let given = weighted.then_some(&weights);
    let weights = shape.widths().map(|width| vec![1.0; width]);
    let weights = given.map_or(weights, |given| given.each_ref().map(|weight| wide(weight)));
    let qkv = shape.random::<T>(seed);

    let [got, saved] = forward(&qkv, given, shape);
    let (mut want, mut kept) = (wide(&qkv), vec![0.0; saved.len()]);
    shape.for_each(|kind, range, in_saved| {
        kept[in_saved].copy_from_slice(&want[range.clone()]);
        let rms = reciprocal_rms(&want[range.clone()]);
        want[range].iter_mut().zip(&weights[kind]).for_each(|(x, w)| *x *= rms * gain * w);
    });
    assert_same(&format!("saved {what}"), &wide(&saved), &kept);
    assert_close(&what, &wide(&got), &want, T::ROUNDING, 1.0);

    let dqkv = shape.random::<T>(seed + 7);
    let dweights = shape.random_weights::<T>(seed + 3);
    let (mut want, mut sums) = (wide(&dqkv), dweights.each_ref().map(|dweight| wide(dweight)));
    shape.for_each(|kind, range, in_saved| {
        let (x, d) = (&kept[in_saved], &mut want[range]);
        let rms = reciprocal_rms(x);
        // The Jacobian of the norm, without the shortcut of the kernel.
        let upstream: Vec<_> = d.iter().zip(&weights[kind]).map(|(d, w)| d * w * gain).collect();
        let along: f64 = upstream.iter().zip(x).map(|(d, x)| d * x).sum();
        for i in 0..x.len() {
            sums[kind][i] += d[i] * x[i] * rms * gain;
            d[i] = rms * upstream[i] - rms.powi(3) * x[i] * along / x.len() as f64;
        }
    });
    let [got, dq, dk] = backward(&dqkv, &saved, given, &dweights, (shape, 1 + seed as usize % 3));
    assert_close(&format!("dqkv {what}"), &wide(&got), &want, T::ROUNDING, 2.0);
    if weighted {
        assert_close(&format!("dq weight {what}"), &wide(&dq), &sums[0], T::ROUNDING, 4.0);
        assert_close(&format!("dk weight {what}"), &wide(&dk), &sums[1], T::ROUNDING, 4.0);
    }
}

/// One to eight packets per thread, of which the last ones may not exist, and queries and keys in the same warp.
fn norm_and_gradients_match_f64_reference<T: Tolerance>() {
    let shapes = [(1, 1, 1, 16), (9, 7, 7, 16), (14, 5, 1, 80), (13, 16, 16, 64), (5, 33, 3, 96), (3, 24, 8, 256)];
    for (i, (rows, heads, kv_heads, head_size)) in shapes.into_iter().enumerate() {
        for weighted in [false, true] {
            check::<T>(Shape { rows, heads, kv_heads, head_size }, weighted, i as u32);
        }
    }
    // The maximum.
    let heads = max_channels::<T>() / 128;
    check::<T>(Shape { rows: 2, heads: heads - heads / 4, kv_heads: heads / 4, head_size: 128 }, true, 9);
}

fn norm_of_random_shapes_matches_f64_reference<T: Tolerance>() {
    let shapes = (1..30usize, 1..5usize, 1..5usize, 1..9usize);
    for_all(16, (shapes, proptest::bool::ANY, 0..99u32), |((rows, kv_heads, group, sixteens), weighted, seed)| {
        check::<T>(Shape { rows, heads: group * kv_heads, kv_heads, head_size: 16 * sixteens }, weighted, seed);
    });
}

fn weight_gradient_is_deterministic<T: Tolerance>() {
    let shape = Shape { rows: 19, heads: 6, kv_heads: 3, head_size: 128 };
    let (dqkv, weights) = (shape.random::<T>(8), shape.random_weights::<T>(9));
    let saved = rounded::<T>(&noise(shape.rows * shape.saved(), 10));
    let [first, second] = [(); 2].map(|()| backward(&dqkv, &saved, Some(&weights), &weights, (shape, 2)));
    for (first, second) in first.iter().zip(&second) {
        assert_same("gradients", &wide(first), &wide(second));
    }
}

/// NaN changes only the queries or the keys of its row, and the gradient of their weight.
fn nan_stays_in_the_queries_or_keys_of_its_row<T: Tolerance>() {
    let shape = Shape { rows: 3, heads: 5, kv_heads: 2, head_size: 80 };
    let (clean, weights) = (shape.random::<T>(11), shape.random_weights::<T>(12));
    let mut bad = clean.clone();
    // A query of row 1, and a value of row 2.
    let (query, value) = (shape.packed() + 3, 2 * shape.packed() + 7 * shape.head_size);
    for i in [query, value] {
        bad[i] = T::from_f32(f32::NAN);
    }
    let others_agree = |got: &[T], want: &[T]| {
        let queries = shape.packed()..shape.packed() + shape.widths()[0];
        for (i, (got, want)) in wide(got).iter().zip(wide(want)).enumerate() {
            assert_eq!(got.is_nan(), queries.contains(&i) || i == value && want.is_nan(), "element {i}");
            assert!(got.is_nan() || got.total_cmp(&want).is_eq(), "element {i}: expected {want}, found {got}");
        }
    };
    let ([got, saved], [mut want, clean_saved]) =
        (forward(&bad, Some(&weights), shape), forward(&clean, Some(&weights), shape));
    want[value] = bad[value];
    others_agree(&got, &want);
    let gradient = |saved: &[T]| backward(&clean, saved, Some(&weights), &weights, (shape, 1));
    let ([got, dq, dk], [want, _, want_dk]) = (gradient(&saved), gradient(&clean_saved));
    others_agree(&got, &want);
    assert!(wide(&dq).iter().all(|x| x.is_nan()));
    assert_same("dk weight", &wide(&dk), &wide(&want_dk));
}

fn saved_is_optional<T: Tolerance>() {
    let shape = Shape { rows: 3, heads: 3, kv_heads: 1, head_size: 64 };
    let (qkv, weights, sizes) = (shape.random::<T>(13), shape.random_weights::<T>(14), shape.sizes());
    let mut memory = Memory::new();
    let out = memory.buffer("qkv", &qkv);
    let [q, k] = weight_views(&mut memory, Some(&weights));
    let saved = cuda_std::GlobalMut::null();
    let launch = all_heads_norm_forward_select((packets::<T>(sizes),), out, saved, q, k, sizes, NORM).unwrap();
    run(&mut memory, &launch, sizes.rows, shared_bytes(shared));
    assert_same("qkv", &wide(&memory.read(out)), &wide(&forward(&qkv, Some(&weights), shape)[0]));
}

fn wider_rows_have_no_instance<T: Tolerance>() {
    let exists = |heads| {
        let packets = packets::<T>(Shape { rows: 1, heads, kv_heads: 1, head_size: 16 }.sizes());
        [all_heads_norm_forward_exists::<T>((packets,)), all_heads_norm_backward_exists::<T>((packets,))]
    };
    let most = max_channels::<T>() / 16 - 1;
    assert_eq!([exists(1), exists(most), exists(most + 1)], [[true; 2], [true; 2], [false; 2]]);
}
