//! Collective operations on an engine's tensors: what ranks do together.

use super::nccl::Nccl;
use super::star::{Reduction, Star};
use engine::tensor::{Sharded, Tensor};
use engine::{Engine, Result};

/// One rank's end. All ranks make the same calls in the same order, with tensors of the same size and type.
///
/// An operation begins once the engine has done what it was given before, and may run beside what it is given after; what
/// reads the result, or writes what is read, comes after [`settle`](Self::settle). Every rank ends up with the same bits.
pub trait Communicator {
    /// This rank, and how many there are.
    fn who(&self) -> (usize, usize);

    /// The connections between the processes, for values on the host.
    fn star(&mut self) -> &mut Star;

    /// `tensor` = reduction of every rank's.
    fn all_reduce(&mut self, engine: &mut dyn Engine, tensor: Tensor, reduction: Reduction) -> Result<()>;

    /// `tensor` = rank 0's.
    fn broadcast(&mut self, engine: &mut dyn Engine, tensor: Tensor) -> Result<()>;

    /// The part = this rank's part of the reduction of every rank's whole, of which nothing but that part means anything
    /// afterwards.
    fn reduce_scatter(&mut self, engine: &mut dyn Engine, of: Sharded, reduction: Reduction) -> Result<()>;

    /// The whole = every rank's part, one after another.
    fn all_gather(&mut self, engine: &mut dyn Engine, of: Sharded) -> Result<()>;

    /// What the engine is given from here on comes after all operations so far.
    fn settle(&mut self, engine: &mut dyn Engine) -> Result<()>;

    /// What has failed in the meantime, on the device or between ranks.
    fn check(&self) -> Result<()>;

    /// Ends it in good order: once all ranks do.
    fn close(self: Box<Self>) -> Result<()>;

    /// Ends it at once, whatever is under way.
    fn abandon(self: Box<Self>) -> Star;

    /// `NCCL 2.28.3`
    fn describe(&self) -> String;
}

/// Over the host's memory, for any engine; done when a call returns.
impl Communicator for Star {
    fn who(&self) -> (usize, usize) {
        (self.rank, self.ranks)
    }

    fn star(&mut self) -> &mut Star {
        self
    }

    fn all_reduce(&mut self, engine: &mut dyn Engine, tensor: Tensor, reduction: Reduction) -> Result<()> {
        let mut bytes = vec![0; tensor.bytes()];
        engine.read_bytes(tensor, &mut bytes)?;
        self.reduce_bytes(&mut bytes, tensor.dtype, reduction)?;
        engine.write_bytes(tensor, &bytes)
    }

    fn broadcast(&mut self, engine: &mut dyn Engine, tensor: Tensor) -> Result<()> {
        let mut bytes = vec![0; tensor.bytes()];
        if self.rank == 0 {
            engine.read_bytes(tensor, &mut bytes)?;
        }
        self.broadcast_bytes(&mut bytes)?;
        if self.rank == 0 { Ok(()) } else { engine.write_bytes(tensor, &bytes) }
    }

    fn reduce_scatter(&mut self, engine: &mut dyn Engine, of: Sharded, reduction: Reduction) -> Result<()> {
        let Sharded { whole, shard: part } = of.over(self.ranks)?;
        let mut bytes = vec![0; whole.bytes()];
        engine.read_bytes(whole, &mut bytes)?;
        self.reduce_bytes(&mut bytes, whole.dtype, reduction)?;
        engine.write_bytes(part, &bytes[self.rank * part.bytes()..][..part.bytes()])
    }

    fn all_gather(&mut self, engine: &mut dyn Engine, of: Sharded) -> Result<()> {
        let Sharded { whole, shard: part } = of.over(self.ranks)?;
        let mut bytes = vec![0; part.bytes()];
        engine.read_bytes(part, &mut bytes)?;
        engine.write_bytes(whole, &self.all_gather_bytes(&bytes)?)
    }

    fn settle(&mut self, _engine: &mut dyn Engine) -> Result<()> {
        Ok(())
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }

    fn abandon(self: Box<Self>) -> Star {
        *self
    }

    fn describe(&self) -> String {
        "TCP, through the hosts' memory".to_owned()
    }
}

/// What suits the engine: NCCL where it computes on a GPU. `on` is a tensor of it.
pub fn for_engine(star: Star, engine: &dyn Engine, on: Tensor) -> Result<Box<dyn Communicator>> {
    match engine.device_tensor(on)? {
        Some(device) => Ok(Box::new(Nccl::new(star, device.stream.gpu())?)),
        None => Ok(Box::new(star)),
    }
}
