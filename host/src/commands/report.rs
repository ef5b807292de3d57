//! What `train` prints before its first step and after its last.

use crate::data::{Geometry, Loader};
use crate::engine::Engine;
use crate::model::Descriptor;
use crate::train::{Outcome, Settings};
use std::path::Path;
use std::time::Duration;

/// Everything that was settled about a run.
pub struct Setup<'a> {
    pub settings: &'a Settings,
    pub model: String,
    pub descriptor: Descriptor,
    pub geometry: Geometry,
    pub train: &'a Loader,
    pub val: Option<&'a Loader>,
    pub engine: &'a dyn Engine,
    /// Why it is not another engine.
    pub note: Option<&'a str>,
    pub seed: u32,
}

impl Setup<'_> {
    /// A table of two columns.
    pub fn table(&self) -> String {
        let Self { settings, descriptor, geometry: Geometry { b, t, .. }, engine, .. } = self;
        let schedule = &settings.schedule;
        let float = engine.float().name();
        let data = |loader: &Loader| match loader.shards() {
            [only] => format!("{}, {} tokens", only.name(), loader.tokens()),
            [first, .., last] => {
                format!(
                    "{} … {}, {} shards, {} tokens",
                    first.name(),
                    last.name(),
                    loader.shards().len(),
                    loader.tokens()
                )
            }
            [] => String::new(),
        };
        let every = |n: Option<usize>| match n {
            None => "at the end".to_owned(),
            Some(n) => format!("every {n} steps"),
        };
        let total_batch = b * t * settings.grad_accum;
        let epochs = (settings.steps * total_batch) as f64 / self.train.tokens() as f64;
        let mut rows = vec![
            ("device", engine.describe()),
            ("model", format!("{}: {descriptor}", self.model)),
            ("parameters", format!("{}, {float}", descriptor.parameters())),
            ("training data", data(self.train)),
            ("validation data", self.val.map_or("none".to_owned(), data)),
            ("batch", format!("{b} x {t} tokens x {} = {total_batch} a step", settings.grad_accum)),
            ("steps", format!("{}, {epochs:.2} times through the data", settings.steps)),
            (
                "learning rate",
                format!(
                    "{}, peak {:.2e}, warmup {} steps, final {:.2e}",
                    format!("{:?}", schedule.kind).to_lowercase(),
                    schedule.peak,
                    schedule.warmup,
                    schedule.peak * schedule.final_fraction
                ),
            ),
            ("weight decay, clip", format!("{}, {}", settings.weight_decay, settings.clip)),
            ("seed", self.seed.to_string()),
        ];
        if let Some(note) = self.note {
            rows.insert(1, ("", note.to_owned()));
        }
        if self.val.is_some() {
            rows.push(("validation", format!("every {} steps, {} batches", settings.val_every, settings.val_batches)));
        }
        if settings.sample_tokens > 0 {
            rows.push(("samples", format!("{}, {} tokens", every(settings.sample_every), settings.sample_tokens)));
        }
        if let Some(out) = &settings.out {
            let kept = match settings.checkpoint_every {
                None => "none".to_owned(),
                Some(n) if n >= settings.steps => "at the end".to_owned(),
                Some(n) => format!("every {n} steps"),
            };
            rows.push(("output", format!("{}, model files {kept}", out.display())));
        }
        rows.iter().map(|(name, value)| format!("{name:<20} {value}")).collect::<Vec<_>>().join("\n")
    }
}

/// Totals of a run that took `wall` from its start.
pub fn summary(outcome: &Outcome, total_batch: usize, wall: Duration, out: Option<&Path>) -> String {
    let mut rows = Vec::new();
    if let Some((before, after)) = outcome.val {
        rows.push(format!("validation loss {before:.4} before, {after:.4} after"));
    }
    if let Some(step) = outcome.step {
        let rate = total_batch as f64 / step.as_secs_f64();
        rows.push(format!("{:.2} ms a step, {rate:.0} tok/s", 1e3 * step.as_secs_f64()));
    }
    rows.push(format!(
        "{} tokens in {:.1} s of training, {:.1} s in all",
        outcome.tokens,
        outcome.training.as_secs_f64(),
        wall.as_secs_f64()
    ));
    if let Some(out) = out {
        rows.push(format!("log: {0}/main.log, {0}/main.jsonl", out.display()));
    }
    rows.join("\n")
}
