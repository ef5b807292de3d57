//! Learning rate schedules, bit-exact to those of llm.c.

use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// Shape of a schedule after warmup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// Half a cosine period from the peak to the final learning rate
    Cosine,
    /// Linear decay from the peak to the final learning rate
    Linear,
    /// The peak in every step, without warmup
    Constant,
    /// Warmup-stable-decay: the peak for 80 % of the steps, then 1 - sqrt decay
    Wsd,
    /// The peak, then linear decay to the final learning rate over the last --warmdown of the steps
    Trapezoidal,
}

/// Schedule of Muon's weight decay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WeightDecaySchedule {
    /// The same decay in every step
    #[default]
    Constant,
    /// Half a cosine period from the decay to 0 at the end of the run
    Cosine,
}

impl WeightDecaySchedule {
    /// Returns the factor of the weight decay in a step of `steps`, counted from 0.
    pub fn factor(self, step: usize, steps: usize) -> f64 {
        match self {
            Self::Constant => 1.0,
            Self::Cosine => 0.5 * (1.0 + (PI * step as f64 / steps as f64).cos()),
        }
    }
}

/// A learning rate schedule.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Shape after warmup.
    pub kind: ScheduleKind,
    /// Highest learning rate.
    pub peak: f32,
    /// Number of steps of the linear warmup from `peak / warmup` to `peak`.
    pub warmup: usize,
    /// Number of steps of the run.
    pub steps: usize,
    /// Final learning rate as a fraction of `peak`.
    pub final_fraction: f32,
    /// Fraction of the steps in which a trapezoidal schedule decays.
    pub warmdown: f64,
}

impl Schedule {
    /// Returns the learning rate of a step, counted from 0.
    pub fn at(&self, step: usize) -> f32 {
        let Self { kind, peak, warmup, steps, final_fraction, .. } = *self;
        if kind == ScheduleKind::Constant {
            return peak;
        }
        // The order of operations follows llm.c, so that the bits agree.
        if step < warmup {
            let (done, all) = ((step + 1) as f32, warmup as f32);
            return if kind == ScheduleKind::Wsd { peak * (done / all) } else { peak * done / all };
        }
        let last = peak * final_fraction;
        let share = |from: usize| ((step - from) as f32 / steps.saturating_sub(from).max(1) as f32).min(1.0);
        match kind {
            ScheduleKind::Cosine => {
                let angle = (PI * f64::from(share(warmup))) as f32;
                last + 0.5 * (1.0 + angle.cos()) * (peak - last)
            }
            ScheduleKind::Linear => peak - share(warmup) * (peak - last),
            ScheduleKind::Wsd => {
                let decay = (0.8 * steps as f32) as usize;
                if step < decay { peak } else { last + (1.0 - share(decay).sqrt()) * (peak - last) }
            }
            ScheduleKind::Trapezoidal => peak - self.warmdown_share(step) * (peak - last),
            ScheduleKind::Constant => peak,
        }
    }

    /// Returns the share of a trapezoidal schedule's decay that is over at a step, counted from 0: 0 before the decay, 1 at the end.
    pub fn warmdown_share(&self, step: usize) -> f32 {
        let Self { warmup, steps, warmdown, .. } = *self;
        // Rounded as in nanochat: ties to even.
        let decay = (steps - ((warmdown * steps as f64).round_ties_even() as usize).min(steps)).max(warmup);
        (step.saturating_sub(decay) as f32 / steps.saturating_sub(decay).max(1) as f32).min(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(kind: ScheduleKind, steps: &[usize]) -> Vec<f32> {
        let schedule = Schedule { kind, peak: 1.0, warmup: 10, steps: 110, final_fraction: 0.1, warmdown: 0.5 };
        steps.iter().map(|&s| schedule.at(s)).collect()
    }

    fn close(got: &[f32], expected: &[f32]) {
        let near = got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(near && got.len() == expected.len(), "{got:?}, expected {expected:?}");
    }

    #[test]
    fn values_agree_with_the_formulas() {
        close(&rates(ScheduleKind::Cosine, &[0, 9, 10, 60, 110]), &[0.1, 1.0, 1.0, 0.55, 0.1]);
        // 0.1 + 0.45 (1 + cos(pi / 4))
        close(&rates(ScheduleKind::Cosine, &[35]), &[0.868_198_05]);
        close(&rates(ScheduleKind::Linear, &[4, 10, 35, 110]), &[0.5, 1.0, 0.775, 0.1]);
        close(&rates(ScheduleKind::Constant, &[0, 50, 110]), &[1.0, 1.0, 1.0]);
        // Decay begins at step 88 of 110.
        close(
            &rates(ScheduleKind::Wsd, &[0, 10, 87, 88, 99, 110]),
            &[0.1, 1.0, 1.0, 1.0, 0.1 + 0.9 * (1.0 - 0.5f32.sqrt()), 0.1],
        );
    }

    #[test]
    fn a_trapezoidal_schedule_decays_in_the_last_steps() {
        // Decay begins at step 55 of 110.
        close(&rates(ScheduleKind::Trapezoidal, &[0, 9, 10, 54, 55, 66, 110]), &[0.1, 1.0, 1.0, 1.0, 1.0, 0.82, 0.1]);
        let at = |warmdown, step| {
            let kind = ScheduleKind::Trapezoidal;
            Schedule { kind, peak: 2.0, warmup: 10, steps: 20, final_fraction: 0.0, warmdown }.at(step)
        };
        close(&[at(0.0, 19), at(1.0, 10), at(1.0, 15), at(1.0, 20)], &[2.0, 2.0, 1.0, 0.0]);
    }

    /// The expected values were computed with nanochat's `get_lr_multiplier` for 1210 steps, a warmup of 40, a warmdown of 0.65 (786.5
    /// steps, rounded to 786) and a final fraction of 0.05.
    #[test]
    fn a_trapezoidal_schedule_agrees_with_nanochat() {
        let schedule = Schedule {
            kind: ScheduleKind::Trapezoidal,
            peak: 1.0,
            warmup: 40,
            steps: 1210,
            final_fraction: 0.05,
            warmdown: 0.65,
        };
        let rates = NANOCHAT_STEPS.map(|step| schedule.at(step));
        close(&rates, &NANOCHAT_RATES);
    }

    /// The expected values were computed with nanochat's `get_weight_decay` for 1210 steps and a weight decay of 1.
    #[test]
    fn the_cosine_of_weight_decay_agrees_with_nanochat() {
        let factors = NANOCHAT_STEPS.map(|step| WeightDecaySchedule::Cosine.factor(step, 1210) as f32);
        close(&factors, &NANOCHAT_DECAYS);
        assert!(
            NANOCHAT_STEPS
                .iter()
                .all(|&step| WeightDecaySchedule::Constant.factor(step, 1210).to_bits() == 1f64.to_bits())
        );
    }

    const NANOCHAT_STEPS: [usize; 9] = [0, 39, 40, 399, 424, 425, 830, 1209, 1210];
    const NANOCHAT_RATES: [f32; 9] = [0.025, 1.0, 1.0, 1.0, 1.0, 0.998_791_3, 0.509_287_5, 0.051_208_7, 0.05];
    const NANOCHAT_DECAYS: [f32; 9] =
        [1.0, 0.997_438_9, 0.997_306, 0.754_855_8, 0.726_416_7, 0.725_258_5, 0.224_242, 0.000_001_7, 0.0];

    /// The expected bits were computed with llm.c's code for 100 steps.
    #[test]
    fn bits_agree_with_llm_c() {
        let steps = [0, 1, 6, 7, 8, 40, 79, 80, 81, 99, 100];
        let peak = 0x3a1d4952;
        let rates = |kind| {
            let schedule = Schedule { kind, peak: 6e-4, warmup: 7, steps: 100, final_fraction: 0.1, warmdown: 0.5 };
            steps.map(|step| schedule.at(step).to_bits())
        };
        let cosine = [
            0x38b3c182, 0x3933c182, peak, peak, 0x3a1d3efc, 0x39eb5b34, 0x390336c2, 0x38fa374c, 0x38ee8229, 0x387c4dea,
            0x387ba883,
        ];
        assert_eq!(rates(ScheduleKind::Cosine), cosine);
        let linear = [
            0x38b3c182, 0x3933c182, peak, peak, 0x3a1bc3a8, 0x39d61cca, 0x393ec5f0, 0x3938af46, 0x3932989e, 0x388a0190,
            0x387ba880,
        ];
        assert_eq!(rates(ScheduleKind::Linear), linear);
        assert_eq!(rates(ScheduleKind::Constant), [peak; 11]);
        let wsd = [0x38b3c183, 0x3933c183, peak, peak, peak, peak, peak, peak, 0x39fb4429, 0x389a80f5, 0x387ba883];
        assert_eq!(rates(ScheduleKind::Wsd), wsd);
    }

    #[test]
    fn short_runs_stay_in_bounds() {
        for kind in [
            ScheduleKind::Cosine,
            ScheduleKind::Linear,
            ScheduleKind::Constant,
            ScheduleKind::Wsd,
            ScheduleKind::Trapezoidal,
        ] {
            for (warmup, steps) in [(0, 0), (0, 1), (5, 3), (3, 3)] {
                let schedule = Schedule { kind, peak: 1.0, warmup, steps, final_fraction: 0.0, warmdown: 0.4 };
                for step in 0..=steps {
                    assert!((0.0..=1.0).contains(&schedule.at(step)), "{kind:?} {warmup} {steps} {step}");
                }
            }
        }
    }
}
