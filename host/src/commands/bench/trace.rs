//! The trace of a step in the Trace Event Format of Chrome, which <https://ui.perfetto.dev> and `chrome://tracing` open: one process
//! for each rank, one thread for each stream. Times are in microseconds.

use crate::output::{Kind, Mark};
use anyhow::Context;
use engine::{Interval, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;

/// The file of [`write`], whose keys are sorted.
pub const TRACE: Kind =
    Kind { name: "a trace of bench", mark: Mark::Start(&[br#"{"displayTimeUnit":"ms","otherData":{"#]) };

/// The work of a rank during a step. Times begin at the start of the step on this rank, right after a barrier.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankTrace {
    /// The engine, for example `NVIDIA H200, sm_90a cubin`.
    pub device: String,
    /// Names of streams and their intervals.
    pub streams: Vec<(String, Vec<Interval>)>,
}

/// Writes the trace of all ranks, in rank order.
pub fn write(path: &Path, ranks: &[RankTrace], settings: &Value) -> Result<()> {
    let trace = json!({"traceEvents": events(ranks), "displayTimeUnit": "ms", "otherData": settings});
    atomic_file::write(path, |mut file| {
        serde_json::to_writer(&mut file, &trace)?;
        Ok(file.write_all(b"\n")?)
    })
    .with_context(|| format!("--trace: cannot write {}", path.display()))
}

fn events(ranks: &[RankTrace]) -> Vec<Value> {
    let mut events = Vec::new();
    for (pid, rank) in ranks.iter().enumerate() {
        let name = format!("rank {pid}: {}", rank.device);
        events.push(json!({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}));
        for (tid, (stream, intervals)) in rank.streams.iter().enumerate() {
            events.push(json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": stream}}));
            events.extend(intervals.iter().map(|Interval { name, begin, end }| {
                json!({"ph": "X", "name": name, "cat": stream, "pid": pid, "tid": tid, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)})
            }));
        }
    }
    events
}
