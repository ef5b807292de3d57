//! A loader that mixes several sources, and packs documents into rows.
//!
//! The data are a sequence of rows of T + 1 tokens: T inputs, and the same tokens shifted by one as targets. Each batch takes the next
//! `ranks * B` rows, of which rank `r` reads rows `r * B` to `(r + 1) * B`. The rows of a step therefore depend neither on the
//! number of ranks nor on the size of a micro-batch.
//!
//! The `schedule` module chooses the source of each row, the `order` module the windows or documents of a source, and the `packer`
//! module the documents of a row. All of this is a function of the settings, the lengths of the documents and the number of the row.
//! [`State`] is what a checkpoint needs to continue.
//!
//! [`Loader`](crate::Loader) reads a single source in llm.c's order.

mod documents;
mod order;
mod packer;
mod schedule;
mod source;
#[cfg(test)]
mod tests;

pub use documents::Document;
pub use order::Cursor;
pub use packer::Counts;
pub use source::{Estimate, SourceState};

use crate::Tokens;
use crate::loader::{Geometry, Position};
use anyhow::{Result, bail, ensure};
use engine::{BatchLayout, MASKED_TARGET};
use schedule::next_source;
use serde::{Deserialize, Serialize};
use source::{Reader, Row};
use std::sync::Arc;

/// How the tokens of a source become rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packing {
    /// Consecutive windows, which may begin and end inside documents.
    #[default]
    Stream,
    /// Whole documents; the last one of a row is cropped.
    BestFit,
    /// Whole documents; the rest of a row is masked.
    Pad,
}

/// A source of a mixture.
#[derive(Clone, Debug)]
pub struct Source {
    /// Name, which also determines the order of the source.
    pub name: String,
    /// The token files.
    pub shards: Vec<Tokens>,
    /// Share of the rows, relative to the other sources.
    pub weight: f64,
    /// Number of epochs after which the other sources take the share of this one.
    pub max_epochs: Option<u32>,
}

/// Checks the weights and the names of sources.
pub fn check_sources(sources: &[Source]) -> Result<()> {
    for (i, Source { name, weight, .. }) in sources.iter().enumerate() {
        ensure!(
            weight.is_finite() && *weight >= 0.0,
            "data source {name}: expected a finite weight of at least 0, found {weight}; correct it"
        );
        ensure!(
            sources[..i].iter().all(|other| other.name != *name),
            "data source {name}: expected a name of its own, found two sources with this name; rename one"
        );
    }
    ensure!(
        sources.iter().any(|source| source.weight > 0.0),
        "data sources: expected a weight above 0, found none; give at least one source a weight"
    );
    Ok(())
}

/// The settings that all sources share.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The shape of a micro-batch, and the rank that reads it.
    pub geometry: Geometry,
    /// Every token must be below this.
    pub vocab: usize,
    /// Seed of the shuffle; `None` reads shards, windows and documents in order.
    pub shuffle: Option<u32>,
    /// How tokens become rows.
    pub packing: Packing,
    /// The token that precedes each document in sources without masks. [`Packing::Stream`] does not need it.
    pub separator: Option<u32>,
}

/// The state of a mixture between two batches. It is the same on all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// How tokens become rows.
    pub packing: Packing,
    /// Tokens in a sequence.
    pub seq: usize,
    /// Seed of the shuffle.
    pub shuffle: Option<u32>,
    /// The sources.
    pub sources: Vec<SourceState>,
}

/// Reads batches from several sources.
#[derive(Clone, Debug)]
pub struct Mixture {
    settings: Settings,
    readers: Vec<Reader>,
    /// The documents of the current row.
    documents: Vec<Document>,
    /// The tokens of the current row.
    row: Row,
    /// Whether each input (B, T) of the last batch begins a document.
    begins: Vec<bool>,
    /// Number of batches after which the mixture starts over.
    rewind_after: Option<usize>,
    batches_since_rewind: usize,
}

impl Mixture {
    /// Creates a loader at the first row.
    pub fn new(sources: Vec<Source>, settings: Settings) -> Result<Self> {
        let Geometry { b, t, .. } = settings.geometry;
        check_sources(&sources)?;
        let readers = sources.into_iter().map(|source| Reader::new(source, &settings)).collect::<Result<_>>()?;
        Ok(Self {
            settings,
            readers,
            documents: Vec::new(),
            row: Row::new(t),
            begins: vec![false; b * t],
            rewind_after: None,
            batches_since_rewind: 0,
        })
    }

    /// Starts over after every `batches` batches, so that each evaluation reads the same batches. Rows after the last epoch are padding.
    #[must_use]
    pub fn rewinding_after(mut self, batches: usize) -> Self {
        self.rewind_after = Some(batches);
        self
    }

    /// Returns the number of batches in an epoch of all sources. The last batch may not be full. The number may be an estimate.
    pub fn batches_per_epoch(&self) -> Result<usize> {
        let rows: f64 = self.estimates()?.iter().map(|estimate| estimate.rows).sum();
        let Geometry { b, ranks, .. } = self.settings.geometry;
        Ok((rows.round() as usize).div_ceil(ranks * b))
    }

    /// Returns the layout of a batch.
    pub fn layout(&self) -> BatchLayout {
        BatchLayout::new(self.settings.geometry.b, self.settings.geometry.t)
    }

    /// Returns the geometry of a batch.
    pub fn geometry(&self) -> Geometry {
        self.settings.geometry
    }

    /// Returns how tokens become rows.
    pub fn packing(&self) -> Packing {
        self.settings.packing
    }

    /// Returns whether targets may be masked.
    pub fn masks_targets(&self) -> bool {
        self.settings.packing == Packing::Pad || self.readers.iter().any(|reader| reader.is_masked)
    }

    /// Returns whether each input (B, T) of the batch that was read last begins a document.
    pub fn document_starts(&self) -> &[bool] {
        &self.begins
    }

    /// Returns whether the sources are shuffled.
    pub fn shuffles(&self) -> bool {
        self.settings.shuffle.is_some()
    }

    /// Returns the shards of all sources.
    pub fn shards(&self) -> impl Iterator<Item = &Tokens> {
        self.readers.iter().flat_map(|reader| &reader.shards)
    }

    /// Returns the state before the next batch.
    pub fn state(&self) -> State {
        let Settings { packing, geometry, shuffle, .. } = self.settings;
        let sources = self.readers.iter().map(|reader| reader.state.clone()).collect();
        State { packing, seq: geometry.t, shuffle, sources }
    }

    /// Returns the position of the next batch.
    pub fn position(&self) -> Position {
        Position { shard: 0, sample: 0, shuffle: None, mixture: Some(Arc::new(self.state())) }
    }

    /// Describes the settings that differ from those of a state.
    pub fn changes(&self, was: &State) -> Vec<String> {
        let now = self.state();
        let mut changes = Vec::new();
        if (was.packing, was.seq, was.shuffle) != (now.packing, now.seq, now.shuffle) {
            changes.push("the packing, the sequence length or the shuffle has changed".to_owned());
        }
        let of = |state: &State, name: &str| state.sources.iter().find(|source| source.name == name).cloned();
        let names = was.sources.iter().chain(now.sources.iter().filter(|source| of(was, &source.name).is_none()));
        for SourceState { name, .. } in names {
            changes.extend(match (of(was, name), of(&now, name)) {
                (Some(was), Some(now)) => was.change(&now),
                (None, _) => Some(format!("data source {name} is new")),
                (_, None) => Some(format!("data source {name} was removed")),
            });
        }
        let order = |state: &State| state.sources.iter().map(|source| source.name.clone()).collect::<Vec<_>>();
        if changes.is_empty() && order(was) != order(&now) {
            changes.push("the order of the data sources has changed".to_owned());
        }
        changes
    }

    /// Moves to a state. Sources continue after their last rows; new sources begin. If the data of a source or the packing has changed,
    /// the source begins its next epoch. If the weights have changed, they apply from here on.
    pub fn seek(&mut self, state: &State) -> Result<()> {
        let now = self.state();
        let same_rows = (state.packing, state.seq, state.shuffle) == (now.packing, now.seq, now.shuffle);
        let shares = |state: &State| -> Vec<(String, f64, Option<u32>)> {
            state.sources.iter().map(|source| (source.name.clone(), source.weight, source.max_epochs)).collect()
        };
        let same_shares = shares(state) == shares(&now);
        for reader in &mut self.readers {
            reader.state = reader.state.begun();
            let Some(saved) = state.sources.iter().find(|saved| saved.name == reader.state.name) else { continue };
            reader.seek(saved, same_rows)?;
            if !same_shares {
                (reader.state.phase_rows, reader.state.exhausted) = (0, false);
            }
        }
        Ok(())
    }

    /// Reads the inputs and targets of the next batch into `words`, laid out by [`layout`](Self::layout). The caller sorts the batch.
    /// Targets in padding, and those without loss, are masked.
    pub fn next(&mut self, words: &mut [i32]) -> Result<()> {
        let Geometry { b, t, ranks, rank } = self.settings.geometry;
        if self.rewind_after == Some(self.batches_since_rewind) {
            self.batches_since_rewind = 0;
            self.readers.iter_mut().for_each(|reader| reader.state = reader.state.begun());
        }
        self.batches_since_rewind += 1;
        let (inputs, targets) = (self.layout().inputs().start, self.layout().targets().start);
        for row in 0..ranks * b {
            let source = self.next_row()?;
            let Some(at) = row.checked_sub(rank * b).filter(|&row| row < b).map(|row| row * t) else { continue };
            match source {
                Some(source) => self.readers[source].read(&self.documents, &mut self.row, self.settings.vocab)?,
                // The last batch of an evaluation.
                None if self.rewind_after.is_some() => self.row.pad(self.settings.separator.unwrap_or(0)),
                None => {
                    let rows: u64 = self.readers.iter().map(|reader| reader.state.rows).sum();
                    bail!(
                        "training data: all sources have reached their max_epochs after {rows} sequences; raise max_epochs, or use \
                         fewer --steps"
                    );
                }
            }
            let Row { tokens, has_loss, begins } = &self.row;
            // Ids are below the vocabulary size, which fits into an i32.
            words[inputs + at..][..t].iter_mut().zip(tokens).for_each(|(to, from)| *to = *from as i32);
            for ((to, from), has_loss) in words[targets + at..][..t].iter_mut().zip(&tokens[1..]).zip(&has_loss[1..]) {
                *to = if *has_loss { *from as i32 } else { MASKED_TARGET };
            }
            self.begins[at..][..t].copy_from_slice(&begins[..t]);
        }
        Ok(())
    }

    /// Chooses the source and the documents of the next row. Returns `None` after the last row.
    fn next_row(&mut self) -> Result<Option<usize>> {
        loop {
            let weight = |reader: &Reader| if reader.state.exhausted { 0.0 } else { reader.state.weight };
            let weights: Vec<f64> = self.readers.iter().map(weight).collect();
            let rows: Vec<u64> = self.readers.iter().map(|reader| reader.state.phase_rows).collect();
            let Some(source) = next_source(&weights, &rows) else { return Ok(None) };
            let reader = &mut self.readers[source];
            if reader.next_row(&mut self.documents)? {
                reader.state.rows += 1;
                reader.state.phase_rows += 1;
                return Ok(Some(source));
            }
            // From here on, the other sources share the rows by their weights.
            reader.state.exhausted = true;
            self.readers.iter_mut().for_each(|reader| reader.state.phase_rows = 0);
        }
    }

    /// Estimates what the sources provide in an epoch.
    pub fn estimates(&self) -> Result<Vec<Estimate>> {
        self.readers.iter().map(Reader::estimate).collect()
    }

    /// Returns the rows of each source in a run of `rows` rows, given the `estimates` of an epoch, and how many rows are missing because
    /// all sources reach their `max_epochs` before.
    pub fn rows_of_run(&self, estimates: &[Estimate], rows: u64) -> (Vec<f64>, f64) {
        let limit = |(reader, estimate): (&Reader, &Estimate)| {
            reader.state.max_epochs.map_or(f64::INFINITY, |epochs| f64::from(epochs) * estimate.rows)
        };
        let limits: Vec<f64> = self.readers.iter().zip(estimates).map(limit).collect();
        let mut weights: Vec<f64> = self.readers.iter().map(|reader| reader.state.weight).collect();
        let mut used = vec![0.0; weights.len()];
        let mut left = rows as f64;
        while left > 0.5 && weights.iter().any(|&weight| weight > 0.0) {
            let total: f64 = weights.iter().sum();
            let until =
                |i: usize| if weights[i] > 0.0 { (limits[i] - used[i]) * total / weights[i] } else { f64::INFINITY };
            let first = (0..weights.len()).min_by(|&a, &b| until(a).total_cmp(&until(b))).unwrap_or_default();
            let phase = until(first).min(left);
            used.iter_mut().zip(&weights).for_each(|(used, weight)| *used += phase * weight / total);
            if phase < left {
                weights[first] = 0.0;
            }
            left -= phase;
        }
        (used, left.max(0.0))
    }

    /// Returns the sources: their states, which contain name and weight, and their numbers of tokens.
    pub fn sources(&self) -> impl Iterator<Item = &SourceState> {
        self.readers.iter().map(|reader| &reader.state)
    }
}
