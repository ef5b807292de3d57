//! The outcome of a run, read from its log.

use super::runs::Run;
use checkpoint::config;
use metrics::curves::training_loss;
use serde::Deserialize;
use serde_json::Value;
use std::fmt;
use std::path::Path;
use std::process::ExitStatus;

/// The end of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// All steps are done.
    Finished(Results),
    /// The run was asked to stop, or its log is incomplete.
    Stopped(String),
    /// The run ended with an error.
    Failed(String),
}

/// Measurements of a finished run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Results {
    /// The last validation loss; `None` without validation, NaN if it was not finite.
    pub val_loss: Option<f64>,
    /// The training loss of [`training_loss`]; NaN if that of the last step was not finite.
    pub train_loss: f64,
    /// Seconds of all training steps.
    pub seconds: f64,
    /// Tokens trained on.
    pub tokens: u64,
}

/// A line of `main.jsonl`: a training step, or an evaluation.
#[derive(Deserialize)]
struct Line {
    step: usize,
    /// Only training steps have a learning rate.
    lr: Option<Value>,
    #[serde(default, deserialize_with = "present")]
    val_loss: Option<Value>,
    loss: Option<f32>,
    ms: Option<f64>,
    tokens: Option<u64>,
}

/// Keeps a null, which stands for a number that is not finite.
fn present<'a, D: serde::Deserializer<'a>>(value: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(value).map(Some)
}

impl Outcome {
    /// Reads the outcome of a run that ended without an error.
    pub fn read(run: &Run) -> Self {
        let read = |name: &str| {
            bounded_file::read_to_string(&run.directory.join(name), bounded_file::TEXT).unwrap_or_default()
        };
        let config: toml::Table = toml::from_str(&read(config::FILE)).unwrap_or_default();
        let steps = config.get("steps").and_then(toml::Value::as_integer).unwrap_or_default();
        Self::of_log(&read("main.jsonl"), steps.try_into().unwrap_or_default())
    }

    /// Returns the outcome of a run of `steps` steps.
    fn of_log(log: &str, steps: usize) -> Self {
        let mut results = Results::default();
        let (mut done, mut losses) = (0, Vec::new());
        for line in log.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok()) {
            if line.lr.is_some() {
                done = line.step + 1;
                losses.push(line.loss.unwrap_or(f32::NAN));
                results.seconds += line.ms.unwrap_or_default() / 1e3;
                results.tokens = line.tokens.unwrap_or_default();
            }
            if let Some(loss) = line.val_loss {
                results.val_loss = Some(loss.as_f64().unwrap_or(f64::NAN));
            }
        }
        let last = losses.last().filter(|loss| loss.is_finite());
        results.train_loss = last.and_then(|_| training_loss(&losses)).unwrap_or(f64::NAN);
        if done == steps && steps > 0 {
            Self::Finished(results)
        } else {
            Self::Stopped(format!("stopped after {done} of {steps} steps"))
        }
    }

    /// Returns the outcome of a run that ended with an error. `output` is the file of what it printed.
    pub fn failed(output: &Path, status: ExitStatus) -> Self {
        let text = bounded_file::read(output, bounded_file::TEXT).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let error = text.lines().rev().find_map(|line| line.strip_prefix("error: "));
        Self::Failed(format!("failed: {}", error.map_or_else(|| status.to_string(), str::to_owned)))
    }

    pub const fn is_finished(&self) -> bool {
        matches!(self, Self::Finished(_))
    }

    /// Returns the key to sort runs by: finished runs first, by validation loss, then by training loss. NaN is last.
    pub fn rank(&self) -> (bool, f64, f64) {
        match self {
            Self::Finished(results) => (false, results.val_loss.unwrap_or_default(), results.train_loss),
            Self::Stopped(_) | Self::Failed(_) => (true, 0.0, 0.0),
        }
    }

    /// Returns the end of the run in words.
    pub fn status(&self) -> &str {
        match self {
            Self::Finished(_) => "finished",
            Self::Stopped(status) | Self::Failed(status) => status,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Finished(Results { val_loss: Some(loss), .. }) => write!(f, "val loss {loss:.4}"),
            Self::Finished(Results { train_loss, .. }) => write!(f, "train loss {train_loss:.4}"),
            Self::Stopped(status) | Self::Failed(status) => f.write_str(status),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = r#"{"step":0,"val_loss":5.5}
{"step":0,"loss":5.4,"lr":0.001,"norm":1.0,"ms":250.0,"tokens_per_second":100.0,"tokens":64}
{"step":1,"loss":5.0,"lr":0.001,"norm":1.0,"ms":750.0,"tokens_per_second":100.0,"tokens":128}
{"step":2,"val_loss":4.5}
{"step":2,"hellaswag":0.25,"correct":1,"examples":4}
"#;

    #[test]
    fn the_last_losses_and_the_total_time_count() {
        let expected = Results { val_loss: Some(4.5), train_loss: 5.0, seconds: 1.0, tokens: 128 };
        assert_eq!(Outcome::of_log(LOG, 2), Outcome::Finished(expected));
        assert_eq!(Outcome::of_log(LOG, 2).to_string(), "val loss 4.5000");
        let without: Vec<&str> = LOG.lines().filter(|line| !line.contains("val_loss")).collect();
        let without = without.join("\n");
        assert_eq!(Outcome::of_log(&without, 2).to_string(), "train loss 5.0000");
    }

    #[test]
    fn an_incomplete_log_is_a_stopped_run() {
        assert_eq!(Outcome::of_log(LOG, 3).status(), "stopped after 2 of 3 steps");
        assert_eq!(Outcome::of_log("", 0).status(), "stopped after 0 of 0 steps");
        assert_eq!(Outcome::of_log(&LOG[..LOG.len() / 2], 2).status(), "stopped after 1 of 2 steps");
    }

    #[test]
    fn losses_that_are_not_finite_rank_last_among_finished_runs() {
        let log = LOG.replace("4.5", "null");
        let nan = Outcome::of_log(&log, 2);
        assert_eq!(nan.to_string(), "val loss NaN");
        let good = Outcome::of_log(LOG, 2);
        let failed = Outcome::Failed("failed".to_owned());
        let before = |a: &Outcome, b: &Outcome| {
            let ((a0, a1, _), (b0, b1, _)) = (a.rank(), b.rank());
            a0.cmp(&b0).then(a1.total_cmp(&b1)).is_lt()
        };
        assert!(before(&good, &nan) && before(&nan, &failed) && before(&good, &failed) && !before(&failed, &nan));
    }
}
