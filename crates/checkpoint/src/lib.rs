//! What a run leaves behind and goes on from: model and optimizer in llm.c's formats, and what these have no room for.
//!
//! A checkpoint of step S in a run's directory:
//! ```text
//! model_SSSSSSSS.bin        model.rs     parameters
//! state_SSSSSSSS_RRRRR.bin  state.rs     optimizer, data loader and random numbers of rank R
//! run_SSSSSSSS.json         sidecar.rs   settings, data set, averages; size and checksum of each file
//! DONE_SSSSSSSS                          empty: the checkpoint is whole
//! ```
//! `writer.rs` writes them while the run goes on, `resume.rs` finds the newest that is whole, `directory.rs` knows the names
//! and deletes the old.

pub mod before;
pub mod config;
pub mod directory;
pub mod fingerprint;
pub mod model_file;
pub mod preflight;
pub mod resume;
pub mod sidecar;
pub mod state;
mod tensors;
pub mod writer;

use data::loader::Position;
use model::guards::Guards;
use rng::XorShift;
use serde::{Deserialize, Serialize};

/// Where a run stands between two steps: besides the tensors, all that the rest of it depends on.
#[derive(Clone, Debug)]
pub struct RunState {
    /// Updates done.
    pub step: usize,
    /// Seeds stochastic rounding.
    pub rounding: XorShift,
    /// The same before the last update drew from it.
    pub rounding_before_update: XorShift,
    /// Where the next batch comes from.
    pub data: Position,
    pub progress: Progress,
}

/// First state of the generator that seeds stochastic rounding.
const ROUNDING_SEED: u64 = 13_371_337;

impl RunState {
    /// Before the first step.
    pub fn fresh(data: Position) -> Self {
        let rounding = XorShift { state: ROUNDING_SEED };
        Self { step: 0, rounding, rounding_before_update: rounding, data, progress: Progress::default() }
    }
}

/// What a run knows of its own past, which llm.c's files have no room for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Whether validation and samples that are due at this step, before its update, are done.
    pub evaluated: bool,
    /// Tokens trained on.
    pub tokens: u64,
    /// Time of the training steps alone.
    pub training_seconds: f64,
    /// Validation loss before the first step.
    pub first_val_loss: Option<f64>,
    pub pace: Pace,
    #[serde(default)]
    pub guards: Guards,
}

/// Time of a step, over steps so far; the first after each start is often slower and does not count.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pace {
    pub steps: u32,
    pub seconds: f64,
    /// Exponential average of the same, before bias correction.
    pub average: f64,
}

impl Pace {
    const SMOOTHING: f64 = 0.95;

    pub fn add(&mut self, seconds: f64) {
        self.steps += 1;
        self.seconds += seconds;
        self.average += (1.0 - Self::SMOOTHING) * (seconds - self.average);
    }

    /// Seconds per step, lately.
    pub fn smoothed(&self) -> Option<f64> {
        (self.steps > 0).then(|| self.average / (1.0 - Self::SMOOTHING.powf(f64::from(self.steps))))
    }

    /// Seconds per step, over all.
    pub fn mean(&self) -> Option<f64> {
        (self.steps > 0).then(|| self.seconds / f64::from(self.steps))
    }
}
