//! Finds the newest complete checkpoint of a run and resumes from it.

use super::config;
use super::directory::{done_name, done_steps, existing_model_name, sidecar_name, state_name};
use super::fingerprint;
use super::model_file::ModelFile;
use super::sidecar::{Identity, Sidecar};
use super::state::StateFiles;
use super::{Progress, RunState};
use anyhow::{Context, Error, Result, bail, ensure};
use data::mixture::State;
use data::{Batches, Loader, Mixture};
use engine::Engine;
use engine::ops::Master;
use model::{Decoder, Descriptor};
use rustix::io::Errno;
use serde_json::{Map, Value};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Settings that name the model or the data. Their contents are compared instead.
const MODEL_AND_DATA_SETTINGS: [&str; 7] = ["model", "layers", "heads", "channels", "train", "val", "data"];

/// Settings of the data that may change with new data.
const DATA_SETTINGS: [&str; 3] = ["packing", "seed", "shuffle"];

/// The changes that a resumed run accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// None that affect the weights.
    Nothing,
    /// New training data, and new settings of them.
    Data,
    /// New data and settings.
    Everything,
}

/// A complete checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    /// Number of completed optimizer steps.
    pub step: usize,
    directory: PathBuf,
    model: ModelFile,
    state: StateFiles,
    /// `None` for checkpoints of llm.c.
    sidecar: Option<Sidecar>,
}

/// The result of the search for the newest checkpoint.
#[derive(Debug, Default)]
pub struct FoundCheckpoint {
    /// The newest complete checkpoint. `None` if there are no checkpoints.
    pub checkpoint: Option<Checkpoint>,
    /// Messages for the user about damaged checkpoints and missing files.
    pub notes: Vec<String>,
}

/// Finds the newest complete checkpoint in a directory. It is an error if all checkpoints are damaged, because a new run would
/// overwrite them.
pub fn find_newest(directory: &Path) -> Result<FoundCheckpoint> {
    let mut notes = Vec::new();
    for step in done_steps(directory)?.into_iter().rev() {
        // Errors of network file systems are often temporary.
        let open = || Checkpoint::open(directory, step);
        match open().or_else(|error| if is_damage(&error) { Err(error) } else { open() }) {
            Ok(checkpoint) => {
                if checkpoint.sidecar.is_none() {
                    notes.push(format!(
                        "the checkpoint of step {step} has no {} (llm.c writes none): settings, data set and files cannot \
                         be verified, and moving averages are reset",
                        sidecar_name(step)
                    ));
                }
                return Ok(FoundCheckpoint { checkpoint: Some(checkpoint), notes });
            }
            Err(error) if !is_damage(&error) && !is_of_disk(&error) => {
                return Err(error.context(format!(
                    "the checkpoint of step {step} cannot be read; fix the cause, or delete {} to continue from \
                     an older one",
                    directory.join(done_name(step)).display()
                )));
            }
            Err(error) => notes.push(format!("the checkpoint of step {step} is damaged and ignored: {error:#}")),
        }
    }
    ensure!(
        notes.is_empty(),
        "{}: expected a complete checkpoint, found only damaged ones: {}; restore one, or choose another --out",
        directory.display(),
        notes.join("; ")
    );
    Ok(FoundCheckpoint::default())
}

/// Returns whether an error means that a file is missing or has wrong contents.
fn is_damage(error: &Error) -> bool {
    use ErrorKind::{InvalidData, NotFound, UnexpectedEof};
    let mut errors = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    errors.all(|error| matches!(error.kind(), InvalidData | NotFound | UnexpectedEof) || error.raw_os_error().is_none())
}

/// Returns whether an error is EIO, which a defective disk returns each time.
fn is_of_disk(error: &Error) -> bool {
    let mut errors = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    errors.any(|error| Errno::from_io_error(error) == Some(Errno::IO))
}

/// Returns the path of the model file of the newest complete checkpoint in a directory. The file is not read.
pub fn newest_model_path(directory: &Path) -> Result<Option<PathBuf>> {
    let Some(step) = done_steps(directory)?.pop() else { return Ok(None) };
    Ok(Some(directory.join(existing_model_name(directory, step)?)))
}

/// Returns the model file of the newest complete checkpoint in a directory, after verifying its checksum if there is a sidecar.
pub fn newest_model_file(directory: &Path) -> Result<Option<PathBuf>> {
    let Some(step) = done_steps(directory)?.pop() else { return Ok(None) };
    let name = existing_model_name(directory, step)?;
    let (path, sidecar) = Checkpoint::open_sidecar(directory, step)?;
    if let Some(sidecar) = sidecar {
        let sum = sidecar.files.iter().find(|file| file.name == name);
        sum.with_context(|| format!("{} has no checksum of {name}", path.display()))?.verify(directory)?;
    }
    Ok(Some(directory.join(name)))
}

impl Checkpoint {
    /// Opens the files of a checkpoint and verifies their checksums, if there is a sidecar.
    fn open(directory: &Path, step: usize) -> Result<Self> {
        let (path, sidecar) = Self::open_sidecar(directory, step)?;
        let verify = |name: &str| match &sidecar {
            Some(sidecar) => {
                let sum = sidecar.files.iter().find(|file| file.name == name);
                sum.with_context(|| format!("{} has no checksum of {name}", path.display()))?.verify(directory)
            }
            None => Ok(()),
        };
        if let Some(sidecar) = &sidecar {
            ensure!(sidecar.step == step, "{}: expected step {step}, found {}", path.display(), sidecar.step);
        }
        let model_name = existing_model_name(directory, step)?;
        verify(&model_name)?;
        verify(&state_name(step, 0))?;
        let model = ModelFile::open(&directory.join(model_name))?;
        let state = StateFiles::open(directory, step, model.shape())?;
        (1..state.count()).try_for_each(|rank| verify(&state_name(step, rank)))?;
        Ok(Self { step, directory: directory.to_owned(), model, state, sidecar })
    }

    /// Opens a checkpoint that another rank has verified, without reading its files completely.
    pub fn open_verified(directory: &Path, step: usize) -> Result<Self> {
        let (_, sidecar) = Self::open_sidecar(directory, step)?;
        let model = ModelFile::open(&directory.join(existing_model_name(directory, step)?))?;
        let state = StateFiles::open(directory, step, model.shape())?;
        Ok(Self { step, directory: directory.to_owned(), model, state, sidecar })
    }

    /// Returns the path of the sidecar and its contents, if the directory lists it. A link to a file that does not exist is damage.
    fn open_sidecar(directory: &Path, step: usize) -> Result<(PathBuf, Option<Sidecar>)> {
        let name = sidecar_name(step);
        let path = directory.join(&name);
        let names = system::fs::names(directory).with_context(|| format!("cannot list {}", directory.display()))?;
        let sidecar = names.contains(&name).then(|| Sidecar::read(&path)).transpose()?;
        Ok((path, sidecar))
    }

    /// Returns the shape of the model.
    pub fn descriptor(&self) -> Descriptor {
        self.model.descriptor()
    }

    /// Returns the run's final learning rate as a fraction of the peak, if it is known.
    pub fn final_fraction(&self) -> Option<f32> {
        let config = &self.sidecar.as_ref()?.identity.config;
        config.get("final-fraction")?.as_f64().map(|fraction| fraction as f32)
    }

    /// Returns whether the validation and sampling due at this step are done.
    pub fn evaluated(&self) -> bool {
        self.sidecar.as_ref().is_none_or(|sidecar| sidecar.progress.evaluated)
    }

    /// Compares the settings and data of the checkpoint with those of the resumed run. Returns a message per permitted change: that of a
    /// setting for whose key `may_change` is true. Other changes are an error, unless they are accepted.
    pub fn check_settings(
        &self,
        now: &Identity,
        descriptor: Descriptor,
        may_change: impl Fn(&str) -> bool,
        accepted: Accepted,
    ) -> Result<Vec<String>> {
        ensure!(
            descriptor == self.descriptor(),
            "checkpoint of step {}: expected a model with {descriptor}, found one with {}; {}, or choose another --out",
            self.step,
            self.descriptor(),
            self.use_its_settings()
        );
        let Some(Sidecar { identity: was, .. }) = &self.sidecar else { return Ok(Vec::new()) };
        let (mutable, fixed): (Vec<_>, Vec<_>) =
            changes(&was.config, &now.config).into_iter().partition(|(key, _)| may_change(key));
        let mut notes: Vec<String> = mutable.into_iter().map(|(_, change)| change).collect();
        let is_data = |(key, _): &(String, String)| DATA_SETTINGS.contains(&key.as_str());
        let (of_data, fixed): (Vec<_>, Vec<_>) = fixed.into_iter().partition(is_data);
        let [mut new_data, mut refused] =
            [of_data, fixed].map(|changes| changes.into_iter().map(|(_, change)| change).collect::<Vec<String>>());
        let data_change = |what, was: &_, now: &_| {
            fingerprint::difference(was, now).map(|[was, now]| format!("{what} data was {was}, is now {now}"))
        };
        new_data.extend(data_change("training", &was.train, &now.train));
        match (&was.val, &now.val) {
            (Some(was), Some(now)) => new_data.extend(data_change("validation", was, now)),
            (None, Some(_)) => notes.push("the checkpoint's run had no validation data".to_owned()),
            (Some(_), None) => notes.push("this run has no validation data".to_owned()),
            (None, None) => {}
        }
        if was.engine != now.engine {
            notes.push(format!(
                "the device was {} and is now {}: results may differ in their last bits",
                was.engine, now.engine
            ));
        }
        let only_data = refused.is_empty();
        refused.append(&mut new_data);
        let is_accepted = match accepted {
            Accepted::Nothing => refused.is_empty(),
            Accepted::Data => only_data,
            Accepted::Everything => true,
        };
        if !is_accepted {
            bail!(
                "checkpoint of step {}: the settings have changed: {}; {}, choose another --out, or resume anyway with {}",
                self.step,
                refused.join("; "),
                self.use_its_settings(),
                if only_data { "--resume-data or --force-resume" } else { "--force-resume" }
            );
        }
        notes.append(&mut refused);
        Ok(notes)
    }

    /// Returns the flags that resume with the settings of the checkpoint, for error messages.
    fn use_its_settings(&self) -> String {
        let config = self.directory.join(config::FILE);
        if system::fs::exists(&config).unwrap_or(false) {
            format!("resume with the previous settings by --config {} --resume", config.display())
        } else {
            "use the previous settings".to_owned()
        }
    }

    /// Makes the engine use the GEMM algorithms of the checkpoint. Returns false if it cannot.
    pub fn adopt_algorithms(&self, engine: &mut dyn Engine) -> bool {
        let algorithms = self.sidecar.as_ref().and_then(|sidecar| sidecar.algorithms.as_ref());
        algorithms.is_none_or(|algorithms| engine.adopt_algorithms(algorithms))
    }

    /// Loads the tensors that this rank keeps and moves the loader to the next batch of the run. The model must have been
    /// planned for [`descriptor`](Self::descriptor) and for training.
    ///
    /// With one rank and the same shuffling, the loader seeks to the position in the file. Otherwise it skips the tokens that
    /// all ranks have trained on. If the loader cannot seek there, `new_data` makes it start at its beginning, with a message in
    /// `notes`. A mixture continues with the state in the sidecar; with `new_data` also if its sources or weights have changed.
    ///
    /// Parameters are loaded bit for bit from the model file if it has the engine's precision. Otherwise they are the master
    /// weights or, without them, those of the model file, rounded to nearest if necessary.
    pub fn load(
        mut self,
        model: &Decoder,
        engine: &mut dyn Engine,
        batches: &mut Batches,
        total_batch: usize,
        new_data: bool,
        notes: &mut Vec<String>,
    ) -> Result<RunState> {
        self.load_tensors(model, engine, notes)?;
        let tokens = (self.step * total_batch) as u64;
        let mixture = self.sidecar.as_ref().and_then(|sidecar| sidecar.mixture.as_ref());
        match batches {
            Batches::Mixture(loader) => seek_mixture(loader, mixture, new_data, notes)?,
            Batches::Shards(_) if mixture.is_some() => {
                let change =
                    "the checkpoint's run had several data sources or packed documents, and this run has neither";
                accept_data([change.to_owned()].into(), new_data, notes)?;
            }
            Batches::Shards(loader) => self.seek(loader, tokens, new_data, notes)?,
        }
        let progress = self.sidecar.map(|sidecar| sidecar.progress);
        Ok(RunState {
            step: self.step,
            rounding: self.state.rounding,
            rounding_before_update: self.state.rounding_before_update,
            data: batches.position(),
            progress: progress.unwrap_or(Progress { evaluated: true, tokens, ..Progress::default() }),
        })
    }

    /// Moves a loader of one source to the next batch. `tokens` is the number of tokens trained on, if the checkpoint does not state it.
    fn seek(&self, loader: &mut Loader, tokens: u64, new_data: bool, notes: &mut Vec<String>) -> Result<()> {
        let previous_world_size = self.sidecar.as_ref().map_or(self.state.world_size, |sidecar| sidecar.identity.ranks);
        let progress = self.sidecar.as_ref().map(|sidecar| &sidecar.progress);
        let trained = progress.map_or(tokens, |progress| progress.tokens);
        let world_size = loader.ranks();
        if world_size != previous_world_size {
            notes.push(format!(
                "the world size was {previous_world_size} and is now {world_size}: the data resumes after the tokens trained on, \
                 in the order of {world_size} ranks"
            ));
        }
        let other_order = match loader.check_order(&self.state.data) {
            Err(error) if !new_data => return Err(error),
            order => order.is_err(),
        };
        // Without shuffling the number of tokens is a position for any batch size. Without a sidecar the number is a guess.
        let in_order = progress.is_some() && !loader.shuffles();
        if (world_size, previous_world_size) != (1, 1) || other_order || in_order {
            loader.skip_tokens(trained);
        } else if let Err(error) = loader.seek(self.state.data.clone()) {
            if !new_data {
                return Err(error);
            }
            notes.push(format!("the training data starts from the beginning: {error:#}"));
        }
        Ok(())
    }

    /// Loads the tensors that this rank keeps. See [`load`](Self::load).
    pub fn load_tensors(&mut self, model: &Decoder, engine: &mut dyn Engine, notes: &mut Vec<String>) -> Result<()> {
        let training = model.training.context("the model was planned for inference only")?;
        self.model.load_tensors(model, engine)?;
        if training.master != Master::None && !self.state.has_master_weights() {
            notes.push(
                "the checkpoint has no master weights: they are initialized from the weights of the model file"
                    .to_owned(),
            );
        }
        self.state.load(model, engine)
    }
}

/// Moves a mixture to its saved state. Changed sources, weights and settings are an error, unless `new_data` is set.
fn seek_mixture(loader: &mut Mixture, saved: Option<&State>, new_data: bool, notes: &mut Vec<String>) -> Result<()> {
    let Some(saved) = saved else {
        let change = "the checkpoint's run had one data source without packing: all sources start from the beginning";
        return accept_data([change.to_owned()].into(), new_data, notes);
    };
    accept_data(loader.changes(saved), new_data, notes)?;
    loader.seek(saved)
}

/// Adds changes of the data to the notes if they are accepted.
fn accept_data(changes: Vec<String>, accepted: bool, notes: &mut Vec<String>) -> Result<()> {
    ensure!(
        accepted || changes.is_empty(),
        "training data: expected that of the checkpoint, found changes: {}; continue with the new data by --resume-data, or restore \
         the previous settings",
        changes.join("; ")
    );
    notes.extend(changes);
    Ok(())
}

/// Returns the settings that differ: the key, and a description of the change. A switch that is off equals an absent one: the
/// checkpoints of earlier versions do not have every switch.
fn changes(was: &Map<String, Value>, now: &Map<String, Value>) -> Vec<(String, String)> {
    let set = |settings: &Map<String, Value>, key: &str| settings.get(key).filter(|value| **value != false).cloned();
    let mut keys: Vec<&String> = was.keys().chain(now.keys().filter(|key| !was.contains_key(*key))).collect();
    keys.retain(|key| !MODEL_AND_DATA_SETTINGS.contains(&&***key) && set(was, key) != set(now, key));
    let describe = |value: Option<&Value>| match value {
        None => "not given".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
    };
    keys.into_iter()
        .map(|key| (key.clone(), format!("--{key} was {}, is now {}", describe(was.get(key)), describe(now.get(key)))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_new_switch_that_is_off_is_no_change() {
        let of = |settings: Value| settings.as_object().unwrap().clone();
        let old = of(json!({ "batch": 4, "tf32": true }));
        let keys = |now: Value| changes(&old, &of(now)).into_iter().map(|(key, _)| key).collect::<Vec<_>>();
        assert_eq!(keys(json!({ "batch": 4, "tf32": true, "document-mask": false })), [""; 0]);
        assert_eq!(keys(json!({ "batch": 4, "tf32": true, "document-mask": true })), ["document-mask"]);
        assert_eq!(keys(json!({ "batch": 4, "tf32": false })), ["tf32"]);
        assert_eq!(keys(json!({ "batch": 5, "tf32": true })), ["batch"]);
    }
}
