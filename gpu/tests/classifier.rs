//! The fused classifier against an f64 softmax.

mod common;

use common::{Buffer, Tolerance, assert_close, emulate, noise, shared_bytes};
use gpu::classifier::{classifier, shared, staged};

for_both_types!(losses_and_gradients, losses_alone, infinite_logits);

const DLOSS: f64 = 0.125;

struct Case<T> {
    logits: Buffer<T>,
    losses: Buffer<f32>,
    targets: Vec<i32>,
}

impl<T: Tolerance> Case<T> {
    /// Padding columns hold values that would change every result if they counted.
    fn new(rows: usize, vocabulary: usize, padded: usize) -> Self {
        let logits = noise(rows * padded, 1)
            .iter()
            .enumerate()
            .map(|(i, x)| if i % padded < vocabulary { x * 20.0 } else { 40.0 })
            .collect::<Vec<_>>();
        let targets = (0..rows).map(|row| (row * 7919 % vocabulary) as i32).collect();
        Self { logits: Buffer::of(&logits), losses: Buffer::filled(rows, 0.5), targets }
    }

    fn run(&mut self, vocabulary: usize, padded: usize, staged: usize, gradients: bool) {
        let targets = Buffer::from_fn(self.targets.len(), |i| self.targets[i]);
        let launch = classifier(
            self.logits.view_mut(),
            self.losses.view_mut(),
            targets.view(),
            DLOSS as f32,
            vocabulary as u32,
            padded as u32,
            staged as u32,
            u32::from(gradients),
        );
        emulate(&launch, self.targets.len() as u32, shared_bytes(|layout| shared::<T>(layout, staged)));
    }

    /// The target's gradient is a difference to 1 and as exact as that; all others are as exact as they are small.
    fn assert_gradients(&self, mut want: Vec<f64>, padded: usize) {
        let mut got = self.logits.to_f64();
        for (row, &target) in self.targets.iter().enumerate() {
            let i = row * padded + target as usize;
            assert_close("target's gradient", &got[i..=i], &want[i..=i], T::ROUNDING, DLOSS);
            (got[i], want[i]) = (0.0, 0.0);
        }
        assert_close("gradients", &got, &want, T::ROUNDING.max(2e-5), 1e-6 * DLOSS);
    }

    /// Wanted losses and gradients.
    fn reference(&self, vocabulary: usize, padded: usize) -> (Vec<f64>, Vec<f64>) {
        let (mut losses, mut gradients) = (vec![], vec![]);
        for (row, &target) in self.logits.to_f64().chunks(padded).zip(&self.targets) {
            let max = row[..vocabulary].iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = row[..vocabulary].iter().map(|x| (x - max).exp()).sum();
            losses.push(0.5 + sum.ln() + max - row[target as usize]);
            gradients.extend((0..padded).map(|c| {
                let p = (row[c] - max).exp() / sum - if c == target as usize { 1.0 } else { 0.0 };
                if c < vocabulary { p * DLOSS } else { 0.0 }
            }));
        }
        (losses, gradients)
    }
}

fn losses_and_gradients<T: Tolerance>() {
    // V padded and not, shorter than a packet, rows longer than the block, rows that only partly fit in shared memory.
    for (vocabulary, padded, room) in [
        (3, 8, 1 << 20),
        (64, 64, 1 << 20),
        (517, 520, 1 << 20),
        (9001, 9088, 1 << 20),
        (9001, 9088, 9000),
        (517, 520, 0),
    ] {
        let keep = staged::<T>(padded, room, true);
        let mut case = Case::<T>::new(3, vocabulary, padded);
        let (losses, gradients) = case.reference(vocabulary, padded);
        case.run(vocabulary, padded, keep, true);
        assert_close("losses", &case.losses.to_f64(), &losses, 2e-5, 1.0);
        case.assert_gradients(gradients, padded);
        let padding =
            case.logits.to_f64().chunks(padded).flat_map(|row| row[vocabulary..].to_vec()).collect::<Vec<_>>();
        assert!(padding.iter().all(|&x| x == 0.0));
    }
}

fn losses_alone<T: Tolerance>() {
    let (vocabulary, padded) = (9001, 9088);
    let mut case = Case::<T>::new(2, vocabulary, padded);
    let (losses, _) = case.reference(vocabulary, padded);
    let before = case.logits.to_f64();
    case.run(vocabulary, padded, staged::<T>(padded, 1 << 20, false), false);
    assert_close("losses", &case.losses.to_f64(), &losses, 2e-5, 1.0);
    assert_eq!(case.logits.to_f64(), before);
}

/// Logits of -inf, even all of a thread's, have probability 0.
fn infinite_logits<T: Tolerance>() {
    let (vocabulary, padded) = (517, 520);
    let mut case = Case::<T>::new(1, vocabulary, padded);
    for c in 0..100 {
        case.logits.view_mut().set(100 + c, T::from_f32(f32::NEG_INFINITY));
    }
    let (losses, gradients) = case.reference(vocabulary, padded);
    case.run(vocabulary, padded, padded, true);
    assert_close("losses", &case.losses.to_f64(), &losses, 2e-5, 1.0);
    case.assert_gradients(gradients, padded);
}
