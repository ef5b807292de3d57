//! Flight recorder: the last collectives of a rank, for the report of a run that has lost a rank or has stopped making progress.
//!
//! The recorder of a rank that waits shows the collective that the missing rank has not joined. Comparing the files of all ranks shows
//! which rank is behind.

use super::scope::Scope;
use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use system::time;

/// Number of collectives that are kept.
const KEPT: usize = 64;

/// A collective operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the operations are those of `Communicator` and `TcpGroup`")]
pub enum Operation {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Exchange,
    Gather,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllReduce => "all-reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllGather => "all-gather",
            Self::Broadcast => "broadcast",
            Self::Exchange => "exchange",
            Self::Gather => "gather",
        })
    }
}

/// How far a collective is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// This rank waits for the others.
    Waiting,
    /// It was launched on a device, which completes it later.
    Launched,
    Done,
    Failed,
}

/// A collective in the recorder.
#[derive(Clone, Debug)]
struct Collective {
    /// Number of collectives of this rank before it. All ranks have the same order.
    sequence: u64,
    operation: Operation,
    scope: Scope,
    bytes: usize,
    /// The part of the model, for example `layer 3`, or empty.
    part: String,
    state: State,
    begun: Instant,
    ended: Option<Instant>,
}

/// The last collectives of a rank.
#[derive(Debug)]
pub struct FlightRecorder {
    start: Instant,
    recorded: Mutex<Recorded>,
}

#[derive(Debug, Default)]
struct Recorded {
    count: u64,
    /// The newest collective is the last.
    collectives: VecDeque<Collective>,
    part: String,
    /// The file into which the recorder is written when the run fails.
    file: Option<PathBuf>,
}

impl Default for FlightRecorder {
    fn default() -> Self {
        Self { start: time::now(), recorded: Mutex::default() }
    }
}

impl FlightRecorder {
    fn lock(&self) -> MutexGuard<'_, Recorded> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the file to which [`dump`](Self::dump) writes.
    pub fn set_file(&self, file: PathBuf) {
        self.lock().file = Some(file);
    }

    /// Sets the part of the model that the next collective belongs to, for example `layer 3`.
    pub fn set_part(&self, part: impl Into<String>) {
        self.lock().part = part.into();
    }

    /// Records the beginning of a collective of the ranks in `scope`. `bytes` is the size of this rank's tensor or message.
    pub fn begin(&self, operation: Operation, scope: Scope, bytes: usize) {
        let begun = time::now();
        let mut recorded = self.lock();
        let collective = Collective {
            sequence: recorded.count,
            operation,
            scope,
            bytes,
            part: std::mem::take(&mut recorded.part),
            state: State::Waiting,
            begun,
            ended: None,
        };
        recorded.count += 1;
        if recorded.collectives.len() == KEPT {
            recorded.collectives.pop_front();
        }
        recorded.collectives.push_back(collective);
    }

    /// Records the end of the collective that began last. `launched` means that a device completes it later.
    pub fn end(&self, succeeded: bool, launched: bool) {
        let ended = time::now();
        if let Some(collective) = self.lock().collectives.back_mut() {
            collective.ended = Some(ended);
            collective.state = match (succeeded, launched) {
                (false, _) => State::Failed,
                (true, true) => State::Launched,
                (true, false) => State::Done,
            };
        }
    }

    /// Returns the newest collective in words unless it is done, for example `reduce-scatter 17 of layer 3, 4096 bytes`.
    pub fn pending(&self) -> Option<String> {
        let recorded = self.lock();
        let newest = recorded.collectives.back()?;
        matches!(newest.state, State::Waiting | State::Launched).then(|| newest.to_string())
    }

    /// Writes the recorder to its file, with the `reason` as its first line. Later calls do nothing. Without a file, nothing is
    /// written.
    pub fn dump(&self, reason: &str) {
        let (text, file) = {
            let mut recorded = self.lock();
            let Some(file) = recorded.file.take() else { return };
            (self.text(&recorded, reason), file)
        };
        // The error that ends the run is reported in any case.
        let _ = system::fs::File::create(file).and_then(|mut file| file.write_all(text.as_bytes()));
    }

    fn text(&self, recorded: &Recorded, reason: &str) -> String {
        let since_start = |time: Instant| time.saturating_duration_since(self.start).as_secs_f64();
        let mut text = format!("{reason}\n\nsequence | begun (s) | duration (s) | state | collective\n");
        for collective in &recorded.collectives {
            let Collective { sequence, state, begun, ended, .. } = collective;
            let duration: Duration = ended.unwrap_or_else(time::now).saturating_duration_since(*begun);
            let state = format!("{state:?}").to_lowercase();
            let _ = writeln!(
                text,
                "{sequence} | {:.3} | {:.3} | {state} | {collective}",
                since_start(*begun),
                duration.as_secs_f64()
            );
        }
        text
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sequence, operation, scope, bytes, part, .. } = self;
        write!(f, "{operation} {sequence}")?;
        if !part.is_empty() {
            write!(f, " of {part}")?;
        }
        f.write_str(match scope {
            Scope::World => "",
            Scope::ShardGroup => " in the shard group",
            Scope::Replicas => " over the replicas",
        })?;
        write!(f, ", {bytes} bytes")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_collectives_are_kept_and_written_once() {
        let dir = tempfile::tempdir().unwrap();
        let recorder = FlightRecorder::default();
        assert_eq!(recorder.pending(), None);
        for i in 0..KEPT + 3 {
            recorder.set_part(format!("layer {i}"));
            recorder.begin(Operation::ReduceScatter, Scope::World, 4 * i);
            recorder.end(true, i % 2 == 0);
        }
        recorder.end(true, false);
        assert_eq!(recorder.pending(), None);
        recorder.begin(Operation::AllReduce, Scope::World, 16);
        assert_eq!(recorder.pending().unwrap(), format!("all-reduce {}, 16 bytes", KEPT + 3));
        let path = dir.path().join("flight");
        recorder.set_file(path.clone());
        recorder.dump("rank 1 timed out");
        recorder.dump("another fault");
        let text = std::fs::read_to_string(path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((lines[0], lines.len()), ("rank 1 timed out", 3 + KEPT));
        assert!(
            lines[3].starts_with("4 | ") && lines[3].ends_with(" | launched | reduce-scatter 4 of layer 4, 16 bytes")
        );
        assert!(lines[4].contains(" | done | reduce-scatter 5 of"), "{text}");
        assert!(lines.last().unwrap().contains(" | waiting | all-reduce 67, 16 bytes"), "{text}");
    }

    #[test]
    fn collectives_of_some_ranks_name_them() {
        let recorder = FlightRecorder::default();
        for (scope, expected) in [
            (Scope::ShardGroup, "reduce-scatter 0 of layer 3 in the shard group, 8 bytes"),
            (Scope::Replicas, "reduce-scatter 1 of layer 3 over the replicas, 8 bytes"),
        ] {
            recorder.set_part("layer 3");
            recorder.begin(Operation::ReduceScatter, scope, 8);
            assert_eq!(recorder.pending().unwrap(), expected);
        }
    }
}
