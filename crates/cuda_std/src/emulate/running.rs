//! The blocks of a launch that run in parallel, and may wait for each other.

use std::sync::{Condvar, Mutex, PoisonError};

/// The blocks of a launch that run in parallel.
#[derive(Default)]
pub struct Running {
    state: Mutex<State>,
    condition: Condvar,
}

#[derive(Default)]
struct State {
    /// Number of blocks that have started and not finished.
    active: usize,
    /// Number of these that have found no satisfied wait since the last change of a counter.
    waiting: usize,
    /// Number of changes.
    changes: u64,
    /// Set when all active blocks wait.
    deadlocked: bool,
}

impl Running {
    fn change(&self, active: impl FnOnce(usize) -> usize) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.active = active(state.active);
        state.waiting = 0;
        state.changes += 1;
        self.condition.notify_all();
    }

    /// Records that a block has started.
    pub fn started(&self) {
        self.change(|active| active + 1);
    }

    /// Records that a block has finished.
    pub fn finished(&self) {
        self.change(|active| active - 1);
    }

    /// Records that a counter has changed.
    pub fn changed(&self) {
        self.change(|active| active);
    }

    /// Waits until `satisfied` returns true or all active blocks wait.
    pub fn wait(&self, satisfied: impl Fn() -> bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while !satisfied() && !state.deadlocked {
            state.waiting += 1;
            if state.waiting == state.active {
                state.deadlocked = true;
                self.condition.notify_all();
            }
            let changes = state.changes;
            while state.changes == changes && !state.deadlocked {
                state = self.condition.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}
