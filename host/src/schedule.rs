//! Learning rates over a run.

use serde::{Deserialize, Serialize};
use std::f32::consts::PI;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Half a cosine, from the peak to the end
    Cosine,
    /// A straight line from the peak to the end
    Linear,
    /// The peak throughout, warmup included
    Constant,
    /// Warmup, stable, decay: the peak until 80 % of the steps, then down with the square root
    Wsd,
}

#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    pub kind: Kind,
    /// Highest learning rate.
    pub peak: f32,
    /// Steps over which it rises from `peak / warmup`.
    pub warmup: usize,
    pub steps: usize,
    /// Last learning rate, as a fraction of `peak`.
    pub final_fraction: f32,
}

impl Schedule {
    /// Learning rate of a step, counted from 0.
    pub fn at(&self, step: usize) -> f32 {
        let Self { kind, peak, warmup, steps, final_fraction } = *self;
        if kind == Kind::Constant {
            return peak;
        }
        if step < warmup {
            return peak * (step + 1) as f32 / warmup as f32;
        }
        let last = peak * final_fraction;
        let share = |from: usize| ((step - from) as f32 / steps.saturating_sub(from).max(1) as f32).min(1.0);
        match kind {
            Kind::Cosine => last + 0.5 * (1.0 + (PI * share(warmup)).cos()) * (peak - last),
            Kind::Linear => peak - share(warmup) * (peak - last),
            Kind::Wsd => {
                let decay = (0.8 * steps as f64) as usize;
                if step < decay { peak } else { last + (1.0 - share(decay).sqrt()) * (peak - last) }
            }
            Kind::Constant => peak,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(kind: Kind, steps: &[usize]) -> Vec<f32> {
        let schedule = Schedule { kind, peak: 1.0, warmup: 10, steps: 110, final_fraction: 0.1 };
        steps.iter().map(|&s| schedule.at(s)).collect()
    }

    fn close(got: &[f32], expected: &[f32]) {
        let near = got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(near && got.len() == expected.len(), "{got:?}, expected {expected:?}");
    }

    #[test]
    fn values_are_llm_cs() {
        close(&rates(Kind::Cosine, &[0, 9, 10, 60, 110]), &[0.1, 1.0, 1.0, 0.55, 0.1]);
        // 0.1 + 0.45 (1 + cos(pi / 4))
        close(&rates(Kind::Cosine, &[35]), &[0.868_198_05]);
        close(&rates(Kind::Linear, &[4, 10, 35, 110]), &[0.5, 1.0, 0.775, 0.1]);
        close(&rates(Kind::Constant, &[0, 50, 110]), &[1.0, 1.0, 1.0]);
        // Decay begins at step 88 of 110.
        close(
            &rates(Kind::Wsd, &[0, 10, 87, 88, 99, 110]),
            &[0.1, 1.0, 1.0, 1.0, 0.1 + 0.9 * (1.0 - 0.5f32.sqrt()), 0.1],
        );
    }

    #[test]
    fn short_runs_stay_in_bounds() {
        for kind in [Kind::Cosine, Kind::Linear, Kind::Constant, Kind::Wsd] {
            for (warmup, steps) in [(0, 0), (0, 1), (5, 3), (3, 3)] {
                let schedule = Schedule { kind, peak: 1.0, warmup, steps, final_fraction: 0.0 };
                for step in 0..=steps {
                    assert!((0.0..=1.0).contains(&schedule.at(step)), "{kind:?} {warmup} {steps} {step}");
                }
            }
        }
    }
}
