//! The curves of runs: values over steps, tokens or time, smoothed, and reduced to what a figure can show.

use crate::run::{Evaluation, RunLog, Step};
use anyhow::{Result, ensure};
use clap::ValueEnum;

/// The horizontal axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum XAxis {
    /// Optimizer steps
    #[default]
    Steps,
    /// Tokens trained on
    Tokens,
    /// Time of the training steps, without evaluations, checkpoints and pauses
    Time,
}

/// A measured value, drawn in a panel of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Metric {
    /// Training loss and validation loss
    Loss,
    /// Validation loss of each data source
    Sources,
    /// Learning rate
    Lr,
    /// L2 norm of the gradients before clipping
    Norm,
    /// Tokens per second
    Speed,
    /// Largest load of an expert, relative to the mean load
    Experts,
    /// HellaSwag accuracy
    Hellaswag,
    /// CORE: mean centered accuracy of its tasks
    Core,
}

impl Metric {
    /// All metrics, in the order of their panels.
    pub const ALL: [Self; 8] =
        [Self::Loss, Self::Sources, Self::Lr, Self::Norm, Self::Speed, Self::Experts, Self::Hellaswag, Self::Core];
}

/// Points of a curve. A value that is unknown or not finite is NaN.
pub type Points = Vec<(f64, f64)>;

/// The coordinates of a run's records on the horizontal axis.
#[derive(Clone, Debug)]
pub struct Positions {
    steps: Vec<f64>,
    axis: XAxis,
}

impl Positions {
    /// Returns the coordinates of a run. Fails if its log lacks the values of the axis.
    pub fn new(run: &RunLog, axis: XAxis) -> Result<Self> {
        let shown = run.path.display();
        let has_tokens = |tokens: Option<u64>| tokens.is_some();
        let steps: Vec<f64> = match axis {
            XAxis::Steps => run.steps.iter().map(|step| step.step as f64).collect(),
            XAxis::Tokens => {
                let mut evaluations = run.validations.iter().chain(&run.hellaswag).chain(&run.core);
                ensure!(
                    run.steps.iter().any(|step| has_tokens(step.tokens))
                        || (run.steps.is_empty() && evaluations.any(|evaluation| has_tokens(evaluation.tokens))),
                    "{shown}: expected token counts for --x tokens, found none; state them with --tokens-per-step N"
                );
                run.steps.iter().map(|step| step.tokens.map_or(f64::NAN, |tokens| tokens as f64)).collect()
            }
            XAxis::Time => {
                ensure!(
                    run.steps.iter().any(|step| step.ms.is_finite()),
                    "{shown}: expected step times for --x time, found none; use --x steps"
                );
                let mut seconds = 0.0;
                let mut elapsed = |step: &Step| {
                    seconds += if step.ms.is_finite() { f64::from(step.ms) / 1e3 } else { 0.0 };
                    seconds
                };
                run.steps.iter().map(&mut elapsed).collect()
            }
        };
        Ok(Self { steps, axis })
    }

    /// Returns a value of each training step.
    pub fn of_steps(&self, run: &RunLog, value: impl Fn(&Step) -> f32) -> Points {
        self.steps.iter().zip(&run.steps).map(|(&x, step)| (x, f64::from(value(step)))).collect()
    }

    /// Returns evaluations. They are at the end of the step before them.
    pub fn of_evaluations(&self, run: &RunLog, evaluations: &[Evaluation]) -> Points {
        let place = |evaluation: &Evaluation| match (self.axis, evaluation.tokens) {
            (XAxis::Steps, _) => evaluation.step as f64,
            (XAxis::Tokens, Some(tokens)) => tokens as f64,
            (XAxis::Tokens | XAxis::Time, _) => {
                let before = run.steps.partition_point(|step| step.step < evaluation.step);
                before.checked_sub(1).map_or(0.0, |last| self.steps[last])
            }
        };
        evaluations.iter().map(|evaluation| (place(evaluation), evaluation.value)).collect()
    }

    /// Returns the coordinate of the last training step.
    pub fn last(&self) -> Option<f64> {
        self.steps.iter().copied().rfind(|x| x.is_finite())
    }
}

/// Returns the factor of the moving average for a run of `steps` training steps: 1 - 1 / W. An average spans about W steps: one part
/// in 20 of a short run, 10 steps of a longer one, and one part in 200 of a run of more than 2,000 steps, but at most 1,000 steps.
pub fn default_smoothing(steps: usize) -> f64 {
    let steps = steps as f64;
    let window = (steps / 20.0).min(10.0).max(steps / 200.0).clamp(1.0, 1000.0);
    (1e3 * (1.0 - 1.0 / window)).round() / 1e3
}

/// Returns the training loss of a run: the moving average of the losses of its steps, at the last finite one.
pub fn training_loss(losses: &[f32]) -> Option<f64> {
    let points: Vec<(f64, f64)> = losses.iter().map(|&loss| (0.0, f64::from(loss))).collect();
    let averages = smooth(&points, default_smoothing(losses.len()));
    averages.into_iter().map(|(_, average)| average).rfind(|average| average.is_finite())
}

/// Returns exponential moving averages: each value has the weight `factor` less than the next. They are corrected for the missing
/// values before the first, as in Adam. A NaN stays NaN and has no influence on others.
pub fn smooth(points: &[(f64, f64)], factor: f64) -> Points {
    let (mut average, mut weight) = (0.0, 0.0);
    let next = |&(x, y): &(f64, f64)| {
        if !y.is_finite() {
            return (x, f64::NAN);
        }
        average = factor * average + (1.0 - factor) * y;
        weight = factor * weight + (1.0 - factor);
        (x, average / weight)
    };
    points.iter().map(next).collect()
}

/// Reduces a curve in pixels to a bounded number of points that look the same: in each column of `width` pixels the first, the
/// lowest, the highest and the last one.
///
/// The first coordinates increase. A gap in the curve stays a gap if it is wider than a column.
pub fn reduce(points: &[(f64, f64)], width: f64) -> Points {
    let column = |x: f64| (x / width).floor().to_bits();
    let mut reduced = Points::new();
    for group in points.chunk_by(|a, b| column(a.0) == column(b.0)) {
        if group.len() <= 4 {
            reduced.extend(group);
            continue;
        }
        let finite = || group.iter().enumerate().filter(|(_, (_, y))| y.is_finite());
        let at = |found: Option<(usize, &(f64, f64))>| found.map_or(0, |(at, _)| at);
        let lowest = at(finite().min_by(|(_, a), (_, b)| a.1.total_cmp(&b.1)));
        let highest = at(finite().max_by(|(_, a), (_, b)| a.1.total_cmp(&b.1)));
        let mut kept = [at(finite().next()), lowest, highest, at(finite().next_back())];
        kept.sort_unstable();
        let mut previous = None;
        for at in kept {
            if previous.replace(at) != Some(at) {
                reduced.push(group[at]);
            }
        }
    }
    reduced
}

/// The range of values that a panel shows.
///
/// Outliers, such as the losses of the first steps of a long run or a spike, would flatten the rest of the curve. Values further
/// outside the central 96 percent than the length of that range are left out.
pub fn visible_range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let mut values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    values.sort_unstable_by(f64::total_cmp);
    let (&first, &last) = (values.first()?, values.last()?);
    let skip = values.len() / 50;
    let (low, high) = (values[skip], values[values.len() - 1 - skip]);
    let margin = high - low;
    Some((first.max(low - margin), last.min(high + margin)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> RunLog {
        let text = r#"{"step":0,"val_loss":5.5}
{"step":0,"loss":5.0,"lr":0.001,"ms":500.0,"tokens":64}
{"step":1,"loss":4.0,"lr":0.001,"ms":1500.0,"tokens":128}
{"step":2,"val_loss":4.5}
"#;
        RunLog::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn evaluations_are_at_the_end_of_the_step_before_them() {
        let run = run();
        let places = |axis| {
            let positions = Positions::new(&run, axis).unwrap();
            let steps: Vec<_> = positions.of_steps(&run, |step| step.loss).into_iter().map(|(x, _)| x).collect();
            let evaluations: Vec<_> =
                positions.of_evaluations(&run, &run.validations).into_iter().map(|(x, _)| x).collect();
            (steps, evaluations)
        };
        assert_eq!(places(XAxis::Steps), (vec![0.0, 1.0], vec![0.0, 2.0]));
        assert_eq!(places(XAxis::Tokens), (vec![64.0, 128.0], vec![0.0, 128.0]));
        assert_eq!(places(XAxis::Time), (vec![0.5, 2.0], vec![0.0, 2.0]));
    }

    #[test]
    fn a_log_without_tokens_or_times_has_no_such_axis() {
        let mut log = RunLog::parse("s:0 trl:5.0 lr:0.1 norm:1\ns:4 tel:4.0\n".as_bytes()).unwrap();
        let error = |axis, log: &RunLog| Positions::new(log, axis).unwrap_err().to_string();
        assert!(error(XAxis::Tokens, &log).contains("--tokens-per-step"));
        assert!(error(XAxis::Time, &log).contains("use --x steps"));
        log.assume_tokens_per_step(100);
        let positions = Positions::new(&log, XAxis::Tokens).unwrap();
        assert_eq!(positions.last(), Some(100.0));
        assert_eq!(positions.of_evaluations(&log, &log.validations), [(400.0, 4.0)]);
    }

    #[test]
    fn averages_are_corrected_for_their_start_and_skip_nan() {
        let points = [(0.0, 4.0), (1.0, f64::NAN), (2.0, 2.0)];
        let smoothed = smooth(&points, 0.5);
        assert_eq!(smoothed[0], (0.0, 4.0));
        assert!(smoothed[1].1.is_nan());
        // (0.5 * 0.5 * 4 + 0.5 * 2) / 0.75
        assert!((smoothed[2].1 - 2.0 / 0.75).abs() < 1e-12);
        assert_eq!(smooth(&points[..1], 0.0), points[..1]);
    }

    #[test]
    fn long_runs_are_smoothed_more() {
        let factors = [0, 20, 40, 100, 400, 20_000, 1_000_000].map(default_smoothing);
        assert_eq!(format!("{factors:?}"), "[0.0, 0.0, 0.5, 0.8, 0.9, 0.99, 0.999]");
    }

    #[test]
    fn the_training_loss_follows_a_falling_loss() {
        // An average over W values of a line lags W - 1 values behind it.
        for steps in [2_u16, 20, 60, 200, 1500] {
            let losses: Vec<f32> = (0..steps).map(|step| 5.0 - f32::from(step) / f32::from(steps)).collect();
            let lag = training_loss(&losses).unwrap() - f64::from(losses[losses.len() - 1]);
            assert!((0.0..0.05).contains(&lag), "{steps} steps: {lag}");
        }
        assert_eq!(training_loss(&[3.0, f32::NAN]), Some(3.0));
        assert_eq!(training_loss(&[]), None);
    }

    #[test]
    fn reduced_curves_keep_extremes() {
        let points: Points = (0..100_000).map(|i| (f64::from(i) / 1000.0, f64::from(i % 7))).collect();
        let mut spiked = points.clone();
        spiked[5555].1 = 99.0;
        let reduced = reduce(&spiked, 1.0);
        assert!(reduced.len() <= 400, "{}", reduced.len());
        assert!(reduced.contains(&spiked[5555]) && reduced[0] == spiked[0] && reduced.last() == spiked.last());
        assert!(reduced.windows(2).all(|pair| pair[0].0 < pair[1].0));
        let gap: Points =
            (0..1000).map(|i| (f64::from(i) / 10.0, if (300..600).contains(&i) { f64::NAN } else { 1.0 })).collect();
        assert!(reduce(&gap, 1.0).iter().any(|(_, y)| y.is_nan()));
    }

    #[test]
    fn outliers_do_not_widen_the_range() {
        let mut values: Vec<f64> = (0..1000).map(|i| 3.0 + f64::from(i % 100) / 100.0).collect();
        assert_eq!(visible_range(values.iter().copied()), Some((3.0, 3.99)));
        values[0] = 1e30;
        values[1] = f64::NAN;
        let (low, high) = visible_range(values.iter().copied()).unwrap();
        assert!((3.0..3.01).contains(&low) && (4.0..5.0).contains(&high), "{low} {high}");
        assert_eq!(visible_range([1.0, 9.0].into_iter()), Some((1.0, 9.0)));
        assert_eq!(visible_range([f64::NAN].into_iter()), None);
    }
}
