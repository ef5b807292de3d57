//! Finds the newest whole checkpoint of a run, and goes on from it.

use super::directory::{done_steps, model_name, sidecar_name, state_name};
use super::fingerprint;
use super::model_file::ModelFile;
use super::sidecar::{Identity, Sidecar};
use super::state::StateFiles;
use super::{Progress, RunState};
use anyhow::{Context, Result, bail, ensure};
use data::Loader;
use engine::Engine;
use engine::tensor::DType;
use model::{Descriptor, Gpt2};
use serde_json::{Map, Value};
use std::path::Path;

/// Settings that may change on the way, besides those of the model and the data, which are compared as such: where a run
/// computes and in which precision, what it tells, and what it keeps.
const FREE: [&str; 21] = [
    "device",
    "precision",
    "tf32",
    "gelu-fusion",
    "matmul",
    "kernels",
    "recompute",
    "zero-stage",
    "out",
    "val-every",
    "val-batches",
    "hellaswag",
    "hellaswag-examples",
    "sample-every",
    "sample-length",
    "checkpoint-every",
    "keep",
    "major-every",
    "gpu-info-every",
    "check-ranks",
    "max-bad-steps",
];

/// Settings that name the model or the data.
const NAMES: [&str; 6] = ["model", "layers", "heads", "channels", "train", "val"];

/// A whole checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    pub step: usize,
    model: ModelFile,
    state: StateFiles,
    /// llm.c writes none.
    sidecar: Option<Sidecar>,
}

/// The newest whole checkpoint, and what was found on the way to it.
#[derive(Debug, Default)]
pub struct Found {
    pub checkpoint: Option<Checkpoint>,
    /// For a person: which checkpoints are damaged, what is missing.
    pub notes: Vec<String>,
}

/// The newest whole checkpoint in a directory; none if there never was one. That all there are are damaged is an error: a run
/// that began anew would write over them.
pub fn newest(directory: &Path) -> Result<Found> {
    let mut notes = Vec::new();
    for step in done_steps(directory)?.into_iter().rev() {
        match Checkpoint::open(directory, step) {
            Ok(checkpoint) => {
                if checkpoint.sidecar.is_none() {
                    notes.push(format!(
                        "the checkpoint of step {step} has no {}, as llm.c leaves none: whether settings, data set and \
                         files are those of before is not known; averages begin anew",
                        sidecar_name(step)
                    ));
                }
                return Ok(Found { checkpoint: Some(checkpoint), notes });
            }
            Err(error) => notes.push(format!("the checkpoint of step {step} is not whole and left aside: {error:#}")),
        }
    }
    ensure!(notes.is_empty(), "there is no whole checkpoint in {}: {}", directory.display(), notes.join("; "));
    Ok(Found::default())
}

impl Checkpoint {
    /// Reads all of its files, and checks them against their checksums where there are some.
    fn open(directory: &Path, step: usize) -> Result<Self> {
        let path = directory.join(sidecar_name(step));
        let sidecar = path.exists().then(|| Sidecar::read(&path)).transpose()?;
        let check = |name: &str| match &sidecar {
            Some(sidecar) => {
                let sum = sidecar.files.iter().find(|file| file.name == name);
                sum.with_context(|| format!("{} does not know {name}", path.display()))?.check(directory)
            }
            None => Ok(()),
        };
        if let Some(sidecar) = &sidecar {
            ensure!(sidecar.step == step, "{} is of step {}", path.display(), sidecar.step);
        }
        check(&model_name(step))?;
        check(&state_name(step, 0))?;
        let model = ModelFile::open(&directory.join(model_name(step)))?;
        let state = StateFiles::open(directory, step, model.shape())?;
        (1..state.count()).try_for_each(|rank| check(&state_name(step, rank)))?;
        Ok(Self { step, model, state, sidecar })
    }

    /// One that another rank has checked.
    pub fn open_checked(directory: &Path, step: usize) -> Result<Self> {
        let path = directory.join(sidecar_name(step));
        let sidecar = path.exists().then(|| Sidecar::read(&path)).transpose()?;
        let model = ModelFile::open(&directory.join(model_name(step)))?;
        let state = StateFiles::open(directory, step, model.shape())?;
        Ok(Self { step, model, state, sidecar })
    }

    pub fn descriptor(&self) -> Descriptor {
        self.model.descriptor()
    }

    /// Whether validation and samples that are due at this step are done.
    pub fn evaluated(&self) -> bool {
        self.sidecar.as_ref().is_none_or(|sidecar| sidecar.progress.evaluated)
    }

    /// Compares what the run was with what it shall be. Returns what may have changed and did; what may not is an error,
    /// unless `force`d.
    pub fn compare(&self, now: &Identity, descriptor: Descriptor, force: bool) -> Result<Vec<String>> {
        ensure!(
            descriptor == self.descriptor(),
            "the checkpoint of step {} is of a model with {}, these settings are for one with {}",
            self.step,
            self.descriptor(),
            descriptor
        );
        let Some(Sidecar { identity: was, .. }) = &self.sidecar else { return Ok(Vec::new()) };
        let (free, mut fixed): (Vec<_>, Vec<_>) =
            changes(&was.config, &now.config).into_iter().partition(|(key, _)| FREE.contains(&&**key));
        let mut notes: Vec<String> = free.into_iter().map(|(_, change)| change).collect();
        let mut refused: Vec<String> = fixed.drain(..).map(|(_, change)| change).collect();
        refused.extend(fingerprint::difference(&was.train, &now.train).map(|change| format!("training data {change}")));
        match (&was.val, &now.val) {
            (Some(was), Some(now)) => {
                refused.extend(fingerprint::difference(was, now).map(|change| format!("validation data {change}")));
            }
            (None, Some(_)) => notes.push("validation data: was none".to_owned()),
            (Some(_), None) => notes.push("validation data: is none".to_owned()),
            (None, None) => {}
        }
        if was.engine != now.engine {
            notes.push(format!(
                "the run was on {}, is on {}: numbers may differ in their last bits",
                was.engine, now.engine
            ));
        }
        if !force && !refused.is_empty() {
            bail!(
                "the checkpoint of step {} is of a run with other settings: {}; give those, take another --out, or go on \
                 nevertheless with --force-resume",
                self.step,
                refused.join("; ")
            );
        }
        notes.append(&mut refused);
        Ok(notes)
    }

    /// Has the engine compute matrix products as before; false if it cannot.
    pub fn adopt_algorithms(&self, engine: &mut dyn Engine) -> bool {
        let algorithms = self.sidecar.as_ref().and_then(|sidecar| sidecar.algorithms.as_ref());
        algorithms.is_none_or(|algorithms| engine.adopt_algorithms(algorithms))
    }

    /// Fills what this rank keeps of a model in training, which was planned for [`descriptor`](Self::descriptor), and sends the loader where the
    /// run's next batch is. With `force`, a loader that has no such place stays where it is, with a note. The file has the
    /// place of a run of one rank; of several, each finds its own by the tokens that all have trained on, and so does a loader
    /// that does not shuffle, or has begun or ceased to.
    ///
    /// Parameters come from the model file bit for bit if it has the engine's precision. If not, they are the master weights
    /// or, without those, what the model file has, rounded to nearest where that is needed.
    pub fn load(
        mut self,
        model: &Gpt2,
        engine: &mut dyn Engine,
        loader: &mut Loader,
        total_batch: usize,
        force: bool,
        notes: &mut Vec<String>,
    ) -> Result<RunState> {
        self.load_tensors(model, engine, notes)?;
        let ranks_before = self.sidecar.as_ref().map_or(self.state.ranks, |sidecar| sidecar.identity.ranks);
        let tokens = (self.step * total_batch) as u64;
        let progress = self.sidecar.map(|sidecar| sidecar.progress);
        let trained = progress.as_ref().map_or(tokens, |progress| progress.tokens);
        let ranks = loader.ranks();
        if ranks != ranks_before {
            notes.push(format!(
                "the run was shared out to {ranks_before}, is to {ranks}: the data goes on after as many tokens as have been \
                 trained on, in the order of {ranks}"
            ));
        }
        let other_order = match loader.check_order(&self.state.data) {
            Err(error) if !force => return Err(error),
            order => order.is_err(),
        };
        // In data in order a number of tokens is a place, whatever the batch; without a sidecar that number is a guess.
        let in_order = progress.is_some() && !loader.shuffles();
        if (ranks, ranks_before) != (1, 1) || other_order || in_order {
            loader.skip_tokens(trained);
        } else if let Err(error) = loader.seek(self.state.data.clone()) {
            if !force {
                return Err(error);
            }
            notes.push(format!("the training data begins anew: {error:#}"));
        }
        Ok(RunState {
            step: self.step,
            rounding: self.state.rounding,
            rounding_before_update: self.state.rounding_before_update,
            data: loader.position(),
            progress: progress.unwrap_or(Progress { evaluated: true, tokens, ..Progress::default() }),
        })
    }

    /// Fills what this rank keeps of the tensors, as [`load`](Self::load).
    pub fn load_tensors(&mut self, model: &Gpt2, engine: &mut dyn Engine, notes: &mut Vec<String>) -> Result<()> {
        let training = model.training.context("this model was planned for inference only")?;
        self.model.load_tensors(model, engine)?;
        let masters = match training.master {
            Some(master) => Some(model.state_store(master)),
            None => (model.params.dtype == DType::F32).then(|| model.param_store()),
        };
        if training.master.is_some() && !self.state.masters() {
            notes.push("the checkpoint has no master weights: they begin as the model file's weights".to_owned());
        }
        self.state.load(model, masters, engine)
    }
}

/// Settings that differ: their key, and what to say of it.
fn changes(was: &Map<String, Value>, now: &Map<String, Value>) -> Vec<(String, String)> {
    let mut keys: Vec<&String> = was.keys().chain(now.keys().filter(|key| !was.contains_key(*key))).collect();
    keys.retain(|key| !NAMES.contains(&&***key) && was.get(*key) != now.get(*key));
    let tell = |value: Option<&Value>| match value {
        None => "not given".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
    };
    keys.into_iter()
        .map(|key| (key.clone(), format!("--{key} was {}, is {}", tell(was.get(key)), tell(now.get(key)))))
        .collect()
}
