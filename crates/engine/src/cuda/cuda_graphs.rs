//! CUDA graphs of work that repeats unchanged, by key.

use crate::{GraphKey, Result};
use anyhow::{Context, bail};
use std::collections::HashMap;

/// Determines how an executor runs work that repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphAction {
    /// Launches the kernels individually.
    Launch,
    /// Captures a graph and launches it.
    Capture,
    /// Launches the captured graph.
    Replay,
}

/// The graphs of an executor; `G` is an executable graph.
pub struct CudaGraphs<G> {
    states: HashMap<u64, GraphState<G>>,
    capturing: Option<u64>,
}

enum GraphState<G> {
    /// The work has run once: its kernels are loaded, its tensor maps and GEMM plans exist.
    Warm,
    Captured(G),
    /// Capture failed; the kernels are launched individually from now on.
    Failed,
}

impl<G> Default for CudaGraphs<G> {
    fn default() -> Self {
        Self { states: HashMap::new(), capturing: None }
    }
}

impl<G> CudaGraphs<G> {
    /// Returns how the work of `key` runs now: individually the first time, then captured, then replayed.
    pub fn next_action(&mut self, key: &GraphKey) -> GraphAction {
        match self.states.get(&key.0) {
            None => {
                self.states.insert(key.0, GraphState::Warm);
                GraphAction::Launch
            }
            Some(GraphState::Warm) => GraphAction::Capture,
            Some(GraphState::Captured(_)) => GraphAction::Replay,
            Some(GraphState::Failed) => GraphAction::Launch,
        }
    }

    /// Begins the capture of a graph.
    pub fn begin_capture(&mut self, key: &GraphKey) {
        self.capturing = Some(key.0);
    }

    /// Reports whether a capture is in progress.
    pub fn is_capturing(&self) -> bool {
        self.capturing.is_some()
    }

    /// Ends the capture with its result.
    pub fn end_capture(&mut self, graph: Result<G>) -> Result<()> {
        let key = self.capturing.take().context("the graph was invalidated while it was captured")?;
        let (state, outcome) = match graph {
            Ok(graph) => (GraphState::Captured(graph), Ok(())),
            Err(error) => (GraphState::Failed, Err(error)),
        };
        self.states.insert(key, state);
        outcome
    }

    /// Returns the captured graph of a key.
    pub fn get(&mut self, key: &GraphKey) -> Result<&mut G> {
        match self.states.get_mut(&key.0) {
            Some(GraphState::Captured(graph)) => Ok(graph),
            _ => bail!("no graph was captured for {key:?}"),
        }
    }

    /// Drops all graphs: memory, tensor maps or GEMM algorithms that they refer to have changed.
    pub fn invalidate(&mut self) {
        self.states.clear();
        self.capturing = None;
    }
}
