//! Prefetching of batches on a background thread.

use super::Batches;
use super::loader::Position;
use anyhow::{Context, Result};
use engine::tensor::Tensor;
use engine::{BatchLayout, Engine, HostBuffer};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

/// Number of host buffers, and so the largest number of prefetched batches.
const DEPTH: usize = 3;

/// Runs a loader on a background thread, which reads, checks and sorts batches in the engine's (pinned) host buffers.
#[derive(Debug)]
pub struct Prefetch {
    layout: BatchLayout,
    masks_targets: bool,
    // `Option`s, because `drop` closes the channels before it joins the thread.
    batches: Option<Receiver<Result<PreparedBatch>>>,
    free_buffers: Option<Sender<HostBuffer>>,
    thread: Option<JoinHandle<()>>,
}

/// The mark that begins a document: the flags of a mask, or the document token in data without masks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DocumentStart {
    /// The token. Data with masks do not need one.
    pub token: Option<u32>,
}

struct PreparedBatch {
    words: HostBuffer,
    loaded: LoadedBatch,
}

/// A batch that was loaded.
#[derive(Clone, Debug)]
pub struct LoadedBatch {
    /// Number of targets that are not masked.
    pub targets: usize,
    /// Tokens of each sequence, or of each document if attention stays within documents.
    pub document_lengths: Vec<usize>,
    /// The position of the batch after this one.
    pub next_position: Position,
}

impl Prefetch {
    /// Starts the thread, with host buffers from `engine`.
    pub fn start(loader: impl Into<Batches>, engine: &dyn Engine) -> Result<Self> {
        Self::start_with_documents(loader, engine, None)
    }

    /// Does the same as [`start`](Self::start), for attention within documents if `documents` states what begins a document.
    pub fn start_with_documents(
        loader: impl Into<Batches>,
        engine: &dyn Engine,
        documents: Option<DocumentStart>,
    ) -> Result<Self> {
        let mut loader = loader.into();
        let (mut layout, masks_targets) = (loader.layout(), loader.masks_targets());
        if documents.is_some() {
            layout = layout.with_documents();
        }
        let (batch_sender, batches) = channel();
        let (free_buffers, buffer_receiver) = channel::<HostBuffer>();
        for _ in 0..DEPTH {
            free_buffers.send(engine.host_buffer(layout.words())?).expect("the receiver has not been dropped");
        }
        let read_ahead = move || {
            for mut words in buffer_receiver {
                let batch = loader.next(&mut words).map(|()| {
                    layout.sort(&mut words);
                    if let Some(DocumentStart { token }) = documents {
                        loader.set_documents(layout, &mut words, token);
                    }
                    let loaded = LoadedBatch {
                        targets: layout.count_targets(&words),
                        document_lengths: layout.document_lengths(&words),
                        next_position: loader.position(),
                    };
                    PreparedBatch { words, loaded }
                });
                let failed = batch.is_err();
                if batch_sender.send(batch).is_err() || failed {
                    return;
                }
            }
        };
        let thread = thread::Builder::new()
            .name("loader".into())
            .spawn(read_ahead)
            .context("cannot start the data loader thread")?;
        Ok(Self {
            layout,
            masks_targets,
            batches: Some(batches),
            free_buffers: Some(free_buffers),
            thread: Some(thread),
        })
    }

    /// Returns the layout of a batch.
    pub fn layout(&self) -> BatchLayout {
        self.layout
    }

    /// Returns whether targets may be masked. It is the same on all ranks.
    pub fn masks_targets(&self) -> bool {
        self.masks_targets
    }

    /// Loads the next batch into `to`, with `seed` as its stochastic rounding seed.
    pub fn load_next(&mut self, engine: &mut dyn Engine, to: Tensor, seed: u32) -> Result<LoadedBatch> {
        let batches = self.batches.as_ref().expect("open until dropped");
        let PreparedBatch { mut words, loaded } = batches.recv().context("the data loader thread has stopped")??;
        self.layout.set_seed(&mut words, seed);
        let to = to.slice(0, self.layout.words());
        // An engine may keep buffers. The thread needs a replacement for each of them, or training would deadlock.
        let buffer = match engine.load_batch(to, self.layout, words)? {
            // The returned buffer may belong to another caller's smaller batch.
            Some(buffer) if buffer.len() >= self.layout.words() => buffer,
            _ => engine.host_buffer(self.layout.words())?,
        };
        // The send fails only after an error in the thread. The next call reports that error.
        let _ = self.free_buffers.as_ref().expect("open until dropped").send(buffer);
        Ok(loaded)
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.free_buffers.take();
        self.batches.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
