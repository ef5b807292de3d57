//! Rotary positions and QK-norm against complex rotations in f64.

use crate::common::{Tolerance, assert_close, assert_same, for_all, noise, rounded, run, shared_bytes, wide};
use cuda_std::Global;
use cuda_std::emulate::Memory;
use gpu::column_sum;
use gpu::rotary::{
    Blocks, NormScalars, Sizes, rotary, rotary_norm_backward, rotary_norm_backward_reduce, rotary_norm_backward_shared,
    rotary_norm_forward, supports,
};

tests! {
    kernels of "rotary.rs";
    for both types: rotation_matches_f64_reference, rotation_of_random_shapes_matches_f64_reference,
        rotating_back_restores_the_heads, norm_matches_f64_reference, norm_of_random_shapes_matches_f64_reference,
        gradient_of_the_norm_matches_finite_differences, weight_gradient_is_deterministic,
        nan_stays_in_its_head, large_and_small_heads_are_normalized;
    once: supported_head_sizes_are_multiples_of_16;
}

const NORM: NormScalars = NormScalars { eps: 1e-3, gain: 1.25 };

/// The shape of a launch.
#[derive(Clone, Copy, Debug)]
struct RotaryCase {
    batch: usize,
    sequence: usize,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
}

impl RotaryCase {
    fn sizes(self) -> Sizes {
        let [rows, sequence, heads, kv_heads, head_size] =
            [self.rows(), self.sequence, self.heads, self.kv_heads, self.head_size].map(|size| size as u32);
        Sizes { rows, sequence, heads, kv_heads, head_size }
    }

    fn rows(self) -> usize {
        self.batch * self.sequence
    }

    fn rotated(self) -> usize {
        self.heads + self.kv_heads
    }

    /// Returns the elements of a row of qkv.
    fn row(self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_size
    }

    /// Returns random qkv and a table of two more positions than needed.
    fn random<T: Tolerance>(self, seed: u32) -> (Vec<T>, Vec<f32>) {
        let angles: Vec<_> = noise((self.sequence + 2) * self.head_size / 2, seed + 1);
        let table = angles.iter().flat_map(|angle| [(4.0 * angle).cos() as f32, (4.0 * angle).sin() as f32]);
        (rounded(&noise(self.rows() * self.row(), seed)), table.collect())
    }

    /// Calls `f` for each rotated head with its row, its number and the range of its elements in qkv.
    fn for_each_head(self, mut f: impl FnMut(usize, usize, std::ops::Range<usize>)) {
        for row in 0..self.rows() {
            for head in 0..self.rotated() {
                let start = row * self.row() + head * self.head_size;
                f(row, head, start..start + self.head_size);
            }
        }
    }
}

/// Rotates a head in f64: multiplies each pair by e^(i angle), or by its conjugate if `back`.
fn rotated(head: &[f64], table: &[f32], interleaved: bool, back: bool) -> Vec<f64> {
    let half = head.len() / 2;
    let mut out = head.to_vec();
    for pair in 0..half {
        let (a, b) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
        let (cos, sin) = (f64::from(table[2 * pair]), f64::from(table[2 * pair + 1]));
        let sin = if back { -sin } else { sin };
        out[a] = head[a] * cos - head[b] * sin;
        out[b] = head[a] * sin + head[b] * cos;
    }
    out
}

fn rotate<T: Tolerance>(qkv: &[T], table: &[f32], shape: RotaryCase, interleaved: bool, sign: f32) -> Vec<T> {
    let mut memory = Memory::new();
    let (qkv, table, sizes) = (memory.buffer("qkv", qkv), memory.input("table", table), shape.sizes());
    let launch = if interleaved {
        rotary::<T, true>(qkv, table, sizes, sign)
    } else {
        rotary::<T, false>(qkv, table, sizes, sign)
    };
    run(&mut memory, &launch, sizes.grid::<T>(), 0);
    memory.read(qkv)
}

fn check_rotation<T: Tolerance>(shape: RotaryCase, interleaved: bool, seed: u32) {
    let (qkv, table) = shape.random::<T>(seed);
    for (sign, back) in [(1.0, false), (-1.0, true)] {
        let mut want = wide(&qkv);
        shape.for_each_head(|row, _, range| {
            let angles = &table[row % shape.sequence * shape.head_size..];
            let head = rotated(&want[range.clone()], angles, interleaved, back);
            want[range].copy_from_slice(&head);
        });
        let got = rotate(&qkv, &table, shape, interleaved, sign);
        assert_close(&format!("{shape:?} {interleaved}"), &wide(&got), &want, T::ROUNDING, 1.0);
    }
}

/// All head sizes, with fewer, as many and more heads than slots.
fn shapes() -> Vec<RotaryCase> {
    let mut shapes = Vec::new();
    for head_size in [16, 32, 48, 64, 80, 96, 128, 176, 256] {
        for (batch, sequence, heads, kv_heads) in [(1, 1, 1, 1), (2, 5, 14, 2), (3, 3, 4, 4)] {
            shapes.push(RotaryCase { batch, sequence, heads, kv_heads, head_size });
        }
    }
    shapes.push(RotaryCase { batch: 1, sequence: 7, heads: 32, kv_heads: 8, head_size: 128 });
    shapes.push(RotaryCase { batch: 3, sequence: 37, heads: 3, kv_heads: 1, head_size: 64 });
    shapes
}

fn rotation_matches_f64_reference<T: Tolerance>() {
    for shape in shapes() {
        for interleaved in [false, true] {
            check_rotation::<T>(shape, interleaved, 1);
        }
    }
}

/// Returns a strategy for shapes with at most 40 tokens.
fn any_shape() -> impl proptest::strategy::Strategy<Value = RotaryCase> {
    use proptest::strategy::Strategy;
    (1..4usize, 1..14usize, 1..6usize, 1..5usize, 1..17usize).prop_map(
        |(batch, sequence, kv_heads, group, sixteens)| RotaryCase {
            batch,
            sequence,
            heads: group * kv_heads,
            kv_heads,
            head_size: 16 * sixteens,
        },
    )
}

fn rotation_of_random_shapes_matches_f64_reference<T: Tolerance>() {
    for_all(32, (any_shape(), proptest::bool::ANY, 0..99u32), |(shape, interleaved, seed)| {
        check_rotation::<T>(shape, interleaved, seed);
    });
}

/// Quarter turns are exact: the opposite turn restores every bit, and four turns do, too.
fn rotating_back_restores_the_heads<T: Tolerance>() {
    let shape = RotaryCase { batch: 2, sequence: 3, heads: 3, kv_heads: 1, head_size: 80 };
    let (qkv, _) = shape.random::<T>(3);
    let table: Vec<f32> = (0..3 * 40).flat_map(|i| [[0.0, 1.0], [-1.0, 0.0], [1.0, 0.0]][i % 3]).collect();
    for interleaved in [false, true] {
        let turned = rotate(&qkv, &table, shape, interleaved, 1.0);
        assert_same("back", &wide(&rotate(&turned, &table, shape, interleaved, -1.0)), &wide(&qkv));
        let again = (0..3).fold(turned, |turned, _| rotate(&turned, &table, shape, interleaved, 1.0));
        assert_same("four turns", &wide(&again), &wide(&qkv));
    }
}

/// Returns qkv and saved after the forward kernel.
fn norm_forward<T: Tolerance>(
    qkv: &[T],
    table: &[f32],
    weights: Option<[&[T]; 2]>,
    shape: RotaryCase,
    interleaved: bool,
) -> [Vec<T>; 2] {
    let (mut memory, sizes) = (Memory::new(), shape.sizes());
    let (qkv, table) = (memory.buffer("qkv", qkv), memory.input("table", table));
    let saved = memory.output::<T>("saved", shape.rows() * shape.rotated() * shape.head_size);
    let [q, k] = weight_views(&mut memory, weights);
    let launch = if interleaved {
        rotary_norm_forward::<T, true>(qkv, saved, table, q, k, sizes, NORM)
    } else {
        rotary_norm_forward::<T, false>(qkv, saved, table, q, k, sizes, NORM)
    };
    run(&mut memory, &launch, sizes.norm_grid::<T>(), 0);
    [memory.read(qkv), memory.read(saved)]
}

fn weight_views<T: Tolerance>(memory: &mut Memory, weights: Option<[&[T]; 2]>) -> [Global<T>; 2] {
    match weights {
        Some([q, k]) => [memory.input("q weight", q), memory.input("k weight", k)],
        None => [Global::new(std::ptr::null()); 2],
    }
}

/// The operands of a backward pass. The gradients of the weights start at `dweights`.
struct Backward<'a, T> {
    dqkv: &'a [T],
    saved: &'a [T],
    table: &'a [f32],
    weights: Option<[&'a [T]; 2]>,
    dweights: [&'a [T]; 2],
    sm_count: usize,
}

impl<T: Tolerance> Backward<'_, T> {
    /// Returns dqkv and the gradients of the weights.
    fn run(&self, shape: RotaryCase, interleaved: bool) -> [Vec<T>; 3] {
        let (mut memory, sizes, hs) = (Memory::new(), shape.sizes(), shape.head_size);
        let blocks = Blocks::new::<T>(sizes, self.sm_count);
        let (dqkv, saved) = (memory.buffer("dqkv", self.dqkv), memory.input("saved", self.saved));
        let partials = memory.output::<f32>("partials", blocks.partials(hs));
        let table = memory.input("table", self.table);
        let [q, k] = weight_views(&mut memory, self.weights);
        let kernel = match (interleaved, self.weights.is_some()) {
            (false, false) => rotary_norm_backward::<T, false, false>,
            (false, true) => rotary_norm_backward::<T, false, true>,
            (true, false) => rotary_norm_backward::<T, true, false>,
            (true, true) => rotary_norm_backward::<T, true, true>,
        };
        let launch = kernel(dqkv, partials, saved, table, q, k, sizes, NORM, blocks);
        let shared = if self.weights.is_some() { shared_bytes(rotary_norm_backward_shared::<T>) } else { 0 };
        run(&mut memory, &launch, blocks.grid(), shared);
        let [dq, dk] = self.dweights.map(|dweight| memory.buffer("dweight", dweight));
        if self.weights.is_some() {
            let launch = rotary_norm_backward_reduce(dq, dk, partials.reader(), blocks, hs as u32);
            run(&mut memory, &launch, [column_sum::grid(hs), 2, 1], shared_bytes(column_sum::shared));
        }
        [memory.read(dqkv), memory.read(dq), memory.read(dk)]
    }
}

/// Returns a head after the norm, in f64, and its reciprocal root mean square.
fn normalized(head: &[f64], weight: &[f64]) -> (Vec<f64>, f64) {
    let mean = head.iter().map(|x| x * x).sum::<f64>() / head.len() as f64;
    let rms = 1.0 / (mean + f64::from(NORM.eps)).sqrt();
    (head.iter().zip(weight).map(|(x, w)| x * rms * f64::from(NORM.gain) * w).collect(), rms)
}

fn random_weights<T: Tolerance>(head_size: usize, seed: u32) -> [Vec<T>; 2] {
    [1, 2].map(|i| rounded(&noise(head_size, seed + i).iter().map(|w| 1.0 + w / 2.0).collect::<Vec<_>>()))
}

fn check_norm<T: Tolerance>(shape: RotaryCase, interleaved: bool, weighted: bool, seed: u32) {
    let what = format!("{shape:?} {interleaved} {weighted}");
    let hs = shape.head_size;
    let (qkv, table) = shape.random::<T>(seed);
    let ones = [vec![T::from_f32(1.0); hs], vec![T::from_f32(1.0); hs]];
    let weights = if weighted { random_weights::<T>(hs, seed) } else { ones };
    let given = weighted.then_some([&weights[0][..], &weights[1][..]]);
    let weights = weights.each_ref().map(|weight| wide(weight));
    let weight_of = |head: usize| usize::from(head >= shape.heads);

    let [got, saved] = norm_forward(&qkv, &table, given, shape, interleaved);
    let (mut want, mut kept) = (wide(&qkv), Vec::new());
    shape.for_each_head(|row, head, range| {
        kept.extend_from_slice(&want[range.clone()]);
        let angles = &table[row % shape.sequence * hs..];
        let x = normalized(&want[range.clone()], &weights[weight_of(head)]).0;
        want[range].copy_from_slice(&rotated(&x, angles, interleaved, false));
    });
    assert_same(&format!("saved {what}"), &wide(&saved), &kept);
    assert_close(&what, &wide(&got), &want, T::ROUNDING, 1.0);

    let dqkv = rounded::<T>(&noise(qkv.len(), seed + 7));
    let dweights = [3, 4].map(|i| rounded::<T>(&noise(hs, seed + i)));
    let (mut want, mut sums) = (wide(&dqkv), dweights.each_ref().map(|dweight| wide(dweight)));
    shape.for_each_head(|row, head, range| {
        let at = (row * shape.rotated() + head) * hs;
        let (x, kind) = (&kept[at..at + hs], weight_of(head));
        let (_, rms) = normalized(x, &weights[kind]);
        let d = rotated(&want[range.clone()], &table[row % shape.sequence * hs..], interleaved, true);
        // The Jacobian of the norm, without the shortcut of the kernel.
        let gain = f64::from(NORM.gain);
        let upstream: Vec<_> = d.iter().zip(&weights[kind]).map(|(d, w)| d * w * gain).collect();
        let along: f64 = upstream.iter().zip(x).map(|(d, x)| d * x).sum();
        for i in 0..hs {
            want[range.start + i] = rms * upstream[i] - rms.powi(3) * x[i] * along / hs as f64;
            sums[kind][i] += d[i] * x[i] * rms * gain;
        }
    });
    let backward = Backward {
        dqkv: &dqkv,
        saved: &saved,
        table: &table,
        weights: given,
        dweights: dweights.each_ref().map(|dweight| &dweight[..]),
        sm_count: 1 + seed as usize % 3,
    };
    let [got, dq, dk] = backward.run(shape, interleaved).map(|values| wide(&values));
    assert_close(&format!("dqkv {what}"), &got, &want, T::ROUNDING, 2.0);
    if weighted {
        // The sums of up to a thousand terms near 1 may cancel.
        assert_close(&format!("dq weight {what}"), &dq, &sums[0], T::ROUNDING, 4.0);
        assert_close(&format!("dk weight {what}"), &dk, &sums[1], T::ROUNDING, 4.0);
    }
}

fn norm_matches_f64_reference<T: Tolerance>() {
    for (i, shape) in shapes().into_iter().enumerate() {
        for interleaved in [false, true] {
            check_norm::<T>(shape, interleaved, (i + usize::from(interleaved)) % 2 == 0, i as u32);
        }
    }
    for sm_count in 0..3 {
        let shape = RotaryCase { batch: 5, sequence: 13, heads: 6, kv_heads: 2, head_size: 96 };
        check_norm::<T>(shape, false, true, sm_count);
    }
}

fn norm_of_random_shapes_matches_f64_reference<T: Tolerance>() {
    let options = (proptest::bool::ANY, proptest::bool::ANY, 0..99u32);
    for_all(32, (any_shape(), options), |(shape, (interleaved, weighted, seed))| {
        check_norm::<T>(shape, interleaved, weighted, seed);
    });
}

/// The gradient of a sum of outputs, against the difference of the f64 norm at two points.
fn gradient_of_the_norm_matches_finite_differences<T: Tolerance>() {
    let shape = RotaryCase { batch: 1, sequence: 1, heads: 1, kv_heads: 1, head_size: 64 };
    let (qkv, table) = shape.random::<T>(5);
    let [q, k] = random_weights::<T>(64, 6);
    let dout = rounded::<T>(&noise(qkv.len(), 7));
    let head = wide(&qkv[..64]);
    let loss = |head: &[f64], weight: &[f64]| -> f64 {
        let out = rotated(&normalized(head, weight).0, &table, false, false);
        out.iter().zip(wide(&dout)).map(|(x, d)| x * d).sum()
    };
    let zeros = vec![T::from_f32(0.0); 64];
    let weights = Some([&q[..], &k[..]]);
    let saved = qkv[..128].to_vec();
    let backward = Backward { dqkv: &dout, saved: &saved, table: &table, weights, dweights: [&zeros; 2], sm_count: 1 };
    let [dqkv, dq, _] = backward.run(shape, false).map(|values| wide(&values));
    let step = 1e-5;
    let difference = |f: &dyn Fn(f64) -> f64| (f(step) - f(-step)) / (2.0 * step);
    for i in 0..64 {
        let moved = |values: &[f64], by: f64| {
            values.iter().enumerate().map(|(j, x)| if i == j { x + by } else { *x }).collect::<Vec<_>>()
        };
        let weight = wide(&q);
        let of_head = difference(&|by| loss(&moved(&head, by), &weight));
        let of_weight = difference(&|by| loss(&head, &moved(&weight, by)));
        assert_close("dqkv", &dqkv[i..=i], &[of_head], T::ROUNDING, 2.0);
        assert_close("dq weight", &dq[i..=i], &[of_weight], T::ROUNDING, 2.0);
    }
}

fn weight_gradient_is_deterministic<T: Tolerance>() {
    let shape = RotaryCase { batch: 3, sequence: 11, heads: 6, kv_heads: 3, head_size: 128 };
    let (qkv, table) = shape.random::<T>(8);
    let [q, k] = random_weights::<T>(128, 9);
    let saved = rounded::<T>(&noise(shape.rows() * shape.rotated() * 128, 10));
    let backward =
        Backward { dqkv: &qkv, saved: &saved, table: &table, weights: Some([&q, &k]), dweights: [&q, &k], sm_count: 2 };
    let [first, second] = [(); 2].map(|()| backward.run(shape, true));
    for (first, second) in first.iter().zip(&second) {
        assert_same("gradients", &wide(first), &wide(second));
    }
}

/// NaN and infinity change only their own head, and the weight gradient of its kind.
fn nan_stays_in_its_head<T: Tolerance>() {
    let shape = RotaryCase { batch: 1, sequence: 3, heads: 5, kv_heads: 2, head_size: 80 };
    let hs = shape.head_size;
    let (clean, table) = shape.random::<T>(11);
    let mut bad = clean.clone();
    // Head 2 (a query) of row 1, head 6 (a key) of row 2, and a value.
    let heads = [shape.row() + 2 * hs, 2 * shape.row() + 6 * hs];
    bad[heads[0] + 3] = T::from_f32(f32::NAN);
    bad[heads[1] + 79] = T::from_f32(f32::INFINITY);
    bad[7 * hs] = T::from_f32(f32::NAN);
    let others_agree = |got: &[T], want: &[T]| {
        let affected = |i: usize| heads.iter().any(|&head| (head..head + hs).contains(&i)) || i == 7 * hs;
        for (i, (got, want)) in wide(got).iter().zip(wide(want)).enumerate() {
            assert!(affected(i) || got.total_cmp(&want).is_eq(), "element {i}: expected {want}, found {got}");
        }
    };
    let turned = rotate(&bad, &table, shape, false, 1.0);
    others_agree(&turned, &rotate(&clean, &table, shape, false, 1.0));
    assert!(wide(&turned[heads[0]..][..hs]).iter().filter(|x| x.is_nan()).count() == 2);
    let [got, saved] = norm_forward(&bad, &table, None, shape, false);
    let [want, clean_saved] = norm_forward(&clean, &table, None, shape, false);
    others_agree(&got, &want);
    assert!(wide(&got[heads[0]..][..hs]).iter().all(|x| x.is_nan()));
    let ones = vec![T::from_f32(1.0); hs];
    let gradient = |saved: &[T]| {
        let weights = Some([&ones[..]; 2]);
        Backward { dqkv: &clean, saved, table: &table, weights, dweights: [&ones; 2], sm_count: 1 }.run(shape, false)
    };
    let ([got, dq, dk], [want, ..]) = (gradient(&saved), gradient(&clean_saved));
    others_agree(&got, &want);
    assert!(wide(&got[heads[0]..][..hs]).iter().all(|x| x.is_nan()));
    assert!(wide(&dq).iter().all(|x| x.is_nan()) && wide(&dk)[79].is_nan());
}

/// Heads far from 1 are normalized to about 1; a head of zeros stays zero because of eps.
fn large_and_small_heads_are_normalized<T: Tolerance>() {
    let shape = RotaryCase { batch: 1, sequence: 1, heads: 3, kv_heads: 1, head_size: 64 };
    let table: Vec<f32> = (0..32).flat_map(|_| [1.0, 0.0]).collect();
    let scales = [1e15, 1e6, 0.0, 1e3, 1.0];
    let qkv: Vec<_> = noise(5 * 64, 12).iter().enumerate().map(|(i, x)| x * scales[i / 64]).collect();
    let qkv = rounded::<T>(&qkv);
    let [got, _] = norm_forward(&qkv, &table, None, shape, false);
    let heads = wide(&qkv);
    let want: Vec<_> = heads[..256].chunks(64).flat_map(|head| normalized(head, &[1.0; 64]).0).collect();
    assert_close("heads", &wide(&got[..256]), &want, T::ROUNDING, 1e-3);
    assert_same("values", &wide(&got[256..]), &heads[256..]);
}

fn supported_head_sizes_are_multiples_of_16() {
    assert!([16, 64, 80, 96, 128, 256].into_iter().all(supports));
    assert!(![0, 8, 72, 272].into_iter().any(supports));
}
