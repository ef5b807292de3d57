//! What an executor has recorded of work that comes again and again.

use super::executor::Turn;
use crate::{Recurring, Result};
use anyhow::{Context, bail};
use std::collections::HashMap;

/// `R` is a recording that can be replayed.
pub struct Recordings<R> {
    known: HashMap<u64, Known<R>>,
    under_way: Option<u64>,
}

enum Known<R> {
    /// It has been queued: what it needs is loaded, prepared and decided.
    Queued,
    Recorded(R),
    /// It cannot be recorded, and is queued each time.
    Refused,
}

impl<R> Default for Recordings<R> {
    fn default() -> Self {
        Self { known: HashMap::new(), under_way: None }
    }
}

impl<R> Recordings<R> {
    /// What to do about work that comes now.
    pub fn turn(&mut self, work: &Recurring) -> Turn {
        match self.known.get(&work.0) {
            None => {
                self.known.insert(work.0, Known::Queued);
                Turn::Queue
            }
            Some(Known::Queued) => Turn::Record,
            Some(Known::Recorded(_)) => Turn::Replay,
            Some(Known::Refused) => Turn::Queue,
        }
    }

    /// What is queued from here on is recorded.
    pub fn start(&mut self, work: &Recurring) {
        self.under_way = Some(work.0);
    }

    pub fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// The end of what is recorded, with what it has become.
    pub fn finish(&mut self, recording: Result<R>) -> Result<()> {
        let work = self.under_way.take().context("what it needs has changed meanwhile")?;
        let (known, outcome) = match recording {
            Ok(recording) => (Known::Recorded(recording), Ok(())),
            Err(error) => (Known::Refused, Err(error)),
        };
        self.known.insert(work, known);
        outcome
    }

    pub fn get(&mut self, work: &Recurring) -> Result<&mut R> {
        match self.known.get_mut(&work.0) {
            Some(Known::Recorded(recording)) => Ok(recording),
            _ => bail!("{work:?} has not been recorded"),
        }
    }

    /// Something that recordings name is no longer what it was: memory, tensor maps, how products are computed.
    pub fn forget(&mut self) {
        self.known.clear();
        self.under_way = None;
    }
}
