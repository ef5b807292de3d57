//! Batches read ahead on a thread of their own.

use super::Loader;
use super::loader::Position;
use anyhow::{Context, Result};
use engine::tensor::Tensor;
use engine::{BatchLayout, Engine, HostBuffer};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

/// Batches that lie ready at most.
const DEPTH: usize = 3;

/// A loader on its own thread, which reads, checks and sorts batches into the engine's host buffers.
#[derive(Debug)]
pub struct Prefetch {
    layout: BatchLayout,
    // Options, so that dropping can close the channels before it joins.
    ready: Option<Receiver<Result<Batch>>>,
    spare: Option<Sender<HostBuffer>>,
    thread: Option<JoinHandle<()>>,
}

struct Batch {
    words: HostBuffer,
    after: Position,
}

impl Prefetch {
    pub fn start(mut loader: Loader, engine: &dyn Engine) -> Result<Self> {
        let layout = loader.layout();
        let (to_trainer, ready) = channel();
        let (spare, empty) = channel::<HostBuffer>();
        for _ in 0..DEPTH {
            spare.send(engine.host_buffer(layout.words())?).expect("the receiver is right here");
        }
        let read_ahead = move || {
            for mut words in empty {
                let batch = loader.next(&mut words).map(|()| {
                    layout.sort(&mut words);
                    Batch { words, after: loader.position() }
                });
                let failed = batch.is_err();
                if to_trainer.send(batch).is_err() || failed {
                    return;
                }
            }
        };
        let thread = thread::Builder::new()
            .name("loader".into())
            .spawn(read_ahead)
            .context("cannot start the data loader's thread")?;
        Ok(Self { layout, ready: Some(ready), spare: Some(spare), thread: Some(thread) })
    }

    pub fn layout(&self) -> BatchLayout {
        self.layout
    }

    /// Hands the next batch, with this seed, to the engine. Returns where the one after it comes from.
    pub fn load_next(&mut self, engine: &mut dyn Engine, to: Tensor, seed: u32) -> Result<Position> {
        let ready = self.ready.as_ref().expect("open until dropped");
        let Batch { mut words, after } = ready.recv().context("the data loader has stopped")??;
        self.layout.set_seed(&mut words, seed);
        let to = to.slice(0, self.layout.words());
        // An engine that keeps several buffers gets more of them, or reading ahead would stop, and with it the training.
        let empty = match engine.load_batch(to, self.layout, words)? {
            // It may be one of somebody else's smaller batches.
            Some(buffer) if buffer.len() >= self.layout.words() => buffer,
            _ => engine.host_buffer(self.layout.words())?,
        };
        // A send fails only once the thread has met an error, which the next call reports.
        let _ = self.spare.as_ref().expect("open until dropped").send(empty);
        Ok(after)
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.spare.take();
        self.ready.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
