//! AdamW against an f64 reference, and stochastic rounding, for lengths that are not multiples of the vector size.

mod common;

use common::{Tolerance, assert_close, assert_same, for_all, noise, rounded, run, wide};
use cuda_std::emulate::Memory;
use cuda_std::{Element, Global, GlobalMut, bf16};
use gpu::adamw;
use gpu::noise::round;
use std::ops::Range;

tests! {
    kernels of "adamw.rs";
    for both types: step_matches_f64_reference, random_steps_match_f64_reference, ranges_match_separate_launches,
        non_finite_loss_or_norm_skips_the_step, zero_gradients_only_decay, first_step_has_the_size_of_the_learning_rate,
        clipping_cancels_the_gradient_scale, nan_stays_in_its_element, result_does_not_depend_on_length,
        parameters_are_rounded_masters, parameters_are_neighbours_of_masters;
    once: rounding_is_unbiased, rounding_depends_on_the_whole_index_and_the_seed;
}

/// All lengths up to two packets, all remainders around one block's tile, and several blocks.
fn lengths() -> impl Iterator<Item = usize> {
    (1..=17).chain(1017..=1025).chain(2041..=2049).chain([5003])
}

#[derive(Clone, Copy, Debug)]
struct Settings {
    loss: f32,
    norm: f32,
    clip: f32,
    rate: f64,
    beta1: f64,
    beta2: f64,
    step: i32,
    decay: f64,
    seed: u32,
}

/// A range of a launch, on the host.
#[derive(Clone, Copy, Debug)]
struct Part {
    start: usize,
    len: usize,
    decayed: bool,
    seed: u32,
}

impl Part {
    fn all(n: usize) -> Self {
        Self { start: 0, len: n, decayed: true, seed: 0 }
    }

    fn end(self) -> usize {
        self.start + self.len
    }
}

const EPSILON: f64 = 1e-8;
const SETTINGS: Settings =
    Settings { loss: 7.0, norm: 0.5, clip: 1.0, rate: 0.01, beta1: 0.9, beta2: 0.95, step: 3, decay: 0.1, seed: 5 };

#[derive(Clone)]
struct State<T> {
    params: Vec<T>,
    masters: Option<Vec<f32>>,
    m: Vec<f32>,
    v: Vec<f32>,
}

impl<T: Tolerance> State<T> {
    fn new(n: usize, mastered: bool) -> Self {
        let values = noise(n, 1);
        Self {
            params: rounded(&values),
            masters: mastered.then(|| rounded(&values)),
            m: rounded(&noise(n, 2)),
            v: rounded(&noise(n, 3).iter().map(|x| x.abs()).collect::<Vec<_>>()),
        }
    }

    fn fresh(n: usize, mastered: bool) -> Self {
        Self { m: vec![0.0; n], v: vec![0.0; n], ..Self::new(n, mastered) }
    }

    /// Returns the master weights if there are any, else the parameters.
    fn exact(&self) -> Vec<f64> {
        self.masters.as_ref().map_or_else(|| wide(&self.params), |masters| wide(masters))
    }

    fn updated(&self, grads: &[T], settings: Settings) -> Self {
        self.updated_in(&[Part::all(grads.len())], grads, settings)
    }

    fn updated_in(&self, parts: &[Part], grads: &[T], settings: Settings) -> Self {
        let Settings { loss, norm, clip, rate, beta1, beta2, step, decay, seed } = settings;
        let part = |part: &Part| adamw::Range::new(part.start, part.len, part.decayed, part.seed);
        let mut ranges: Vec<_> = parts.iter().map(part).collect();
        let grid = adamw::assign_blocks::<T>(&mut ranges);
        let table: Vec<u32> = ranges.iter().flat_map(adamw::Range::words).collect();
        let mut memory = Memory::new();
        let params = memory.buffer("params", &self.params);
        let masters = self.masters.as_ref().map(|masters| memory.buffer("masters", masters));
        let (m, v) = (memory.buffer("m", &self.m), memory.buffer("v", &self.v));
        let scalars = adamw::Scalars {
            clip,
            learning_rate: rate as f32,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            correction1: (1.0 / (1.0 - beta1.powi(step))) as f32,
            correction2: (1.0 / (1.0 - beta2.powi(step))) as f32,
            epsilon: EPSILON as f32,
            weight_decay: decay as f32,
            seed,
            range_count: ranges.len() as u32,
        };
        let masters_or_null = masters.unwrap_or(GlobalMut::new(std::ptr::null_mut()));
        let grads = memory.input("grads", grads);
        let stats = memory.input("stats", &[loss, norm]);
        let table = Global::new(memory.input("ranges", &table).pointer().cast());
        let launch = adamw::adamw(params, masters_or_null, m, v, grads, stats, table, scalars);
        if grid > 0 {
            run(&mut memory, &launch, grid, 0);
        }
        Self {
            params: memory.read(params),
            masters: masters.map(|view| memory.read(view)),
            m: memory.read(m),
            v: memory.read(v),
        }
    }

    #[track_caller]
    fn assert_same(&self, what: &str, want: &Self) {
        assert_same(&format!("params, {what}"), &wide(&self.params), &wide(&want.params));
        assert_same(&format!("masters, {what}"), &self.exact(), &want.exact());
        assert_same(&format!("m, {what}"), &wide(&self.m), &wide(&want.m));
        assert_same(&format!("v, {what}"), &wide(&self.v), &wide(&want.v));
    }

    fn part(&self, elements: Range<usize>) -> Self {
        Self {
            params: self.params[elements.clone()].to_vec(),
            masters: self.masters.as_ref().map(|masters| masters[elements.clone()].to_vec()),
            m: self.m[elements.clone()].to_vec(),
            v: self.v[elements].to_vec(),
        }
    }

    fn prefix(&self, n: usize) -> Self {
        self.part(0..n)
    }
}

fn check<T: Tolerance>(n: usize, mastered: bool, settings: Settings) {
    let Settings { norm, clip, rate, beta1, beta2, step, decay, .. } = settings;
    let (before, grads) = (State::<T>::new(n, mastered), rounded::<T>(&noise(n, 4)));
    let after = before.updated(&grads, settings);

    let scale = f64::from(if norm > clip { clip / norm } else { 1.0 });
    let grads: Vec<_> = wide(&grads).iter().map(|g| g * scale).collect();
    let m: Vec<_> = wide(&before.m).iter().zip(&grads).map(|(m, g)| beta1 * m + (1.0 - beta1) * g).collect();
    let v: Vec<_> = wide(&before.v).iter().zip(&grads).map(|(v, g)| beta2 * v + (1.0 - beta2) * g * g).collect();
    let new = before.exact().into_iter().enumerate().map(|(i, old)| {
        let (m, v) = (m[i] / (1.0 - beta1.powi(step)), v[i] / (1.0 - beta2.powi(step)));
        old - rate * (m / (v.sqrt() + EPSILON) + decay * old)
    });
    let new: Vec<_> = new.collect();
    assert_close("m", &wide(&after.m), &m, 2e-6, 1e-1);
    assert_close("v", &wide(&after.v), &v, 2e-6, 1e-1);
    assert_close("params", &wide(&after.params), &new, T::STEP, 1e-2);
    if mastered {
        assert_close("masters", &after.exact(), &new, 4e-6, 1e-1);
    }
}

fn step_matches_f64_reference<T: Tolerance>() {
    for (i, n) in lengths().enumerate() {
        check::<T>(n, i % 2 == 0, SETTINGS);
        check::<T>(
            n,
            i % 2 == 1,
            Settings { norm: 4.0, clip: if i % 4 == 0 { f32::INFINITY } else { 1.0 }, ..SETTINGS },
        );
    }
}

fn random_steps_match_f64_reference<T: Tolerance>() {
    let betas = (0.0..0.95f64, 0.5..0.99f64, 0.0..0.3f64, 0.0..0.1f64);
    for_all(64, (1..3000usize, proptest::bool::ANY, 0.0..3f32, betas, 1..50i32), |(n, mastered, norm, betas, step)| {
        let (beta1, beta2, decay, rate) = betas;
        check::<T>(n, mastered, Settings { norm, rate, beta1, beta2, step, decay, ..SETTINGS });
    });
}

/// Each range of a launch gets the same result as a launch for this range only. Elements between ranges do not change.
fn ranges_match_separate_launches<T: Tolerance>() {
    const LENS: [usize; 12] = [0, 1, 7, 8, 9, 1000, 1024, 1025, 2047, 2048, 2050, 5000];
    let len = proptest::sample::select(&LENS[..]);
    let parts = proptest::collection::vec((len, 0..3usize, proptest::bool::ANY, proptest::num::u32::ANY), 1..12);
    for_all(64, (parts, proptest::bool::ANY, 0..99u32), |(parts, mastered, seed)| {
        check_parts::<T>(&parts, mastered, Settings { seed, ..SETTINGS });
    });
    // As many ranges as a deep model has, one block each.
    let many: Vec<_> = (0..98).map(|i| (i * 31 % 200 + 1, i % 2, i % 3 == 0, 7 * i as u32)).collect();
    check_parts::<T>(&many, true, SETTINGS);
}

/// `parts` lists (length, gap before it in units of the alignment, whether it decays, seed).
fn check_parts<T: Tolerance>(parts: &[(usize, usize, bool, u32)], mastered: bool, settings: Settings) {
    let mut end: usize = 0;
    let place = |&(len, gap, decayed, seed): &(usize, usize, bool, u32)| {
        let start = end.next_multiple_of(adamw::Range::ALIGNMENT) + gap * adamw::Range::ALIGNMENT;
        end = start + len;
        Part { start, len, decayed, seed }
    };
    let parts: Vec<_> = parts.iter().map(place).collect();
    let n = end.max(1) + 3;
    let (before, grads) = (State::<T>::new(n, mastered), rounded::<T>(&noise(n, 4)));
    let after = before.updated_in(&parts, &grads, settings);
    let mut done = 0;
    for part in &parts {
        let decay = if part.decayed { settings.decay } else { 0.0 };
        let alone = Settings { decay, seed: settings.seed.wrapping_add(part.seed), ..settings };
        let elements = part.start..part.end();
        let want = before.part(elements.clone()).updated(&grads[elements.clone()], alone);
        after.part(elements).assert_same(&format!("{part:?}"), &want);
        after.part(done..part.start).assert_same(&format!("before {part:?}"), &before.part(done..part.start));
        done = part.end();
    }
    after.part(done..n).assert_same("after all ranges", &before.part(done..n));
}

/// A non-finite loss or norm suffices to skip the step, for full tiles and for the tail.
fn non_finite_loss_or_norm_skips_the_step<T: Tolerance>() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for mastered in [false, true] {
            let before = State::<T>::new(101, mastered);
            let skipped = |grads: &[T], settings| before.updated(grads, settings).assert_same("skipped", &before);
            skipped(&rounded(&[f64::NAN; 101]), Settings { norm: bad, ..SETTINGS });
            skipped(&rounded(&noise(101, 4)), Settings { loss: bad, ..SETTINGS });
        }
    }
    let before = State::<T>::new(101, true);
    let after = before.updated(&rounded(&noise(101, 4)), Settings { loss: f32::MAX, norm: f32::MAX, ..SETTINGS });
    assert_ne!(after.m, before.m, "the largest finite loss and norm do not skip the step");
}

fn zero_gradients_only_decay<T: Tolerance>() {
    for_all(32, (1..300usize, proptest::bool::ANY, 0.0..0.5f64, 0..99u32), |(n, mastered, decay, seed)| {
        let before = State::<T> { m: vec![0.0; n], ..State::new(n, mastered) };
        let after = before.updated(&vec![T::from_f32(0.0); n], Settings { norm: 0.0, decay, seed, ..SETTINGS });
        assert_same("m", &wide(&after.m), &wide(&before.m));
        let v: Vec<_> = wide(&before.v).iter().map(|v| v * SETTINGS.beta2).collect();
        assert_close("v", &wide(&after.v), &v, 1e-6, 0.0);
        let decayed: Vec<_> = before.exact().iter().map(|x| x * (1.0 - SETTINGS.rate * decay)).collect();
        let tolerance = if mastered { 1e-6 } else { T::STEP };
        assert_close("params", &after.exact(), &decayed, tolerance, 0.0);
    });
    let before = State::<T>::fresh(77, false);
    before
        .updated(&[T::from_f32(0.0); 77], Settings { decay: 0.0, ..SETTINGS })
        .assert_same("no gradient, no decay", &before);
}

/// The first step moves each parameter by the learning rate against the gradient's sign, whatever the gradient's size.
fn first_step_has_the_size_of_the_learning_rate<T: Tolerance>() {
    for_all(32, (1..300usize, -3..16i32, 0..99u32), |(n, exponent, seed)| {
        let before = State::<T>::fresh(n, true);
        let scale = 10f64.powi(exponent);
        let grads = rounded::<T>(&noise(n, seed).iter().map(|x| (x + 0.1f64.copysign(*x)) * scale).collect::<Vec<_>>());
        let settings = Settings { norm: 1e3, clip: f32::INFINITY, step: 1, decay: 0.0, seed, ..SETTINGS };
        let after = before.updated(&grads, settings);
        let moved: Vec<_> = after.exact().iter().zip(before.exact()).map(|(new, old)| new - old).collect();
        let want: Vec<_> = wide(&grads).iter().map(|g| -SETTINGS.rate * g.signum()).collect();
        // Allows for the cancellation of two parameters near 1, and for epsilon next to a small gradient.
        assert_close("step", &moved, &want, 2e-4, 0.0);
    });
}

/// If the norm exceeds the clipping threshold, scaling gradients and norm by the same factor does not change the step.
fn clipping_cancels_the_gradient_scale<T: Tolerance>() {
    for_all(32, (1..300usize, 0..30i32, proptest::bool::ANY), |(n, exponent, mastered)| {
        let (before, grads) = (State::<T>::new(n, mastered), noise(n, 4));
        let scale = f64::from(exponent).exp2();
        let scaled: Vec<_> = grads.iter().map(|g| g * scale).collect();
        let (plain, large) = (Settings { norm: 2.0, ..SETTINGS }, Settings { norm: 2.0 * scale as f32, ..SETTINGS });
        before.updated(&rounded(&scaled), large).assert_same("clipped", &before.updated(&rounded(&grads), plain));
    });
}

fn nan_stays_in_its_element<T: Tolerance>() {
    for (n, at) in [(1, 0), (17, 16), (2049, 1031)] {
        let (before, mut grads) = (State::<T>::new(n, true), noise(n, 4));
        let clean = before.updated(&rounded(&grads), SETTINGS);
        grads[at] = f64::NAN;
        let mut want = clean;
        let masters = want.masters.as_mut().unwrap();
        (want.params[at], masters[at], want.m[at], want.v[at]) = (T::from_f32(f32::NAN), f32::NAN, f32::NAN, f32::NAN);
        before.updated(&rounded(&grads), SETTINGS).assert_same("one NaN", &want);
    }
}

/// The result for an element does not depend on the number of elements: full tiles and tails agree bit for bit.
fn result_does_not_depend_on_length<T: Tolerance>() {
    for mastered in [false, true] {
        let (before, grads) = (State::<T>::new(5003, mastered), rounded::<T>(&noise(5003, 4)));
        let after = before.updated(&grads, SETTINGS);
        for n in lengths() {
            before.prefix(n).updated(&grads[..n], SETTINGS).assert_same(&format!("{n} of 5003"), &after.prefix(n));
        }
    }
}

/// Each parameter is its master weight, stochastically rounded with its index and the seed.
fn parameters_are_rounded_masters<T: Tolerance>() {
    for (seed, n) in lengths().enumerate() {
        let settings = Settings { seed: seed as u32, ..SETTINGS };
        let after = State::<T>::new(n, true).updated(&rounded(&noise(n, 4)), settings);
        let params: Vec<T> = all_rounded(after.masters.as_ref().unwrap(), settings.seed);
        assert_same("params", &wide(&params), &wide(&after.params));
    }
}

fn all_rounded<T: Tolerance>(masters: &[f32], seed: u32) -> Vec<T> {
    masters.iter().enumerate().map(|(i, &master)| round(master, i, seed)).collect()
}

/// Covers infinite and subnormal masters. A master that is representable in the type does not change.
fn parameters_are_neighbours_of_masters<T: Tolerance>() {
    let check = |masters: &[f32], seed: u32| {
        for (param, &master) in all_rounded::<T>(masters, seed).iter().zip(masters) {
            let (param, [low, high]) = (param.to_f32(), T::neighbours(master));
            let is = |x: f32| param.to_bits() == x.to_bits() || param.is_nan() && x.is_nan();
            assert!(is(low) || is(high), "{master:e} was rounded to {param:e}, expected {low:e} or {high:e}");
        }
    };
    let special = [0.0, 1e-40, f32::MAX, f32::INFINITY, f32::NAN];
    (0..32).for_each(|seed| check(&special.map(|x| [x, -x]).concat(), seed));
    for_all(100, (proptest::collection::vec(proptest::num::f32::ANY, 1..80), 0..99u32), |(masters, seed)| {
        // Excludes signaling NaNs, which no operation produces.
        let quiet: Vec<_> = masters.iter().map(|x| if x.is_nan() { f32::NAN } else { *x }).collect();
        check(&quiet, seed);
    });
}

/// The probability of rounding up is the position between the two neighbours, at every position in a packet.
fn rounding_is_unbiased() {
    let (n, below) = (32_768usize, 1.0f32);
    let step = bf16::neighbours(1.001)[1] - below;
    for sixteenths in 0..=16 {
        let masters = vec![below + step * sixteenths as f32 / 16.0; n];
        for sign in [1.0, -1.0] {
            let masters: Vec<_> = masters.iter().map(|x| x * sign).collect();
            let params = all_rounded::<bf16>(&masters, 7 + sixteenths);
            let ups = |of: &mut dyn Iterator<Item = &bf16>| {
                of.filter(|x| f64::from(x.to_f32().abs()) > f64::from(below)).count() as f64
            };
            let p = f64::from(sixteenths) / 16.0;
            // Five standard deviations, plus 1/65536 for the finite number of random bits.
            let allowed = |n: usize| 5.0 * (n as f64 * p * (1.0 - p)).sqrt() + n as f64 / 65536.0;
            for k in 0..8 {
                let count = ups(&mut params.iter().skip(k).step_by(8));
                let off = (count - p * (n / 8) as f64).abs();
                assert!(off <= allowed(n / 8), "{sixteenths}/16 at position {k}: {count} of {} rounded up", n / 8);
            }
        }
    }
}

/// Elements 2^32 apart, and steps with adjacent seeds, get independent random bits.
fn rounding_depends_on_the_whole_index_and_the_seed() {
    let n = 4096;
    let value = 1.0 + 1.0 / 256.0;
    let rounded = |first: usize, seed: u32| (first..first + n).map(move |i| round::<bf16>(value, i, seed).to_f32());
    let agree = |a: &mut dyn Iterator<Item = f32>, b: &mut dyn Iterator<Item = f32>| {
        a.zip(b).filter(|(a, b)| a.to_bits() == b.to_bits()).count()
    };
    for (first, seed) in [(1, 5), (0, 6), (1 << 32, 5), (1 << 33, 5)] {
        let same = agree(&mut rounded(0, 5), &mut rounded(first, seed));
        assert!(same.abs_diff(n / 2) < 5 * 32, "elements from {first}, seed {seed}: {same} of {n} results are equal");
    }
}
