//! The two loaders behind one type.

use crate::loader::Position;
use crate::{Loader, Mixture, Tokens};
use anyhow::Result;
use engine::BatchLayout;

/// A source of batches.
#[derive(Clone, Debug)]
pub enum Batches {
    /// The shards of one source, in llm.c's order.
    Shards(Loader),
    /// Several sources, or packed documents.
    Mixture(Box<Mixture>),
}

impl From<Loader> for Batches {
    fn from(loader: Loader) -> Self {
        Self::Shards(loader)
    }
}

impl From<Mixture> for Batches {
    fn from(mixture: Mixture) -> Self {
        Self::Mixture(Box::new(mixture))
    }
}

impl Batches {
    /// Returns the layout of a batch.
    pub fn layout(&self) -> BatchLayout {
        match self {
            Self::Shards(loader) => loader.layout(),
            Self::Mixture(mixture) => mixture.layout(),
        }
    }

    /// Returns the shards.
    pub fn shards(&self) -> Vec<&Tokens> {
        match self {
            Self::Shards(loader) => loader.shards().iter().collect(),
            Self::Mixture(mixture) => mixture.shards().collect(),
        }
    }

    /// Returns the number of ranks that share the data.
    pub fn ranks(&self) -> usize {
        match self {
            Self::Shards(loader) => loader.ranks(),
            Self::Mixture(mixture) => mixture.geometry().ranks,
        }
    }

    /// Returns whether targets may be masked. It is the same on all ranks.
    pub fn masks_targets(&self) -> bool {
        match self {
            Self::Shards(_) => false,
            Self::Mixture(mixture) => mixture.masks_targets(),
        }
    }

    /// Returns the position of the next batch.
    pub fn position(&self) -> Position {
        match self {
            Self::Shards(loader) => loader.position(),
            Self::Mixture(mixture) => mixture.position(),
        }
    }

    /// Returns the number of batches in an epoch. That of a mixture may be an estimate.
    pub fn batches_per_epoch(&self) -> Result<usize> {
        match self {
            Self::Shards(loader) => Ok(loader.batches_per_epoch()),
            Self::Mixture(mixture) => mixture.batches_per_epoch(),
        }
    }

    /// Starts over after every `batches` batches, so that each evaluation reads the same batches.
    #[must_use]
    pub fn rewinding_after(self, batches: usize) -> Self {
        match self {
            Self::Shards(loader) => Self::Shards(loader.rewinding_after(batches)),
            Self::Mixture(mixture) => mixture.rewinding_after(batches).into(),
        }
    }

    /// Writes the documents of the batch that was read last, for attention within documents. Those of data without masks begin with the
    /// token `start`.
    pub(crate) fn set_documents(&self, layout: BatchLayout, words: &mut [i32], start: Option<u32>) {
        match (self, start) {
            (Self::Mixture(mixture), _) => layout.set_documents(words, mixture.document_starts()),
            (Self::Shards(_), Some(start)) => layout.find_documents(words, start as i32),
            (Self::Shards(_), None) => layout.set_documents(words, &vec![false; layout.b * layout.t]),
        }
    }

    /// Reads the inputs and targets of the next batch into `words`, laid out by [`layout`](Self::layout). The caller sorts the batch.
    pub fn next(&mut self, words: &mut [i32]) -> Result<()> {
        match self {
            Self::Shards(loader) => loader.next(words),
            Self::Mixture(mixture) => mixture.next(words),
        }
    }
}
