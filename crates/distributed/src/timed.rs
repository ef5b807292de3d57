//! How long an engine stands still for what ranks do together.

use super::communicator::Communicator;
use super::star::{Reduction, Star};
use engine::tensor::{Sharded, Tensor};
use engine::{Engine, PendingRead, Result};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

/// Where an engine had to wait, between two marks each.
#[derive(Clone, Default)]
pub struct Waits(Rc<RefCell<Vec<[PendingRead; 2]>>>);

impl Waits {
    /// Those since the last call, in order. Waits for the engine.
    pub fn take(&self, engine: &mut dyn Engine) -> Result<Vec<Duration>> {
        let mut waits = Vec::new();
        for [begin, end] in self.0.take() {
            let begin = engine.wait(begin)?.completed_at;
            waits.push(engine.wait(end)?.completed_at.saturating_sub(begin));
        }
        Ok(waits)
    }
}

/// A communicator with marks in the engine's work wherever that waits.
pub struct Timed {
    inner: Box<dyn Communicator>,
    /// Small and f32: a mark is a read of it.
    mark: Tensor,
    waits: Waits,
}

impl Timed {
    pub fn new(inner: Box<dyn Communicator>, mark: Tensor, waits: Waits) -> Self {
        Self { inner, mark, waits }
    }

    fn between_marks(
        &mut self,
        engine: &mut dyn Engine,
        call: impl FnOnce(&mut dyn Communicator, &mut dyn Engine) -> Result<()>,
    ) -> Result<()> {
        let begin = engine.read_async(self.mark)?;
        call(&mut *self.inner, engine)?;
        let end = engine.read_async(self.mark)?;
        self.waits.0.borrow_mut().push([begin, end]);
        Ok(())
    }

    /// On a device an operation goes on beside the engine; else the engine waits for it.
    fn operation(
        &mut self,
        engine: &mut dyn Engine,
        call: impl FnOnce(&mut dyn Communicator, &mut dyn Engine) -> Result<()>,
    ) -> Result<()> {
        if engine.device_tensor(self.mark)?.is_some() {
            return call(&mut *self.inner, engine);
        }
        self.between_marks(engine, call)
    }
}

impl Communicator for Timed {
    fn who(&self) -> (usize, usize) {
        self.inner.who()
    }

    fn star(&mut self) -> &mut Star {
        self.inner.star()
    }

    fn all_reduce(&mut self, engine: &mut dyn Engine, tensor: Tensor, reduction: Reduction) -> Result<()> {
        self.operation(engine, |inner, engine| inner.all_reduce(engine, tensor, reduction))
    }

    fn broadcast(&mut self, engine: &mut dyn Engine, tensor: Tensor) -> Result<()> {
        self.operation(engine, |inner, engine| inner.broadcast(engine, tensor))
    }

    fn reduce_scatter(&mut self, engine: &mut dyn Engine, of: Sharded, reduction: Reduction) -> Result<()> {
        self.operation(engine, |inner, engine| inner.reduce_scatter(engine, of, reduction))
    }

    fn all_gather(&mut self, engine: &mut dyn Engine, of: Sharded) -> Result<()> {
        self.operation(engine, |inner, engine| inner.all_gather(engine, of))
    }

    fn settle(&mut self, engine: &mut dyn Engine) -> Result<()> {
        self.between_marks(engine, |inner, engine| inner.settle(engine))
    }

    fn check(&self) -> Result<()> {
        self.inner.check()
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.inner.close()
    }

    fn abandon(self: Box<Self>) -> Star {
        self.inner.abandon()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}
