//! Checkpoints: writing them during training, and resuming a run from them.
//!
//! Model and optimizer files have the formats of llm.c. A sidecar file stores what these formats cannot represent. The
//! checkpoint of step S in the directory of a run consists of:
//! ```text
//! model_SSSSSSSS.bin        model_file.rs  parameters
//! state_SSSSSSSS_RRRRR.bin  state.rs       optimizer, data loader and random number generator of rank R
//! run_SSSSSSSS.json         sidecar.rs     settings, data set, averages; size and checksum of each file
//! DONE_SSSSSSSS                            empty; marks the checkpoint as complete
//! ```
//! [`writer`] writes checkpoints while training continues. [`resume`] finds the newest complete checkpoint and loads it.
//! [`directory`] defines file names and deletes old checkpoints. [`preflight`] checks before the first step that all ranks
//! have the same program, settings and data.

#![warn(missing_docs)]

pub mod config;
pub mod directory;
pub mod fingerprint;
pub mod finite;
pub mod fp8;
pub mod model_file;
pub mod preflight;
pub mod recovery;
pub mod resume;
pub mod sidecar;
pub mod state;
pub mod tensors;
pub mod writer;

use crate::fp8::Fp8Statistics;
use data::loader::Position;
use model::digests::Digests;
use model::guards::Guards;
use rng::XorShift;
use serde::{Deserialize, Serialize};

/// The state of a run between two steps, except for its tensors.
#[derive(Clone, Debug)]
pub struct RunState {
    /// Number of completed optimizer steps.
    pub step: usize,
    /// Random number generator that seeds stochastic rounding.
    pub rounding: XorShift,
    /// The state of `rounding` before the last optimizer step.
    pub rounding_before_update: XorShift,
    /// Position of the next batch in the training data.
    pub data: Position,
    /// Statistics of the run so far.
    pub progress: Progress,
}

/// Initial state of the generator that seeds stochastic rounding.
const ROUNDING_SEED: u64 = 13_371_337;

impl RunState {
    /// Returns the state before the first step.
    pub fn fresh(data: Position) -> Self {
        let rounding = XorShift { state: ROUNDING_SEED };
        Self { step: 0, rounding, rounding_before_update: rounding, data, progress: Progress::default() }
    }
}

/// Statistics of the run so far, which the files of llm.c do not store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Whether the validation and sampling due at this step, before its update, are done.
    pub evaluated: bool,
    /// Number of tokens trained on.
    pub tokens: u64,
    /// Total time of the training steps, without evaluation and checkpoints.
    pub training_seconds: f64,
    /// Loss of the first step, if it was finite. Files of earlier versions lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_loss: Option<f32>,
    /// Validation loss before the first step.
    pub first_val_loss: Option<f64>,
    /// Average time of a step.
    #[serde(rename = "pace")]
    pub step_time: StepTimeAverage,
    /// State of the loss and gradient norm guards.
    #[serde(default)]
    pub guards: Guards,
    /// Statistics of FP8 with delayed scaling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp8: Option<Fp8Statistics>,
    /// Steps of the checkpoints that were written because of the time since the previous one, in ascending order. Newer ones
    /// replace them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub timed: Vec<usize>,
    /// The last step at which the hardware was found to be correct.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verified: Option<usize>,
    /// Hash and type of the frozen weights of a run that trains adapters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<String>,
    /// Hashes of parameters and optimizer state at this step. Empty in files of earlier versions.
    #[serde(default, skip_serializing_if = "Digests::is_empty")]
    pub hashes: Digests,
}

impl Progress {
    /// Number of checkpoints in [`timed`](Self::timed) that are kept until the end of the run.
    const TIMED_KEPT: usize = 2;

    /// Returns the timed checkpoints that a complete checkpoint replaces. At the end of the run it replaces all of them.
    pub fn replaced(&self, last: bool) -> &[usize] {
        let kept = if last { 0 } else { Self::TIMED_KEPT };
        &self.timed[..self.timed.len().saturating_sub(kept)]
    }
}

/// Average time of a training step. The first step after each start is excluded, because it is often slower.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepTimeAverage {
    /// Number of steps.
    pub steps: u32,
    /// Total seconds of these steps.
    pub seconds: f64,
    /// Exponential moving average of the seconds per step, without bias correction.
    pub average: f64,
}

impl StepTimeAverage {
    const SMOOTHING: f64 = 0.95;

    /// Adds the time of a step.
    pub fn add(&mut self, seconds: f64) {
        self.steps += 1;
        self.seconds += seconds;
        self.average += (1.0 - Self::SMOOTHING) * (seconds - self.average);
    }

    /// Returns the exponential moving average of the seconds per step, with bias correction.
    pub fn smoothed(&self) -> Option<f64> {
        (self.steps > 0).then(|| self.average / (1.0 - Self::SMOOTHING.powf(f64::from(self.steps))))
    }

    /// Returns the mean of the seconds per step over the whole run.
    pub fn mean(&self) -> Option<f64> {
        (self.steps > 0).then(|| self.seconds / f64::from(self.steps))
    }
}
