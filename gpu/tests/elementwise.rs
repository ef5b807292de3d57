//! Conversions, GELU, residual addition, sums and `AdamW` against f64, for lengths that are a multiple of nothing where a
//! kernel takes any.

mod common;

use common::{Buffer, Tolerance, assert_close, emulate, noise, shared_bytes};
use cuda_std::GlobalMut;
use gpu::{adamw, cast, gelu, global_norm, residual};

for_both_types!(casts, gelu_both_ways, residual_addition, norm, adamw_step, adamw_skips_bad_norms, masters_come_back);

const LENGTHS: [usize; 5] = [1, 7, 8, 2051, 5000];

fn casts<T: Tolerance>() {
    for n in LENGTHS {
        let values = noise(n, 1);
        let exact = Buffer::<f32>::of(&values);
        let mut rounded = Buffer::<T>::filled(n, f32::NAN);
        let launch = cast::cast_from_f32(rounded.view_mut(), exact.view(), n as u64);
        emulate(&launch, cast::grid::<T>(n), 0);
        assert_eq!(rounded.to_f64(), Buffer::<T>::of(&values).to_f64());
        let mut widened = Buffer::<f32>::filled(n, f32::NAN);
        emulate(&cast::cast_to_f32(widened.view_mut(), rounded.view(), n as u64), cast::grid::<T>(n), 0);
        assert_eq!(widened.to_f64(), rounded.to_f64());
    }
}

fn gelu_both_ways<T: Tolerance>() {
    let n = 4104;
    let x = Buffer::<T>::of(&noise(n, 1).iter().map(|x| x * 6.0).collect::<Vec<_>>());
    let mut y = Buffer::<T>::filled(n, f32::NAN);
    let mut grad = Buffer::<T>::of(&noise(n, 2));
    let before = grad.to_f64();
    emulate(&gelu::gelu_forward(y.view_mut(), x.view(), n as u64), gelu::grid::<T>(n), 0);
    emulate(&gelu::gelu_backward(grad.view_mut(), x.view(), n as u64), gelu::grid::<T>(n), 0);
    let gelu = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
    let slope = |x: f64| (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5;
    let xs = x.to_f64();
    assert_close("y", &y.to_f64(), &xs.iter().map(|&x| gelu(x)).collect::<Vec<_>>(), T::ROUNDING, 1.0);
    let want: Vec<_> = xs.iter().zip(before).map(|(&x, g)| g * slope(x)).collect();
    assert_close("grad", &grad.to_f64(), &want, T::ROUNDING, 1.0);
}

fn residual_addition<T: Tolerance>() {
    let n = 4104;
    let (a, b) = (Buffer::<T>::of(&noise(n, 1)), Buffer::<T>::of(&noise(n, 2)));
    let mut out = Buffer::<T>::filled(n, f32::NAN);
    let launch = residual::residual_forward(out.view_mut(), a.view(), b.view(), n as u64);
    emulate(&launch, residual::grid::<T>(n), 0);
    let sum: Vec<_> = a.to_f64().iter().zip(b.to_f64()).map(|(a, b)| a + b).collect();
    assert_eq!(out.to_f64(), Buffer::<T>::of(&sum).to_f64());
}

fn norm<T: Tolerance>() {
    for n in LENGTHS.into_iter().chain([40_003]) {
        let values = Buffer::<T>::of(&noise(n, 3));
        let grid = global_norm::squared_sum_grid::<T>(n, 1);
        let mut partials = Buffer::<f32>::filled(grid as usize, f32::NAN);
        let shared = shared_bytes(global_norm::shared);
        emulate(&global_norm::squared_sum(partials.view_mut(), values.view(), n as u64), grid, shared);
        let mut out = Buffer::<f32>::filled(2, f32::NAN);
        emulate(&global_norm::norm(out.view_mut(), partials.view(), u64::from(grid)), 1, shared);
        emulate(&global_norm::sum(out.view_mut().skip(1), partials.view(), u64::from(grid)), 1, shared);
        let squares: f64 = values.to_f64().iter().map(|x| x * x).sum();
        assert_close("norm", &out.to_f64(), &[squares.sqrt(), squares], 1e-5, 1e-3);
    }
}

#[test]
fn sum_of_losses() {
    for n in [1, 1024, 20_011] {
        let values = Buffer::<f32>::of(&noise(n, 3).iter().map(|x| x + 2.0).collect::<Vec<_>>());
        let mut out = Buffer::<f32>::filled(1, f32::NAN);
        emulate(&global_norm::sum(out.view_mut(), values.view(), n as u64), 1, shared_bytes(global_norm::shared));
        assert_close("sum", &out.to_f64(), &[values.to_f64().iter().sum()], 1e-6, 1.0);
    }
}

const BETA1: f64 = 0.9;
const BETA2: f64 = 0.95;
const EPSILON: f64 = 1e-8;
const RATE: f64 = 0.01;
const DECAY: f64 = 0.1;
const STEP: i32 = 3;

struct Optimized<T> {
    params: Buffer<T>,
    masters: Option<Buffer<f32>>,
    m: Buffer<f32>,
    v: Buffer<f32>,
    grads: Buffer<T>,
}

impl<T: Tolerance> Optimized<T> {
    fn new(n: usize, mastered: bool) -> Self {
        let values = noise(n, 1);
        Self {
            params: Buffer::of(&values),
            masters: mastered.then(|| Buffer::of(&values)),
            m: Buffer::of(&noise(n, 2)),
            v: Buffer::of(&noise(n, 3).iter().map(|x| x.abs()).collect::<Vec<_>>()),
            grads: Buffer::of(&noise(n, 4)),
        }
    }

    fn update(&mut self, norm: f32, clip: f64, seed: u32) {
        let n = self.params.to_vec().len();
        let norm = Buffer::<f32>::filled(1, norm);
        let launch = adamw::adamw(
            self.params.view_mut(),
            self.masters.as_mut().map_or(GlobalMut::new(std::ptr::null_mut()), Buffer::view_mut),
            self.m.view_mut(),
            self.v.view_mut(),
            self.grads.view(),
            norm.view(),
            n as u64,
            clip as f32,
            RATE as f32,
            BETA1 as f32,
            BETA2 as f32,
            (1.0 / (1.0 - BETA1.powi(STEP))) as f32,
            (1.0 / (1.0 - BETA2.powi(STEP))) as f32,
            EPSILON as f32,
            DECAY as f32,
            seed,
        );
        emulate(&launch, adamw::grid::<T>(n), 0);
    }

    fn state(&self) -> [Vec<f64>; 4] {
        let masters = self.masters.as_ref().map_or(vec![], Buffer::to_f64);
        [self.params.to_f64(), masters, self.m.to_f64(), self.v.to_f64()]
    }
}

fn adamw_step<T: Tolerance>() {
    for (n, mastered, norm, clip) in
        [(1, true, 0.5, 1.0), (7, false, 4.0, 1.0), (2051, true, 4.0, 1.0), (5000, false, 0.5, f64::INFINITY)]
    {
        let mut range = Optimized::<T>::new(n, mastered);
        let [params, masters, m, v] = range.state();
        let old = if mastered { masters } else { params };
        let scale = if norm > clip { clip / norm } else { 1.0 };
        let grads: Vec<_> = range.grads.to_f64().iter().map(|g| g * scale).collect();
        let m: Vec<_> = m.iter().zip(&grads).map(|(m, g)| BETA1 * m + (1.0 - BETA1) * g).collect();
        let v: Vec<_> = v.iter().zip(&grads).map(|(v, g)| BETA2 * v + (1.0 - BETA2) * g * g).collect();
        let new: Vec<_> = (0..n)
            .map(|i| {
                let m = m[i] / (1.0 - BETA1.powi(STEP));
                let v = v[i] / (1.0 - BETA2.powi(STEP));
                old[i] - RATE * (m / (v.sqrt() + EPSILON) + DECAY * old[i])
            })
            .collect();
        range.update(norm as f32, clip, 5);
        let [params, masters, got_m, got_v] = range.state();
        assert_close("m", &got_m, &m, 2e-6, 1e-1);
        assert_close("v", &got_v, &v, 2e-6, 1e-1);
        assert_close("params", &params, &new, T::STEP, 1e-2);
        if mastered {
            assert_close("masters", &masters, &new, 4e-6, 1e-1);
        }
        // Rounded to both sides: on average the parameters are what they should be.
        let bias = params.iter().zip(&new).map(|(p, w)| (p - w) / w.abs().max(1e-2)).sum::<f64>() / n as f64;
        assert!(bias.abs() < T::STEP / (n as f64).sqrt(), "bias {bias} over {n}");
    }
}

fn adamw_skips_bad_norms<T: Tolerance>() {
    for norm in [f32::NAN, f32::INFINITY] {
        let mut range = Optimized::<T>::new(100, true);
        let before = range.state();
        range.update(norm, 1.0, 5);
        assert_eq!(range.state(), before);
    }
}

/// Parameters made anew from masters are, bit for bit, those the update left.
fn masters_come_back<T: Tolerance>() {
    for n in LENGTHS {
        let mut range = Optimized::<T>::new(n, true);
        range.update(1.0, 1.0, 77);
        let mut params = Buffer::<T>::filled(n, f32::NAN);
        let masters = range.masters.as_ref().unwrap();
        emulate(&adamw::params_from_masters(params.view_mut(), masters.view(), n as u64, 77), adamw::grid::<T>(n), 0);
        assert_eq!(params.to_f64(), range.params.to_f64());
    }
}
