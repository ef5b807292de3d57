//! The thread that follows the log of a run and the state of the machine, for the pages that are open. It only reads.

use super::queue::Queue;
use super::worker::SharedStatus;
use crate::gpu_info::GpuInfo;
use crate::log::SAMPLES;
use anyhow::Result;
use metrics::figure::{Figure, FigureOptions};
use metrics::report::Summary;
use metrics::run::{RunLog, SourceLog};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::watch::Sender;

/// Minimum time between two updates.
const INTERVAL: Duration = Duration::from_secs(1);
/// Number of the newest texts that the page shows, and the part of the file that is searched for them, in bytes.
const MAX_SAMPLES: usize = 5;
const SAMPLE_BYTES: u64 = 64 << 10;
/// Widths of the figure in pixels: next to the chat, and on a phone.
const WIDTHS: [f64; 2] = [760.0, 380.0];

/// The run and the model that the page shows, and their state.
pub struct Follow {
    /// The directory of a run, if the server shows one.
    pub run: Option<PathBuf>,
    /// Name of the model or the run.
    pub name: String,
    /// State of the model.
    pub status: SharedStatus,
    /// Requests that wait.
    pub queue: Arc<Queue>,
    /// Receives the state of the run, and that of model and machine, as JSON.
    pub events: [Sender<Arc<str>>; 2],
    /// The GPU whose state is shown, if there is one.
    pub gpu: Option<GpuInfo>,
}

impl Follow {
    /// Sends changes until the server ends.
    pub fn run(self) {
        let (mut seen, mut next_read) = (None, Instant::now());
        while !self.queue.is_closed() {
            let pages = self.events[1].receiver_count() > 1;
            if let Some(directory) = self.run.as_deref().filter(|_| pages && Instant::now() >= next_read) {
                let changed = stamp(directory);
                if seen.as_ref() != Some(&changed) {
                    let started = Instant::now();
                    let state = run_state(directory).unwrap_or_else(|error| json!({ "error": format!("{error:#}") }));
                    send(&self.events[0], &state);
                    seen = Some(changed);
                    // Reading a long log takes at most a fifth of the time.
                    next_read = Instant::now() + INTERVAL.max(4 * started.elapsed());
                }
            }
            if pages || self.events[1].borrow().is_empty() {
                send(&self.events[1], &self.state());
            }
            sleep(INTERVAL);
        }
    }

    /// Returns the state of the model and the machine.
    fn state(&self) -> Value {
        let model = self.status.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let gpu = self.gpu.as_ref().and_then(|gpu| gpu.line().ok());
        let gpu_memory = self.gpu.as_ref().and_then(|gpu| gpu.memory().ok());
        json!({
            "name": self.name,
            "run": self.run.is_some(),
            "model": model,
            "queued": self.queue.len(),
            "gpu": gpu,
            "gpu_memory": gpu_memory.map(|(used, total)| [used, total]),
            "memory": memory(&fs::read_to_string("/proc/meminfo").unwrap_or_default()).map(|(used, total)| [used, total]),
        })
    }
}

/// Sends a state if it differs from the last one.
fn send(to: &Sender<Arc<str>>, state: &Value) {
    let text = state.to_string();
    to.send_if_modified(|sent| {
        let changed = **sent != *text;
        if changed {
            *sent = text.into();
        }
        changed
    });
}

/// Returns what changes when a run writes: lengths and times of its files.
fn stamp(directory: &Path) -> Vec<Option<(u64, SystemTime)>> {
    let of = |name: &str| {
        let metadata = directory.join(name).metadata().ok()?;
        Some((metadata.len(), metadata.modified().ok()?))
    };
    ["main.jsonl", "main.log", SAMPLES].map(of).to_vec()
}

/// Returns final values, figures for wide and narrow screens, and newest texts of a run.
fn run_state(directory: &Path) -> Result<Value> {
    let run = RunLog::read(directory)?;
    let summary = Summary::new(&run);
    let mut cells: Vec<Value> = summary.cells().iter().map(|(name, value)| json!([name, value])).collect();
    cells.extend(run.sources.iter().map(SourceLog::cell).map(|(name, value)| json!([name, value])));
    let runs = std::slice::from_ref(&run);
    let figures = WIDTHS.map(|width| -> Result<Value> {
        let figure = Figure::new(runs, &FigureOptions { width, ..FigureOptions::default() })?;
        Ok(json!({ "svg": figure.to_svg(false), "panels": figure.panels }))
    });
    let figures = figures.into_iter().collect::<Result<Vec<Value>>>()?;
    let logged = run.steps.last().map(|step| step.time).filter(|time| time.is_finite());
    Ok(json!({
        "name": run.name,
        "cells": cells,
        "figures": figures,
        "samples": samples(&directory.join(SAMPLES)).unwrap_or_default(),
        "time": logged,
    }))
}

/// Returns the newest texts that the run has generated, the newest first. Only the end of the file is read.
fn samples(path: &Path) -> Result<Vec<Value>> {
    let mut file: File = bounded_file::open(path)?;
    let len = file.metadata()?.len();
    file.seek(SeekFrom::Start(len.saturating_sub(SAMPLE_BYTES)))?;
    let mut end = Vec::new();
    file.take(SAMPLE_BYTES).read_to_end(&mut end)?;
    let text = String::from_utf8_lossy(&end);
    Ok(text.lines().rev().filter_map(|line| serde_json::from_str(line).ok()).take(MAX_SAMPLES).collect())
}

/// Returns the used and the total memory of the machine in bytes, from `/proc/meminfo`.
fn memory(text: &str) -> Option<(u64, u64)> {
    let kib = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()
    };
    let total = kib("MemTotal")? << 10;
    Some((total.checked_sub(kib("MemAvailable")? << 10)?, total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_that_which_is_not_available() {
        let text = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    400 kB\n";
        assert_eq!(memory(text), Some((600 << 10, 1000 << 10)));
        assert_eq!(memory(""), None);
    }

    #[test]
    fn the_newest_samples_come_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(SAMPLES);
        let lines: String =
            (0..2000).map(|i| json!({ "step": i, "text": "x".repeat(60) }).to_string() + "\n").collect();
        fs::write(&path, lines + "{\"step\":2000,\"te").unwrap();
        let steps: Vec<Value> = samples(&path).unwrap().iter().map(|sample| sample["step"].clone()).collect();
        assert_eq!(steps, [1999, 1998, 1997, 1996, 1995]);
        assert!(samples(&dir.path().join("none")).is_err());
    }
}
