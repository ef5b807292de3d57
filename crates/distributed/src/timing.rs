//! Measures how long an engine waits for communication.

use super::communicator::{Communicator, Transfer};
use super::scope::Scope;
use super::tcp_group::{Reduction, TcpGroup};
use engine::tensor::{Sharded, Tensor};
use engine::{Engine, Interval, PendingRead, Result};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

/// Start and end timestamps of each wait for communication.
#[derive(Clone, Default)]
pub struct CommunicationTimings(Rc<RefCell<Vec<[PendingRead; 2]>>>);

impl CommunicationTimings {
    /// Returns the durations of the waits since the last call, in order. Blocks until the engine has passed them.
    pub fn take(&self, engine: &mut dyn Engine) -> Result<Vec<Duration>> {
        let mut waits = Vec::new();
        for [begin, end] in self.0.take() {
            let begin = engine.wait(begin)?.completed_at;
            waits.push(engine.wait(end)?.completed_at.saturating_sub(begin));
        }
        Ok(waits)
    }
}

/// A communicator that records a timestamp before and after each wait of the engine.
pub struct TimedCommunicator {
    inner: Box<dyn Communicator>,
    /// A small f32 tensor. Reading it returns a timestamp of the engine.
    probe: Tensor,
    timings: CommunicationTimings,
}

impl TimedCommunicator {
    /// Wraps `inner`. `probe` is a small f32 tensor of the engine.
    pub fn new(inner: Box<dyn Communicator>, probe: Tensor, timings: CommunicationTimings) -> Self {
        Self { inner, probe, timings }
    }

    fn time(
        &mut self,
        engine: &mut dyn Engine,
        call: impl FnOnce(&mut dyn Communicator, &mut dyn Engine) -> Result<()>,
    ) -> Result<()> {
        let begin = engine.read_async(self.probe)?;
        call(&mut *self.inner, engine)?;
        let end = engine.read_async(self.probe)?;
        self.timings.0.borrow_mut().push([begin, end]);
        Ok(())
    }

    /// Times `call` if it is synchronous. On a GPU collectives overlap with the engine, which waits only in
    /// [`wait_on_stream`](Communicator::wait_on_stream).
    fn collective(
        &mut self,
        engine: &mut dyn Engine,
        call: impl FnOnce(&mut dyn Communicator, &mut dyn Engine) -> Result<()>,
    ) -> Result<()> {
        if engine.device_tensor(self.probe)?.is_some() {
            return call(&mut *self.inner, engine);
        }
        self.time(engine, call)
    }
}

impl Communicator for TimedCommunicator {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn tcp_group(&mut self) -> &mut TcpGroup {
        self.inner.tcp_group()
    }

    fn all_reduce(
        &mut self,
        engine: &mut dyn Engine,
        scope: Scope,
        tensor: Tensor,
        reduction: Reduction,
    ) -> Result<()> {
        self.collective(engine, |inner, engine| inner.all_reduce(engine, scope, tensor, reduction))
    }

    fn broadcast(&mut self, engine: &mut dyn Engine, tensor: Tensor) -> Result<()> {
        self.collective(engine, |inner, engine| inner.broadcast(engine, tensor))
    }

    fn exchange(&mut self, engine: &mut dyn Engine, transfers: &[Transfer]) -> Result<()> {
        self.collective(engine, |inner, engine| inner.exchange(engine, transfers))
    }

    fn reduce_scatter(&mut self, engine: &mut dyn Engine, of: Sharded, reduction: Reduction) -> Result<()> {
        self.collective(engine, |inner, engine| inner.reduce_scatter(engine, of, reduction))
    }

    fn all_gather(&mut self, engine: &mut dyn Engine, of: Sharded) -> Result<()> {
        self.collective(engine, |inner, engine| inner.all_gather(engine, of))
    }

    fn wait_on_stream(&mut self, engine: &mut dyn Engine) -> Result<()> {
        self.time(engine, |inner, engine| inner.wait_on_stream(engine))
    }

    fn check(&self) -> Result<()> {
        self.inner.check()
    }

    fn start_profile(&mut self) -> Result<()> {
        self.inner.start_profile()
    }

    fn profile(&mut self) -> Result<Vec<Interval>> {
        self.inner.profile()
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.inner.close()
    }

    fn abort(self: Box<Self>) -> TcpGroup {
        self.inner.abort()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}
