//! AdamW against an f64 reference, and stochastic rounding, for lengths that are not multiples of the vector size.

use crate::common::{Tolerance, assert_close, assert_same, for_all, noise, rounded, run, wide};
use cuda_std::emulate::Memory;
use cuda_std::{Element, Global, GlobalMut, bf16};
use gpu::adamw::compact::{Scaled, adamw_compact};
use gpu::adamw::eight_bit::adamw_8bit;
use gpu::block_float::{self, BLOCK};
use gpu::noise::{Stream, moment_bits, round, seed_from};
use gpu::{adamw, remainder};
use std::ops::Range;

tests! {
    kernels of "adamw.rs", "adamw";
    for both types: step_matches_f64_reference, random_steps_match_f64_reference, ranges_match_separate_launches,
        non_finite_loss_or_norm_skips_the_step, zero_gradients_only_decay, first_step_has_the_size_of_the_learning_rate,
        clipping_cancels_the_gradient_scale, nan_stays_in_its_element, result_does_not_depend_on_length,
        parameters_are_rounded_masters, parameters_are_neighbours_of_masters;
    once: rounding_is_unbiased, rounding_depends_on_the_whole_index_and_the_seed, bf16_moments_are_rounded_f32_moments,
        bf16_moments_follow_the_average_of_small_gradients, streams_are_independent,
        streams_of_a_slice_are_those_of_the_tensor, remainders_are_exact_master_weights, every_master_weight_can_be_updated,
        compact_state_keeps_nan_in_its_element_and_skips_steps, compact_state_gets_the_bits_of_f32_masters,
        eight_bit_moments_are_rounded_f32_moments, signs_of_tiny_gradients_move_all_forms_of_weights;
}

/// All lengths up to two packets, all remainders around one block's tile, and several blocks.
fn lengths() -> impl Iterator<Item = usize> {
    (1..=17).chain(1017..=1025).chain(2041..=2049).chain([5003])
}

#[derive(Clone, Copy, Debug)]
struct Settings {
    loss: f32,
    norm: f32,
    factor: f32,
    clip: f32,
    rate: f64,
    beta1: f64,
    beta2: f64,
    step: i32,
    decay: f64,
    epsilon: f64,
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

/// Returns the grid of a launch over `parts`, and the words of its table of ranges.
fn table<T: Element>(parts: &[Part]) -> (u32, Vec<u32>) {
    let part = |part: &Part| adamw::Range::new(part.start, part.len, part.decayed, part.seed);
    let mut ranges: Vec<_> = parts.iter().map(part).collect();
    let grid = adamw::assign_blocks::<T>(&mut ranges);
    (grid, ranges.iter().flat_map(adamw::Range::words).collect())
}

const EPSILON: f64 = 1e-8;
const SETTINGS: Settings = Settings {
    loss: 7.0,
    norm: 0.5,
    factor: 1.0,
    clip: 1.0,
    rate: 0.01,
    beta1: 0.9,
    beta2: 0.95,
    step: 3,
    decay: 0.1,
    epsilon: EPSILON,
    seed: 5,
};

/// The weights beside the parameters.
#[derive(Clone, Debug)]
enum Masters {
    None,
    F32(Vec<f32>),
    Remainder(Vec<u16>),
}

impl Masters {
    fn part(&self, elements: Range<usize>) -> Self {
        match self {
            Self::None => Self::None,
            Self::F32(masters) => Self::F32(masters[elements].to_vec()),
            Self::Remainder(remainders) => Self::Remainder(remainders[elements].to_vec()),
        }
    }
}

/// Parameters and moments of types `T` and `M`.
#[derive(Clone)]
struct State<T, M = f32> {
    params: Vec<T>,
    masters: Masters,
    m: Vec<M>,
    v: Vec<M>,
}

impl<T: Tolerance> State<T> {
    fn fresh(n: usize, mastered: bool) -> Self {
        Self { m: vec![0.0; n], v: vec![0.0; n], ..Self::new(n, mastered) }
    }
}

impl<T: Tolerance, M: Tolerance> State<T, M> {
    fn new(n: usize, mastered: bool) -> Self {
        let values = noise(n, 1);
        Self {
            params: rounded(&values),
            masters: if mastered { Masters::F32(rounded(&values)) } else { Masters::None },
            m: rounded(&noise(n, 2)),
            v: rounded(&noise(n, 3).iter().map(|x| x.abs()).collect::<Vec<_>>()),
        }
    }

    /// Returns the master weights if there are any, else the parameters.
    fn weights(&self) -> Vec<f32> {
        let params = self.params.iter().map(|param| param.to_f32());
        match &self.masters {
            Masters::None => params.collect(),
            Masters::F32(masters) => masters.clone(),
            Masters::Remainder(remainders) => {
                params.zip(remainders).map(|(param, low)| remainder::join(param, *low)).collect()
            }
        }
    }

    fn exact(&self) -> Vec<f64> {
        wide(&self.weights())
    }

    /// Converts the moments to another type. They must be representable.
    fn with_moments<N: Tolerance>(&self) -> State<T, N> {
        let converted = |moments: &[M]| moments.iter().map(|x| N::from_f32(x.to_f32())).collect();
        State {
            params: self.params.clone(),
            masters: self.masters.clone(),
            m: converted(&self.m),
            v: converted(&self.v),
        }
    }

    fn updated(&self, grads: &[T], settings: Settings) -> Self {
        self.updated_in(&[Part::all(grads.len())], grads, settings)
    }

    fn updated_in(&self, parts: &[Part], grads: &[T], settings: Settings) -> Self {
        let (grid, table) = table::<T>(parts);
        let mut memory = Memory::new();
        let params = memory.buffer("params", &self.params);
        let (m, v) = (memory.buffer("m", &self.m), memory.buffer("v", &self.v));
        let scalars = settings.scalars(parts.len());
        let grads = memory.input("grads", grads);
        let stats = memory.input("stats", &[settings.loss, settings.norm]);
        let table = Global::new(memory.input("ranges", &table).pointer().cast());
        let launch = |memory: &mut Memory, launch| {
            if grid > 0 {
                run(memory, &launch, grid, 0);
            }
        };
        let masters = match &self.masters {
            Masters::None => {
                let none = GlobalMut::<f32>::new(std::ptr::null_mut());
                launch(&mut memory, adamw::adamw(params, none, m, v, grads, stats, table, scalars));
                Masters::None
            }
            Masters::F32(masters) => {
                let masters = memory.buffer("masters", masters);
                launch(&mut memory, adamw::adamw(params, masters, m, v, grads, stats, table, scalars));
                Masters::F32(memory.read(masters))
            }
            Masters::Remainder(remainders) => {
                let remainders = memory.buffer("remainders", remainders);
                let kernel = if size_of::<M>() == size_of::<bf16>() {
                    let bf16 = |view: GlobalMut<M>| GlobalMut::<bf16>::new(view.pointer().cast());
                    let (params, grads) =
                        (GlobalMut::new(params.pointer().cast()), Global::new(grads.pointer().cast()));
                    let scaled = Scaled::new(&scalars);
                    adamw_compact(params, remainders, bf16(m), bf16(v), grads, stats, table, scalars, scaled)
                } else {
                    adamw::adamw(params, remainders, m, v, grads, stats, table, scalars)
                };
                launch(&mut memory, kernel);
                Masters::Remainder(memory.read(remainders))
            }
        };
        Self { params: memory.read(params), masters, m: memory.read(m), v: memory.read(v) }
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
            masters: self.masters.part(elements.clone()),
            m: self.m[elements.clone()].to_vec(),
            v: self.v[elements].to_vec(),
        }
    }

    fn prefix(&self, n: usize) -> Self {
        self.part(0..n)
    }
}

impl Settings {
    fn scalars(self, ranges: usize) -> adamw::Scalars {
        let Self { factor, clip, rate, beta1, beta2, step, decay, epsilon, seed, .. } = self;
        adamw::Scalars {
            grad_factor: factor,
            clip,
            learning_rate: rate as f32,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            correction1: (1.0 / (1.0 - beta1.powi(step))) as f32,
            correction2: (1.0 / (1.0 - beta2.powi(step))) as f32,
            epsilon: epsilon as f32,
            weight_decay: decay as f32,
            seed,
            range_count: ranges as u32,
        }
    }
}

fn check<T: Tolerance>(n: usize, mastered: bool, settings: Settings) {
    let Settings { norm, factor, clip, rate, beta1, beta2, step, decay, .. } = settings;
    let (before, grads) = (State::<T>::new(n, mastered), rounded::<T>(&noise(n, 4)));
    let after = before.updated(&grads, settings);

    let norm = norm * factor;
    let scale = f64::from(factor) * f64::from(if norm > clip { clip / norm } else { 1.0 });
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
        // The factor decides whether the norm exceeds the threshold.
        let factor = if i % 4 < 2 { 3.0 } else { 1.5 };
        check::<T>(n, i % 2 == 0, Settings { factor, ..SETTINGS });
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
            skipped(&rounded(&noise(101, 4)), Settings { norm: f32::MAX, factor: 2.0, ..SETTINGS });
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
        let clipped = before.updated(&rounded(&grads), plain);
        before.updated(&rounded(&scaled), large).assert_same("clipped", &clipped);
        before.updated(&rounded(&grads), Settings { factor: scale as f32, ..plain }).assert_same("factor", &clipped);
    });
}

fn nan_stays_in_its_element<T: Tolerance>() {
    for (n, at) in [(1, 0), (17, 16), (2049, 1031)] {
        let (before, mut grads) = (State::<T>::new(n, true), noise(n, 4));
        let clean = before.updated(&rounded(&grads), SETTINGS);
        grads[at] = f64::NAN;
        let mut want = clean;
        let Masters::F32(masters) = &mut want.masters else { unreachable!() };
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
        let params: Vec<T> = all_rounded(&after.weights(), settings.seed);
        assert_same("params", &wide(&params), &wide(&after.params));
    }
}

fn all_rounded<T: Tolerance>(masters: &[f32], seed: u32) -> Vec<T> {
    masters.iter().enumerate().map(|(i, &master)| round(Stream::Params, master, i, seed)).collect()
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
    let rounded = |first: usize, seed: u32| {
        (first..first + n).map(move |i| round::<bf16>(Stream::Params, value, i, seed).to_f32())
    };
    let agree = |a: &mut dyn Iterator<Item = f32>, b: &mut dyn Iterator<Item = f32>| {
        a.zip(b).filter(|(a, b)| a.to_bits() == b.to_bits()).count()
    };
    for (first, seed) in [(1, 5), (0, 6), (1 << 32, 5), (1 << 33, 5)] {
        let same = agree(&mut rounded(0, 5), &mut rounded(first, seed));
        assert!(same.abs_diff(n / 2) < 5 * 32, "elements from {first}, seed {seed}: {same} of {n} results are equal");
    }
}

/// Returns `(start, len, decayed, seed)` of ranges with gaps that together have every kind of tile, and the elements of all.
fn compact_parts() -> (Vec<Part>, usize) {
    let part = |start, len, decayed, seed| Part { start, len, decayed, seed };
    let parts = vec![
        part(8, 17, true, 3),
        part(32, 2048, false, 0),
        part(2088, 4101, true, 900),
        part(6200, 1, true, 7),
        part(6208, 7, false, 40),
    ];
    (parts, 6215)
}

/// The weights do not depend on the type of the moments. bf16 moments are those in f32, rounded with the bits of their streams.
fn bf16_moments_are_rounded_f32_moments() {
    let (parts, n) = compact_parts();
    for mastered in [false, true] {
        let (before, grads) = (State::<bf16, bf16>::new(n, mastered), rounded(&noise(n, 4)));
        let got = before.updated_in(&parts, &grads, SETTINGS);
        let want = before.with_moments::<f32>().updated_in(&parts, &grads, SETTINGS);
        assert_same("params", &wide(&got.params), &wide(&want.params));
        assert_same("masters", &got.exact(), &want.exact());
        let rounded = |stream, moments: &[f32]| {
            let mut moments = moments.to_vec();
            for part in &parts {
                let seed = SETTINGS.seed.wrapping_add(part.seed);
                for i in 0..part.len {
                    let moment = &mut moments[part.start + i];
                    *moment = round::<bf16>(stream, *moment, i, seed).to_f32();
                }
            }
            wide(&moments)
        };
        assert_same("m", &wide(&got.m), &rounded(Stream::M, &want.m));
        assert_same("v", &wide(&got.v), &rounded(Stream::V, &want.v));
        let changed = |moments: &[bf16], exact: &[f32]| {
            moments.iter().zip(exact).filter(|(a, b)| a.to_f32().to_bits() != b.to_bits()).count()
        };
        assert!(changed(&got.m, &want.m) > n / 2 && changed(&got.v, &want.v) > n / 2, "most moments are rounded");
    }
}

/// Each step changes the moments by less than half of their last place: rounding to nearest would never change them. Their means
/// follow the exact moments.
fn bf16_moments_follow_the_average_of_small_gradients() {
    const STEPS: i32 = 60;
    let n = 8192;
    let grads: Vec<bf16> = rounded(&vec![0.25; n]);
    let settings = Settings { norm: 0.5, rate: 0.0, beta1: 0.999, beta2: 0.999, ..SETTINGS };
    let mut state = State::<bf16, bf16>::new(n, false);
    (state.m, state.v) = (rounded(&vec![0.5; n]), rounded(&vec![0.125; n]));
    let (mut m, mut v) = (0.5, 0.125);
    for step in 1..=STEPS {
        state = state.updated(&grads, Settings { step, seed: 1000 * step as u32, ..settings });
        (m, v) = (0.999 * m + 0.001 * 0.25, 0.999 * v + 0.001 * 0.0625);
    }
    // A step of bf16 below 0.5 is 2^-9, and below 0.125 it is 2^-11. The sum of `STEPS` roundings deviates by at most half a step
    // times the root of their number, and the mean of n elements by the root of n less.
    let deviation = |step: f64| 5.0 * step / 2.0 * f64::from(STEPS).sqrt() / (n as f64).sqrt();
    let mean = |moments: &[bf16]| wide(moments).iter().sum::<f64>() / n as f64;
    let (got_m, got_v) = (mean(&state.m), mean(&state.v));
    assert!((got_m - m).abs() < deviation(2f64.powi(-9)), "m: {got_m}, expected {m}");
    assert!((got_v - v).abs() < deviation(2f64.powi(-11)), "v: {got_v}, expected {v}");
    assert!((m - 0.5).abs() > 20.0 * deviation(2f64.powi(-9)), "the test cannot detect moments that do not change");
}

/// Parameters and both moments are rounded up independently of each other, also in neighboring elements.
fn streams_are_independent() {
    let n = 16_384;
    let streams = [Stream::Params, Stream::M, Stream::V];
    let ups = streams.map(|stream| -> Vec<bool> {
        let up = |i| round::<bf16>(stream, 1.0 + 1.0 / 256.0, i, 5).to_f32() > 1.0;
        (0..n + 64).map(up).collect()
    });
    for (a, first) in ups.iter().enumerate() {
        assert!(first[..n].iter().filter(|up| **up).count().abs_diff(n / 2) < 5 * 64, "stream {a} is biased");
        for (b, second) in ups.iter().enumerate() {
            for shift in (0..64).filter(|&shift| (a, 0) != (b, shift)) {
                let same = (0..n).filter(|&i| first[i] == second[i + shift]).count();
                assert!(same.abs_diff(n / 2) < 5 * 64, "streams {a} and {b}, {shift} apart: {same} of {n} agree");
            }
        }
    }
}

fn streams_of_a_slice_are_those_of_the_tensor() {
    for stream in [Stream::Params, Stream::M, Stream::V] {
        for (first, i) in [(64, 0), (1000, 7), (1_000_000_007, 12)] {
            let value = 1.0 + 1.0 / 256.0;
            let slices = (0..64).map(|seed| round::<bf16>(stream, value, i, seed_from(seed, first)).to_bits());
            let whole = (0..64).map(|seed| round::<bf16>(stream, value, first + i, seed).to_bits());
            assert!(slices.eq(whole), "{stream:?} from {first}");
        }
    }
}

/// Splits f32 master weights into parameters and remainders.
fn compact<M: Tolerance>(state: &State<bf16, M>) -> State<bf16, M> {
    let (params, remainders) =
        state.weights().into_iter().map(remainder::split).map(|(param, low)| (bf16::from_f32(param), low)).unzip();
    State { params, masters: Masters::Remainder(remainders), ..state.clone() }
}

/// Several steps with equal gradients give the same bits as f32 master weights, and the parameters are the masters rounded to
/// nearest. Elements outside of the ranges do not change.
fn remainders_are_exact_master_weights() {
    fn check<M: Tolerance>() {
        let (parts, n) = compact_parts();
        let mut exact = State::<bf16, M>::new(n, true);
        let mut state = compact(&exact);
        for step in 1..=5 {
            let grads = rounded(&noise(n, 40 + step as u32));
            let settings = Settings { step, seed: 77 * step as u32, norm: 2.0, ..SETTINGS };
            exact = exact.updated_in(&parts, &grads, settings);
            state = state.updated_in(&parts, &grads, settings);
            state.assert_same(&format!("step {step}"), &compact(&exact));
        }
        let before = State::<bf16, M>::new(n, true).weights();
        for (i, (new, old)) in state.weights().iter().zip(before).enumerate() {
            let updated = parts.iter().any(|part| (part.start..part.end()).contains(&i));
            assert_eq!(new.to_bits() != old.to_bits(), updated, "element {i}");
        }
    }
    check::<f32>();
    check::<bf16>();
    // Full tiles and tails agree with an f64 reference.
    for n in [1, 17, 2047, 2048, 2049] {
        let before = compact(&State::<bf16>::new(n, true));
        let grads = rounded::<bf16>(&noise(n, 4));
        let after = before.updated(&grads, SETTINGS);
        let Settings { rate, beta1, beta2, step, decay, .. } = SETTINGS;
        let new = before.exact().into_iter().enumerate().map(|(i, old)| {
            let g = f64::from(grads[i].to_f32());
            let m = (beta1 * f64::from(before.m[i]) + (1.0 - beta1) * g) / (1.0 - beta1.powi(step));
            let v = (beta2 * f64::from(before.v[i]) + (1.0 - beta2) * g * g) / (1.0 - beta2.powi(step));
            old - rate * (m / (v.sqrt() + EPSILON) + decay * old)
        });
        let new: Vec<_> = new.collect();
        assert_close("masters", &after.exact(), &new, 4e-6, 1e-1);
        assert_close("params", &wide(&after.params), &new, bf16::ROUNDING, 1e-2);
    }
}

/// Covers ties, subnormal numbers, zeros, and master weights that round to an infinite parameter. Without gradients, a step
/// changes nothing.
fn every_master_weight_can_be_updated() {
    let upper: [u32; 8] = [0, 1, 0x7f, 0x80, 0x3f7f, 0x3f80, 0x3f81, 0x7f7f];
    let lower: [u32; 6] = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
    let bits = upper.into_iter().flat_map(|upper| lower.map(|lower| (upper << 16) | lower));
    let masters: Vec<f32> = bits.flat_map(|bits| [bits, bits | (1 << 31)]).map(f32::from_bits).collect();
    // A full tile and a tail.
    let masters: Vec<f32> = masters.iter().copied().cycle().take(2048 + masters.len()).collect();
    let n = masters.len();
    let zeros = vec![0.0; n];
    let exact =
        State::<bf16> { masters: Masters::F32(masters.clone()), m: zeros.clone(), v: zeros, ..State::new(n, true) };
    let before = compact(&exact);
    let settings = Settings { norm: 0.0, decay: 0.0, ..SETTINGS };
    let after = before.updated(&vec![bf16::from_f32(0.0); n], settings);
    for (i, (got, want)) in after.weights().iter().zip(&masters).enumerate() {
        assert_eq!(got.to_bits(), want.to_bits(), "element {i}, {want:e}");
    }
    // The same steps from f32 master weights.
    let grads = rounded(&noise(n, 4));
    let [got, want] = [&before, &exact].map(|state| state.updated(&grads, SETTINGS).weights());
    assert!(got.iter().zip(&want).all(|(got, want)| got.to_bits() == want.to_bits()));
}

fn compact_state_keeps_nan_in_its_element_and_skips_steps() {
    fn check<M: Tolerance>(n: usize, at: usize) {
        let before = compact(&State::<bf16, M>::new(n, true));
        let mut grads = noise(n, 4);
        let mut want = before.updated(&rounded(&grads), SETTINGS);
        grads[at] = f64::NAN;
        let got = before.updated(&rounded(&grads), SETTINGS);
        let nan = M::from_f32(f32::NAN);
        (want.params[at], want.m[at], want.v[at]) = (bf16::from_f32(f32::NAN), nan, nan);
        let Masters::Remainder(remainders) = &mut want.masters else { unreachable!() };
        remainders[at] = 0;
        got.assert_same("one NaN", &want);
        // The NaN of GPUs, 0x7fffffff, has a carry into the sign.
        let mut poisoned = before.clone();
        poisoned.params[at] = bf16::from_bits(0x8000);
        poisoned.masters = match poisoned.masters {
            Masters::Remainder(mut remainders) => {
                remainders[at] = 0xffff;
                Masters::Remainder(remainders)
            }
            other => other,
        };
        assert_eq!(poisoned.weights()[at].to_bits(), 0x7fff_ffff);
        let got = poisoned.updated(&rounded(&noise(n, 4)), SETTINGS);
        assert!(got.params[at].to_f32().is_nan() && got.weights()[at].is_nan());
        for (norm, factor) in [(f32::NAN, 1.0), (f32::INFINITY, 1.0), (f32::MAX, 2.0)] {
            let skipped = before.updated(&rounded(&grads), Settings { norm, factor, ..SETTINGS });
            skipped.assert_same("skipped", &before);
        }
    }
    for (n, at) in [(1, 0), (17, 16), (2049, 1031)] {
        check::<f32>(n, at);
        check::<bf16>(n, at);
    }
}

/// Covers all finite moments and gradients, subnormal ones in particular, all finite weights from 2^-70 on, and scalars for which the
/// kernel cannot scale its operands.
fn compact_state_gets_the_bits_of_f32_masters() {
    let sized = |[size, x]: [u32; 2]| {
        f32::from_bits(match size % 16 {
            0 if x & 0x7f80_0000 < 0x7f80_0000 => x,
            0..=6 => x & 0x80ff_ffff,
            _ => x & 0x87ff_ffff | 0x3000_0000,
        })
    };
    let column = || proptest::collection::vec(proptest::array::uniform2(proptest::num::u32::ANY), 400);
    let epsilon = proptest::sample::select(vec![1e-8, 1e-10, 0.0, 1e-20, 1.0, 1e5]);
    let rate = proptest::sample::select(vec![1e-3, 0.0, -1e-3, 1e-17, 1e-19, 1e-30]);
    let scalars = (epsilon, rate, proptest::sample::select(vec![0.0, 0.1, 1e20]), 1..9i32, 0..99u32);
    for_all(300, (1..400usize, [column(), column(), column(), column()], scalars), |(n, columns, scalars)| {
        let (epsilon, rate, decay, step, seed) = scalars;
        let [masters, m, v, grads] = columns.map(|column| column[..n].iter().copied().map(sized).collect::<Vec<f32>>());
        // Smaller weights can differ in their last bits.
        let masters: Vec<_> = masters.iter().map(|x| if x.abs() < 2f32.powi(-70) { 0.02 } else { *x }).collect();
        let upper = |x: &f32| bf16::from_bits((x.to_bits() >> 16) as u16);
        let exact = State::<bf16, bf16> {
            params: masters.iter().map(upper).collect(),
            masters: Masters::F32(masters),
            m: m.iter().map(upper).collect(),
            v: v.iter().map(|v| upper(&v.abs())).collect(),
        };
        let grads: Vec<bf16> = grads.iter().map(upper).collect();
        let settings = Settings { rate, step, decay, epsilon, seed, ..SETTINGS };
        let want = exact.updated(&grads, settings);
        compact(&exact).updated(&grads, settings).assert_same(&format!("{scalars:?}"), &compact(&want));
    });
}

/// Moments in blocks of eight, with zeros past the end of each part.
#[derive(Clone, Debug, PartialEq)]
struct Blocks {
    m: Vec<u64>,
    v: Vec<u64>,
}

impl Blocks {
    /// Returns the moments rounded with the noise of an update with `seed`.
    fn new(state: &State<bf16>, parts: &[Part], seed: u32) -> Self {
        let blocks = vec![0; state.m.len().div_ceil(BLOCK)];
        let mut new = Self { m: blocks.clone(), v: blocks };
        for part in parts {
            for i in (0..part.len).step_by(BLOCK) {
                let values = |moments: &[f32]| {
                    std::array::from_fn(|k| if i + k < part.len { moments[part.start + i + k] } else { 0.0 })
                };
                let noise = |k| moment_bits(i + k, seed.wrapping_add(part.seed));
                let block = (part.start + i) / BLOCK;
                new.m[block] = block_float::encode::<true>(values(&state.m), std::array::from_fn(noise));
                new.v[block] =
                    block_float::encode::<false>(values(&state.v), std::array::from_fn(|k| noise(k).rotate_left(16)));
            }
        }
        new
    }

    /// Writes the moments of the parts to `state`.
    fn decode(&self, state: &mut State<bf16>, parts: &[Part]) {
        for i in parts.iter().flat_map(|part| part.start..part.end()) {
            state.m[i] = block_float::decode::<true>(self.m[i / BLOCK])[i % BLOCK];
            state.v[i] = block_float::decode::<false>(self.v[i / BLOCK])[i % BLOCK];
        }
    }

    /// Updates the blocks, and the parameters and master weights of `state`.
    fn update(&mut self, state: &mut State<bf16>, parts: &[Part], grads: &[bf16], settings: Settings) {
        let (grid, table) = table::<bf16>(parts);
        let mut memory = Memory::new();
        let params = memory.buffer("params", &state.params);
        let (m, v) = (memory.buffer("m", &self.m), memory.buffer("v", &self.v));
        let (grads, stats) = (memory.input("grads", grads), memory.input("stats", &[settings.loss, settings.norm]));
        let table = Global::new(memory.input("ranges", &table).pointer().cast());
        let scalars = settings.scalars(parts.len());
        let scaled = Scaled::new(&scalars);
        match &mut state.masters {
            Masters::None => {
                let none = GlobalMut::<f32>::new(std::ptr::null_mut());
                run(&mut memory, &adamw_8bit(params, none, m, v, grads, stats, table, scalars, scaled), grid, 0);
            }
            Masters::F32(values) => {
                let masters = memory.buffer("masters", values);
                run(&mut memory, &adamw_8bit(params, masters, m, v, grads, stats, table, scalars, scaled), grid, 0);
                *values = memory.read(masters);
            }
            Masters::Remainder(values) => {
                let masters = memory.buffer("remainders", values);
                run(&mut memory, &adamw_8bit(params, masters, m, v, grads, stats, table, scalars, scaled), grid, 0);
                *values = memory.read(masters);
            }
        }
        (state.params, self.m, self.v) = (memory.read(params), memory.read(m), memory.read(v));
    }
}

/// Weights get the bits of an update with f32 moments, and the stored moments are those, rounded. Non-finite losses and norms change
/// nothing.
fn eight_bit_moments_are_rounded_f32_moments() {
    let (parts, n) = compact_parts();
    let masters = State::<bf16>::new(n, true);
    for mut state in [State::new(n, false), compact(&masters), masters] {
        // Scaled by 2^64, this moment is infinite, and the kernel falls back to unscaled operands.
        (state.m[40], state.v[40]) = (1e25, 1e30);
        let mut blocks = Blocks::new(&state, &parts, 0);
        for step in 1..=4 {
            blocks.decode(&mut state, &parts);
            let grads = rounded::<bf16>(&noise(n, 40 + step as u32));
            let settings = Settings { step, seed: 77 * step as u32, norm: 2.0, ..SETTINGS };
            let want = state.updated_in(&parts, &grads, settings);
            let (mut skipped, mut same) = (state.clone(), blocks.clone());
            same.update(&mut skipped, &parts, &grads, Settings { loss: f32::NAN, ..settings });
            skipped.assert_same("skipped", &state);
            assert_eq!(same, blocks, "skipped");
            blocks.update(&mut state, &parts, &grads, settings);
            assert_same(&format!("params, step {step}"), &wide(&state.params), &wide(&want.params));
            assert_same(&format!("masters, step {step}"), &state.exact(), &want.exact());
            assert_eq!(blocks, Blocks::new(&want, &parts, settings.seed), "step {step}");
        }
    }
}

/// Without decay of the moments, an update subtracts the learning rate times the sign of the gradient, however small the gradient is. The
/// biases of routers are updated in this way.
fn signs_of_tiny_gradients_move_all_forms_of_weights() {
    fn check<T: Tolerance, M: Tolerance>(before: &State<T, M>, grads: &[T], settings: Settings, want: &[f64]) {
        assert_eq!(before.updated(grads, settings).exact(), want);
    }
    let n = 2048 + 77;
    let rate = 1.0 / 16.0;
    let epsilon = f64::from(f32::MIN_POSITIVE);
    let (norm, clip) = (1e30, f32::INFINITY);
    let settings = Settings { norm, clip, rate, beta1: 0.0, beta2: 0.0, decay: 0.0, epsilon, ..SETTINGS };
    let gradient = |i: usize| [0.0, 1.0, -1.0, 3.0, -100.0, 1e5, -1e7][i % 7] * 2f64.powi(-50);
    let grads: Vec<_> = (0..n).map(gradient).collect();
    let weights: Vec<_> = noise(n, 9).iter().map(|x| (x * 16.0).round() / 16.0).collect();
    let want: Vec<_> =
        weights.iter().zip(&grads).map(|(w, g)| if *g == 0.0 { *w } else { w - rate * g.signum() }).collect();
    let f32s = State::<f32> { params: rounded(&weights), ..State::new(n, false) };
    check(&f32s, &rounded(&grads), settings, &want);
    let grads = rounded::<bf16>(&grads);
    let alone = State::<bf16> { params: rounded(&weights), ..State::new(n, false) };
    let mastered = State { masters: Masters::F32(rounded(&weights)), ..alone.clone() };
    for mut state in [compact(&mastered), mastered, alone] {
        check(&state, &grads, settings, &want);
        check(&state.with_moments::<bf16>(), &grads, settings, &want);
        let parts = [Part::all(n)];
        Blocks::new(&state, &parts, 0).update(&mut state, &parts, &grads, settings);
        assert_eq!(state.exact(), want, "moments in 8 bits");
    }
}
