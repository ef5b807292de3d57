//! Skipping of updates: always if the loss or the gradient norm is not finite, and on request if one of them is an outlier.
//!
//! The outlier rule is llm.c's: the z-score of a value within the window of the last 128 values, itself included. An outlier
//! remains in the window, because later values may be equally large; a value that is not finite is never added.
//!
//! A skipped step still counts, as in llm.c: its batch is consumed, and the learning rate schedule and t of AdamW's bias
//! correction advance.

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fmt;

/// Size of the window in values.
pub const WINDOW: usize = 128;

/// Window of the last finite values, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
struct Detector(VecDeque<f32>);

impl Detector {
    /// Adds `value` to the window and returns its z-score, (value - mean) / standard deviation. Returns `None` if the value
    /// is not finite or the window was not yet full.
    fn z(&mut self, value: f32) -> Option<f64> {
        if !value.is_finite() {
            return None;
        }
        let full = self.0.len() >= WINDOW;
        if full {
            self.0.pop_front();
        }
        self.0.push_back(value);
        full.then(|| {
            // Sums are recomputed each time: in running sums, one huge value would permanently destroy the low digits.
            let mean = self.mean_of(|x| x);
            let deviation = self.mean_of(|x| (x - mean).powi(2)).sqrt();
            if deviation == 0.0 { 0.0 } else { (f64::from(value) - mean) / deviation }
        })
    }

    fn mean_of(&self, term: impl Fn(f64) -> f64) -> f64 {
        self.0.iter().map(|&x| term(f64::from(x))).sum::<f64>() / self.0.len() as f64
    }
}

/// Limits above which an update is skipped or the run ends.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// z-score of the loss above which the update is skipped.
    pub loss_z: Option<f64>,
    /// z-score of the gradient norm above which the update is skipped.
    pub norm_z: Option<f64>,
    /// Number of consecutive non-finite steps that end the run.
    pub bad_steps: usize,
}

impl Limits {
    /// Whether the host must read loss and norm before the update. The engine itself checks whether they are finite.
    pub fn decide_before_update(&self) -> bool {
        self.loss_z.is_some() || self.norm_z.is_some()
    }
}

/// Windows and counters of a run. They are saved in checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Guards {
    loss: Detector,
    norm: Detector,
    /// Number of consecutive non-finite steps up to the latest step.
    pub bad_in_a_row: usize,
    /// Skipped updates since the start of the run.
    pub skips: Skips,
}

/// Number of skipped updates by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skips {
    /// Loss or gradient norm was not finite.
    pub not_finite: usize,
    /// Loss or gradient norm was an outlier.
    pub outliers: usize,
}

impl Guards {
    /// Returns the median of the last `steps` finite losses, the upper one of two. It does not depend on a single outlier. Returns `None` if
    /// no loss was finite.
    pub fn median_loss(&self, steps: usize) -> Option<f32> {
        let mut last: Vec<f32> = self.loss.0.iter().rev().take(steps).copied().collect();
        last.sort_unstable_by(f32::total_cmp);
        last.get(last.len() / 2).copied()
    }

    /// Decides whether the update of a step is skipped. Must be called exactly once per step, in order.
    pub fn judge(&mut self, loss: f32, norm: f32, limits: &Limits) -> Verdict {
        let (loss_z, norm_z) = (self.loss.z(loss), self.norm.z(norm));
        let above = |z: Option<f64>, limit: Option<f64>| z.zip(limit).is_some_and(|(z, limit)| z > limit);
        let skipped = if !(loss.is_finite() && norm.is_finite()) {
            self.skips.not_finite += 1;
            Some(Skipped::NotFinite)
        } else if above(loss_z, limits.loss_z) {
            Some(Skipped::Loss)
        } else if above(norm_z, limits.norm_z) {
            Some(Skipped::Norm)
        } else {
            None
        };
        self.skips.outliers += usize::from(matches!(skipped, Some(Skipped::Loss | Skipped::Norm)));
        self.bad_in_a_row = if skipped == Some(Skipped::NotFinite) { self.bad_in_a_row.saturating_add(1) } else { 0 };
        Verdict { loss_z, norm_z, skipped }
    }
}

/// Result of [`Guards::judge`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Verdict {
    /// z-score of the loss, once the window is full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_z: Option<f64>,
    /// z-score of the gradient norm, once the window is full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub norm_z: Option<f64>,
    /// Why the update was skipped, or `None` if it was applied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<Skipped>,
}

/// Why an update was skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Skipped {
    /// The loss or the gradient norm was not finite.
    NotFinite,
    /// The z-score of the loss exceeded its limit.
    Loss,
    /// The z-score of the gradient norm exceeded its limit.
    Norm,
}

impl fmt::Display for Skips {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { not_finite, outliers } = self;
        write!(f, "{not_finite} not finite, {outliers} outliers")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFF: Limits = Limits { loss_z: None, norm_z: None, bad_steps: 10 };

    /// Returns a detector with a window of 64 values of -1 and 64 values of 1.
    fn filled() -> Detector {
        let mut detector = Detector::default();
        for i in 0..128 {
            assert_eq!(detector.z(if i < 64 { -1.0 } else { 1.0 }), None, "value {i}");
        }
        detector
    }

    #[test]
    fn z_scores_are_those_computed_by_hand() {
        let mut detector = filled();
        // 63 times -1, 64 times 1 and 10: sum 11, sum of squares 227.
        let (mean, square) = (11.0f64 / 128.0, 227.0 / 128.0);
        let expected = (10.0 - mean) / (square - mean * mean).sqrt();
        let z = detector.z(10.0).unwrap();
        assert!((z - expected).abs() < 1e-12 && z > 5.0, "{z}, expected {expected}");
        // Below the mean it is negative: 62 times -1, 64 times 1, 10 and -3.
        let (mean, square) = (9.0f64 / 128.0, 235.0 / 128.0);
        let expected = (-3.0 - mean) / (square - mean * mean).sqrt();
        let z = detector.z(-3.0).unwrap();
        assert!((z - expected).abs() < 1e-12, "{z}, expected {expected}");
    }

    #[test]
    fn the_window_is_the_last_128() {
        let mut detector = filled();
        assert!(detector.z(1e30).unwrap() > 11.0);
        for i in 0..127 {
            let z = detector.z(2.0).unwrap();
            assert!((-0.1..0.0).contains(&z), "{z} after {i}");
        }
        // The huge value has left the window without a trace: 128 equal values have a z-score of 0.
        assert_eq!(detector.z(2.0), Some(0.0));
        assert_eq!(detector.0.len(), 128);
    }

    #[test]
    fn random_values_stay_within_three_deviations() {
        let mut rng = rng::Mt19937::new(5);
        let mut detector = Detector::default();
        let zs: Vec<_> = (0..256).map(|_| detector.z(rng.below(1000) as f32 / 500.0 - 1.0)).collect();
        assert!(zs[..128].iter().all(Option::is_none));
        assert!(zs[128..].iter().all(|z| z.unwrap().abs() <= 3.0), "{zs:?}");
        assert!(detector.z(10.0).unwrap() >= 5.0);
    }

    #[test]
    fn non_finite_values_are_counted_and_skipped_but_not_added_to_the_window() {
        let mut guards = Guards::default();
        guards.judge(1.0, 2.0, &OFF);
        let bad = [(f32::NAN, 3.0), (4.0, f32::INFINITY), (f32::NEG_INFINITY, f32::NAN)];
        for (i, (loss, norm)) in bad.into_iter().enumerate() {
            let verdict = guards.judge(loss, norm, &OFF);
            assert_eq!((verdict.skipped, guards.bad_in_a_row), (Some(Skipped::NotFinite), i + 1));
        }
        assert_eq!((guards.loss.0.as_slices().0, guards.norm.0.as_slices().0), (&[1.0, 4.0][..], &[2.0, 3.0][..]));
        assert_eq!(guards.judge(1.0, 2.0, &OFF).skipped, None);
        assert_eq!((guards.bad_in_a_row, guards.skips), (0, Skips { not_finite: 3, outliers: 0 }));
    }

    /// Returns guards with full windows of alternating values 0 and 1, and their verdict on the next step.
    fn judged(loss: f32, norm: f32, limits: Limits) -> (Guards, Verdict) {
        let mut guards = Guards::default();
        for i in 0..128 {
            let x = (i % 2) as f32;
            assert_eq!(guards.judge(x, x, &limits), Verdict::default());
        }
        let verdict = guards.judge(loss, norm, &limits);
        (guards, verdict)
    }

    #[test]
    fn updates_above_the_limit_are_skipped_and_the_loss_is_checked_first() {
        let limits = |loss_z, norm_z| Limits { loss_z, norm_z, ..OFF };
        let skipped = |loss, norm, limits| judged(loss, norm, limits).1.skipped;
        let both = limits(Some(5.0), Some(5.0));
        assert_eq!(skipped(9.0, 9.0, both), Some(Skipped::Loss));
        assert_eq!(skipped(9.0, 1.0, both), Some(Skipped::Loss));
        assert_eq!(skipped(1.0, 9.0, both), Some(Skipped::Norm));
        assert_eq!(skipped(1.0, 1.0, both), None);
        assert_eq!(skipped(-90.0, -90.0, both), None, "below the mean");
        assert_eq!(skipped(9.0, 9.0, OFF), None);
        assert_eq!(skipped(9.0, 1.0, limits(None, Some(5.0))), None);
        assert_eq!(skipped(9.0, 9.0, limits(Some(50.0), Some(5.0))), Some(Skipped::Norm));
        let (guards, verdict) = judged(9.0, 1.0, both);
        assert!(verdict.loss_z.unwrap() > 5.0 && verdict.norm_z.unwrap() < 2.0);
        assert_eq!((guards.skips.outliers, guards.bad_in_a_row), (1, 0));
        assert_eq!(guards.loss.0.back(), Some(&9.0), "an outlier stays in the window");
    }

    #[test]
    fn the_median_loss_is_that_of_the_last_finite_steps() {
        let mut guards = Guards::default();
        assert_eq!(guards.median_loss(3), None);
        for (loss, median) in
            [(4.0, 4.0), (5.0, 5.0), (1.0, 4.0), (f32::NAN, 4.0), (9.0, 5.0), (f32::INFINITY, 5.0), (2.0, 2.0)]
        {
            guards.judge(loss, 1.0, &OFF);
            assert_eq!(guards.median_loss(3), Some(median), "{loss}");
        }
    }

    #[test]
    fn windows_survive_a_json_round_trip_bit_for_bit() {
        let mut rng = rng::Mt19937::new(6);
        let mut guards = Guards::default();
        for _ in 0..200 {
            guards.judge(f32::from_bits(rng.below(0x7f80_0000)), rng.below(1 << 24) as f32 * 1e-6, &OFF);
        }
        let text = serde_json::to_string(&guards).unwrap();
        assert_eq!(serde_json::from_str::<Guards>(&text).unwrap(), guards);
    }
}
